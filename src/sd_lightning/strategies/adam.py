"""Replacement of torch's Adam by another package's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's Adam or AdamW, not a subclass."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def unsupported_option(optimizer: Optimizer) -> str | None:
    """Return an option that a group sets and only torch's Adam has, or None."""
    options = ("amsgrad", "maximize")
    return next((option for group in optimizer.param_groups for option in options if group.get(option)), None)


def replace_adam(optimizer: Optimizer, kind: Callable[..., Optimizer]) -> Optimizer:
    """Return an Adam of class ``kind`` for the groups of torch's Adam or AdamW, with their hyper-parameters.

    Both optimizers share the groups, so learning-rate schedulers of the old one keep working.
    """
    defaults: dict[str, Any] = optimizer.defaults
    adam = kind(
        optimizer.param_groups,
        lr=float(defaults["lr"]),
        betas=defaults["betas"],
        eps=defaults["eps"],
        weight_decay=defaults["weight_decay"],
        adamw_mode=isinstance(optimizer, torch.optim.AdamW),
    )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns that nobody steps it
    return adam
