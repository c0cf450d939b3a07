"""Choice of what each block keeps for backward: as little recomputation as fits into a limit.

A knapsack with several choices per item: from each block to the next smaller choice, by bytes freed per second of
recomputation, greedily (Kellerer, Pferschy and Pisinger 2004, section 11.2). The peak is simulated on a trace without
checkpointing, then checked on a trace with the choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from sd_lightning.models.checkpointing import KINDS, SavedActivations
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.trace import Trace

_MENU = tuple(SavedActivations)
_TRIES = 5
"""Traces that check a choice, at most."""
_CLOSE = 0.02
"""A peak that is below the limit by less than this part of it is close enough."""


@dataclass(frozen=True)
class Simulated:
    """What blocks keep, and what that is simulated to gain and cost."""

    kept: Mapping[str, SavedActivations]
    """By block; those without an entry keep everything."""
    change: np.ndarray
    """Bytes that are more or less during each operation of a pass in which blocks keep everything."""
    seconds: float
    """To recompute in each pass."""


@dataclass(frozen=True)
class Recomputation:
    """What blocks keep, checked by a trace."""

    kept: Mapping[str, SavedActivations]
    peak: int
    """Bytes."""
    seconds: float
    slowdown: float
    """``seconds`` as part of the time of a pass without recomputation."""


class _Blocks:
    """The recomputable blocks of a trace, and which of their allocations a choice changes, for all batch sizes."""

    def __init__(self, trace: Trace) -> None:
        operations = trace.operations
        parts = list(dict.fromkeys(each.part for each in operations if each.part))
        self.names = [name for name in parts if not any(other.startswith(name + ".") for other in parts)]
        position = {name: index for index, name in enumerate(self.names)}
        of = np.array([position.get(each.part, len(position)) for each in operations], int)
        count, inside = len(self.names), of < len(self.names)
        forward, backward = (np.flatnonzero(inside & (trace.is_backward == which)) for which in (False, True))
        self.left, self.entered = np.zeros(count + 1, int), np.full(count + 1, len(operations))
        np.maximum.at(self.left, of[forward], forward + 1)
        np.minimum.at(self.entered, of[backward], backward)
        self.done = np.zeros(count + 1, int)
        np.maximum.at(self.done, of[backward], backward + 1)
        names = {each.cost.name for each in operations}
        keeps = {name: [each.keeps(name) for each in _MENU] for name in names}
        kept = np.array([keeps[each.cost.name] for each in operations], bool).T
        self.forward, self.of = forward, of[forward]
        born = trace.born.clip(max=len(operations) - 1)
        is_ours = inside[born] & ~trace.is_backward[born]
        left, entered = self.left[of[born]], self.entered[of[born]]
        dropped = is_ours & ~trace.is_output & (trace.freed > entered) & (entered > left)
        longer = is_ours & (trace.freed < entered) & (entered > left)
        self.changed = np.flatnonzero(dropped | longer)
        """Buffers that a choice drops after forward, or keeps for longer."""
        self.is_dropped = dropped[self.changed]
        self.of_changed, self.kept_changed = of[born][self.changed], kept[:, born][:, self.changed]
        forward_ends = int(backward.min(initial=len(operations)))
        dropped_at = np.where(trace.is_cast, forward_ends, trace.used + 1)[self.changed]
        self.begin = np.where(self.is_dropped, dropped_at, trace.freed[self.changed])
        self.end = entered[self.changed]
        self.columns = np.arange(len(self.changed))
        self.is_entered = self.entered[:-1] < len(operations)
        # A recomputation ends when the last saved tensor is there: mostly before a block's last product.
        last = np.full((len(_MENU), count + 1), -1)
        products = forward[[operations[index].cost.name in KINDS for index in forward]]
        for level, keeps_it in enumerate(self.kept_changed):
            np.maximum.at(last[level], of[products], products - 1)
            lost = self.changed[self.is_dropped & ~keeps_it]
            np.maximum.at(last[level], of[born][lost], born[lost])
        self.again = ~kept[:, forward] & (forward <= last[:, self.of])
        pairs = [
            (k, position[name]) for k, each in enumerate(trace.buffers) for name in each.enters if name in position
        ]
        buffers, consumers = np.array(pairs, int).reshape(-1, 2).T
        lacking = trace.freed[buffers] < self.done[consumers]
        self.inputs, self.which = np.unique(buffers[lacking], return_inverse=True)
        self.input_freed, self.consumers = trace.freed[self.inputs], consumers[lacking]
        """Buffers that would be gone before the backward pass of a block that they enter ends."""
        # While a block is recomputed, it holds what it computes, as in forward.
        self.inside = np.flatnonzero(is_ours)
        self.of_inside = of[born[self.inside]]
        self.computed = ~kept[:, born[self.inside]] & (born[self.inside] <= last[:, self.of_inside])
        self.born_inside = born[self.inside]
        self.gone = np.minimum(trace.freed[self.inside], self.left[self.of_inside])


_BLOCKS: WeakKeyDictionary[Trace, _Blocks] = WeakKeyDictionary()


class Simulation:
    """The memory and time of a pass in which blocks keep less, from a trace in which they keep everything.

    Args:
        trace: Without checkpointing.
        batch_size: Samples per pass.
        speeds: Of the device.
    """

    def __init__(self, trace: Trace, batch_size: int, speeds: Speeds) -> None:
        if trace not in _BLOCKS:
            _BLOCKS[trace] = _Blocks(trace)
        self._of = blocks = _BLOCKS[trace]
        self.blocks = blocks.names
        self._count = len(trace.operations)
        sizes = trace.sizes(batch_size)
        self._sizes = sizes[blocks.changed]
        self._signed = np.where(blocks.is_dropped, -self._sizes, self._sizes)
        self._input_sizes = sizes[blocks.inputs]
        seconds = speeds.seconds(trace, batch_size)
        self.seconds = float(seconds.sum())
        self._recomputed = np.zeros((len(self.blocks), len(_MENU)))
        for level, again in enumerate(blocks.again):
            np.add.at(self._recomputed[:, level], blocks.of, seconds[blocks.forward] * again)
        self._extra = np.array([self._held_by_recomputation(level, sizes) for level in range(len(_MENU))])
        self._known: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def _held_by_recomputation(self, level: int, sizes: np.ndarray) -> np.ndarray:
        """Return the bytes that each block's recomputation takes beside what backward needs of it."""
        blocks = self._of
        inside = np.where(blocks.computed[level], sizes[blocks.inside], 0)
        held = np.bincount(blocks.born_inside, inside, self._count + 1)
        held -= np.bincount(blocks.gone, inside, self._count + 1)
        most = np.zeros(len(self.blocks) + 1)
        np.maximum.at(most, blocks.of, held.cumsum()[blocks.forward])
        lost = blocks.is_dropped & ~blocks.kept_changed[level]
        needed = np.bincount(blocks.of_changed[lost], self._sizes[lost], len(self.blocks) + 1)
        return np.maximum(most - needed, 0)[:-1]

    def change(self, levels: np.ndarray) -> np.ndarray:
        """Return the change of the bytes that exist during each operation.

        Args:
            levels: For each block, the index in :class:`SavedActivations` of what it keeps.
        """
        blocks = self._of
        level = levels[blocks.of_changed]
        changed = np.flatnonzero((level > 0) & (blocks.kept_changed[level, blocks.columns] != blocks.is_dropped))
        until = blocks.input_freed.copy()
        waiting = levels[blocks.consumers] > 0
        np.maximum.at(until, blocks.which[waiting], blocks.done[blocks.consumers[waiting]])
        sizes, held = self._signed[changed], self._input_sizes
        places = np.concatenate((blocks.begin[changed], blocks.end[changed], blocks.input_freed, until))
        change = np.bincount(places, np.concatenate((sizes, -sizes, held, -held)), self._count + 1).cumsum()[:-1]
        again = np.flatnonzero((levels > 0) & blocks.is_entered)
        change[blocks.entered[again]] += self._extra[levels[again], again]
        return change

    def recomputed(self, levels: np.ndarray) -> float:
        """Return the seconds of recomputation."""
        return float(self._recomputed[np.arange(len(self.blocks)), levels].sum())

    def cheapest(self, memory: np.ndarray, limit: int, menu: Sequence[SavedActivations]) -> Simulated:
        """Return what blocks keep so that the simulated peak fits with the least recomputation; or the least.

        Args:
            memory: Bytes during each operation of a pass in which blocks keep everything.
            limit: Bytes.
            menu: What blocks may keep.
        """
        return self._simulated(self._cheapest(memory, limit, [n for n, each in enumerate(_MENU) if each in menu]))

    def least(self, menu: Sequence[SavedActivations]) -> Simulated:
        """Return what blocks keep at the least."""
        level = max(level for level, each in enumerate(_MENU) if each in menu)
        return self._simulated(np.full(len(self.blocks), level))

    def _simulated(self, levels: np.ndarray) -> Simulated:
        kept = {name: _MENU[level] for name, level in zip(self.blocks, levels) if level}
        return Simulated(kept, self.change(levels).astype(np.int64), self.recomputed(levels))

    def _cheapest(self, memory: np.ndarray, limit: int, menu: Sequence[int]) -> np.ndarray:
        reductions = self._reductions(menu)

        def fits(levels: np.ndarray) -> bool:
            return bool((memory + self.change(levels)).max() <= limit)

        def after(number: int) -> np.ndarray:
            levels = np.zeros(len(self.blocks), int)
            for block, level in reductions[:number]:
                levels[block] = max(levels[block], level)
            return levels

        fewest = bisect_left(range(len(reductions)), True, key=lambda number: fits(after(number)))
        levels = after(fewest)
        if not fits(levels):
            return levels
        for block, _ in reversed(reductions[:fewest]):  # the last one may free more than is needed
            for level in (level for level in menu if level < levels[block]):
                fewer = levels.copy()
                fewer[block] = level
                if self.recomputed(fewer) < self.recomputed(levels) and fits(fewer):
                    levels = fewer
                    break
        return levels

    def _reductions(self, menu: Sequence[int]) -> list[tuple[int, int]]:
        """Return each step of a block to a smaller choice, (block, level): first those with most bytes per second."""
        if tuple(menu) in self._known:
            return self._known[tuple(menu)]
        steps = []
        for block in range(len(self.blocks)):
            points = [(0.0, 0.0, 0)]  # of the convex hull: seconds, bytes freed, level
            for level in menu[1:]:
                alone = np.zeros(len(self.blocks), int)
                alone[block] = level
                freed = -float(self.change(alone)[self._of.left[block] - 1 : self._of.entered[block]].min(initial=0))
                new = float(self._recomputed[block, level]), freed, level
                while len(points) > 1 and _rate(points[-2], points[-1]) <= _rate(points[-2], new):
                    points.pop()
                if freed > points[-1][1]:
                    points.append(new)
            steps += [(_rate(last, new), block, new[2]) for last, new in zip(points, points[1:])]
        reductions = [(block, level) for _, block, level in sorted(steps, key=lambda each: -each[0])]
        return self._known.setdefault(tuple(menu), reductions)


