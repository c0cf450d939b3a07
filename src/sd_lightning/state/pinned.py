"""Pinned host memory, in blocks that waste little of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20
"""Tensors share blocks of this size: torch rounds each pinned allocation up to a power of two."""


def streams_of(device: torch.device) -> Any:
    """Return torch's module of a device with streams, which copies pinned memory beside its work; None for others."""
    return torch.cuda if device.type == "cuda" else None


def pinned_bytes(nbytes: int) -> int:
    """Return the host memory that tensors of so many bytes take in pinned blocks."""
    if nbytes > BLOCK_BYTES:
        return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_memory(
    shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return tensors in host memory; ``device`` copies from and to them without waiting, if it is CUDA."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    blocks: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = next((i for i, left in enumerate(room) if left >= sizes[number]), None)
        if fitting is None:
            fitting = len(blocks)
            blocks.append([])
            room.append(max(BLOCK_BYTES // dtype.itemsize, sizes[number]))
        blocks[fitting].append(number)
        room[fitting] -= sizes[number]
    found: dict[int, Tensor] = {}
    for block in blocks:
        is_pinned = streams_of(device) is not None
        memory = torch.empty(sum(sizes[i] for i in block), dtype=dtype, pin_memory=is_pinned)
        for number, part in zip(block, memory.split([sizes[i] for i in block])):
            found[number] = part.view(tuple(shapes[number]))
    return [found[i] for i in range(len(sizes))]
