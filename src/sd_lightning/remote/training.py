"""Training on a Ray cluster: Ray Train starts the same program on its workers, and again when some of them die.

Ray hears only how a worker ends. Checkpoints stay those of the run's folder, from which a new start resumes. What
torchrun tells its processes, Ray's workers get in the same environment variables, so that nothing else knows of Ray.
"""

from __future__ import annotations

import io
import logging
import math
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from sd_lightning._conf.cli import log_to_console
from sd_lightning._errors import UsageError
from sd_lightning.remote.cluster import check_resources, check_versions, connect, package_versions
from sd_lightning.remote.launchers import Ray
from sd_lightning.storage.atomic import TEMPORARY

log = logging.getLogger(__name__)

_WHO = "launcher=ray"
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUBLAS_", "OMP_", "HF_HUB_OFFLINE", "SD_LIGHTNING_")
"""Beginnings of the environment variables that workers get from the program; none holds a password."""
_OF_RAY = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # a dead worker is seen after this
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # these two would show every line twice
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}
"""Settings of Ray Train, unless the environment has others."""
_SAVE_SECONDS = 600.0
"""How long workers may take to save before their number changes."""

_asked = threading.Event()
"""Whether this worker is to save and leave."""
_training = threading.Event()
"""Whether this worker trains."""
_reasons: list[str] = []
"""Why this very worker, of all, is to leave."""


class Console:
    """Actor beside the program: workers write to it, and ask it whether to stop."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Any]] = []
        self._is_stopping = False

    def write(self, kind: str, value: Any) -> None:
        self._events.append((kind, value))

    def read(self) -> list[tuple[str, Any]]:
        """Return what was written since the last call."""
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        self._is_stopping = True

    def is_stopping(self) -> bool:
        return self._is_stopping


class _Lines(io.TextIOBase):
    """Text stream that sends whole lines to the console, as "stdout" or "stderr"."""

    def __init__(self, console: Any, kind: str) -> None:
        self._console, self._kind, self._rest = console, kind, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            self._console.write.remote(self._kind, "\n".join(lines))
        return len(text)


def launch(options: Ray, run: Callable[..., int], *, folder: Path, on_gpus: bool, position: Callable[[], str]) -> int:
    """Run a training on Ray workers, and show what rank 0 writes.

    Args:
        options: Workers and their number.
        run: Trains, and returns the exit code. Workers call it with ``devices`` (processes on their machine),
            ``num_nodes``, ``is_restart`` (there was an earlier start of this run) and ``asked``, a function that
            returns whether to stop after the current step, and save.
        folder: The run's folder, or that of a run in a bucket, which all machines have to see.
        on_gpus: Whether the run uses GPUs where there are some.
        position: Returns from where a new start goes on: ``"from step 40"``.

    Returns:
        Exit code of rank 0; 1 after more failures than ``max_failures``.

    Raises:
        UsageError: The cluster has fewer resources, a worker's machine cannot take part, or the run raised one.
    """
    cpus = math.ceil(options.worker_range[0] * options.cpus_per_worker)
    ray = connect(_WHO, options.address, num_cpus=max(cpus, os.cpu_count() or 1), logs=False)
    in_cluster = ray.cluster_resources().get("GPU", 0.0)
    gpus = min(on_gpus, in_cluster) if options.gpus_per_worker is None else options.gpus_per_worker
    if gpus not in (0, 1):
        raise UsageError(f"launcher.gpus_per_worker={gpus}: a process trains on one GPU; write 1, or 0 for CPUs")
    each = {name: float(n) for name, n in (("CPU", options.cpus_per_worker), ("GPU", gpus)) if n}
    wanted = {name: n * options.worker_range[0] for name, n in each.items()}
    check_resources(_WHO, wanted, setting="launcher.num_workers")
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(options.start_seconds)
    os.environ.update(_OF_RAY | os.environ)
    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    console = ray.remote(num_cpus=0, resources=here)(Console).remote()
    with _probe(folder) as probe, tempfile.TemporaryDirectory(prefix="sd-lightning-ray-") as storage:
        versions = package_versions()
        trainer = _trainer(options, lambda: _work(run, console, versions, probe), console, each, storage)
        return _Launch(console, position, options.max_failures).follow(trainer.fit)


@contextmanager
def _probe(folder: Path) -> Iterator[Path]:
    """Put a file into the run's folder, for workers to look for."""
    probe = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        yield probe
    finally:
        probe.unlink(missing_ok=True)


