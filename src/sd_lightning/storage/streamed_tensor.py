"""Tensors that stay in their files until they are written to another: no network is ever in memory as a whole."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.safetensors_file import (
    SLICE_BYTES,
    PieceSpec,
    PieceWriter,
    bytes_of,
    indexed_files,
    tensors_in,
)
from sd_lightning.storage.tensor_store import ShardedTensors


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor described by where its values can be read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    """Gives the values in row-major order as successive 1-D CPU tensors; each is overwritten by the next one."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """Return the whole tensor in memory."""
        tensor = torch.empty(self.numel, dtype=self.dtype)
        position = 0
        for block in self.slices():
            tensor[position : position + block.numel()] = block
            position += block.numel()
        return tensor.view(self.shape)

    def reshaped(self, shape: tuple[int, ...]) -> StreamedTensor:
        """Return the same values in another shape."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"{self.shape} cannot be reshaped to {shape}.")
        return StreamedTensor(self.dtype, shape, self.slices)

    def transposed(self) -> StreamedTensor:
        """Return the transposed matrix; it is read as a whole when its turn comes."""
        rows, columns = self.shape
        return StreamedTensor(self.dtype, (columns, rows), lambda: iter([self.read().T.reshape(-1)]))


def joined(tensors: Sequence[StreamedTensor]) -> StreamedTensor:
    """Return tensors joined along their first axis."""
    first = tensors[0]
    if any((t.dtype, t.shape[1:]) != (first.dtype, first.shape[1:]) for t in tensors):
        raise ValueError(f"Cannot join {[(t.dtype, t.shape) for t in tensors]}.")
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return StreamedTensor(first.dtype, shape, lambda: (block for t in tensors for block in t.slices()))


def stored_tensor(store: ShardedTensors, key: str) -> StreamedTensor:
    """Describe a tensor of a store, which must stay open until it is read."""
    return StreamedTensor(store.dtype(key), store.shape(key), lambda: store.slices(key))


def file_tensors(path: str | os.PathLike[str]) -> dict[str, StreamedTensor]:
    """Describe the tensors of a safetensors file, or of several that ``<path>.index.json`` names.

    Raises:
        UsageError: There is no such file, or it is damaged.
    """
    return {
        spec.key: StreamedTensor(spec.dtype, spec.shape, _reader(file, begin, math.prod(spec.shape), spec.dtype))
        for file in indexed_files(Path(path))
        for spec, begin in tensors_in(file).items()
    }


def write_streamed(
    path: str | os.PathLike[str],
    tensors: Mapping[str, StreamedTensor],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write one safetensors file, slice by slice.

    Args:
        path: File to create.
        tensors: By name in the file.
        dtype: Convert floating-point values to it; as they are if not given.
        metadata: Free strings of the header, besides ``format``.

    Returns:
        The SHA-256 of the file.

    Raises:
        UsageError: A value is too large for ``dtype``.
    """
    specs = [PieceSpec(name, converted_dtype(tensor, dtype), tensor.shape) for name, tensor in tensors.items()]
    with PieceWriter(path, specs, metadata={"format": "pt", **(metadata or {})}) as writer:
        for piece in writer.pieces:
            blocks = (_converted(piece.key, block, piece.dtype) for block in tensors[piece.key].slices())
            writer.write_slices(piece.key, blocks)
        return writer.close()


def converted_dtype(tensor: StreamedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that :func:`write_streamed` gives a tensor."""
    return tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype


def _converted(name: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    if block.dtype == dtype:
        return block
    if dtype.is_floating_point and dtype.itemsize < block.dtype.itemsize and block.numel():
        largest = max(-block.min().item(), block.max().item())
        if torch.finfo(dtype).max < largest < math.inf:
            raise UsageError(
                f"{name} holds {largest:.4g}, which is too large for {str(dtype).removeprefix('torch.')}; write "
                "dtype=bfloat16"
            )
    return block.to(dtype)


def _reader(path: Path, offset: int, numel: int, dtype: torch.dtype) -> Callable[[], Iterator[Tensor]]:
    def slices() -> Iterator[Tensor]:
        max_numel = SLICE_BYTES // dtype.itemsize
        buffer = torch.empty(min(numel, max_numel), dtype=dtype)
        # Plain reads, as in the tensor store: mapped pages would count as resident memory.
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            for start in range(0, numel, max_numel):
                block = buffer[: numel - start]
                rest = bytes_of(block)
                while len(rest):
                    count = file.readinto(rest)
                    if not count:
                        raise UsageError(f"{path}: ends too early; copy or download that file again")
                    rest = rest[count:]
                yield block

    return slices
