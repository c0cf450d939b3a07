"""CUDA's caching allocator: what it reserves for a trace's allocations, and what of that it cannot give back.

It takes memory in segments, cuts blocks from them, and gives only whole segments back. The rules are those of torch's
``CUDACachingAllocator.cpp``; to replay them is the idea of xMem (Shi et al. 2025, arXiv:2510.21048).
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from sd_lightning.planner.recording import ROUNDING
from sd_lightning.planner.trace import Trace

log = logging.getLogger(__name__)

EXPANDABLE = "expandable_segments:True"
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MIB = 2**20
_SMALL = MIB
"""Blocks up to this size are in segments of their own."""
_SMALL_SEGMENT = 2 * MIB
_LARGE = 10 * MIB
"""Blocks from this size on make their own segment, in multiples of :data:`_SMALL_SEGMENT`."""
_LARGE_SEGMENT = 20 * MIB


def use_expandable_segments() -> None:
    """Have CUDA's allocator grow its segments page by page, as plans assume: it loses no memory between blocks then.

    Must be called before memory is taken on a GPU. What the environment says already stays.
    """
    given = next((name for name in _SETTINGS if name in os.environ), None)
    if given is None:
        os.environ[_SETTINGS[0]] = EXPANDABLE
    elif EXPANDABLE not in os.environ[given]:
        log.warning(
            "%s=%s: without %s, CUDA's allocator may take more memory than is predicted; add it",
            *(given, os.environ[given], EXPANDABLE),
        )


@dataclass(eq=False)
class _Segment:
    size: int
    used: int = 0


@dataclass(eq=False)
class _Block:
    size: int
    segment: _Segment
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False
    number: int = 0


@dataclass
class Reserved:
    """What the allocator holds, bytes."""

    most: int = 0
    """Of all segments at the end: what nvidia-smi shows, but for the CUDA context."""
    peak: int = 0
    """Of the segments with at least one block in use, at most: what a GPU must have."""
    live: int = 0
    """Of all blocks in use, at most."""

    @property
    def fragments(self) -> int:
        """Bytes that are lost between the blocks in use."""
        return self.peak - self.live


@dataclass
class Allocator:
    """The allocator of one process and stream."""

    reserved: Reserved = field(default_factory=Reserved)

    def __post_init__(self) -> None:
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._count = self._in_use = self._live = 0

    def allocate(self, size: int) -> _Block:
        """Return a block: the smallest free one that is large enough, or one of a new segment."""
        size = max(-(-size // ROUNDING) * ROUNDING, ROUNDING)
        is_small = size <= _SMALL
        pool = self._free[is_small]
        place = bisect_left(pool, (size, -1))
        if place < len(pool):
            block = pool.pop(place)[-1]
        else:
            segment = _Segment(_SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _LARGE else _whole(size))
            self.reserved.most += segment.size
            block = _Block(segment.size, segment)
        block.is_free = False
        left = block.size - size
        if left >= ROUNDING if is_small else left > _SMALL:
            rest = _Block(left, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        self._use(block.segment, block.size)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it is joined with free neighbours."""
        self._use(block.segment, -block.size)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool = self._free[other.segment.size == _SMALL_SEGMENT]
                del pool[bisect_left(pool, (other.size, other.number))]
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
        self._put(block)

    def _put(self, block: _Block) -> None:
        self._count += 1
        block.is_free, block.number = True, self._count
        insort(self._free[block.segment.size == _SMALL_SEGMENT], (block.size, block.number, block))

    def _use(self, segment: _Segment, size: int) -> None:
        was = segment.used > 0
        segment.used += size
        self._live += size
        self._in_use += segment.size * ((segment.used > 0) - was)
        self.reserved.peak = max(self.reserved.peak, self._in_use)
        self.reserved.live = max(self.reserved.live, self._live)


def _whole(size: int) -> int:
    return -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT


def replayed(trace: Trace, batch_size: int, kept: float, *, steps: int = 2) -> Reserved:
    """Replay the allocations of training steps.

    Args:
        trace: Of a forward and backward pass.
        batch_size: Samples per pass.
        kept: Part of each gradient that is kept from when it is ready to the backward pass of the next step.
        steps: After the first one, the allocator reuses what it has.
    """
    allocator = Allocator()
    sizes = trace.sizes(batch_size)
    events = [(freed, _FREED, index) for index, freed in enumerate(trace.freed.tolist())]
    events += [(born, _BORN, index) for index, born in enumerate(trace.born.tolist())]
    events.append((int(np.flatnonzero(trace.is_backward).min(initial=len(trace.operations))), _FORGOTTEN, 0))
    events.sort()
    gradients: list[_Block] = []
    for _ in range(steps):
        blocks: dict[int, _Block] = {}
        for _, what, index in events:
            if what == _FORGOTTEN:
                for block in gradients:
                    allocator.free(block)
                gradients = []
            elif what == _BORN:
                blocks[index] = allocator.allocate(int(sizes[index]))
            elif not trace.is_gradient[index] or not kept:
                allocator.free(blocks.pop(index))
            elif kept == 1:
                gradients.append(blocks.pop(index))
            else:
                gradients.append(allocator.allocate(int(kept * sizes[index])))
                allocator.free(blocks.pop(index))
    return allocator.reserved


_FORGOTTEN, _FREED, _BORN = range(3)
"""What happens before an operation, in this order; gradients of the last step are forgotten."""