def _rate(last: tuple[float, float, int], new: tuple[float, float, int]) -> float:
    return (new[1] - last[1]) / max(new[0] - last[0], 1e-12)


def choose(
    traced: Callable[[Mapping[str, SavedActivations]], Trace],
    total: Callable[[Trace], np.ndarray],
    limit: int,
    batch_size: int,
    speeds: Speeds,
    *,
    menu: Sequence[SavedActivations] = tuple(SavedActivations),
) -> Recomputation:
    """Return what blocks keep so that the peak is below a limit, with the least recomputation.

    Args:
        traced: What blocks keep -> trace of a pass.
        total: Trace -> bytes that count against the limit during each of its operations.
        limit: Bytes.
        batch_size: Samples per pass.
        speeds: Of the device.
        menu: What blocks may keep.

    Returns:
        The choice. If none fits, that with the smallest peak found; its ``peak`` is above the limit.
    """
    base = traced({})
    memory = total(base)
    if memory.max() <= limit:
        return Recomputation({}, int(memory.max()), 0.0, 0.0)
    simulation = Simulation(base, batch_size, speeds)
    aimed = limit
    choices: list[Recomputation] = []
    for _ in range(_TRIES):
        chosen = simulation.cheapest(memory, aimed, menu)
        if any(each.kept == chosen.kept for each in choices):
            break
        peak = int(total(traced(chosen.kept)).max())
        choices.append(Recomputation(chosen.kept, peak, chosen.seconds, chosen.seconds / simulation.seconds))
        if (1 - _CLOSE) * limit <= peak <= limit:
            break
        aimed += limit - peak  # what the simulation does not know, such as the buffers of a recomputation
    fitting = [each for each in choices if each.peak <= limit]
    return min(fitting, key=lambda each: each.seconds) if fitting else min(choices, key=lambda each: each.peak)
