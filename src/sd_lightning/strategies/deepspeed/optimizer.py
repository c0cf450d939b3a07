"""Optimizers under DeepSpeed: which ones can step sharded states, and its CPU Adam in the place of torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from sd_lightning._errors import UsageError

_WHOLE = {"LBFGS", "Adafactor", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers that look at whole matrices or at all weights: a rank has a flat range of them."""


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose states are not one value per weight.

    Raises:
        UsageError: Naming it and the reason.
    """
    name = type(optimizer).__name__
    told = f"{name} cannot step DeepSpeed's shards, flat ranges of many weights"
    if hasattr(optimizer, "init_state"):  # bitsandbytes
        raise UsageError(f"{told}: its states are quantised in blocks; choose optimizer=adamw, or strategy=ddp")
    if name in _WHOLE:
        raise UsageError(f"{told}: it looks at whole weights; choose optimizer=adamw, or strategy=ddp")


def to_cpu_adam(optimizer: Optimizer, *, build: bool = True) -> Optimizer:
    """Return DeepSpeed's CPU Adam for the groups of torch's Adam or AdamW, with their hyper-parameters.

    It shares the groups with the optimizer it replaces, so learning-rate schedulers of that one go on to work.

    Args:
        optimizer: What the module has configured.
        build: False only checks.

    Raises:
        UsageError: The optimizer is another one, or uses what CPU Adam has not.
    """
    remedy = "write strategy.cpu_adam=false to step with torch's optimizer"
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UsageError(
            f"strategy.cpu_adam=true replaces torch's Adam or AdamW, not {type(optimizer).__name__}; {remedy}"
        )
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UsageError(f"strategy.cpu_adam=true: DeepSpeed's CPU Adam has no {option}; {remedy}")
    if not build:
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    decoupled = isinstance(optimizer, torch.optim.AdamW)
    defaults: Any = optimizer.defaults
    adam = DeepSpeedCPUAdam(
        optimizer.param_groups,
        lr=float(defaults["lr"]),
        betas=defaults["betas"],
        eps=defaults["eps"],
        weight_decay=defaults["weight_decay"],
        adamw_mode=decoupled,
    )
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or its scheduler warns that nobody steps it
    return adam
