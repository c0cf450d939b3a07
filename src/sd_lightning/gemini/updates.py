"""Elementwise optimizers as functions on flat ranges: what stepping in chunks needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sd_lightning._errors import UsageError


class Update(Protocol):
    """How an optimizer changes flat ranges of weights; the group is the user's, with its current learning rate."""

    def states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that the group keeps, one value per weight."""
        ...

    def scalars(self, step: int) -> dict[str, Any]:
        """Return what torch's optimizer keeps once per parameter after so many steps."""
        ...

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        step: int,
        group: Mapping[str, Any],
        divisor: Tensor | None,
    ) -> None:
        """Update ranges on one device in place.

        Args:
            weights: Flat ranges.
            gradients: Like the weights; may be overwritten.
            states: By name, like the weights.
            step: Number of this step, from 1.
            group: Hyper-parameters.
            divisor: Gradients are divided by it.
        """
        ...


class AdamUpdate:
    """``torch.optim.Adam`` and ``AdamW``, by torch's fused kernels."""

    def __init__(self, *, decoupled: bool) -> None:
        self._decoupled = decoupled

    def states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def scalars(self, step: int) -> dict[str, Any]:
        return {"step": torch.tensor(float(step))}

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        step: int,
        group: Mapping[str, Any],
        divisor: Tensor | None,
    ) -> None:
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        count = torch.tensor(float(step), device=weights[0].device)
        kernel(
            list(weights),
            list(gradients),
            list(states["exp_avg"]),
            list(states["exp_avg_sq"]),
            list(states.get("max_exp_avg_sq", ())),
            [count] * len(weights),
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            grad_scale=divisor,
            found_inf=None,
        )


class SGDUpdate:
    """``torch.optim.SGD``, by torch's fused kernel."""

    def states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, step: int) -> dict[str, Any]:
        return {}

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        step: int,
        group: Mapping[str, Any],
        divisor: Tensor | None,
    ) -> None:
        torch._fused_sgd_(
            list(weights),
            list(gradients),
            list(states.get("momentum_buffer", ())),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=step == 1,
            grad_scale=divisor,
            found_inf=None,
        )


def update_of(optimizer: torch.optim.Optimizer) -> Update:
    """Return how an optimizer updates flat ranges.

    Raises:
        UsageError: Its update is not elementwise, or not known to be.
    """
    kind = type(optimizer)
    if kind is torch.optim.AdamW:
        return AdamUpdate(decoupled=True)
    if kind is torch.optim.Adam:
        return AdamUpdate(decoupled=False)
    if kind is torch.optim.SGD:
        return SGDUpdate()
    reason = _REASONS.get(kind.__name__, "its update is not known to be elementwise")
    raise UsageError(
        f"Gemini cannot step {kind.__name__}: {reason}, and chunks are cut anywhere inside a parameter; use AdamW, "
        "Adam or SGD, or another strategy"
    )


_REASONS = {
    "Adafactor": "it keeps sums over the rows and columns of whole parameters",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs the loss again and dot products of whole histories",
    "SparseAdam": "it works on sparse gradients",
    "LAMB": "it scales by the norms of whole parameters",
    "LARS": "it scales by the norms of whole parameters",
}
