"""Which units a rank calls, and how that is brought together with what other ranks call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

_MAX_IDLE = 16
"""Passes that no rank calls a unit in, until it is not expected any more."""


class Call:
    """A unit's call, which its part of autograd's graph alone holds."""

    def __init__(self, unit: int, key: int) -> None:
        self.unit = unit
        self.key = key
        """Calls go backward from the largest; equal ones at the same node, in their order."""
        self.has_begun = False
        """Its backward pass."""
        self.position: int | None = None
        """In the schedule."""


class Route:
    """The units of a network in the order of its forward pass, as all ranks know it.

    Args:
        network: Whose.
        units: At first in the order of registration.
    """

    def __init__(self, network: nn.Module, units: Sequence[int]) -> None:
        self.network = network
        self.units = list(units)
        self.position: int | None = None
        """In a forward pass that is under way: what comes next."""
        self.called: list[int] = []
        self.num_idle: Counter[int] = Counter()
        """Passes since any rank called a unit, or ranks differed."""

    def skipped_before(self, unit: int | None) -> list[int]:
        """Return what other ranks may call before a unit that is called now, or until the end if none is."""
        if self.position is None:
            return []
        ahead = self.units[self.position :]
        if unit is not None and unit not in ahead:
            return []
        end = len(self.units) if unit is None else self.position + ahead.index(unit)
        skipped, self.position = self.units[self.position : end], end + 1
        return skipped

    def learn(self) -> None:
        """Note that all ranks have called the same."""
        if not self.called:
            return
        learnt = list(self.called)
        for position, unit in enumerate(self.units):
            if unit in learnt:
                self.num_idle[unit] = 0
                continue
            self.num_idle[unit] += 1
            if self.num_idle[unit] < _MAX_IDLE:
                before = [learnt.index(earlier) for earlier in self.units[:position] if earlier in learnt]
                learnt.insert(max(before, default=-1) + 1, unit)
        self.units = learnt


def order_of(tensor: Tensor) -> int:
    """Return the number by which autograd's engine sorts: the largest goes backward first."""
    return torch.iinfo(torch.int64).max if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def is_reached(parameter: nn.Parameter) -> bool:
    """Whether the graph task that runs now will compute this gradient."""
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False  # torch.autograd.grad asks for this very parameter, and accumulates nothing


def merged(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return a short sequence that has both in it, in their order."""
    both = []
    for change, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        both += one[a:b] if change == "equal" else one[a:b] + other[c:d]
    return both
