"""Training on a Ray cluster: Ray Train starts the same program on its workers, and again when some of them die.

Ray hears only how a worker ends. Checkpoints stay those of the run's folder, from which a new start resumes. What
torchrun tells its processes, Ray's workers get in the same environment variables, so that nothing else knows of Ray.
Ray itself brings what they write to the console of the program.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
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

_asked: list[str] = []
"""Why this worker is to save and leave."""


def launch(options: Ray, run: Callable[..., int], *, folder: Path, on_gpus: bool, position: Callable[[], str]) -> int:
    """Run a training on Ray workers.

    Args:
        options: Workers and their number.
        run: Trains, and returns the exit code. Workers call it with ``devices`` (processes on their machine),
            ``num_nodes``, ``is_restart`` (there was an earlier start of this run) and ``asked``, a function that
            returns whether to stop after the current step, and save.
        folder: A folder that all machines have to see.
        on_gpus: Whether the run uses GPUs where there are some.
        position: Returns from where a new start goes on: ``"from step 40"``.

    Returns:
        Exit code of rank 0; 1 after more failures than ``max_failures``, or if workers get no place.

    Raises:
        UsageError: The cluster has fewer resources, a worker's machine cannot take part, or the run raised one.
    """
    os.environ.update(_OF_RAY | os.environ)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(2 * options.start_seconds)  # `_follow` gives up before
    cpus = math.ceil(options.worker_range[0] * options.cpus_per_worker)
    ray = connect(_WHO, options.address, num_cpus=max(cpus, os.cpu_count() or 1))
    in_cluster = ray.cluster_resources().get("GPU", 0.0)
    gpus = min(on_gpus, in_cluster) if options.gpus_per_worker is None else options.gpus_per_worker
    if gpus not in (0, 1):
        raise UsageError(f"launcher.gpus_per_worker={gpus}: a process trains on one GPU; write 1, or 0 for CPUs")
    each = {"CPU": float(options.cpus_per_worker), "GPU": float(gpus)}
    wanted = {name: n * options.worker_range[0] for name, n in each.items()}
    check_resources(_WHO, wanted, setting="launcher.num_workers", labels=options.labels)
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams
    from ray.util.queue import Queue

    streams.remove_handler("ray_print_logs")
    streams.add_handler("ray_print_logs", _print_lines)
    here = {"num_cpus": 0, "resources": {f"node:{ray.util.get_node_ip_address()}": 0.001}}
    events, stop = Queue(actor_options=here), Queue(actor_options=here)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder, ignore_cleanup_errors=True) as storage:
        work = partial(_work, run, events, stop, package_versions(), Path(storage))
        return _follow(_trainer(options, work, events, each, storage).fit, events, stop, options, position)


def _print_lines(data: Mapping[str, Any]) -> None:
    """Show what a worker has written, and not what Ray's own actors have."""
    if data.get("actor_name") == "RayTrainWorker":
        print(*data["lines"], sep="\n", file=sys.stderr if data["is_err"] else sys.stdout, flush=True)


