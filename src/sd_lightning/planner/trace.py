"""A computation as allocations and operations that are affine in the batch size: one recording serves all sizes.

A line through the peaks of two batch sizes mispredicts others by half: the peak moves from one operation to another.
Each single allocation is affine, though, and the peak is that of their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from sd_lightning.planner.recording import Amount, Recording, live_bytes, rounded


@dataclass(frozen=True)
class Amounts:
    """One value per item, affine in the batch size."""

    constant: np.ndarray
    per_sample: np.ndarray

    @classmethod
    def of(cls, amounts: Iterable[Amount]) -> Amounts:
        pairs = np.array([(each.constant, each.per_sample) for each in amounts], np.int64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1])

    def at(self, batch_size: int) -> np.ndarray:
        return self.constant + batch_size * self.per_sample


class Trace:
    """The operations and allocations of a computation at any batch size.

    Args:
        recording: Made with a prime batch size, or with constant sizes.
    """

    def __init__(self, recording: Recording) -> None:
        self.operations, self.buffers = recording.operations, recording.buffers
        self.born, self.freed, self._count = recording.spans()
        self._size = Amounts.of(each.size for each in self.buffers)
        self.flops = Amounts.of(each.cost.flops for each in self.operations)
        self.moved = Amounts.of(each.cost.moved for each in self.operations)
        alike: dict[tuple[str, torch.dtype], list[int]] = {}
        for index, each in enumerate(self.operations):
            alike.setdefault((each.cost.kind, each.cost.dtype), []).append(index)
        self.alike = {key: np.array(found) for key, found in alike.items()}
        """Indices of operations by kind and dtype."""
        self.is_backward = np.array([each.is_backward for each in self.operations], bool)
        self.is_output = np.array([each.is_output for each in self.buffers], bool)
        self.used = np.array([each.used for each in self.buffers], np.int64)
        self.is_cast = np.array([each.is_cast for each in self.buffers], bool)
        self.is_gradient = np.array([each.gradient_of is not None for each in self.buffers], bool)

    def sizes(self, batch_size: int) -> np.ndarray:
        """Return the bytes of each buffer, rounded as the allocator rounds."""
        return rounded(self._size.at(batch_size))

    def live(self, batch_size: int, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes that are allocated during each operation.

        Args:
            batch_size: Samples.
            chosen: Which buffers count; all of them if not given.
        """
        sizes = self.sizes(batch_size)
        return live_bytes(self.born, self.freed, self._count, sizes if chosen is None else np.where(chosen, sizes, 0))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained weights."""
        return int(self._size.constant[self.is_gradient].sum())

    def ready(self) -> np.ndarray:
        """Return the part of the trained weights whose gradients have been ready before each operation, 0 to 1."""
        sizes = np.where(self.is_gradient, self._size.constant, 0)
        born, never = self.freed.clip(max=self._count - 1), np.full_like(self.freed, self._count)
        return live_bytes(born, never, self._count, sizes) / max(self.gradient_bytes, 1)
