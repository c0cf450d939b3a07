"""Does jobs on several processes that are forks of one that has imported everything.

A pair of new processes takes twenty seconds of two cores to import what it needs; a pair of forks takes none. What is
imported starts no threads, uses one thread to compute, and touches no device, so it survives the fork. Forks share the
seed of Python's hashes: that ranks do not depend on the order of sets is for tests with real launchers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)
FAILED = "JOB FAILED"
"""Where the report of a failure begins."""
IMPORTED = ("strategy_jobs", "gemini_jobs", "deepspeed_jobs", "deepspeed", "setuptools", "sklearn.datasets")
LAZY = {
    "diffusers": ("UNet2DConditionModel", "AutoencoderKL", "StableDiffusionPipeline", "DPMSolverMultistepScheduler"),
    "transformers": ("CLIPTextModel", "CLIPTokenizer"),
}
"""What jobs use of packages that import their parts when they are named: five seconds, once and not in every fork."""
LAST_WORDS_S = 5.0
"""How long the other ranks have to end when one has failed."""


def run_jobs(
    module: str,
    jobs: Mapping[Name, Mapping[str, Any]],
    folder: Path,
    *,
    world_size: int,
    timeout: float = 600,
    accelerator: str = "cpu",
) -> dict[Name, Any]:
    """Do jobs on every rank, one after another in the same processes, and return what rank 0 found.

    Args:
        module: A module of this folder with ``run(job)``, from JSON to JSON. It may have ``prepare(accelerator)``,
            which is called once.
        jobs: By a name of the test's own.
        folder: Jobs and results are written into it.
        world_size: Number of processes; one on CUDA.
        timeout: Seconds until they are killed.
        accelerator: "cpu", with gloo, or "cuda".

    Raises:
        AssertionError: A rank failed, or they took too long; with the end of what they printed.
    """
    return run_jobs_of_all(module, jobs, folder, world_size=world_size, timeout=timeout, accelerator=accelerator)[0]


def run_jobs_of_all(
    module: str,
    jobs: Mapping[Name, Mapping[str, Any]],
    folder: Path,
    *,
    world_size: int,
    timeout: float = 600,
    accelerator: str = "cpu",
) -> list[dict[Name, Any]]:
    """Do what :func:`run_jobs` does, and return what each rank found."""
    place = Path(tempfile.mkdtemp(prefix="jobs-", dir=folder))
    (place / "jobs.json").write_text(json.dumps(list(jobs.values())))
    if accelerator == "cpu":
        _fork("ranks:do_jobs", module, accelerator, place, world_size=world_size, timeout=timeout)
    else:
        assert world_size == 1
        _run_alone(module, accelerator, place, timeout=timeout)
    found = [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    return [dict(zip(jobs, each, strict=True)) for each in found]


def run_program(name: str, *arguments: str, world_size: int = 2, timeout: float = 240) -> str:
    """Run ``python -m sd_lightning.<name>`` in this folder on every rank, as torchrun does; return what they printed.

    Raises:
        AssertionError: A rank failed, or they took too long.
    """
    return _fork("ranks:do_program", name, os.getcwd(), *arguments, world_size=world_size, timeout=timeout)


def do_program(name: str, folder: str, *arguments: str) -> None:
    """Be a rank of ``run_program``."""
    from sd_lightning import _conf

    os.chdir(folder)
    sys.argv = [name, *arguments]
    _conf.main(importlib.import_module(f"sd_lightning.{name}").PROGRAM)


def do_jobs(module: str, accelerator: str, place: str) -> None:
    """Do the jobs of a folder on this rank, and write what it found."""
    import torch
    import torch.distributed as dist

    if accelerator != "cpu":  # let kernels add in one order, where they can
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    worker = importlib.import_module(module)
    if hasattr(worker, "prepare"):
        worker.prepare(accelerator)
    found = []
    for job in json.loads(Path(place, "jobs.json").read_text()):
        try:
            found.append(worker.run(job))
        except Exception:
            print(f"{FAILED}: {job}\n{traceback.format_exc()}", flush=True)
            sys.exit(1)
    Path(place, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _fork(function: str, *arguments: str | Path, world_size: int, timeout: float) -> str:
    """Call ``module:name`` of this folder on every rank, in this environment and torchrun's; return what they print."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        order = {"function": function, "arguments": [str(a) for a in arguments], "world_size": world_size}
        order |= {"folder": folder, "environment": dict(os.environ)}
        server.stdin.write(json.dumps(order).encode() + b"\n")
        answer = server.stdout.readline()
        assert answer, "the process that ranks are forks of has ended; its standard error says why"
        pids = json.loads(answer)
        try:
            in_time, _, _ = select.select([server.stdout], [], [], timeout)
        except BaseException:  # the test's own time is over
            _end(pids)
            server.kill()
            _server.cache_clear()
            raise
        if not in_time:
            _end(pids)
        codes = json.loads(server.stdout.readline())
        said = "\n".join(path.read_text(errors="replace") for path in sorted(Path(folder).iterdir()))
    late = "" if in_time else f" after {timeout} s"
    assert in_time and not any(codes), f"{function}: exit codes {codes}{late}\n{_last_words(said)}"
    return said


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run_alone(*arguments: str | Path, timeout: float) -> None:
    """Do jobs as the only rank, in a new process: CUDA does not survive a fork."""
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda"} | _environment(0, 1, free_port())
    command = [sys.executable, "-W", "ignore", __file__, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, _last_words(done.stdout + done.stderr)


def _last_words(said: str) -> str:
    if FAILED not in said:
        return said[-5000:]
    report = said[said.find(FAILED) :]  # of the first rank, from its job to its error, however deep the calls
    first = report[:end] if (end := report.find(FAILED, 1)) > 0 else report
    return first if len(first) < 6000 else f"{first[:1000]}\n…\n{first[-5000:]}"


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    others = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
    return {name: str(value) for name, value in (own | others).items()}


@functools.cache
def _server() -> subprocess.Popen[bytes]:
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    settings["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a thread of pyarrow's, which sklearn imports
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Import everything, then fork ranks for every line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    for package, names in LAZY.items():
        for name in names:
            getattr(importlib.import_module(package), name)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"{threads} threads do not survive a fork"
    gc.freeze()  # of what is imported nothing is garbage, for ranks that collect it
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        port = free_port()
        for rank in range(order["world_size"]):
            pid = os.fork()
            if pid == 0:
                _become(rank, port, order)
                module, _, name = order["function"].partition(":")
                getattr(importlib.import_module(module), name)(*order["arguments"])
                return  # and through the interpreter's own end
            pids.append(pid)
        print(json.dumps(pids), file=answers, flush=True)
        print(json.dumps(_wait(pids)), file=answers, flush=True)


def _become(rank: int, port: int, order: dict[str, Any]) -> None:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ |= order["environment"] | _environment(rank, order["world_size"], port)
    rank_zero_only.rank = rank
    output = os.open(f"{order['folder']}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for handle, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(handle, standard)


def _wait(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    killing_at = float("inf")
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                killing_at = min(killing_at, time.monotonic() + LAST_WORDS_S)
            continue
        if time.monotonic() > killing_at:
            killing_at = float("inf")
            _end([each for each in pids if each not in codes])
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to connections: Ray opens hundreds."""
    import random
    import socket

    numbers = random.Random()  # its own, as tests seed the common one
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port := numbers.randrange(20_000, 32_000)))  # Ray's workers have those up to 20000
            return port


if __name__ == "__main__":
    do_jobs(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
