"""Which chunks are gathered, evicted and reduced when: the same decisions on every rank, within limits of memory."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.memory import spare_bytes
from sd_lightning.gemini.placement import (
    EARLY_GRADIENTS,
    SENT_GRADIENTS,
    ChunkPlan,
    Tier,
    mib,
    whole_gradient_bytes,
)
from sd_lightning.gemini.tracer import Tracer
from sd_lightning.gemini.weights import ChunkState

log = logging.getLogger(__name__)


_MAX_REDUCTIONS = SENT_GRADIENTS
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
        self.touched: set[nn.Parameter] = set()
        """Parameters with gradients on this rank since the last optimizer step."""
        self.version = 0
        """Changes when a backward pass begins, or when gradients are dropped or changed."""
        self.step_chunk: Callable[[Chunk], None] | None = None
        """Steps a chunk in the backward pass; None if that is left to the optimizer's step."""
        self.complete: set[int] = set()
        """Chunks that have all gradients of this step, and are stepped in the backward pass."""
        self.stepped: set[nn.Parameter] = set()
        """Parameters that a backward pass has stepped since the last optimizer step, also if it failed afterwards."""
        self._under_way: deque[Chunk] = deque()
        self._unstepped: deque[Chunk] = deque()

    def reduce(self, index: int, *, is_complete: bool = False) -> None:
        """Start to reduce a chunk's gradients, or keep them whole.

        Args:
            index: The chunk's index.
            is_complete: Whether this pass gives it no more gradients, so that it may be stepped.
        """
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
        if is_complete and self.step_chunk is not None:
            self.complete.add(index)
        self.statistics["reductions"] += 1

    def finish_oldest(self) -> bool:
        """Finish the oldest reduction; return whether there was one."""
        if not self._under_way:
            return False
        chunk = self._under_way.popleft()
        chunk.gradients.finish_reduction()
        if chunk.index in self.complete:
            self._note_complete(chunk)
        return True

    def check_incomplete(self, chunk: Chunk) -> None:
        """Raise if a chunk gets gradients after it was stepped in this backward pass.

        Raises:
            UsageError: It does.
        """
        if chunk.index in self.complete:
            raise UsageError(
                f"Gemini got gradients of {chunk.layout.slots[0].name}, or of what shares its chunk, after it was "
                "stepped (step_in_backward): by a second backward pass before the optimizer's step, by a block that is "
                "recomputed under use_reentrant=True, or by a use outside of its block's forward, such as a "
                "penalty on weights that is taken before the network is called; expected one backward pass per step, "
                "use_reentrant=False, and penalties after the call; otherwise leave step_in_backward out"
            )

    def _note_complete(self, chunk: Chunk) -> None:
        """Step a chunk, on the host only when the next chunks' gradients are under way as well."""
        assert self.step_chunk is not None
        if chunk.placement.step_tier is Tier.FAST:
            self.step_chunk(chunk)
        else:
            self._unstepped.append(chunk)
            self._step_all_but(EARLY_GRADIENTS[Tier.SLOW] - _MAX_REDUCTIONS)

    def _step_all_but(self, count: int) -> None:
        """Step the complete chunks, but for the latest ones, whose gradients may not have arrived yet."""
        while len(self._unstepped) > count and self.step_chunk is not None:
            self.step_chunk(self._unstepped.popleft())

    def finish(self, chunk: Chunk) -> None:
        """Finish the reduction of a chunk and all older ones."""
        while chunk in self._under_way:
            self.finish_oldest()

    def finish_all(self) -> None:
        """Finish all reductions."""
        while self.finish_oldest():
            pass
        self._step_all_but(0)

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
        self._unstepped.clear()
        self.complete.clear()
        self.kept.clear()
        self.late.clear()
        self.touched.clear()
        self.version += 1
        for chunk in self.chunks:
            chunk.gradients.drop()
            chunk.weights.release()


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


class Accumulation:
    """Choice per step between reducing each micro-batch and reducing all of them once (setting ``reduce_once``).

    With ``"auto"``, ``placement=auto`` keeps whole gradients if its plan leaves room for them under ``memory_cap``.
    ``placement=static`` has no cap: the first step reduces each micro-batch, and the least spare memory of any rank
    decides for all later steps. All ranks take the same decision, and it holds until the optimizer steps. Exception: a
    move to a plan without room for whole gradients, such as for a measurement, reduces the kept gradients first.

    Args:
        chunked: The chunks.
        reducer: Keeps their gradients.
    """

    def __init__(self, chunked: ChunkedNetworks, reducer: Reducer) -> None:
        self._chunked = chunked
        self._reducer = reducer
        self._whole_bytes = whole_gradient_bytes(chunked.layouts)
        self._keeps: bool | None = None
        """The decision for the current step."""
        self._has_stepped = False
        self._measured: int | None = None
        self._logged: bool | None = None

    def keeps_gradients(self) -> bool:
        """Return whether this step keeps whole gradients between micro-batches; a collective call."""
        if self._keeps is None:
            self._keeps, message = self._decide()
            if message and self._keeps is not self._logged:
                log.info("Gemini: %s", message)
                self._logged = self._keeps
        return self._keeps

    def end_step(self) -> None:
        """Note that an optimizer has stepped."""
        self._keeps, self._has_stepped = None, True

    def make_room(self, plan: ChunkPlan) -> None:
        """Reduce the kept gradients now if the new plan has no room for them; a collective call."""
        if self._keeps and self._chunked.config.reduce_once == "auto" and not plan.keeps_gradients:
            self._reducer.flush()
            self._reducer.keeps_gradients = self._keeps = False

    def _decide(self) -> tuple[bool, str]:
        """Return the decision and a message about it; none before the first measurement."""
        chunked, mode = self._chunked, self._chunked.config.reduce_once
        whole = mib(self._whole_bytes)
        if mode != "auto":
            once = f"gradients of all micro-batches are reduced once; until then they take {whole}"
            each = f"each micro-batch is reduced; with {whole} to spare, reduce_once=true does it once"
            return mode, once if mode else each
        if chunked.collectives.is_alone:
            return False, "each micro-batch is added up at once: there are no other ranks to reduce over"
        spare = self._spare_bytes()
        if spare is None:
            return False, ""
        keeps = chunked.plan.keeps_gradients if chunked.config.placement == "auto" else self._whole_bytes <= spare
        once = f"micro-batches are reduced once, in float32: {whole} of the {mib(spare)} to spare"
        each = f"each micro-batch is reduced: whole gradients take {whole}, and {mib(max(spare, 0))} are to spare"
        return keeps, once if keeps else each

    def _spare_bytes(self) -> int | None:
        """Return the spare bytes of the fast tier on the rank with the least; None before the first measurement."""
        collectives = self._chunked.collectives
        if self._chunked.config.placement == "auto":
            return self._chunked.plan.spare_bytes
        if self._measured is None and self._has_stepped:
            own = spare_bytes(self._chunked.memory, collectives.world_size)
            least = collectives.all_reduce(torch.tensor([own], dtype=torch.int64), dist.ReduceOp.MIN)
            self._measured = int(least)
        return self._measured
