"""What a run cannot have under some of Gemini's settings."""

from __future__ import annotations

from typing import NoReturn

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

    def refuse(given: str, remedy: str) -> NoReturn:
        raise UsageError(f"GeminiStrategy got step_in_backward={str(mode).lower()} and {given}; {remedy}")

    once, unclipped = "a step has one backward pass then:", "write trainer.gradient_clip_val=null"
    callbacks, module = getattr(run, "callbacks", []), getattr(run, "lightning_module", None)  # of a trainer
    schedulers = [each for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if (number := run.accumulate_grad_batches) > 1:
        refuse(f"trainer.accumulate_grad_batches={number}", f"{once} write trainer.accumulate_grad_batches=1")
    if any(each.going_to_accumulate_grad_batches() for each in schedulers):
        refuse("the callback GradientAccumulationScheduler", f"{once} leave the callback out")
    if mode == "running_norm" and module is not None and not module.automatic_optimization:
        given = "manual optimization, for which Lightning takes no trainer.gradient_clip_val"
        refuse(given, "write step_in_backward=true, or let Lightning optimize")
    if clip and mode is True:
        remedy = f"{unclipped}, or step_in_backward=running_norm to clip by the norm so far"
        refuse(f"trainer.gradient_clip_val={clip}", f"the global norm is known after the pass: {remedy}")
    if clip and run.gradient_clip_algorithm == "value":
        refuse("trainer.gradient_clip_algorithm=value", unclipped)
    if mode == "running_norm" and not clip:
        refuse("no trainer.gradient_clip_val", "give one, or write step_in_backward=true")
