"""What strategies ask of optimizers: which Adam they are, and whether they skip steps on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer


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


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a step leaves everything unchanged where ``optimizer.found_inf`` is 1, without reading it.

    Torch's fused Adam, AdamW and Adagrad do. Fused SGD does not: its first step would leave new momentum buffers
    uninitialised.
    """
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's own mark
    return skips and not isinstance(optimizer, SGD) and all(group.get("fused") for group in optimizer.param_groups)


def give_found_inf(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have the next step leave everything unchanged if ``found_inf`` is 1: a float32 scalar on the device."""
    attributes: dict[str, Tensor | None] = vars(optimizer)
    if "found_inf" not in attributes:  # it stays, so the hook is registered once
        optimizer.register_step_post_hook(_forget)
    attributes |= {"found_inf": found_inf, "grad_scale": None}


def _forget(optimizer: Optimizer, *_: object) -> None:
    vars(optimizer)["found_inf"] = None


def gradient_scaler(plugin: Precision) -> GradScaler | None:
    """Return the gradient scaler of a precision plugin, if it has one."""
    return getattr(plugin, "scaler", None)  # two unrelated plugins of Lightning have one
