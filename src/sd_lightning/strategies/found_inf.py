"""Steps that are skipped on the device: gradient scalers, and optimizers that take ``found_inf``."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a step leaves everything unchanged where ``optimizer.found_inf`` is 1, without reading it.

    Torch's fused Adam, AdamW and Adagrad do. Fused SGD does not: its first step would leave new momentum buffers
    uninitialised.
    """
    is_told = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's own mark
    return is_told and not isinstance(optimizer, SGD) and all(group.get("fused") for group in optimizer.param_groups)


def give_found_inf(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have the next step leave everything unchanged if ``found_inf`` is 1: a float32 scalar on the device."""
    told: dict[str, Tensor | None] = vars(optimizer)
    if "found_inf" not in told:  # it stays, so the hook is registered once
        optimizer.register_step_post_hook(_forget)
    told |= {"found_inf": found_inf, "grad_scale": None}


def _forget(optimizer: Optimizer, *_: object) -> None:
    vars(optimizer)["found_inf"] = None


def gradient_scaler(plugin: Precision) -> GradScaler | None:
    """Return the gradient scaler of a precision plugin, if it has one."""
    return getattr(plugin, "scaler", None)  # two unrelated plugins of Lightning have one
