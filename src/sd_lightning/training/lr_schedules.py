"""Learning-rate schedules over optimizer steps, as torch schedulers."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning.training.optimizers import TwoSidedOptimizer


def constant(optimizer: Optimizer, *, warmup_steps: int = 0) -> LambdaLR:
    """Return linear warmup over ``warmup_steps``, then a constant rate: a cosine that ends where it begins."""
    return cosine(optimizer, warmup_steps=warmup_steps, total_steps=1, final_fraction=1.0)


def cosine(optimizer: Optimizer, *, warmup_steps: int = 0, total_steps: int, final_fraction: float = 0.0) -> LambdaLR:
    """Return linear warmup over ``warmup_steps``, times half a cosine from 1 to ``final_fraction``.

    SGDR, arXiv 1608.03983, equation 5, without restarts.

    Raises:
        UsageError: A number is out of range, or the optimizer is schedule-free.
    """
    if final_fraction < 1 and isinstance(optimizer, TwoSidedOptimizer):
        raise UsageError(
            f"lr_scheduler=cosine got {type(optimizer).__name__}, whose average replaces a schedule; expected a "
            "constant learning rate; write lr_scheduler=none, or constant"
        )
    check_at_least("lr_scheduler", 0, warmup_steps=warmup_steps)
    if total_steps < 1:
        raise UsageError(
            f"lr_scheduler=cosine got total_steps={total_steps}; expected at least 1: set trainer.max_steps, or "
            "lr_scheduler=constant"
        )
    if not 0 <= final_fraction <= 1:
        raise UsageError(
            f"lr_scheduler=cosine got final_fraction={final_fraction}; expected a number in [0, 1], e.g. "
            "final_fraction=0.1"
        )

    def factor(step: int) -> float:
        half_cosine = 0.5 * (1 + math.cos(math.pi * min(step / total_steps, 1.0)))
        warmup = min((step + 1) / warmup_steps, 1.0) if warmup_steps else 1.0
        return warmup * (final_fraction + (1 - final_fraction) * half_cosine)

    return LambdaLR(optimizer, factor)
