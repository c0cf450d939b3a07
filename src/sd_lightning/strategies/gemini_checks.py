"""What a run cannot have under some of Gemini's settings."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig
from sd_lightning.strategies.base import RunSettings


def refuse_late_gradients(config: GeminiConfig, run: RunSettings | pl.Trainer) -> None:
    """Raise if a run needs the gradients after a backward pass that steps.

    Raises:
        UsageError: It does: it accumulates them, or clips them in another way.
    """
    clip, mode = run.gradient_clip_val, config.step_in_backward
    if not mode:
        return
    accumulate, algorithm = run.accumulate_grad_batches, run.gradient_clip_algorithm
    unclipped, running = "write trainer.gradient_clip_val=null", "step_in_backward=running_norm"
    callbacks, module = getattr(run, "callbacks", []), getattr(run, "lightning_module", None)  # of a trainer
    schedulers = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    for is_wrong, given, remedy in (
        (
            accumulate > 1,
            f"trainer.accumulate_grad_batches={accumulate}",
            "a step has one backward pass then: write trainer.accumulate_grad_batches=1",
        ),
        (
            any(each.going_to_accumulate_grad_batches() for each in schedulers),
            "the callback GradientAccumulationScheduler",
            "a step has one backward pass then: leave the callback out",
        ),
        (
            mode == "running_norm" and module is not None and not module.automatic_optimization,
            "manual optimization, for which Lightning takes no trainer.gradient_clip_val",
            "write step_in_backward=true, or let Lightning optimize",
        ),
        (
            bool(clip) and mode is True,
            f"trainer.gradient_clip_val={clip}",
            f"the global norm is known after the pass: {unclipped}, or {running} to clip by the norm so far",
        ),
        (bool(clip) and algorithm == "value", "trainer.gradient_clip_algorithm=value", unclipped),
        (
            not clip and mode == "running_norm",
            "no trainer.gradient_clip_val",
            "give one, or write step_in_backward=true",
        ),
    ):
        if is_wrong:
            raise UsageError(f"GeminiStrategy got step_in_backward={str(mode).lower()} and {given}; {remedy}")
