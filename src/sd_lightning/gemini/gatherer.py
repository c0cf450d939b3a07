"""Gather the chunks of a unit before it computes, and prefetch others, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.compute_weights import ChunkState
from sd_lightning.gemini.reducer import Reducer
from sd_lightning.gemini.tracer import Tracer

_EVICTABLE = {ChunkState.GATHERING, ChunkState.GATHERED}


class Gatherer:
    """Gathering and eviction of chunks, with the same decisions on every rank.

    Args:
        tracer: Predicts when chunks are used.
        reducer: Holds all chunks; its reductions also take temporary memory.
        budget: Bytes of temporarily gathered chunks; None for no limit.
        prefetch: Chunks gathered ahead.
    """

    def __init__(self, tracer: Tracer, reducer: Reducer, *, budget: int | None, prefetch: int) -> None:
        self.budget = budget
        self._tracer = tracer
        self._reducer = reducer
        self._chunks = reducer.chunks
        self._statistics = reducer.statistics
        self._num_ahead = prefetch

    def gather(self, indices: Sequence[int], in_use: Callable[[], set[int]]) -> None:
        """Gather chunks, prefetch the next ones, and order the computation after the chunks.

        Args:
            indices: Indices of the chunks.
            in_use: Returns other chunks that must not be released.
        """

        def busy() -> set[int]:
            return in_use().union(indices)

        chunks = [self._chunks[index] for index in indices]
        for chunk in chunks:
            self._reducer.finish(chunk)
        missing = [chunk for chunk in chunks if chunk.weights.state is ChunkState.RELEASED]
        self._make_room(sum(chunk.layout.nbytes for chunk in missing), Tracer.NEVER, busy)
        self._statistics["misses"] += len(missing)
        self._statistics["hits"] += sum(not chunk.weights.is_resident for chunk in chunks) - len(missing)
        for chunk in missing:
            chunk.weights.gather()
        self._prefetch(busy)
        for chunk in chunks:
            chunk.weights.wait()

    def release(self) -> None:
        """Free all temporarily gathered weights."""
        for chunk in self._chunks:
            if not chunk.weights.is_resident:
                chunk.weights.release()

    def _prefetch(self, busy: Callable[[], set[int]]) -> None:
        begun = 0
        for position, index in self._tracer.upcoming():
            if begun >= self._num_ahead:
                return
            chunk = self._chunks[index]
            if chunk.weights.state is ChunkState.GATHERING and not chunk.weights.is_resident:
                begun += 1
            if chunk.weights.state is not ChunkState.RELEASED:
                continue
            if not self._make_room(chunk.layout.nbytes, position, busy):
                return
            chunk.weights.gather()
            self._statistics["prefetches"] += 1
            begun += 1

    def _make_room(self, needed: int, until: int, busy: Callable[[], set[int]]) -> bool:
        """Evict chunks whose next use is after ``until``, the furthest first; return whether there is room."""
        if self.budget is None or not needed:
            return True
        must = until == Tracer.NEVER
        while sum(chunk.weights.temporary_bytes for chunk in self._chunks) + needed > self.budget:
            if must and self._reducer.finish_oldest():
                continue
            victim = self._furthest(until, busy())
            if victim is None:
                return False
            victim.weights.release()
            self._statistics["evictions"] += 1
        return True

    def _furthest(self, until: int, busy: set[int]) -> Chunk | None:
        candidates = [
            (self._tracer.next_use(chunk.index), -chunk.index)
            for chunk in self._chunks
            if chunk.index not in busy and not chunk.weights.is_resident and chunk.weights.state in _EVICTABLE
        ]
        if until != Tracer.NEVER:
            candidates = [candidate for candidate in candidates if candidate[0] > until]
        return self._chunks[-max(candidates)[1]] if candidates else None
