"""The units that each rank calls, and one common order if the ranks differ."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import reduce
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.networks import Unit

_MAX_IDLE = 16
"""After this many passes in which no rank calls a unit, it is no longer expected."""


class Call:
    """A unit's call that may have a backward; only autograd's graph references it."""

    def __init__(self, unit: int, key: int) -> None:
        self.unit = unit
        self.key = key
        """Backward runs from the largest key down. Calls with equal keys share one node, in the order of the calls."""
        self.has_begun = False
        """Whether its backward pass has begun."""
        self.position: int | None = None
        """Index in the schedule, if there is one."""


class Route:
    """The units of a network in forward order; the same on all ranks.

    Args:
        network: Contains the units.
        units: In the order of registration; the order of calls is learnt.
    """

    def __init__(self, network: nn.Module, units: Sequence[int]) -> None:
        self.network = network
        self.units = list(units)
        self.position: int | None = None
        """Index of the next unit while a forward pass is under way."""
        self.called: list[int] = []
        self.num_idle: Counter[int] = Counter()
        """By unit: passes since any rank called it, or since ranks differed."""

    def skipped_before(self, unit: int | None) -> list[int]:
        """Return the units that other ranks may call before ``unit``, or before the end if None."""
        if self.position is None:
            return []
        ahead = self.units[self.position :]
        if unit is not None and unit not in ahead:
            return []
        end = len(self.units) if unit is None else self.position + ahead.index(unit)
        skipped, self.position = self.units[self.position : end], end + 1
        return skipped

    def learn(self) -> None:
        """Adopt the order of this pass, which was the same on all ranks."""
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


class Calls:
    """This rank's calls that may have a backward, and the additional calls of other ranks.

    Args:
        units: All units.
        networks: Contain the units.
        collectives: Over all ranks.
    """

    def __init__(self, units: Sequence[Unit], networks: Iterable[nn.Module], collectives: Collectives) -> None:
        self._units = units
        self._collectives = collectives
        self._alive: list[weakref.ref[Call]] = []
        self.routes: list[Route] = []
        for network in networks:
            inside = set(network.modules())
            self.routes.append(Route(network, [i for i, unit in enumerate(units) if unit.module in inside]))

    def add(self, call: Call) -> None:
        """Note a call in a forward pass."""
        self._alive.append(weakref.ref(call))

    def alive(self) -> list[Call]:
        """Return the calls that autograd's graph still holds, and forget the others."""
        alive = [call for reference in self._alive if (call := reference()) is not None]
        self._alive = [weakref.ref(call) for call in alive]
        return alive

    def reset(self) -> None:
        """Forget the current pass."""
        for route in self.routes:
            route.position, route.called = None, []
        for call in self.alive():
            call.position = None

    def skipped_before(self, unit: int) -> list[int]:
        """Record the call of a unit; return the units that other ranks may have called before it."""
        skipped = []
        for route in self.routes:
            if route.position is not None:
                skipped += route.skipped_before(unit)
                route.called.append(unit)
        return skipped

    def agree(self) -> list[tuple[int, int]] | None:
        """Compare the pending backward calls of all ranks with a small all-reduce; merge their orders if they differ.

        A rank cannot foresee which calls the pass reaches. The trained parameters that it reaches reveal most of them.

        Returns:
            None if the ranks agree, otherwise the schedule: (node number, unit) of every call of any rank. Each call of
            this rank gets its position in it.
        """
        collectives = self._collectives
        calls = [call for call in self.alive() if not call.has_begun]
        self._alive = [weakref.ref(call) for call in calls]
        if collectives.is_alone:
            return None
        calls.sort(key=lambda call: -call.key)
        at_nodes = [list(group) for _, group in groupby(calls, key=lambda call: call.key)]
        own = [tuple(call.unit for call in group) for group in at_nodes]
        with torch._C.DisableTorchFunctionSubclass():  # guarded parameters would be gathered
            reached = [any(map(_is_reached, unit.parameters)) for unit in self._units]
        called = [route.called for route in self.routes]
        if collectives.agree(repr((own, reached, called))):
            for route in self.routes:
                route.learn()
            return None
        everyone: list[list[tuple[int, ...]]] = [[]] * collectives.world_size
        dist.all_gather_object(everyone, own, group=collectives.group)
        nodes = reduce(merged, everyone)
        places = iter(enumerate(nodes))
        for group, units in zip(at_nodes, own, strict=True):
            number = next(number for number, others in places if others == units)
            begin = sum(map(len, nodes[:number]))
            for offset, call in enumerate(group):
                call.position = begin + offset
        for route in self.routes:
            route.num_idle.clear()
        return [(number, unit) for number, units in enumerate(nodes) for unit in units]


def order_of(tensor: Tensor) -> int:
    """Return the number by which autograd sorts nodes: the largest runs backward first."""
    return torch.iinfo(torch.int64).max if tensor.grad_fn is None else int(tensor.grad_fn._sequence_nr())


def _is_reached(parameter: nn.Parameter) -> bool:
    """Return whether the running graph task will compute the gradient of a parameter."""
    if not parameter.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:
        return False  # torch.autograd.grad with respect to this parameter, which accumulates nothing


def merged(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return a short sequence that has both as subsequences."""
    both = []
    for change, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        both += one[a:b] if change == "equal" else one[a:b] + other[c:d]
    return both
