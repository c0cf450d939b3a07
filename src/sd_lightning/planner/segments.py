"""CUDA's caching allocator: what it reserves for a trace's allocations, and what of that it cannot give back.

It takes memory in segments, cuts blocks from them, and gives only whole segments back. The rules are those of torch's
``CUDACachingAllocator.cpp``; to replay them is the idea of xMem (Shi et al. 2025, arXiv:2510.21048).
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sd_lightning.planner.trace import ROUNDING, Trace, rounded

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
    name = next((name for name in _SETTINGS if name in os.environ), None)
    if name is None:
        os.environ[_SETTINGS[0]] = EXPANDABLE
    elif EXPANDABLE not in os.environ[name]:
        log.warning(
            "%s=%s: without %s, CUDA's allocator may take more memory than is predicted; add it",
            *(name, os.environ[name], EXPANDABLE),
        )


class Block(NamedTuple):
    """Memory within a segment; free blocks are taken in this order."""

    size: int
    number: int
    """Of the block among those that were freed."""
    begin: int
    """Address."""
    segment: int
    """Index of its segment."""


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


class Allocator:
    """The allocator of one process and stream."""

    def __init__(self) -> None:
        self.reserved = Reserved()
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        """Free blocks of small segments, and of large ones."""
        self._by_begin: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self._segments: list[int] = []
        """Bytes of each segment."""
        self._used: list[int] = []
        self._count = self._in_use = self._live = 0

    def allocate(self, size: int) -> Block:
        """Return a block: the smallest free one that is large enough, or one of a new segment."""
        size = max(rounded(size), ROUNDING)
        is_small = size <= _SMALL
        place = bisect_left(self._free[is_small], (size,))
        if place < len(self._free[is_small]):
            block = self._free[is_small][place]
            self._remove(block)
        else:
            whole = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
            block = self._new_segment(_SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _LARGE else whole)
        left = block.size - size
        if left >= ROUNDING if is_small else left > _SMALL:
            self._add(block._replace(size=left, begin=block.begin + size))
            block = block._replace(size=size)
        self._use(block.segment, block.size)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it is joined with free neighbours."""
        self._use(block.segment, -block.size)
        for other in (self._by_end.get(block.begin), self._by_begin.get(block.begin + block.size)):
            if other is not None:
                self._remove(other)
                block = block._replace(size=block.size + other.size, begin=min(block.begin, other.begin))
        self._add(block)

    def _new_segment(self, size: int) -> Block:
        begin = sum(self._segments) + len(self._segments)  # apart from the last one, so that no blocks are joined
        self._segments.append(size)
        self._used.append(0)
        self.reserved.most += size
        return Block(size, 0, begin, len(self._segments) - 1)

    def _add(self, block: Block) -> None:
        self._count += 1
        block = block._replace(number=self._count)
        insort(self._free[self._segments[block.segment] == _SMALL_SEGMENT], block)
        self._by_begin[block.begin] = self._by_end[block.begin + block.size] = block

    def _remove(self, block: Block) -> None:
        pool = self._free[self._segments[block.segment] == _SMALL_SEGMENT]
        del pool[bisect_left(pool, block)], self._by_begin[block.begin], self._by_end[block.begin + block.size]

    def _use(self, segment: int, size: int) -> None:
        was = self._used[segment] > 0
        self._used[segment] += size
        self._live += size
        self._in_use += self._segments[segment] * ((self._used[segment] > 0) - was)
        self.reserved.peak = max(self.reserved.peak, self._in_use)
        self.reserved.live = max(self.reserved.live, self._live)


def replayed(trace: Trace, batch_size: int, kept: float) -> Reserved:
    """Replay the allocations of two training steps: in the second, the allocator reuses what it has.

    Args:
        trace: Of a forward and backward pass.
        batch_size: Samples per pass.
        kept: Part of each gradient that is kept from when it is ready to the backward pass of the next step.
    """
    allocator = Allocator()
    sizes, count = trace.sizes(batch_size).tolist(), len(trace.operations)
    freed: list[list[int]] = [[] for _ in range(count + 1)]
    born: list[list[int]] = [[] for _ in range(count + 1)]
    for index, (begin, end) in enumerate(zip(trace.born.tolist(), trace.freed.tolist())):
        born[begin].append(index)
        freed[end].append(index)
    turn = int(np.flatnonzero(trace.is_backward).min(initial=count))
    gradients: list[Block] = []
    for _ in range(2):
        blocks: dict[int, Block] = {}
        for operation in range(count + 1):
            if operation == turn:  # the gradients of the last step are dropped
                for block in gradients:
                    allocator.free(block)
                gradients = []
            for index in freed[operation]:
                block = blocks.pop(index)
                if trace.is_gradient[index] and kept:
                    gradients.append(block if kept == 1 else allocator.allocate(int(kept * sizes[index])))
                if not trace.is_gradient[index] or kept != 1:
                    allocator.free(block)
            for index in born[operation]:
                blocks[index] = allocator.allocate(sizes[index])
    return allocator.reserved
