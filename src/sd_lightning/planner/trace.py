"""A computation as allocations and operations that are affine in the batch size: one recording serves all sizes.

A line through the peaks of two batch sizes mispredicts others by half: the peak moves from one operation to another.
Each single allocation is affine, though, and the peak is that of their sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from sd_lightning.models.checkpointing import KINDS

NEVER = 2**62
ROUNDING = 512
"""CUDA's caching allocator rounds every block up to a multiple of this, bytes."""


Bytes = TypeVar("Bytes", int, np.ndarray)


def rounded(nbytes: Bytes) -> Bytes:
    """Round bytes up as CUDA's caching allocator does."""
    return -(-nbytes // ROUNDING) * ROUNDING


@dataclass(frozen=True)
class Amount:
    """A number that is affine in the batch size."""

    constant: int = 0
    per_sample: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.constant + other.constant, self.per_sample + other.per_sample)


@dataclass(frozen=True)
class Cost:
    """What an operator does with inputs of certain shapes."""

    name: str
    """Its name without overload: "addmm", "convolution"."""
    flops: Amount
    """Floating-point operations of matrix products, convolutions and attention; 0 for others."""
    moved: Amount
    """Bytes of its inputs and outputs; 0 if it only allocates."""
    dtype: torch.dtype
    """Of its largest floating-point tensor."""

    @property
    def kind(self) -> str:
        """Return "matmul"; "convolution" or "attention", also with "_backward"; "function" or "elementwise".

        Functions are activation functions and normalisations.
        """
        product = KINDS.get(self.name, "matmul" if self.flops != Amount() else "")
        if product:
            is_backward = self.name.endswith("_backward") and product != "matmul"
            return f"{product}_backward" if is_backward else product
        return "function" if self.name.removesuffix("_backward").removesuffix("_data") in _FUNCTIONS else "elementwise"


_FUNCTIONS = frozenset(
    ("silu", "gelu", "sigmoid", "tanh", "exp", "erf", "_softmax", "_log_softmax", "native_group_norm")
    + ("native_layer_norm", "_fused_rms_norm", "rsqrt", "pow", "cos", "sin")
)


@dataclass
class Operation:
    """One call of an aten operator; views are no operations."""

    cost: Cost
    block: str
    """The repeated block that it belongs to, also in backward; "" outside of blocks."""
    part: str
    """The innermost of the modules that are followed: a block's layer, or the block."""
    is_backward: bool
    """Whether it ran in the backward pass, as a gradient or a recomputation."""


@dataclass
class Buffer:
    """A storage that an operation allocated."""

    size: Amount
    """Bytes, not rounded."""
    born: int
    """Index of the operation that allocated it."""
    freed: int = NEVER
    """Index of the first operation that ran without it."""
    is_gradient: bool = False
    """Whether it is the gradient of a parameter."""
    is_output: bool = False
    """Whether a block returned it."""
    used: int = 0
    """Index of the last operation of forward that read it."""
    enters: list[str] = field(default_factory=list)
    """Modules that are followed, and that it is an input of."""
    is_cast: bool = False
    """Whether it is a cast weight, which autocast keeps until forward ends."""


class Amounts:
    """One value per item, affine in the batch size."""

    def __init__(self, amounts: Iterable[Amount]) -> None:
        pairs = np.array([(each.constant, each.per_sample) for each in amounts], np.int64).reshape(-1, 2)
        self.constant, self.per_sample = pairs.T

    def at(self, batch_size: int) -> np.ndarray:
        return self.constant + batch_size * self.per_sample


class Trace:
    """The operations and allocations of a computation at any batch size.

    Args:
        operations: In order.
        buffers: The storages that they allocated, in order. Sizes are for a prime batch size, or constant.
    """

    def __init__(self, operations: list[Operation], buffers: list[Buffer]) -> None:
        self.operations, self.buffers = operations, buffers
        self.born = np.array([each.born for each in buffers], np.int64)
        self.freed = np.minimum(np.array([each.freed for each in buffers], np.int64), len(operations))
        self._size = Amounts(each.size for each in buffers)
        self.flops = Amounts(each.cost.flops for each in operations)
        self.moved = Amounts(each.cost.moved for each in operations)
        alike: dict[tuple[str, torch.dtype], list[int]] = {}
        for index, each in enumerate(operations):
            alike.setdefault((each.cost.kind, each.cost.dtype), []).append(index)
        self.alike = {key: np.array(indices) for key, indices in alike.items()}
        """Indices of operations by kind and dtype."""
        self.is_backward = np.array([each.is_backward for each in operations], bool)
        self.is_output = np.array([each.is_output for each in buffers], bool)
        self.used = np.array([each.used for each in buffers], np.int64)
        self.is_cast = np.array([each.is_cast for each in buffers], bool)
        self.is_gradient = np.array([each.is_gradient for each in buffers], bool)

    def sizes(self, batch_size: int) -> np.ndarray:
        """Return the bytes of each buffer, rounded as CUDA's caching allocator rounds."""
        return rounded(self._size.at(batch_size))

    def live(self, batch_size: int, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return the bytes that are allocated during each operation.

        Args:
            batch_size: Samples.
            chosen: Which buffers count; all of them if not given.
        """
        sizes = self.sizes(batch_size)
        return self._during(sizes if chosen is None else np.where(chosen, sizes, 0), self.born, self.freed)

    def peak(self, batch_size: int = 0) -> int:
        """Return the most bytes that are allocated at once; all sizes are constant in a trace of a single batch."""
        return int(self.live(batch_size).max(initial=0))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trained weights."""
        return int(self._size.constant[self.is_gradient].sum())

    def ready(self) -> np.ndarray:
        """Return the part of the trained weights whose gradients have been ready before each operation, 0 to 1."""
        sizes = np.where(self.is_gradient, self._size.constant, 0)
        count = len(self.operations)
        never = np.full_like(self.freed, count)
        return self._during(sizes, self.freed.clip(max=count - 1), never) / max(self.gradient_bytes, 1)

    def _during(self, sizes: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the bytes of buffers that exist during each operation."""
        changes = np.zeros(len(self.operations) + 1, np.int64)
        np.add.at(changes, begin, sizes)
        np.add.at(changes, end, -sizes)
        return changes.cumsum()[:-1]
