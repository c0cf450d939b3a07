"""Elementwise optimizers as functions on flat ranges: what stepping in chunks needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.blockwise import BlockwiseUpdate
from sd_lightning.gemini.layout import Shard, Slot


class Update(Protocol):
    """How an optimizer changes flat ranges of weights; the group is the user's, with its current learning rate."""

    @property
    def joins_parameters(self) -> bool:
        """Whether neighbouring parameters can be updated as one range."""
        ...

    def states(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that the group keeps, one value per weight."""
        ...

    def scalars(self, step: int) -> dict[str, Any]:
        """Return what torch's optimizer keeps once per parameter after so many steps."""
        ...

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        """Return elements and type of one state of this rank's shard of a chunk."""
        ...

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        """Return what a state of a shard holds of one parameter."""
        ...

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        """Return a part as float32 values, live or by a function."""
        ...

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        """Replace a part by float32 values."""
        ...

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Mapping[str, Sequence[Tensor]],
        step: int,
        group: Mapping[str, Any],
        divisor: float,
    ) -> None:
        """Update ranges on one device in place.

        Args:
            weights: Flat ranges, each of one parameter unless ``joins_parameters``.
            gradients: Like the weights; may be overwritten.
            states: By name, one per range.
            step: Number of this step, from 1.
            group: Hyper-parameters.
            divisor: Gradients are divided by it.
        """
        ...


class Elementwise:
    """States with one value per weight, in the type of the weights."""

    joins_parameters = True

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        return shard.numel, shard.master_dtype

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        return shard.view_of(slot, flat)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        return part

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        part.copy_(values)


class AdamUpdate(Elementwise):
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
        divisor: float,
    ) -> None:
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        count = torch.full((), float(step), device=weights[0].device)  # torch.tensor would wait for the device
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
            grad_scale=_scale(divisor, weights[0].device),
            found_inf=None,
        )


class SGDUpdate(Elementwise):
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
        divisor: float,
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
            grad_scale=_scale(divisor, weights[0].device),
            found_inf=None,
        )


def _scale(divisor: float, device: torch.device) -> Tensor | None:
    return None if divisor == 1.0 else torch.full((), divisor, dtype=torch.float32, device=device)


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
    if kind.__name__ == "AdamW8bit" and kind.__module__.startswith("bitsandbytes."):
        return BlockwiseUpdate(optimizer)
    reason = _REASONS.get(kind.__name__, "its update is not known to be elementwise")
    raise UsageError(
        f"Gemini cannot step {kind.__name__}: {reason}, and chunks are cut anywhere inside a parameter; use AdamW, "
        "Adam, SGD or bitsandbytes' AdamW8bit, or another strategy"
    )


_REASONS = {
    "Adafactor": "it keeps sums over the rows and columns of whole parameters",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs the loss again and dot products of whole histories",
    "SparseAdam": "it works on sparse gradients",
    "LAMB": "it scales by the norms of whole parameters",
    "LARS": "it scales by the norms of whole parameters",
}
