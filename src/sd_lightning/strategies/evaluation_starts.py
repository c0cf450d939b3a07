"""Where an evaluation starts: Lightning calls no hook there on a rank that has no batches, but all ranks pass here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.strategies.whole_tensors import of_all_ranks, rank_and_world_size


class EvaluationStarts:
    """Calls a function on every rank at each validation of a fit and each ``validate``, ``test`` and ``predict``.

    Args:
        trainer: The trainer.
        at_start: Is given the evaluation's loop, whose data are set up; it may make collective calls.
    """

    def __init__(self, trainer: pl.Trainer, at_start: Callable[[Any], None]) -> None:
        loops: Any = trainer
        of_fit = loops.fit_loop.epoch_loop.val_loop
        self._loops = [of_fit, loops.validate_loop, loops.test_loop, loops.predict_loop]
        for loop in self._loops:
            loop.__dict__["setup_data"] = _followed(loop, at_start)

    def release(self) -> None:
        """Leave the loops as they were."""
        for loop in self._loops:
            loop.__dict__.pop("setup_data", None)


def _followed(loop: Any, at_start: Callable[[Any], None]) -> Callable[[], None]:
    def setup_data() -> None:
        type(loop).setup_data(loop)
        at_start(loop)

    return setup_data


def refuse_uneven(loop: Any, who: str) -> None:
    """Refuse an evaluation in which ranks have different numbers of batches; a collective call.

    Args:
        loop: The loop of the evaluation, of which loaders without a known length do not count.
        who: The strategy, whose ranks gather weights together in each forward.

    Raises:
        UsageError: The numbers differ; on all ranks alike.
    """
    counts = _batches_by_rank(loop)
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"{who} got an evaluation in which {', '.join(f'rank {n} has {count:.0f}' for n, count in counts.items())} "
            "batches, and all ranks gather weights together in each forward: one with fewer batches would leave the "
            "others waiting; give every rank as many batches (Lightning's own sampler for validation and test does; "
            "for predict, pad the data or set limit_predict_batches to the smallest number), or take strategy=ddp"
        )


def refuse_rank_without_batches(loop: Any, who: str) -> None:
    """Refuse a validation of which some ranks have no batch, so that they swap no averages in; a collective call.

    Args:
        loop: As for :func:`refuse_uneven`.
        who: The strategy, whose ranks exchange weights together.

    Raises:
        UsageError: Some ranks have none; on all ranks alike.
    """
    counts = _batches_by_rank(loop)
    without = [rank for rank, count in counts.items() if count == 0]
    if without and len(without) < len(counts):
        raise UsageError(
            f"{who} got a validation of which rank {without[0]} has no batches, so that Lightning does not start it "
            "there, and all ranks exchange the weights for their EMA together where it starts: the others would wait; "
            "give every rank a batch (Lightning's own sampler does), or train without the callback EMA "
            "(callbacks.ema=null)"
        )


def _batches_by_rank(loop: Any) -> dict[int, float]:
    """Return the batches of each rank with a known number; empty for one process."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return {}
    limits = getattr(loop, "_max_batches", None) or loop.max_batches  # the latter is cut for a sanity check
    mode = getattr(loop._combined_loader, "_mode", "sequential")  # None where there is nothing to evaluate
    by_rank = of_all_ranks({str(rank): _NUM_STEPS[mode](limits or [0])})
    return {each: by_rank[str(each)] for each in range(world_size) if by_rank[str(each)] != math.inf}


_NUM_STEPS: dict[str, Callable[[list[float]], float]] = {
    "sequential": sum,
    "min_size": min,
    "max_size": max,
    "max_size_cycle": max,
}
"""Mode of Lightning's combined loader -> how many batches its loaders have together."""
