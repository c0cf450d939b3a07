"""torch's Adam, AdamW and SGD on flat ranges, and the choice of an update for an optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sd_lightning.gemini.blockwise import BlockwiseUpdate
from sd_lightning.gemini.own_update import OwnUpdate
from sd_lightning.gemini.update import Group, Progress, Ranges, Update, next_step


class AdamUpdate(Update):
    """``torch.optim.Adam`` and ``AdamW``, with torch's fused kernels."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {"step": torch.tensor(float(progress.step))}

    def apply(self, ranges: Ranges, group: Group, divisor: float) -> Progress:
        step = next_step(ranges.progress)
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        device = ranges.weights[0].device
        count = torch.full((), float(step), device=device)  # torch.tensor would wait for the device
        kernel(
            ranges.weights,
            ranges.gradients,
            ranges.states["exp_avg"],
            ranges.states["exp_avg_sq"],
            ranges.states.get("max_exp_avg_sq", []),
            [count] * len(ranges.weights),
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=_grad_scale(ranges.gradients, divisor),
            found_inf=None,
        )
        return Progress(step)


class SGDUpdate(Update):
    """``torch.optim.SGD``, with torch's fused kernel."""

    scalar_names = ()

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {}

    def apply(self, ranges: Ranges, group: Group, divisor: float) -> Progress:
        torch._fused_sgd_(
            ranges.weights,
            ranges.gradients,
            ranges.states.get("momentum_buffer", []),
            weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=ranges.progress is None,
            grad_scale=_grad_scale(ranges.gradients, divisor),
            found_inf=None,
        )
        return Progress(next_step(ranges.progress))


def _grad_scale(gradients: list[Tensor], divisor: float) -> Tensor | None:
    """Return ``grad_scale`` for torch's fused kernels; it is float32, so float64 gradients are divided here."""
    if divisor == 1.0:
        return None
    if gradients[0].dtype == torch.float64:
        torch._foreach_div_(gradients, divisor)
        return None
    return torch.full((), divisor, dtype=torch.float32, device=gradients[0].device)


def update_of(inner: torch.optim.Optimizer, devices: Iterable[torch.device] = (torch.device("cpu"),)) -> Update:
    """Return an optimizer's update of flat ranges; :meth:`Update.states` raises if it is not elementwise.

    Args:
        inner: The user's optimizer.
        devices: Devices on which ranges are stepped.
    """
    kind = type(inner)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamUpdate(decoupled=kind is torch.optim.AdamW)
    if kind is torch.optim.SGD:
        return SGDUpdate()
    if kind.__name__ == "AdamW8bit" and kind.__module__.startswith("bitsandbytes."):
        return BlockwiseUpdate(inner)
    return OwnUpdate(inner, devices)
