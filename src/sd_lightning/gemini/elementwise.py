"""Updates of flat ranges: what the engine asks of every optimizer, and Adam, AdamW and SGD with torch's kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sd_lightning.gemini.layout import Shard, Slot

Group = Mapping[str, Any]
"""A parameter group of the user's optimizer, with its current learning rate."""


class Progress(NamedTuple):
    """State kept once per parameter; parameters with equal progress are stepped together."""

    step: int
    """Number of steps if the engine counts them; 1 if the scalars hold the number."""
    scalars: tuple[tuple[str, float], ...] = ()
    """Scalars that the user's own class keeps per parameter, by name: NAdam's ``mu_product``."""


class StepRange(NamedTuple):
    """Neighbouring parameters that are stepped as one range of this rank's shard."""

    begin: int
    """First element in the shard."""
    end: int
    slot: Slot
    """The last of the parameters."""

    def blocks(self, numel: int) -> list[StepRange]:
        """Return the parts that are stepped one after another."""
        return [StepRange(i, min(i + numel, self.end), self.slot) for i in range(self.begin, self.end, numel)]


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
    scratch: Sequence[Tensor] = ()
    """As many float32 tensors as the update's ``num_scratch``, each for the values of one range."""
    draws: Sequence[tuple[int, str, int]] = ()
    """For random numbers, of each range: the seed, the last parameter's name, and the first element counted in it."""


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

    def num_scratch(self, device: torch.device) -> int:
        """Return how many float32 tensors like the weights a step on a device needs."""
        return 0

    def moved(self, shard: Shard, kind: str, flat: Tensor, source: torch.device) -> None:
        """Convert one state of a shard that has come from another device."""
        return  # float32 values are the same everywhere

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        """Return the number and type of the elements of one state of a shard."""
        return shard.numel, shard.layout.master_dtype

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        """Return the view of one parameter's part in a state of a shard."""
        return shard.view_of(slot, flat)

    def ranges(self, shard: Shard, kind: str, flat: Tensor, chosen: Sequence[StepRange]) -> dict[str, list[Tensor]]:
        """Return, by name, what :meth:`apply` gets of a state: one tensor for each range of the shard."""
        return {kind: slices(flat, chosen)}

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
    return 1 if progress is None else int(dict(progress.scalars).get("step", progress.step)) + 1


def slices(flat: Tensor, ranges: Sequence[StepRange]) -> list[Tensor]:
    """Return the views of ranges in a flat tensor."""
    return [flat[begin:end] for begin, end, _ in ranges]
