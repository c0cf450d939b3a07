"""Checks of optimizers for DeepSpeed's shards, and replacement of torch's Adam by DeepSpeed's CPU Adam."""

from __future__ import annotations

from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.state.eight_bit import is_eight_bit
from sd_lightning.strategies.optimizers import is_adam, replace_adam, unsupported_option

_WHOLE = {"LBFGS", "Adafactor", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers that need whole matrices or all weights, while a rank has only a flat range."""


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise if an optimizer's states are not one value per weight.

    Raises:
        UsageError: They are not; names the optimizer and the reason.
    """
    name = type(optimizer).__name__
    told = f"{name} cannot step DeepSpeed's shards, flat ranges of many weights"
    if is_eight_bit(optimizer):
        raise UsageError(f"{told}: its states are quantised in blocks; choose optimizer=adamw, or strategy=ddp")
    if name in _WHOLE:
        raise UsageError(f"{told}: it looks at whole weights; choose optimizer=adamw, or strategy=ddp")


def check_cpu_adam(optimizer: Optimizer) -> None:
    """Raise if DeepSpeed's CPU Adam cannot replace an optimizer.

    Raises:
        UsageError: It is not torch's Adam or AdamW, or uses an option that CPU Adam lacks.
    """
    remedy = "write strategy.cpu_adam=false to step with torch's optimizer"
    if not is_adam(optimizer):
        raise UsageError(
            f"strategy.cpu_adam=true replaces torch's Adam or AdamW, not {type(optimizer).__name__}; {remedy}"
        )
    option = unsupported_option(optimizer)
    if option is not None:
        raise UsageError(f"strategy.cpu_adam=true: DeepSpeed's CPU Adam has no {option}; {remedy}")


def to_cpu_adam(optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's CPU Adam for the groups of torch's Adam or AdamW."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    check_cpu_adam(optimizer)
    return replace_adam(optimizer, DeepSpeedCPUAdam)
