"""Setup, watchdog and teardown of a run's process group."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed import distributed_c10d
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.processes.watchdog import CONTINUE, EXIT_CODE, FAREWELL, Watchdog, start_watchdog

log = logging.getLogger(__name__)


class ProcessWatch:
    """The watchdog of this process's default process group; it outlives strategies, and several fits share it."""

    def __init__(self) -> None:
        self._watchdog: Watchdog | None = None
        self._group: dist.ProcessGroup | None = None
        self._starts = 0
        """Number of earlier watchdogs in the group."""

    def begin(self, rank: int, world_size: int, timeout_seconds: float, *, remedy: str = CONTINUE) -> None:
        """Start the watchdog unless an earlier strategy did; called by all ranks."""
        is_same, current = self._group is dist.group.WORLD, self._watchdog
        # After an exception on all ranks each watchdog ends in its own time, and the ranks must do the same here.
        if is_same and (current is None or (current.is_alive() and current.failure is None)):
            if current is not None:
                current.set_timeout(timeout_seconds)
            return
        if current is not None:
            current.join(FAREWELL)
        if self._group is None:
            atexit.register(self._at_exit)
        self._starts = self._starts + 1 if is_same else 0
        self._group = dist.group.WORLD
        store = dist.PrefixStore(f"sd_lightning/watchdog/{self._starts}", distributed_c10d._get_default_store())
        self._watchdog = start_watchdog(rank, world_size, store, timeout_seconds=timeout_seconds, remedy=remedy)
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread._child_processes = []  # it would kill this process before the watchdog can say why

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one raised, so they end; return after that, or at a timeout."""
        if self._watchdog is not None:
            self._watchdog.fail(error)

    @property
    def blames_another_rank(self) -> bool:
        """Whether this process ends because of another rank, which the watchdog has named."""
        watchdog = self._watchdog
        if watchdog is None or watchdog.cause is None or watchdog.failure is None:
            return False
        return watchdog.failure.in_collective and watchdog.rank not in watchdog.cause.ranks

    def stop(self) -> None:
        """Stop the watchdogs of all ranks: from now on ranks may end in any order."""
        if self._watchdog is not None:
            self._watchdog.stop()

    def end(self) -> None:
        """Stop the watchdog and destroy the process group."""
        self.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _at_exit(self) -> None:
        """Clean up after a script that did not call :func:`leave_process_group`."""
        error: BaseException | None = getattr(sys, "last_value", None)  # set if an exception ends the interpreter
        if error is not None:
            self.report(error)
        else:
            self.end()


WATCH = ProcessWatch()
"""A process has one default group, so one watchdog."""


TIMEOUT = timedelta(minutes=30)
"""Of joining the process group and of collectives, unless a strategy has its own."""


@contextmanager
def joining(rank: int, world_size: int, timeout: timedelta, *, remedy: str = CONTINUE) -> Iterator[None]:
    """Start the watchdog after the block, which joins the process group.

    Raises:
        UsageError: The backend's own error, such as two processes on one device; or a process that did not join
            within the timeout: names this rank, the address and the time.
    """
    try:
        yield
    except dist.DistBackendError as error:  # NCCL connects in here, when all processes have joined
        raise UsageError(
            f"rank {rank} could not connect to the other processes: {_last_line(error)}; give each "
            "process a device of its own and the same libraries; NCCL_DEBUG=INFO in the environment says more"
        ) from error
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"rank {rank} cannot listen at {where}: another program has that port; set MASTER_PORT, or the "
                "launcher's option for it, to one that is free"
            ) from error
        raise UsageError(
            f"rank {rank} waited {timeout.total_seconds():.0f} s at {where} for all {world_size} "
            f"processes ({str(error).splitlines()[0]}); see the output of the ones that are missing, and whether "
            "every machine reaches that address"
        ) from error
    if world_size > 1:
        WATCH.begin(rank, world_size, timeout.total_seconds(), remedy=remedy)


class WatchedProcesses(ParallelStrategy):
    """Mixin of strategies: when a rank dies, raises, freezes or hangs, the run ends on all ranks and names it.

    The watchdog and the process group outlive the strategy: Lightning tears a strategy down after every ``fit``,
    ``validate``, …, but later code still runs collectives. Both end in :func:`leave_process_group`, or when the
    interpreter exits.
    """

    _timeout: timedelta | None

    def joining(self) -> AbstractContextManager[None]:
        """See :func:`joining`; the timeout is the strategy's."""
        return joining(self.global_rank, self.world_size, self._timeout or TIMEOUT)

    @override
    def setup_environment(self) -> None:
        with self.joining():
            super().setup_environment()

    @override
    def set_world_ranks(self) -> None:  # type: ignore[misc]  # it belongs to the strategies this is mixed into
        # DeepSpeed's launcher sets no NODE_RANK, and Lightning would take every machine for node 0.
        if not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
            first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
            os.environ["NODE_RANK"] = str(first // max(len(self.parallel_devices or ()), 1))
        super().set_world_ranks()  # type: ignore[misc]

    @override
    def on_exception(self, exception: BaseException) -> None:
        WATCH.report(exception)
        super().on_exception(exception)


def _last_line(error: BaseException) -> str:
    """Return the line of a backend's error that says what is wrong: NCCL puts it last, after its source file."""
    return ([line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def timeout_of(who: str, seconds: float, *, name: str = "timeout_seconds") -> timedelta:
    """Return a timeout as a ``timedelta``.

    Args:
        who: The strategy's name, for the message.
        seconds: The timeout.
        name: The argument's name, for the message.

    Raises:
        UsageError: The timeout is not positive.
    """
    if seconds <= 0:
        raise UsageError(f"{who} got {name}={seconds}; expected a positive number")
    return timedelta(seconds=seconds)


def leave_process_group() -> None:
    """Destroy the process group after the last collective; a collective call.

    At the interpreter's exit, C++ destructors would stop the backends' threads in any order. All ranks wait for each
    other first, because rank 0 serves the store, and because the others take a rank that has left for dead.
    """
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        WATCH.end()


def process_group_shutdown(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """See :func:`ending_together`; the trainer may have started processes."""

    def started() -> Iterable[subprocess.Popen[bytes]]:
        launcher = trainer.strategy.launcher
        return launcher.procs if isinstance(launcher, _SubprocessScriptLauncher) else ()

    return ending_together(started)


@contextmanager
def ending_together(started: Callable[[], Iterable[subprocess.Popen[bytes]]]) -> Iterator[None]:
    """Leave the process group after the block, which holds the program's last collective.

    Without an exception, all ranks wait for each other, stop the watchdog and destroy the process group; then the
    process that launched the others waits for them. After an exception, this rank tells the others and destroys
    nothing: backends would wait for collectives that never complete.

    Args:
        started: Returns the processes that this one has started.
    """
    try:
        yield
    except BaseException as error:
        WATCH.report(error)
        if WATCH.blames_another_rank:
            raise SystemExit(EXIT_CODE) from None  # the watchdog has printed the cause in one line
        raise
    leave_process_group()
    for process in started():
        code = process.wait()
        if code < 0:
            log.warning("process %d was killed by signal %d when all was done", process.pid, -code)
