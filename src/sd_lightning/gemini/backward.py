"""State of the current pass: which units still use which chunks, and when a chunk's gradients are complete."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.autograd import Variable

from sd_lightning.gemini.networks import Unit
from sd_lightning.gemini.reducer import Reducer


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
                self._reduce(chunk)
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

    def _reduce(self, chunk: int) -> None:
        del self.visited[chunk]
        self._spent.pop(chunk, None)
        self._reducer.reduce(chunk)
