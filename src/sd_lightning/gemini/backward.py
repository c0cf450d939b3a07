"""The pass under way: which units still compute on which chunks, and when a chunk's gradients are complete."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import Variable

from sd_lightning.gemini.networks import Unit
from sd_lightning.gemini.reducer import Reducer


class _TaskEnd:
    """What a graph task of autograd calls at its end, unless it fails; nothing else holds it."""

    def __init__(self, number: int, on_end: Callable[[int], None]) -> None:
        self._number = number
        self._on_end = on_end
        self.is_called = False

    def __call__(self) -> None:
        self.is_called = True
        self._on_end(self._number)


class GraphTask:
    """A graph task of autograd that belongs to the backward pass.

    Args:
        number: Autograd's.
        on_end: Is called with the number at the end, unless the task fails.
    """

    def __init__(self, number: int, on_end: Callable[[int], None]) -> None:
        end = _TaskEnd(number, on_end)
        self._end = weakref.ref(end)
        self.node: Any = None
        """The node, of autograd or of the schedule, before which the last unit was opened."""
        self.units_at_node: list[int] = []
        """Units that were opened before that node."""
        Variable._execution_engine.queue_callback(end)

    @property
    def is_running(self) -> bool:
        end = self._end()
        return end is not None and not end.is_called


class Pass:
    """What units of the forward and backward pass under way have done.

    A unit is opened when it goes backward, and closed when a unit that ran before it goes backward: autograd runs in
    the reverse order of execution. A chunk is reduced when all units that were called with it are closed.

    Args:
        units: All units.
        chunks_of: Chunk indices of each.
        reducer: Reduces chunks that are complete.
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
        """Units in their forward, the outermost first."""
        self.tasks: dict[int, GraphTask] = {}
        """Graph tasks by autograd's numbers: others run inside nodes of the first one."""
        self.visited: dict[int, None] = {}
        """Chunks that may have gradients of this pass that are not reduced yet."""
        self.has_begun = False
        """Whether a unit went backward."""
        self.schedule: list[tuple[int, int]] | None = None
        """(number of the node, unit) of all calls of all ranks, if ranks differ."""
        self.cursor = 0
        """First entry of the schedule that is not done."""
        self._units = units
        self._chunks_of = chunks_of
        self._chunks = reducer.chunks
        self._reducer = reducer
        self._access = access
        self._calls: Counter[int] = Counter()
        """Calls of each unit that have not gone backward."""
        self._users: dict[int, set[int]] = {}
        """By chunk: units that were called and are not closed."""
        self._open: dict[int, int] = {}
        """Open units, and the graph task that each was opened in."""
        self._spent: dict[int, set[int]] = {}
        """By chunk that is not reduced yet: closed units, whose gradients may have overwritten their weights."""
        self._pinned: dict[int, int] = {}
        """Chunks of containers, and the graph task until whose end they are in use."""

    @property
    def has_failed(self) -> bool:
        """Whether the backward pass has ended in an exception: autograd has let go of its first task."""
        return bool(self.tasks) and not next(iter(self.tasks.values())).is_running

    def chunks_in_use(self) -> set[int]:
        """Return the chunks that must not be released now; the same on every rank."""
        units = [*self.running, *(unit for task in self.tasks.values() for unit in task.units_at_node)]
        # Whether gradients are in their memory already may differ between ranks; that they are visited does not.
        in_use = {chunk for chunk in self.visited if self._chunks[chunk].is_trained}
        return in_use.union(self._pinned, *(self._chunks_of[unit] for unit in units))

    def note_call(self, unit: int) -> None:
        """Note a call in the forward pass that may go backward."""
        self._calls[unit] += 1
        for chunk in self._chunks_of[unit]:
            self._users.setdefault(chunk, set()).add(unit)

    def follow(self, schedule: list[tuple[int, int]]) -> None:
        """Go by a schedule from here on, so that all ranks count alike."""
        self.schedule, self.cursor = schedule, 0
        self._calls.clear()
        self._users.clear()
        for _, unit in schedule:
            self.note_call(unit)

    def advance(self, end: int) -> None:
        """Go through the schedule up to a position: what other ranks compute before it, and what is there."""
        assert self.schedule is not None
        first = next(iter(self.tasks))
        while self.cursor < end:
            node, unit = self.schedule[self.cursor]
            self.cursor += 1
            self.open(unit, first, node)

    def open(self, unit: int, number: int, node: Any) -> None:
        """Gather a unit that goes backward, on this rank or another.

        Args:
            unit: Its index.
            number: Of the graph task.
            node: Of autograd's graph, or its number in the schedule.
        """
        # Whatever ran later is done, except units that return the same tensor: a network and its last block, a block
        # and the one after it that was left out.
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
        self.visited.update(dict.fromkeys(self._chunks_of[unit]))
        if self._units[unit].is_container:
            for chunk in self._chunks_of[unit]:
                self._pinned.setdefault(chunk, number)
        self._access(unit, "backward")

    def renew(self, unit: int, number: int) -> None:
        """Reduce gradients that may have overwritten the weights of a unit that is about to compute again."""
        is_elsewhere = self._open.get(unit, number) != number
        for chunk in self._chunks_of[unit]:
            is_spent = chunk in self.visited and (is_elsewhere or unit in self._spent.get(chunk, ()))
            if is_spent and not self._chunks[chunk].weights.is_resident:
                self._reduce(chunk)
                self.visited[chunk] = None

    def end_inner_task(self, number: int) -> None:
        """Close the units of a graph task that ran inside another."""
        if self.tasks.pop(number, None) is None:
            return  # the pass around it was forgotten
        self._pinned = {chunk: task for chunk, task in self._pinned.items() if task != number}
        for unit in [unit for unit, task in self._open.items() if task == number]:
            if self._calls[unit] <= 0:
                self._close(unit)
            else:
                self._note_spent(unit)

    def finish(self) -> None:
        """Reduce everything that is left."""
        self._pinned.clear()
        if not self._reducer.keeps_gradients:
            self.visited.update(self._reducer.kept)
        for chunk in sorted(self.visited):
            self._reduce(chunk)
        self._reducer.finish_all()

    def _close(self, unit: int) -> None:
        """Reduce the chunks of a unit that has all its gradients, where no other unit still works on them."""
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

    def _reduce(self, chunk: int) -> None:
        del self.visited[chunk]
        self._spent.pop(chunk, None)
        self._reducer.reduce(chunk)
