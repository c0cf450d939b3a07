"""Collective calls after which all ranks continue, or all fail with one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.storage import checkpoint

T = TypeVar("T")


def on_rank_zero(trainer: pl.Trainer, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0, and return its result on all ranks; a collective call.

    Raises:
        UsageError: ``work`` raised one, or an OSError.
    """
    result: T | None = None
    refused: str | None = None
    if trainer.is_global_zero:
        try:
            result = work()
        except (UsageError, OSError) as error:
            refused = str(error)
    result, refused = trainer.strategy.broadcast((result, refused))
    if refused is not None:
        raise UsageError(refused)
    return result  # type: ignore[return-value]


@contextmanager
def saving_together(trainer: pl.Trainer, run_dir: Path, known: dict[str, str]) -> Iterator[Path]:
    """Yield the current step's checkpoint directory on all ranks; rank 0 completes it, or removes it on failure.

    Args:
        trainer: The running trainer.
        run_dir: Directory of the run.
        known: As for :func:`checkpoint.saving`.
    """
    with ExitStack() as stack:
        tmp: Path | None = None
        with failing_together(trainer, run_dir):
            if trainer.is_global_zero:
                tmp = stack.enter_context(checkpoint.saving(run_dir, trainer.global_step, known=known))
        tmp = trainer.strategy.broadcast(tmp)
        assert tmp is not None
        yield tmp
        with failing_together(trainer, run_dir):
            stack.close()


@contextmanager
def failing_together(trainer: pl.Trainer, run_dir: Path) -> Iterator[None]:
    """Raise on all ranks if the block, a part of saving, fails on any; a collective call.

    Raises:
        UsageError: The disk is full, or the block failed on another rank.
    """
    step, error = trainer.global_step, None
    try:
        yield
    except Exception as caught:
        error = caught
    if trainer.strategy.reduce_boolean_decision(error is None, all=True):
        return
    if error is None:
        raise UsageError(f"Saving the checkpoint of step {step} failed on another process; see its message")
    raise checkpoint.disk_full(error, run_dir, step) or error
