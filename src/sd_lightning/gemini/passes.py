"""A forward and backward pass: the calls of units, one common order of them, and when gradients are complete."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.gathering import Reducer
from sd_lightning.gemini.layout import Unit

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
        orders: list[list[tuple[int, ...]]] = [[]] * collectives.world_size
        dist.all_gather_object(orders, own, group=collectives.group)
        nodes = reduce(merged, orders)
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


class GraphTask:
    """An autograd graph task that belongs to the backward pass.

    Args:
        number: Autograd's id of the task.
        on_end: Called with the number at the end, unless the task fails.
    """

    def __init__(self, number: int, on_end: Callable[[int], None]) -> None:
        self.node: Any = None
        """The autograd or schedule node before which the last unit was opened."""
        self.units_at_node: list[int] = []
        """Units opened before that node."""
        self._has_ended = False

        def end() -> None:
            self._has_ended = True
            on_end(number)

        self._callback = weakref.ref(end)
        """Only autograd holds the callback, and lets go of it when the task ends or fails."""
        Variable._execution_engine.queue_callback(end)

    @property
    def is_running(self) -> bool:
        return self._callback() is not None and not self._has_ended


class Pass:
    """Progress of the units in the current forward and backward pass.

    A unit is opened when its backward begins. It is closed when the backward of an earlier unit begins, since autograd
    runs in reverse order of execution. A chunk is reduced when all called units that use it are closed.

    Args:
        units: All units.
        chunks_of: Chunk indices of each unit.
        reducer: Reduces complete chunks.
        access: Gathers a unit's chunks for a phase.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks_of: Sequence[Sequence[int]],
        reducer: Reducer,
        access: Callable[[int, str], None],
    ) -> None:
        self.running: list[int] = []
        """Units inside their forward, outermost first."""
        self.tasks: dict[int, GraphTask] = {}
        """Graph tasks by autograd's id; all others run inside nodes of the first one."""
        self.visited: dict[int, None] = {}
        """Chunks that may have unreduced gradients of this pass."""
        self.has_begun = False
        """Whether any unit's backward has begun."""
        self.schedule: list[tuple[int, int]] | None = None
        """(node number, unit) of all calls of all ranks, if the ranks differ."""
        self.cursor = 0
        """Index of the first schedule entry that is not done."""
        self._units = units
        self._chunks_of = chunks_of
        self._chunks = reducer.chunks
        self._reducer = reducer
        self._access = access
        self._calls: Counter[int] = Counter()
        """Calls of each unit whose backward has not begun."""
        self._users: dict[int, set[int]] = {}
        """By chunk: called units that are not closed."""
        self._open: dict[int, int] = {}
        """Open units, and the graph task in which each was opened."""
        self._spent: dict[int, set[int]] = {}
        """By unreduced chunk: closed units, whose gradients may have overwritten their weights."""
        self._pinned: dict[int, int] = {}
        """Chunks of containers, and the graph task during which they stay in use."""

    @property
    def has_failed(self) -> bool:
        """Whether the backward pass ended in an exception: autograd has released its first task."""
        return bool(self.tasks) and not next(iter(self.tasks.values())).is_running

    def chunks_in_use(self) -> set[int]:
        """Return the chunks that must not be released now; the same on every rank."""
        units = [*self.running, *(unit for task in self.tasks.values() for unit in task.units_at_node)]
        # ``visited`` is the same on all ranks; whether a chunk already holds gradients may differ.
        in_use = {chunk for chunk in self.visited if self._chunks[chunk].is_trained}
        return in_use.union(self._pinned, *(self._chunks_of[unit] for unit in units))

    def note_call(self, unit: int) -> None:
        """Count a forward call that may have a backward."""
        self._calls[unit] += 1
        for chunk in self._chunks_of[unit]:
            self._users.setdefault(chunk, set()).add(unit)

    def follow(self, schedule: list[tuple[int, int]]) -> None:
        """Follow a schedule from now on, so that all ranks count the same calls."""
        self.schedule, self.cursor = schedule, 0
        self._calls.clear()
        self._users.clear()
        for _, unit in schedule:
            self.note_call(unit)

    def advance(self, end: int) -> None:
        """Open the units of the schedule before position ``end``, including those that only other ranks compute."""
        assert self.schedule is not None
        first = next(iter(self.tasks))
        while self.cursor < end:
            node, unit = self.schedule[self.cursor]
            self.cursor += 1
            self.open(unit, first, node)

    def open(self, unit: int, number: int, node: Any) -> None:
        """Open and gather a unit whose backward begins, on this rank or another.

        Args:
            unit: Its index.
            number: The graph task's number.
            node: Autograd's node, or the node's number in the schedule.
        """
        # Units that ran later in the forward are done, except units that return the same tensor: a network and its
        # last block, or a block and the skipped block after it.
        task = self.tasks[number]
        if node != task.node:
            task.node = node
            task.units_at_node.clear()
            for earlier in [other for other, opened_in in self._open.items() if opened_in == number]:
                if earlier != unit and not self._units[earlier].is_container and self._calls[earlier] <= 0:
                    self._close(earlier)
        task.units_at_node.append(unit)
        self._calls[unit] -= 1
        self.renew(unit, number)
        self._open[unit] = number
        for chunk in self._chunks_of[unit]:
            self._reducer.check_incomplete(self._chunks[chunk])
        self.visited.update(dict.fromkeys(self._chunks_of[unit]))
        if self._units[unit].is_container:
            for chunk in self._chunks_of[unit]:
                self._pinned.setdefault(chunk, number)
        self._access(unit, "backward")

    def renew(self, unit: int, number: int) -> None:
        """Reduce gradients that may have overwritten the weights of a unit that is about to run again."""
        is_elsewhere = self._open.get(unit, number) != number
        for chunk in self._chunks_of[unit]:
            is_spent = chunk in self.visited and (is_elsewhere or unit in self._spent.get(chunk, ()))
            if is_spent and not self._chunks[chunk].weights.is_resident:
                self._reduce(chunk, is_complete=False)
                self.visited[chunk] = None

    def end_inner_task(self, number: int) -> None:
        """Close the units of a graph task that ran inside another."""
        if self.tasks.pop(number, None) is None:
            return  # the outer pass was aborted
        self._pinned = {chunk: task for chunk, task in self._pinned.items() if task != number}
        for unit in [unit for unit, task in self._open.items() if task == number]:
            if self._calls[unit] <= 0:
                self._close(unit)
            else:
                self._note_spent(unit)

    def finish(self) -> None:
        """Reduce all remaining chunks."""
        self._pinned.clear()
        if not self._reducer.keeps_gradients:
            self.visited.update(self._reducer.kept)
        for chunk in sorted(self.visited):
            self._reduce(chunk)
        self._reducer.finish_all()

    def _close(self, unit: int) -> None:
        """Close a unit that has all its gradients; reduce those of its chunks that no other unit still uses."""
        del self._open[unit]
        for chunk in self._chunks_of[unit]:
            users = self._users.get(chunk, set())
            users.discard(unit)
            if not users and chunk in self.visited and chunk not in self._pinned:
                self._reduce(chunk)
        self._note_spent(unit)

    def _note_spent(self, unit: int) -> None:
        for chunk in self._chunks_of[unit]:
            if chunk in self.visited:
                self._spent.setdefault(chunk, set()).add(unit)

    def _reduce(self, chunk: int, *, is_complete: bool = True) -> None:
        del self.visited[chunk]
        self._spent.pop(chunk, None)
        self._reducer.reduce(chunk, is_complete=is_complete)
