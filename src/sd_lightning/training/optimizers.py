"""Optimizers of optional packages: ``pip install 'sd-lightning[optimizers]'``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from sd_lightning._errors import UsageError, check_at_least
from sd_lightning._imports import require

_LEAST_FACTOR = 0.1
"""Of Prodigy: with less it learns nothing, and what is given was meant for another optimizer."""


@runtime_checkable
class TwoSidedOptimizer(Protocol):
    """An optimizer that takes gradients at other weights than those it has found: schedule-free."""

    def train(self) -> None:
        """Bring the weights to where gradients are taken."""

    def eval(self) -> None:
        """Bring the weights to those to validate, draw and save with."""


def prodigy(
    params: Iterable[Any],
    *,
    lr: float = 1.0,
    betas: Sequence[float] = (0.9, 0.99),
    weight_decay: float = 0.01,
    d_coef: float = 1.0,
    use_bias_correction: bool = True,
    safeguard_warmup: bool = True,
    slice_p: int = 11,
) -> Optimizer:
    """Return Prodigy (arXiv 2306.06101), which finds its own learning rate: ``lr`` multiplies it.

    Args:
        params: Parameters or groups, which have one learning rate.
        lr: Factor of the learning rate that it finds, at least 0.1; a schedule may change it.
        betas: Decay of the moments.
        weight_decay: Decoupled, as AdamW's.
        d_coef: Factor of the estimates.
        use_bias_correction: Correct the moments' bias, as Adam does.
        safeguard_warmup: Leave ``lr`` out of the estimate's denominator, for schedules that warm up.
        slice_p: The estimate takes one of so many values; with 1 its states look like weights to checkpoints.

    Raises:
        UsageError: A setting is out of range, groups have several learning rates, or the package is missing.
    """
    check_at_least("optimizer=prodigy", 2, slice_p=slice_p)
    if lr < _LEAST_FACTOR:
        raise UsageError(
            f"optimizer=prodigy got lr={lr}, which multiplies the learning rate that it finds; expected at least "
            f"{_LEAST_FACTOR}, mostly 1; write optimizer.lr=1, in dreambooth learning_rate=1"
        )
    params = list(params)
    rates = {group.get("lr", lr) for group in params if isinstance(group, Mapping)} - {lr}
    if rates:
        raise UsageError(
            f"optimizer=prodigy got lr={lr} and {rates.pop()} for another group (text_encoder_lr); expected one "
            "learning rate, as it finds one for all weights; write module.text_encoder_lr=null"
        )
    cls = require("prodigyopt", extra="optimizers", who="optimizer=prodigy").Prodigy
    options = {"d_coef": d_coef, "use_bias_correction": use_bias_correction, "slice_p": slice_p}
    options |= {"weight_decay": weight_decay, "safeguard_warmup": safeguard_warmup}
    with redirect_stdout(None):  # it prints that weight decay is decoupled
        optimizer: Optimizer = cls(params, lr=lr, betas=tuple(betas), **options)
    return optimizer


def schedule_free_adamw(
    params: Iterable[Any],
    *,
    lr: float = 1e-4,
    betas: Sequence[float] = (0.9, 0.99),
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    warmup_steps: int = 0,
) -> Optimizer:
    """Return schedule-free AdamW (arXiv 2405.15682): an average of the iterates in place of a schedule.

    Args:
        params: Parameters or groups.
        lr: Learning rate; keep it constant (``lr_scheduler=none``).
        betas: Weight of the average in the point of the gradients; decay of the second moment.
        weight_decay: Decoupled.
        eps: Added to the root of the second moment.
        warmup_steps: Steps over which the learning rate rises.
    """
    cls = require("schedulefree", extra="optimizers", who="optimizer=schedule_free").AdamWScheduleFree
    options = {"weight_decay": weight_decay, "warmup_steps": warmup_steps}
    optimizer: Optimizer = cls(params, lr=lr, betas=tuple(betas), eps=eps, **options)
    return optimizer