def _trainer(options: Ray, work: Callable[[], None], console: Any, each: Mapping[str, float], storage: str) -> Any:
    """Return Ray's trainer, for which workers become ranks as under torchrun.

    Args:
        options: Workers and their number.
        work: What workers call.
        console: The console.
        each: What each worker reserves.
        storage: Folder for Ray's own records, which nothing reads again.
    """
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.callback import UserCallback
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    least, most = options.worker_range

    class Torchrun(Backend):
        share_cuda_visible_devices = True
        starts = 0

        def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
            console.write.remote("start", (self.starts, len(worker_group)))
            sizes = set(worker_group.execute(lambda: ray.train.get_context().get_local_world_size()))
            worker_group.execute(_become_rank, *worker_group.execute_single(0, _free_address), self.starts, sizes)
            self.starts += 1

        def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
            if least < most and all(worker_group.execute(_is_training)):  # neither done nor failed: a resize
                worker_group.execute(_save_and_leave)

    class TorchrunConfig(BackendConfig):
        backend_cls = Torchrun

    class Failures(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            console.write.remote("cause", _cause(worker_exceptions))
            for error in worker_exceptions.values():
                if isinstance(error, UsageError):
                    raise error  # another start would end like this one

    return DataParallelTrainer(
        work,
        backend_config=TorchrunConfig(),
        scaling_config=ScalingConfig(
            num_workers=least if least == most else (least, most),
            use_gpu="GPU" in each,
            resources_per_worker=dict(each),
            label_selector=dict(options.labels) if options.labels else None,
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # annotated as that of Ray Train's first version
            name=f"run-{secrets.token_hex(8)}",  # Ray would go on with the records of a name used before
            storage_path=storage,
            failure_config=FailureConfig(options.max_failures, controller_failure_limit=options.max_failures),
            callbacks=[Failures()],
            worker_runtime_env={
                "env_vars": {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
            },
        ),
    )


class _Launch:
    """A run as the program sees it that started its workers."""

    def __init__(self, console: Any, position: Callable[[], str], max_failures: int) -> None:
        self._console, self._position, self._max_failures = console, position, max_failures
        self._cause: str | None = None
        self._code = 1
        self._signals = 0

    def follow(self, fit: Callable[[], Any]) -> int:
        """Show what workers write until they have ended; return the exit code."""
        import ray

        failures: list[Exception] = []

        def work() -> None:
            try:
                fit()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work, daemon=True)  # in the main thread, Ray would not save at Ctrl-C
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            thread.start()
            while thread.is_alive():
                if self._signals:
                    ray.get(self._console.stop.remote())
                thread.join(0.3)
                self._show(ray.get(self._console.read.remote()))
        except ray.exceptions.RayError as error:  # the cluster is gone
            failures.append(error)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._give_up(failures[0]) if failures else self._code

    def _handle(self, number: int, *_: object) -> None:
        """Let the first signal stop the run after a step, and a second Ctrl-C at once."""
        self._signals += 1
        if self._signals > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _show(self, events: list[tuple[str, Any]]) -> None:
        for kind, value in events:
            if kind in ("stdout", "stderr"):
                print(value, file=getattr(sys, kind), flush=True)
            elif kind == "cause":
                self._cause = self._cause or value
            elif kind == "code":
                self._code = value
            else:
                starts, num_workers = value
                if starts:
                    cause, self._cause = self._cause or "the number of workers changes", None
                    log.warning("%s; the run goes on %s with %d workers", cause, self._position(), num_workers)
                else:
                    log.info("%s: %d worker(s) have started, and import what they need", _WHO, num_workers)

    def _give_up(self, error: Exception) -> int:
        """Tell why the run ends, and return its exit code; raise the run's ``UsageError``."""
        reason = getattr(error, "controller_failure", None)
        if isinstance(reason, UsageError):
            raise reason
        text = f"the workers did not start: {reason}; ray status shows what there is"
        if reason is None:
            sys.stderr.write(f"{error}\n")
            text = f"{self._cause}; that was more than launcher.max_failures={self._max_failures}"
        if reason is self._cause is None:
            text = f"Ray failed ({type(error).__name__})"
        log.error("%s: %s; resume=auto goes on %s", _WHO, " ".join(text.split()), self._position())
        return 1


def _cause(failures: Mapping[int, Exception]) -> str:
    """Return a clause that says which worker ended, and of what."""
    from ray.exceptions import RayActorError

    errors = {rank: getattr(error, "health_check_failure", error) for rank, error in failures.items()}
    dead = {rank: error for rank, error in errors.items() if isinstance(error, RayActorError)}
    left = [error.error_msg for error in dead.values() if error.preempted]
    if left:
        return max(left, key=len) or "a machine of the run is taken away"
    rank, error = next(iter((dead or errors).items()))
    text = " ".join(str(error).split())
    return f"rank {rank} died: {text[:400]}" if dead else f"rank {rank} raised {type(error).__name__}: {text[:400]}"


# What follows runs in the workers.


def _free_address() -> tuple[str, int]:
    """Return this machine's address and a free port, on which rank 0 will listen."""
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), free.getsockname()[1]


