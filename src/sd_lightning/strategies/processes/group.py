"""What all strategies of several processes share: how they come together, are watched, and part."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import ParallelStrategy
from torch.distributed import distributed_c10d
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.strategies.processes.watchdog import EXIT_CODE, Watchdog
from sd_lightning.strategies.processes.watchdog_hub import start_watchdog

log = logging.getLogger(__name__)

_watchdog: Watchdog | None = None
_watched_group: Any = None
_starts = 0  # of watchdogs in that group


class WatchedProcesses(ParallelStrategy):
    """Mixin of strategies: a rank that dies, raises, freezes or gets stuck ends the run on all, with its name.

    A strategy wraps its ``setup_environment`` in :meth:`joining`. The watch and the process group then outlive the
    strategy: Lightning tears a strategy down after every ``fit``, ``validate``, …, and the next one, or the code
    between them, still has collectives. They end in :func:`leave_process_group`, or when the interpreter exits.
    """

    _timeout: timedelta | None

    def teardown_beside_the_module(self) -> None:
        """Tear down as Lightning does, but leave the module where it is: its engine holds the weights, and the average
        comes to them after it.
        """
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Name who waited where for how long if the processes do not come together; then start to watch them.

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
            _watch(self.global_rank, self.world_size, timeout.total_seconds())

    @override
    def set_world_ranks(self) -> None:  # type: ignore[misc]  # it belongs to the strategies this is mixed into
        # DeepSpeed's launcher gives no NODE_RANK, and Lightning would take every machine for the first.
        if not {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() and {"RANK", "LOCAL_RANK"} <= os.environ.keys():
            first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
            os.environ["NODE_RANK"] = str(first // max(len(self.parallel_devices or ()), 1))
        super().set_world_ranks()  # type: ignore[misc]

    @override
    def on_exception(self, exception: BaseException) -> None:
        report_failure(exception)
        super().on_exception(exception)


def _watch(rank: int, world_size: int, timeout_seconds: float) -> None:
    """Start the watch of this process, unless an earlier strategy did; called by all ranks."""
    global _watchdog, _watched_group, _starts
    if _watched_group is dist.group.WORLD and (_watchdog is None or _watchdog.is_alive()):
        if _watchdog is not None:
            _watchdog.set_timeout(timeout_seconds)
        return
    if _watched_group is None:
        atexit.register(_at_exit)
    _starts = _starts + 1 if _watched_group is dist.group.WORLD else 0
    _watched_group = dist.group.WORLD
    store = dist.PrefixStore(f"sd_lightning/watchdog/{_starts}", distributed_c10d._get_default_store())
    _watchdog = start_watchdog(rank, world_size, store, timeout_seconds=timeout_seconds)
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []  # it would kill this process before the watchdog can say why


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that this one raised; they end. Returns when they have, or within seconds."""
    if _watchdog is not None:
        _watchdog.fail(error)


def ended_by_another_rank() -> bool:
    """Whether this process is ending because of another rank, which the watchdog has named."""
    if _watchdog is None or _watchdog.cause is None or _watchdog.failure is None:
        return False
    return _watchdog.failure.in_collective and _watchdog.rank not in _watchdog.cause.ranks


def leave_process_group() -> None:
    """Destroy the process group after the last collective, on all ranks together; a collective call.

    Left to the interpreter's end, backends' threads are stopped in any order by C++ destructors. All wait for each
    other first, because rank 0 serves the store, and because a rank that is gone is a dead rank to the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    dist.barrier()
    _stop_watching()
    dist.destroy_process_group()


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
        report_failure(error)
        if ended_by_another_rank():
            raise SystemExit(EXIT_CODE) from None  # the watchdog has said why in one line
        raise
    leave_process_group()
    for process in getattr(trainer.strategy.launcher, "procs", ()):
        code = process.wait()
        if code < 0:
            log.warning("process %d was killed by signal %d when all was done", process.pid, -code)


def _stop_watching() -> None:
    if _watchdog is not None:
        _watchdog.stop()


def _at_exit() -> None:
    """End what a script that does not call :func:`leave_process_group` left open."""
    error: Any = getattr(sys, "last_value", None)
    if error is not None:  # the interpreter ends with a stack trace
        report_failure(error)
        return
    _stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()
