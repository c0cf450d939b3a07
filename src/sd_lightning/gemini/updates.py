"""An optimizer's update of flat ranges, for stepping in chunks: its interface, Adam, AdamW, SGD and 8-bit AdamW."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.layout import Shard, Slot, align
from sd_lightning.state.replicated import BLOCK, dequantise, quantise

Group = Mapping[str, Any]
"""A parameter group of the user's optimizer, with its current learning rate."""


class Progress(NamedTuple):
    """State kept once per parameter; parameters with equal progress are stepped together."""

    step: int
    """Number of steps if the engine counts them; 1 if the scalars hold the number."""
    scalars: tuple[tuple[str, float], ...] = ()
    """Scalars that the user's own class keeps per parameter, by name: NAdam's ``mu_product``."""


@dataclass(frozen=True)
class Ranges:
    """Flat ranges on one device that are stepped together."""

    weights: list[Tensor]
    """Each range is in one parameter, unless the update joins parameters."""
    gradients: list[Tensor]
    """Like the weights; may be overwritten."""
    states: dict[str, list[Tensor]]
    """By state name, one tensor per range."""
    progress: Progress | None
    """Progress of all ranges before this step; None before the first."""


class Update(ABC):
    """An elementwise update; by default, states have one value per weight, in the type of the weights."""

    joins_parameters = True
    """Whether neighbouring parameters can be updated as one range."""
    takes_found_inf = False
    """Whether :meth:`apply` takes its divisor, and whether to skip, from tensors on the device."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of the scalars per parameter."""
        return ("step",)

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the states that a group keeps, one value per weight.

        Raises:
            UsageError: The update is not elementwise with these settings.
        """

    @abstractmethod
    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        """Divide the gradients by ``divisor`` and update ranges in place; return the progress after this step.

        Args:
            ranges: The ranges.
            group: Their settings.
            divisor: A tensor only if the update ``takes_found_inf``.
            found_inf: Like ``divisor``; where it is 1, weights and states stay as they are.
        """

    def scalars(self, progress: Progress) -> dict[str, Any]:
        """Return the scalars that the user's optimizer keeps per parameter, in its own types."""
        return {"step": progress.step}

    def progress(self, scalars: Mapping[str, Any]) -> Progress | None:
        """Return a parameter's progress from the result of :meth:`scalars`; None if a scalar is missing."""
        return Progress(int(scalars.get("step", 1)))

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        """Return the number and type of the elements of one state of a shard."""
        return shard.numel, shard.layout.master_dtype

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        """Return the view of one parameter's part in a state of a shard."""
        return shard.view_of(slot, flat)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        """Return a part as float32 values: a live tensor, or a function that dequantises them."""
        return part

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        """Fill a part from float32 values."""
        part.copy_(values)


class AdamUpdate(Update):
    """``torch.optim.Adam`` and ``AdamW``, with torch's fused kernels."""

    takes_found_inf = True

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {"step": torch.tensor(float(progress.step))}

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        step = next_step(ranges.progress)
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
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
            found_inf=found_inf,
        )
        return Progress(step)


class SGDUpdate(Update):
    """``torch.optim.SGD``, with torch's fused kernel."""

    scalar_names = ()
    takes_found_inf = True

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def scalars(self, progress: Progress) -> dict[str, Any]:
        return {}

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
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
            found_inf=found_inf,
        )
        return Progress(next_step(ranges.progress))


def _grad_scale(gradients: list[Tensor], divisor: float | Tensor) -> Tensor | None:
    """Return ``grad_scale`` for torch's fused kernels; it is float32, so float64 gradients are divided here."""
    is_known = not isinstance(divisor, Tensor)
    if is_known and divisor == 1.0:
        return None
    if gradients[0].dtype == torch.float64:
        torch._foreach_div_(gradients, divisor)
        return None
    if isinstance(divisor, Tensor):
        return divisor.float()
    return torch.full((), divisor, dtype=torch.float32, device=gradients[0].device)


def next_step(progress: Progress | None) -> int:
    """Return the number of the next step, counted from 1."""
    return 1 if progress is None else progress.step + 1


_SIGNED = {"state1": True, "state2": False}
"""Whether the codes of a state are signed."""


class BlockwiseUpdate(Update):
    """``bitsandbytes.optim.AdamW8bit``, with its kernels for the accelerator and the host.

    Each state of a chunk is one byte buffer. Each parameter has a part of it: codes followed by the blocks' scales, or
    float32 values if the parameter is smaller than ``min_8bit_size``. Blocks start at this rank's part of a parameter,
    so they depend on the world size and not on the placement of chunks.

    Args:
        inner: The user's optimizer.

    Raises:
        UsageError: The optimizer pages its states to the host itself.
    """

    joins_parameters = False

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        if getattr(inner, "is_paged", False):
            raise UsageError(
                f"Gemini got {type(inner).__name__} with is_paged=True, which moves states by itself; expected "
                "is_paged=False, with offload_optim_frac to move them"
            )
        self._least_numel = int(inner.args.min_8bit_size)  # type: ignore[attr-defined]

    def states(self, group: Group) -> tuple[str, ...]:
        return tuple(_SIGNED)

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        return sum(self._nbytes(shard, slot) for slot in shard.layout.slots), torch.uint8

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        slots = shard.layout.slots
        begin = sum(self._nbytes(shard, other) for other in slots[: slots.index(slot)])
        part = flat[begin : begin + self._nbytes(shard, slot)]
        return part if slot.numel >= self._least_numel else part.view(torch.float32)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        if part.dtype == torch.float32:
            return part[:numel]
        return partial(dequantise, *_split(part, numel), _code(kind, part.device))

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        if part.dtype == torch.float32:
            part[: values.numel()].copy_(values)
        else:
            quantise(values, *_split(part, values.numel()), _code(kind, values.device))

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        assert found_inf is None and not isinstance(divisor, Tensor)
        from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

        step = next_step(ranges.progress)
        (beta1, beta2), eps, lr, decay = group["betas"][:2], group["eps"], float(group["lr"]), group["weight_decay"]
        first_moments, second_moments = ranges.states["state1"], ranges.states["state2"]
        for weight, gradient, first, second in zip(
            ranges.weights, ranges.gradients, first_moments, second_moments, strict=True
        ):
            n = weight.numel()
            if first.dtype == torch.float32:
                optimizer_update_32bit(
                    "adam", gradient, weight, first[:n], beta1, eps, step, lr, second[:n], beta2, 0.0, 0.0, decay,
                    gnorm_scale=1 / divisor,
                )  # fmt: skip
                continue
            (codes1, scales1), (codes2, scales2) = _split(first, n), _split(second, n)
            maps = _code("state1", weight.device), _code("state2", weight.device)
            optimizer_update_8bit_blockwise(
                "adam", gradient, weight, codes1, codes2, beta1, beta2, 0.0, 0.0, eps, step, lr, *maps, scales1,
                scales2, decay, gnorm_scale=1 / divisor,
            )  # fmt: skip
        return Progress(step)

    def _nbytes(self, shard: Shard, slot: Slot) -> int:
        begin, end = shard.owned(slot)
        numel = end - begin
        is_quantised = slot.numel >= self._least_numel
        return align(numel) + align(4 * -(-numel // BLOCK)) if is_quantised else align(4 * numel)


@cache
def _code(kind: str, device: torch.device) -> Tensor:
    """Return the value of each byte of a state."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor = create_dynamic_map(signed=_SIGNED[kind]).to(device)
    return code


def _split(part: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of a part."""
    return part[:numel], part[align(numel) :].view(torch.float32)[: -(-numel // BLOCK)]
