"""What ranks tell each other in Python objects, and how all of them fail when one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from sd_lightning._errors import UsageError

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the world size: 0 and 1 without a process group."""
    is_one_of_many = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if is_one_of_many else (0, 1)


def gathered(value: T) -> list[T]:
    """Return the values of all ranks; a collective call."""
    parts = [value] * rank_and_world_size()[1]
    if len(parts) > 1:
        dist.all_gather_object(parts, value)
    return parts


def of_all_ranks(mine: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the dictionaries of all ranks; a collective call."""
    return {name: entry for part in gathered(mine) for name, entry in part.items()}


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise on every rank if the block raises on one; its end is a collective call.

    Raises:
        UsageError: Another rank failed: names it and its reason. A rank that failed raises its own error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    reasons = gathered(None if error is None else str(error) if isinstance(error, UsageError) else repr(error))
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise UsageError(f"rank {rank}: {reason}")


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0, and return its result on all ranks; a collective call.

    Raises:
        UsageError: ``work`` raised one, or an OSError.
    """
    result: T | None = None
    with failing_together():
        try:
            if rank_and_world_size()[0] == 0:
                result = work()
        except OSError as error:
            raise UsageError(str(error)) from error
    return gathered(result)[0]  # type: ignore[return-value]
