"""The ranks of a program without a Trainer: started here or by a launcher, joined, watched, and ended together."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _launch_process_observer
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process, num_processes_here, num_started_processes
from sd_lightning.strategies.processes.group import TIMEOUT, WATCH, ending_together, joining
from sd_lightning.strategies.processes.watchdog import EXIT_CODE

_STARTED_BY = "SD_LIGHTNING_STARTED_BY"
"""Environment variable of the processes that rank 0 starts: its process ID."""
_CONNECT = timedelta(minutes=1)
"""For such a process to connect to rank 0, which listens already."""


@contextmanager
def ranks(size: int, device: torch.device) -> Iterator[None]:
    """Run the block on several ranks that form the default process group, over gloo on a CPU and NCCL on GPUs.

    The processes of a launcher are used. Without one, this process is rank 0 and starts the others with its own command
    line, with which they come here, too. When one dies or raises, all end, and a line says why.

    Args:
        size: Number of ranks, at least two.
        device: This rank's.

    Raises:
        UsageError: A rank ended before it joined, or cannot join.
    """
    others: list[subprocess.Popen[bytes]] = []
    try:
        if num_started_processes() == 1:
            server = _start(others, size)  # noqa: F841  which ends when nothing refers to it
        elif _STARTED_BY in os.environ:
            _arrive()
        elif "RANK" not in os.environ:
            _read_slurm(size)
        _set_num_threads_if_needed(num_processes_here(size))
        backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        if device_id is not None:
            torch.cuda.set_device(device_id)
        with joining(int(os.environ["RANK"]), size, TIMEOUT, remedy="start it again"):
            dist.init_process_group(backend, timeout=TIMEOUT, device_id=device_id)
        with ending_together(lambda: others):
            try:
                yield
            except (KeyboardInterrupt, UsageError) as error:
                if others:  # they need not say why they end
                    WATCH.stop()
                if is_first_process():
                    raise
                WATCH.report(error)  # rank 0 says it
                raise SystemExit(EXIT_CODE) from None
    finally:
        for process in others:
            process.kill()


def _start(others: list[subprocess.Popen[bytes]], size: int) -> dist.Store:
    """Start ranks 1, 2, … on this machine, fill ``others`` with their processes, and wait until all have arrived.

    Ctrl-C does not reach them, as they have sessions of their own: rank 0 ends them.

    Returns:
        The store in which they tell it; `init_process_group` shares its server.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    size_of = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    os.environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "RANK": "0", "LOCAL_RANK": "0"} | size_of
    _set_num_threads_if_needed(size)  # also of the processes that inherit the environment
    for number in map(str, range(1, size)):
        own = {"RANK": number, "LOCAL_RANK": number, _STARTED_BY: str(os.getpid())}
        others.append(subprocess.Popen(_basic_subprocess_cmd(), env=os.environ | own, start_new_session=True))
    missing = dict(enumerate(others, start=1))
    while missing := {rank: process for rank, process in missing.items() if not store.check([_arrival(rank)])}:
        for rank, process in missing.items():
            if process.poll() is not None:
                raise UsageError(
                    f"rank {rank} (process {process.pid}) ended with code {process.returncode} before it joined the "
                    "others; its output says why, or it was killed: start it again"
                )
        time.sleep(0.05)
    _launch_process_observer(others)  # until the watchdog takes over
    return store


def _arrive() -> None:
    """Tell rank 0 that this process is there; end it if rank 0 is gone."""
    if os.getppid() != int(os.environ[_STARTED_BY]):
        raise SystemExit(EXIT_CODE)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.TCPStore(address, port, is_master=False, timeout=_CONNECT).set(_arrival(int(os.environ["RANK"])), "")


def _arrival(rank: int) -> str:
    return f"sd_lightning/arrived/{rank}"


def _read_slurm(size: int) -> None:
    """Name this rank and rank 0's address as torch expects them."""
    slurm = SLURMEnvironment()
    sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": num_processes_here(size)}
    of_rank = {"RANK": slurm.global_rank(), "LOCAL_RANK": slurm.local_rank(), **sizes}
    of_first = {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": slurm.main_port}
    os.environ |= {name: str(value) for name, value in (of_rank | of_first).items()}
