"""The Adam of another package in the place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is torch's Adam or AdamW, and no subclass."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def unsupported_option(optimizer: Optimizer) -> str | None:
    """Name an option of torch's Adam that a group sets and the others do not have."""
    options = ("amsgrad", "maximize")
    return next((option for group in optimizer.param_groups for option in options if group.get(option)), None)


def replace_adam(optimizer: Optimizer, kind: Callable[..., Optimizer]) -> Optimizer:
    """Return another Adam for the groups of torch's Adam or AdamW, with their hyper-parameters.

    It shares the groups with the optimizer that it replaces, so learning-rate schedulers of that one work on.
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