def _trainer(options: Ray, work: Callable[[], None], events: Any, each: Mapping[str, float], storage: str) -> Any:
    """Return Ray's trainer, for which workers become ranks as under torchrun.

    Args:
        options: Workers and their number.
        work: What workers call.
        events: Queue of what happens.
        each: What each worker reserves.
        storage: Folder for Ray's own records, which nothing reads again.
    """
    import ray.train
    from ray.train._internal.utils import get_address_and_port
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2._internal.execution.callback import ControllerCallback
    from ray.train.v2.api.callback import UserCallback
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    least, most = options.worker_range

    class Torchrun(Backend):
        share_cuda_visible_devices = True
        starts = 0

        def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
            events.put(("start", (self.starts, len(worker_group))))
            sizes = set(worker_group.execute(lambda: ray.train.get_context().get_local_world_size()))
            address, port = worker_group.execute_single(0, get_address_and_port)  # on which rank 0 will listen
            worker_group.execute(_become_rank, address, port, self.starts, sizes)
            self.starts += 1

    class TorchrunConfig(BackendConfig):
        backend_cls = Torchrun

    class Controller(ControllerCallback):
        def after_controller_start(self, train_run_context: Any) -> None:
            events.put(("controller", ray.get_runtime_context().current_actor))

    class Failures(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            events.put(("failure", _cause(worker_exceptions)))
            for error in worker_exceptions.values():
                if isinstance(error, UsageError):
                    raise error  # another start would end like this one

    return DataParallelTrainer(
        work,
        backend_config=TorchrunConfig(),
        scaling_config=ScalingConfig(
            num_workers=least if least == most else (least, most),
            use_gpu=each["GPU"] > 0,
            resources_per_worker=dict(each),
            label_selector=dict(options.labels) if options.labels else None,
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # annotated as that of Ray Train's first version
            name=f"run-{secrets.token_hex(8)}",  # Ray would go on with the records of a name used before
            storage_path=storage,
            failure_config=FailureConfig(options.max_failures, controller_failure_limit=options.max_failures),
            callbacks=[Failures(), Controller()],  # type: ignore[list-item]  # annotated without Ray's own kind
            worker_runtime_env={
                "env_vars": {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
            },
        ),
    )


def _follow(fit: Callable[[], Any], events: Any, stop: Any, options: Ray, position: Callable[[], str]) -> int:
    """Call Ray's ``fit``, tell when workers go on after others have ended, and return the exit code.

    Args:
        fit: Returns when all have ended.
        events: Queue of (``"controller"``, Ray's actor that starts workers), (``"start"``, (earlier starts, workers)),
            (``"cause"``, clause), (``"failure"``, clause), (``"code"``, exit code). Workers also tell causes, as others
            vanish, when Ray changes their number.
        stop: Queue that is filled when the run is to stop.
        options: Workers and their number.
        position: Returns from where a new start goes on.
    """
    import ray

    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED

    failures: list[Exception] = []
    signals: list[int] = []
    controller: Any = None
    cause, code, deadline = None, 1, time.monotonic() + options.start_seconds
    is_waiting, has_failed = True, False

    def work() -> None:
        try:
            fit()
        except Exception as error:
            failures.append(error)

    def handle(number: int, *_: object) -> None:
        signals.append(number)
        if len(signals) > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt

    thread = threading.Thread(target=work, daemon=True)  # in the main thread, Ray would not save at Ctrl-C
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        thread.start()
        while thread.is_alive() or events.size():
            if signals and stop.empty():
                stop.put(None)
            thread.join(0.3)
            for kind, value in events.get_nowait_batch(events.size()):
                if kind in ("cause", "failure"):
                    cause, deadline = cause or value, min(deadline, time.monotonic() + options.start_seconds)
                    has_failed = has_failed or kind == "failure"
                    is_waiting = is_waiting or has_failed
                elif kind == "code":
                    code = value
                elif kind == "controller":
                    controller = value
                else:
                    ended = (has_failed and cause) or "the number of workers changes"
                    cause, deadline, is_waiting, has_failed = None, math.inf, False, False
                    if value[0]:
                        log.warning("%s; the run goes on %s with %d workers", ended, position(), value[1])
                    else:
                        log.info("%s: %d worker(s) have started, and import what they need", _WHO, value[1])
            if signals and is_waiting and thread.is_alive():
                log.warning("%s: stopped by a signal while no worker runs; resume=auto continues", _WHO)
                return EXIT_INTERRUPTED
            if time.monotonic() > deadline and thread.is_alive():
                raise TimeoutError(
                    f"{f'{cause}; ' if cause else ''}launcher.num_workers={options.num_workers} got no place within "
                    f"launcher.start_seconds={options.start_seconds:g}; ray status shows what there is"
                )
    except (ray.exceptions.RayError, TimeoutError) as error:  # the cluster is gone, or full
        failures.append(error)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _abandon(thread, controller, events)
    time.sleep(1.0)  # Ray reads the last lines of workers from files
    if not failures:
        return code
    text = _end(failures[0], cause, options.max_failures)
    log.error("%s: %s; resume=auto goes on %s", _WHO, " ".join(text.split())[:800], position())
    return 1


def _abandon(thread: threading.Thread, controller: Any, events: Any) -> None:
    """End the thread in Ray's ``fit``: one that waits inside Ray while this process ends would crash it.

    Args:
        thread: It ends with the controller.
        controller: Ray's actor that starts workers; None while it starts, which it says in ``events``.
        events: Queue of (kind, value).
    """
    import ray

    with suppress(ray.exceptions.RayError):  # the cluster is gone, and the thread ends by itself
        until = time.monotonic() + 60.0
        while thread.is_alive() and controller is None and time.monotonic() < until:
            happened = events.get_nowait_batch(events.size())
            controller = next((value for kind, value in happened if kind == "controller"), None)
            thread.join(0.3)
        if thread.is_alive() and controller is not None:
            ray.kill(controller)
    thread.join(10.0)


def _end(failure: Exception, cause: str | None, max_failures: int) -> str:
    """Return a clause that says why a run ends; raise the run's own ``UsageError``."""
    reason = getattr(failure, "controller_failure", failure)
    if isinstance(reason, UsageError):
        raise reason
    if hasattr(reason, "worker_failures"):
        sys.stderr.write(f"{reason}\n")  # with their stack traces
        return f"{cause}; that was more than launcher.max_failures={max_failures}"
    return str(reason) if isinstance(reason, TimeoutError) else f"Ray failed ({type(reason).__name__}: {reason})"


def _cause(failures: Mapping[int, Exception]) -> str:
    """Return a clause that says which worker ended, and of what; first come those that died."""
    from ray.exceptions import RayActorError

    errors = {rank: getattr(error, "health_check_failure", error) for rank, error in failures.items()}
    rank, error = min(errors.items(), key=lambda each: not isinstance(each[1], RayActorError))
    end = "died" if isinstance(error, RayActorError) else f"raised {type(error).__name__}"
    return f"rank {rank} {end}: {' '.join(str(error).split())[:400]}"


# What follows runs in the workers.


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
    signal.signal(signal.SIGTERM, lambda number, frame: _asked.append("got SIGTERM"))


def _listen(stop: Any) -> None:
    """Ask every second whether the run is to stop, or the machine of this worker is taken away."""
    import ray.train

    preemption = getattr(ray.train, "get_preemption_info", lambda: None)  # Ray 2.55 has none
    while True:
        try:
            if not stop.empty():
                _asked.append("is to stop")
            info = preemption()  # waits for all ranks
        except Exception:  # the program that started the run is gone, and Ray ends its workers
            _asked.append("lost its program")
            return
        if info is not None and int(os.environ["RANK"]) in info.preempted_ranks:
            _asked.append("loses its machine")
        time.sleep(1.0)


def _work(run: Callable[..., int], events: Any, stop: Any, versions: Mapping[str, str], probe: Path) -> None:
    """Train as one rank.

    Raises:
        UsageError: The run's, or this machine cannot take part.
        RayActorError: This start was asked to leave; Ray starts others, and counts no failure.
    """
    import ray
    from ray.exceptions import RayActorError

    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED
    from sd_lightning.strategies.processes import watchdog

    def tell(kind: str, value: Any) -> None:
        ray.get(events.actor.put.remote((kind, value)), timeout=5)

    names = {"devices": "LOCAL_WORLD_SIZE", "num_nodes": "GROUP_WORLD_SIZE", "is_restart": "TORCHELASTIC_RESTART_COUNT"}
    watchdog.listeners.append(partial(tell, "cause"))
    threading.Thread(target=_listen, args=[stop], daemon=True).start()
    log_to_console()
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # stack traces come with the last failure
    try:
        check_versions(_WHO, versions)
        if not probe.exists():
            raise UsageError(
                f"{_WHO}: {socket.gethostname()} cannot see {probe.parent}; expected a folder that all machines share; "
                "write output_dir=<such a folder>, or set SD_LIGHTNING_CACHE to one for a run in a bucket"
            )
        code = run(**{name: int(os.environ[variable]) for name, variable in names.items()}, asked=lambda: bool(_asked))
    except UsageError as error:
        raise UsageError(str(error)) from None  # a plain one can be sent
    finally:
        sys.stdout.flush()
    if code == EXIT_INTERRUPTED and stop.empty():
        if _asked:
            tell("cause", f"rank {os.environ['RANK']} on {socket.gethostname()} {_asked[0]}, saved and left")
        raise RayActorError(error_msg=f"saved and left ({_asked})", preempted=True)
    if os.environ["RANK"] == "0":
        tell("code", code)
