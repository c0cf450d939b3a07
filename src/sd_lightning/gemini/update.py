"""How an optimizer changes flat ranges of weights: the interface that stepping in chunks needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sd_lightning.gemini.layout import Shard, Slot

Group = Mapping[str, Any]
"""A group of the user's optimizer, with its current learning rate."""


class Progress(NamedTuple):
    """What is kept once per parameter; parameters that agree in it are stepped together."""

    step: int
    """Steps so far, where the engine counts them; 1 where they are among the scalars."""
    scalars: tuple[tuple[str, float], ...] = ()
    """What the user's own class keeps once per parameter, by name: NAdam's ``mu_product``."""


@dataclass(frozen=True)
class Ranges:
    """Flat ranges on one device that are stepped together."""

    weights: list[Tensor]
    """Each of one parameter, unless the update joins parameters."""
    gradients: list[Tensor]
    """Like the weights; may be overwritten."""
    states: dict[str, list[Tensor]]
    """By name, one per range."""
    progress: Progress | None
    """Before this step, of all of them; None before the first."""


class Update(ABC):
    """An elementwise update; by default with states that have one value per weight, in the type of the weights."""

    joins_parameters = True
    """Whether neighbouring parameters can be updated as one range."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of what is kept once per parameter."""
        return ("step",)

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Return the names of the states that a group keeps, one value per weight.

        Raises:
            UsageError: With these settings the update is not elementwise.
        """

    @abstractmethod
    def scalars(self, progress: Progress) -> dict[str, Any]:
        """Return what torch's optimizer keeps once per parameter, in its own types."""

    @abstractmethod
    def apply(self, ranges: Ranges, group: Group, divisor: float) -> Progress:
        """Update ranges in place, after dividing their gradients; return the progress after this step."""

    def progress(self, scalars: Mapping[str, Any]) -> Progress | None:
        """Return the progress of a parameter from what :meth:`scalars` gave, None if some of it is missing."""
        return Progress(int(scalars.get("step", 1)))

    def size(self, shard: Shard) -> tuple[int, torch.dtype]:
        """Return the number and type of elements of one state of this rank's shard of a chunk."""
        return shard.numel, shard.layout.master_dtype

    def part(self, shard: Shard, slot: Slot, flat: Tensor) -> Tensor:
        """Return the part of one parameter in a state of a shard."""
        return shard.view_of(slot, flat)

    def values(self, kind: str, part: Tensor, numel: int) -> Tensor | Callable[[], Tensor]:
        """Return a part as float32 values: live ones, or a function that dequantises them."""
        return part

    def store(self, kind: str, part: Tensor, values: Tensor) -> None:
        """Replace a part by float32 values."""
        part.copy_(values)


def next_step(progress: Progress | None) -> int:
    """Return the number of the step that comes, from 1."""
    return 1 if progress is None else progress.step + 1
