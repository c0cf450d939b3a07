"""Where an evaluation starts: Lightning calls no hook there on a rank that has no batches, but all ranks pass here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.strategies.whole_tensors import of_all_ranks, rank_and_world_size


class EvaluationStarts:
    """Calls a function on every rank where an evaluation starts: while fitting, and each that is asked for.

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
        loop: The loop of the evaluation, of which each loader with a known length counts.
        who: The strategy, whose ranks gather weights together in each forward.

    Raises:
        UsageError: The numbers differ; on all ranks alike.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return
    batches = of_all_ranks({str(rank): [each for each in loop.max_batches if each != float("inf")]})
    counts = [batches[str(each)] for each in range(world_size)]
    if any(each != counts[0] for each in counts):
        told = ", ".join(f"rank {each} has {_told(count)}" for each, count in enumerate(counts))
        raise UsageError(
            f"{who} got an evaluation in which {told} batches, and all ranks gather weights together in each forward: "
            "one with fewer batches would leave the others waiting; give every rank as many batches (Lightning's own "
            "sampler for validation and test does), or take strategy=ddp"
        )


def _told(count: list[int | float]) -> str:
    return " + ".join(f"{each:g}" for each in count) or "0"