def _become_rank(address: str, port: int, starts: int, sizes: set[int]) -> None:
    """Set what torchrun would; called in a worker's main thread, where signals can be handled.

    Lightning knows machines with equally many processes. Otherwise each process counts as a machine of its own.
    """
    import ray.train

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    local_rank, local_size, node = context.get_local_rank(), context.get_local_world_size(), context.get_node_rank()
    if len(sizes) > 1:
        local_rank, local_size, node = 0, 1, rank
        if gpus := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    group, local = f"{node} {world_size // local_size}", f"{local_rank} {local_size}"
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    os.environ.update(zip(names.split(), f"{rank} {world_size} {local} {group} {address} {port}".split(), strict=True))
    os.environ.update(TORCHELASTIC_RUN_ID="ray", TORCHELASTIC_RESTART_COUNT=str(starts))
    signal.signal(signal.SIGTERM, lambda number, frame: _leave("got SIGTERM"))


def _is_training() -> bool:
    return _training.is_set()


def _leave(reason: str) -> None:
    _reasons.append(f"rank {os.environ['RANK']} on {socket.gethostname()} {reason}, saved and left")
    _asked.set()


def _save_and_leave() -> None:
    _asked.set()
    end = time.monotonic() + _SAVE_SECONDS
    while _training.is_set() and time.monotonic() < end:
        time.sleep(0.1)


def _listen(console: Any) -> None:
    """Ask every second whether the run is to stop, or a machine of it is taken away."""
    import ray.train

    preemption = getattr(ray.train, "get_preemption_info", None)  # Ray 2.55 has none
    while True:
        try:
            if ray.get(console.is_stopping.remote()):
                _asked.set()
            info = None if preemption is None else preemption()  # waits for all ranks
        except Exception:  # the program that started the run is gone, and Ray ends its workers
            _asked.set()
            return
        if info is not None and int(os.environ["RANK"]) in info.preempted_ranks:
            _leave("loses its machine")
        time.sleep(1.0)


def _work(run: Callable[..., int], console: Any, versions: Mapping[str, str], probe: Path) -> None:
    """Train as one rank.

    Raises:
        UsageError: The run's, or this machine cannot take part.
        RayActorError: This start was asked to leave; Ray starts others, and counts no failure.
    """
    import ray
    from ray.exceptions import RayActorError

    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED
    from sd_lightning.strategies.processes import watchdog

    is_first = os.environ["RANK"] == "0"
    names = {"devices": "LOCAL_WORLD_SIZE", "num_nodes": "GROUP_WORLD_SIZE", "is_restart": "TORCHELASTIC_RESTART_COUNT"}
    watchdog.listeners.append(lambda text: ray.get(console.write.remote("cause", text), timeout=5))
    threading.Thread(target=_listen, args=[console], daemon=True).start()
    out, err = (_Lines(console, each) if is_first else getattr(sys, each) for each in ("stdout", "stderr"))
    with redirect_stdout(out), redirect_stderr(err):
        log_to_console()
        _training.set()
        try:
            check_versions(_WHO, versions)
            if not probe.exists():
                raise UsageError(
                    f"{_WHO}: {socket.gethostname()} cannot see output_dir={probe.parent}; expected a folder that "
                    "all machines share; write output_dir=<such a folder>, or set SD_LIGHTNING_CACHE to one for a "
                    "run in a bucket"
                )
            code = run(**{name: int(os.environ[variable]) for name, variable in names.items()}, asked=_asked.is_set)
        except UsageError as error:
            raise UsageError(str(error)) from None  # a plain one can be sent
        finally:
            _training.clear()
    if code == EXIT_INTERRUPTED and not ray.get(console.is_stopping.remote()):
        raise RayActorError(error_msg="".join(_reasons[:1]), preempted=True)
    if is_first:
        ray.get(console.write.remote("code", code))
