"""How the processes of a run come together, are watched, and part."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed import distributed_c10d
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.processes.watchdog import EXIT_CODE, Watchdog
from sd_lightning.strategies.processes.watchdog_hub import start_watchdog

log = logging.getLogger(__name__)


class ProcessWatch:
    """The watch over the default process group of this process; it outlives the strategies of several fits."""

    def __init__(self) -> None:
        self._watchdog: Watchdog | None = None
        self._group: dist.ProcessGroup | None = None
        self._starts = 0
        """Watchdogs that there have been in the group before this one."""

    def begin(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Start watching, unless an earlier strategy did; called by all ranks."""
        is_same = self._group is dist.group.WORLD
        if is_same and (self._watchdog is None or self._watchdog.is_alive()):
            if self._watchdog is not None:
                self._watchdog.set_timeout(timeout_seconds)
            return
        if self._group is None:
            atexit.register(self._at_exit)
        self._starts = self._starts + 1 if is_same else 0
        self._group = dist.group.WORLD
        store = dist.PrefixStore(f"sd_lightning/watchdog/{self._starts}", distributed_c10d._get_default_store())
        self._watchdog = start_watchdog(rank, world_size, store, timeout_seconds=timeout_seconds)
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread._child_processes = []  # it would kill this process before the watchdog can say why

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one raised; they end. Returns when they have, or within seconds."""
        if self._watchdog is not None:
            self._watchdog.fail(error)

    @property
    def blames_another_rank(self) -> bool:
        """Whether this process is ending because of another rank, which the watchdog has named."""
        watchdog = self._watchdog
        if watchdog is None or watchdog.cause is None or watchdog.failure is None:
            return False
        return watchdog.failure.in_collective and watchdog.rank not in watchdog.cause.ranks

    def end(self) -> None:
        """Stop watching and destroy the process group."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _at_exit(self) -> None:
        """End what a script that does not call :func:`leave_process_group` left open."""
        error: BaseException | None = getattr(sys, "last_value", None)  # set when the interpreter ends by an exception
        if error is not None:
            self.report(error)
        else:
            self.end()


_WATCH = ProcessWatch()
"""A process has one default group, and so one watch."""


class WatchedProcesses(ParallelStrategy):
    """Mixin of strategies: a rank that dies, raises, freezes or gets stuck ends the run on all, with its name.

    The watch and the process group outlive the strategy: Lightning tears a strategy down after every ``fit``,
    ``validate``, …, and the next one, or the code between them, still has collectives. They end in
    :func:`leave_process_group`, or when the interpreter exits.
    """

    _timeout: timedelta | None

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Start to watch the processes once they have come together; if they do not, say who waited where for how long.

        Raises:
            UsageError: A process did not come within the timeout.
        """
        timeout = self._timeout or timedelta(minutes=30)
        try:
            yield
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise UsageError(
                f"rank {self.global_rank} waited {timeout.total_seconds():.0f} s at {where} for all {self.world_size} "
                f"processes ({str(error).splitlines()[0]}); see the output of the ones that are missing, and whether "
                "every machine reaches that address"
            ) from error
        if self.world_size > 1:
            _WATCH.begin(self.global_rank, self.world_size, timeout.total_seconds())

    @override
    def setup_environment(self) -> None:
        with self.joining():
            super().setup_environment()

    @override
    def set_world_ranks(self) -> None:  # type: ignore[misc]  # it belongs to the strategies this is mixed into
        # DeepSpeed's launcher gives no NODE_RANK, and Lightning would take every machine for the first.
        if not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
            first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
            os.environ["NODE_RANK"] = str(first // max(len(self.parallel_devices or ()), 1))
        super().set_world_ranks()  # type: ignore[misc]

    @override
    def on_exception(self, exception: BaseException) -> None:
        _WATCH.report(exception)
        super().on_exception(exception)


def timeout_of(who: str, seconds: float, *, name: str = "timeout_seconds") -> timedelta:
    """Return a timeout as torch takes it.

    Args:
        who: The strategy, for the message.
        seconds: The timeout.
        name: What the strategy calls it.

    Raises:
        UsageError: It is not positive.
    """
    if seconds <= 0:
        raise UsageError(f"{who} got {name}={seconds}; expected a positive number")
    return timedelta(seconds=seconds)


def leave_process_group() -> None:
    """Destroy the process group after the last collective, on all ranks together; a collective call.

    Left to the interpreter's end, backends' threads are stopped in any order by C++ destructors. All wait for each
    other first, because rank 0 serves the store, and because a rank that is gone is a dead rank to the others.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        _WATCH.end()


@contextmanager
def parting(trainer: pl.Trainer) -> Iterator[None]:
    """End what a program's collectives need, after the last of them, in good order or by an exception.

    In good order: all ranks wait for each other, stop watching and destroy the process group; then the process that
    started the others waits for them. After an exception the others are told, and nothing is destroyed: backends wait
    for collectives that will never complete.
    """
    try:
        yield
    except BaseException as error:
        _WATCH.report(error)
        if _WATCH.blames_another_rank:
            raise SystemExit(EXIT_CODE) from None  # the watchdog has said why in one line
        raise
    leave_process_group()
    launcher = trainer.strategy.launcher
    for process in launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else ():
        code = process.wait()
        if code < 0:
            log.warning("process %d was killed by signal %d when all was done", process.pid, -code)
