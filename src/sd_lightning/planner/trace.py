"""A training step as allocations and operations that are affine in the batch size, so that one trace serves all sizes.

A line through the peaks of two batch sizes mispredicts others by half: the peak moves from one operation to another.
Each single allocation is affine, though, and the peak is that of their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.planner.recording import NEVER, Operation, Recording

ROUNDING = 512
"""CUDA's caching allocator rounds every block up to a multiple of this, bytes."""
SIZES = (2, 3)
"""Batch sizes that are recorded; 1 makes some tensors contiguous that are not at other sizes."""


@dataclass(frozen=True)
class Affine:
    """One value per item, affine in the batch size."""

    constant: np.ndarray
    slope: np.ndarray

    @classmethod
    def through(cls, small: np.ndarray, large: np.ndarray) -> Affine:
        """Return the line through the values at the two recorded sizes."""
        slope = (large - small) // (SIZES[1] - SIZES[0])
        return cls(small - SIZES[0] * slope, slope)

    def at(self, batch_size: int) -> np.ndarray:
        return self.constant + batch_size * self.slope


class Trace:
    """The operations and allocations of a computation at any batch size."""

    def __init__(self, recorded: Callable[[int], Recording]) -> None:
        """Record a computation at two batch sizes.

        Args:
            recorded: Batch size -> recording.

        Raises:
            UsageError: The computation differs between batch sizes in more than the sizes of its tensors.
        """
        small, large = map(recorded, SIZES)
        names = [[each.name for each in recording.operations] for recording in (small, large)]
        if names[0] != names[1] or len(small.buffers) != len(large.buffers):
            raise UsageError(
                f"planner: a step calls {len(names[0])} operations at batch size {SIZES[0]} and {len(names[1])} at "
                f"{SIZES[1]}; expected a model that computes the same for every sample"
            )
        self.operations: list[Operation] = small.operations
        self.buffers = small.buffers
        self.born = np.array([each.born for each in small.buffers])
        self.freed = np.minimum([each.freed for each in small.buffers], len(small.operations))
        self.size = self._affine(small.buffers, large.buffers, "size")
        self.flops = self._affine(small.operations, large.operations, "flops")
        self.moved = self._affine(small.operations, large.operations, "moved")

    @staticmethod
    def _affine(small: list, large: list, name: str) -> Affine:
        return Affine.through(*(np.array([getattr(each, name) for each in side], np.int64) for side in (small, large)))

    def sizes(self, batch_size: int) -> np.ndarray:
        """Return the bytes of each buffer, rounded as the allocator rounds."""
        return -(-self.size.at(batch_size) // ROUNDING) * ROUNDING
