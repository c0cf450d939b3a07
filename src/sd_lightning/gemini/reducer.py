"""Reduction of chunk gradients: a few chunks at a time, or kept whole until the last micro-batch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sd_lightning.gemini.chunk import Chunk

_MAX_REDUCTIONS = 4
"""Reductions under way at a time: each keeps a chunk of gradients in memory."""


class Reducer:
    """Reduction of the gradients of chunks, in the order of the calls.

    Args:
        chunks: All chunks.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self.statistics: Counter[str] = Counter()
        """Counters of the runtime: reductions, hits, misses, prefetches, evictions, aborted passes, schedules."""
        self.keeps_gradients = False
        """Whether gradients are kept whole, to be reduced by a later pass."""
        self.kept: dict[int, None] = {}
        """Chunks whose whole gradients are kept."""
        self.late: set[int] = set()
        """Chunks that got gradients on this rank outside of their units' backward, so that no unit reduces them."""
        self._under_way: deque[Chunk] = deque()

    def reduce(self, index: int) -> None:
        """Start to reduce a chunk's gradients, or keep them whole."""
        self.late.discard(index)
        chunk = self.chunks[index]
        if not chunk.is_trained:
            return
        if self.keeps_gradients:
            self.kept[index] = None
            return
        self.kept.pop(index, None)
        while len(self._under_way) >= _MAX_REDUCTIONS:
            self.finish_oldest()
        chunk.gradients.reduce()
        self._under_way.append(chunk)
        self.statistics["reductions"] += 1

    def finish_oldest(self) -> bool:
        """Finish the oldest reduction; return whether there was one."""
        if not self._under_way:
            return False
        self._under_way.popleft().gradients.finish_reduction()
        return True

    def finish(self, chunk: Chunk) -> None:
        """Finish the reduction of a chunk and all older ones."""
        while chunk in self._under_way:
            self.finish_oldest()

    def finish_all(self) -> None:
        """Finish all reductions."""
        while self.finish_oldest():
            pass

    @contextmanager
    def keeping_gradients(self, keeps: bool) -> Iterator[None]:
        """Keep whole gradients during the body, for a later pass to reduce them, or reduce them at once."""
        before, self.keeps_gradients = self.keeps_gradients, keeps
        try:
            yield
        finally:
            self.keeps_gradients = before

    def flush(self, late: Iterable[int] = ()) -> None:
        """Reduce the kept gradients that no backward pass outside of ``no_sync`` has reduced.

        Args:
            late: Chunks that have late gradients on any rank.
        """
        with self.keeping_gradients(False):
            for index in sorted({*self.kept, *late}):
                self.reduce(index)
        self.finish_all()

    def drop(self) -> None:
        """Drop the gradients of all chunks, including those being reduced."""
        self._under_way.clear()
        self.kept.clear()
        self.late.clear()
        for chunk in self.chunks:
            chunk.gradients.drop()
            chunk.weights.release()
