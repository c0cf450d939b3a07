"""Tensors computed or read slice by slice while they are written, so that no whole network is in memory."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import LazyTensor, tensor_of
from sd_lightning.storage.safetensors_file import (
    SLICE_BYTES,
    Column,
    HostBuffer,
    bytes_of,
    flat_blocks,
    header_bytes,
    indexed_files,
    open_safetensors,
    read_exactly,
)


@dataclass(frozen=True)
class StreamedTensor:
    """A whole tensor whose values are read in slices, on demand."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: Callable[[], Iterator[Tensor]]
    """Yields the values in row-major order as blocks; the next block may overwrite the previous one."""

    @classmethod
    def of(
        cls, values: LazyTensor, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None
    ) -> StreamedTensor:
        """Wrap a tensor of any strides and device, or a function that makes one (give dtype and shape)."""
        if isinstance(values, Tensor):
            dtype, shape = dtype or values.dtype, tuple(values.shape) if shape is None else shape
        assert dtype is not None and shape is not None
        return cls(dtype, shape, partial(_blocks, values, dtype.itemsize))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self) -> Tensor:
        """Return the whole tensor in memory."""
        tensor = torch.empty(self.numel, dtype=self.dtype)
        position = 0
        for block in self.slices():
            tensor[position : position + block.numel()] = block.reshape(-1)
            position += block.numel()
        return tensor.view(self.shape)

    def reshaped(self, shape: tuple[int, ...]) -> StreamedTensor:
        """Return the same values in another shape."""
        if math.prod(shape) != self.numel:
            raise ValueError(f"{self.shape} cannot be reshaped to {shape}.")
        return StreamedTensor(self.dtype, shape, self.slices)

    def transposed(self) -> StreamedTensor:
        """Return the transposed matrix; the whole matrix is in memory while it is written."""
        rows, columns = self.shape
        return StreamedTensor(self.dtype, (columns, rows), lambda: iter([self.read().T.reshape(-1)]))


def _blocks(values: LazyTensor, itemsize: int) -> Iterator[Tensor]:
    tensor = tensor_of(values).detach()
    yield from flat_blocks(tensor, 0, tensor.numel(), SLICE_BYTES // max(itemsize, tensor.dtype.itemsize))


def joined(tensors: Sequence[StreamedTensor]) -> StreamedTensor:
    """Return tensors concatenated along dim 0."""
    first = tensors[0]
    if any((t.dtype, t.shape[1:]) != (first.dtype, first.shape[1:]) for t in tensors):
        raise ValueError(f"Cannot join {[(t.dtype, t.shape) for t in tensors]}.")
    shape = (sum(t.shape[0] for t in tensors), *first.shape[1:])
    return StreamedTensor(first.dtype, shape, lambda: (block for t in tensors for block in t.slices()))


def tensors_in(path: Path) -> dict[str, StreamedTensor]:
    """Return the tensors of one safetensors file by name; only the header is read.

    Raises:
        UsageError: There is no such file, or it is damaged.
    """
    remedy = "copy or download that file again"
    try:
        file = open_safetensors(path)
        file.handle.close()
        size = path.stat().st_size
        if (short := next((name for name, each in file.header.columns.items() if each.end > size), None)) is not None:
            raise ValueError(f"it ends within {short!r}")
        return {
            name: StreamedTensor(each.dtype, each.shape, partial(_stored, path, each))
            for name, each in file.header.columns.items()
        }
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; expected weights in safetensors files; {remedy}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a complete safetensors file ({error}); {remedy}") from error


def _stored(path: Path, column: Column) -> Iterator[Tensor]:
    itemsize, numel = column.dtype.itemsize, column.numel
    buffer = torch.empty(min(numel, SLICE_BYTES // itemsize), dtype=column.dtype)
    with open(path, "rb", buffering=0) as file:
        for start in range(0, numel, SLICE_BYTES // itemsize):
            block = buffer[: numel - start]
            if not read_exactly(file, bytes_of(block), column.begin + start * itemsize):
                raise UsageError(f"{path}: ends too early; copy or download that file again")
            yield block


def file_tensors(path: str | os.PathLike[str]) -> dict[str, StreamedTensor]:
    """Return the tensors of a safetensors file, or of the shards that ``<path>.index.json`` lists, by name.

    Raises:
        UsageError: There is no such file, or it is damaged.
    """
    return {name: tensor for file in indexed_files(Path(path)) for name, tensor in tensors_in(file).items()}


def write_streamed(
    path: str | os.PathLike[str],
    tensors: Mapping[str, StreamedTensor],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write a network's weights as one safetensors file that any library loads, slice by slice.

    Args:
        path: File to create.
        tensors: Tensors by name in the file.
        dtype: Dtype for floating-point values; None keeps theirs.
        metadata: Extra strings of the header, besides ``format``.

    Returns:
        The SHA-256 of the file.

    Raises:
        UsageError: A value is too large for ``dtype``.
    """
    converted = {name: _in_dtype(name, tensor, converted_dtype(tensor, dtype)) for name, tensor in tensors.items()}
    return write_file(path, converted, metadata={"format": "pt", **(metadata or {})})


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors in memory as :func:`write_streamed` does; an existing file is unlinked, not overwritten.

    Returns:
        The SHA-256 of the file.
    """
    Path(path).unlink(missing_ok=True)  # it may be a hard link shared with a checkpoint
    return write_streamed(path, {n: StreamedTensor.of(tensor) for n, tensor in tensors.items()}, metadata=metadata)


def converted_dtype(tensor: StreamedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that :func:`write_streamed` gives a tensor."""
    return tensor.dtype if dtype is None or not tensor.dtype.is_floating_point else dtype


def _in_dtype(name: str, tensor: StreamedTensor, dtype: torch.dtype) -> StreamedTensor:
    if dtype == tensor.dtype:
        return tensor
    return StreamedTensor(dtype, tensor.shape, lambda: (_converted(name, block, dtype) for block in tensor.slices()))


def _converted(name: str, block: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize >= block.dtype.itemsize:
        return block.to(dtype)
    if block.numel():
        largest = max(-block.min().item(), block.max().item())
        if torch.finfo(dtype).max < largest < math.inf:
            raise UsageError(
                f"{name} holds {largest:.4g}, which is too large for {str(dtype).removeprefix('torch.')}; write "
                "dtype=bfloat16"
            )
    return block  # the writer converts it


def content_digest(tensors: Mapping[str, StreamedTensor], dtype: torch.dtype | None = None) -> str:
    """Return the SHA-256 of the values that :func:`write_streamed` writes, in their order, without the header."""
    digest = hashlib.sha256()
    converted = {name: replace(tensor, dtype=converted_dtype(tensor, dtype)) for name, tensor in tensors.items()}
    for tensor in _ordered(converted).values():
        for block in tensor.slices():
            digest.update(bytes_of(block.to(tensor.dtype).contiguous()))
    return digest.hexdigest()


def _ordered(tensors: Mapping[str, StreamedTensor]) -> dict[str, StreamedTensor]:
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, StreamedTensor], *, metadata: Mapping[str, str] | None = None
) -> str:
    """Write one safetensors file, tensor by tensor, and sync it to disk.

    Args:
        path: File to create; it must not exist. After an error, the caller deletes the partial file.
        tensors: Tensors by name in the file. Wide dtypes come first, as in safetensors, so that all are aligned.
        metadata: Extra strings of the header.

    Returns:
        The SHA-256 of the file.

    Raises:
        OSError: The disk is full, or the file cannot be created.
        UsageError: A dtype cannot be stored.
    """
    ordered = _ordered(tensors)
    header = header_bytes({name: (each.dtype, each.shape) for name, each in ordered.items()}, metadata or {})
    digest, buffer = hashlib.sha256(), HostBuffer()
    # hashlib and write() both release the GIL: hashing costs no time if a core is free.
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="sha256") as hasher:

        def append(data: memoryview) -> None:
            hashed = hasher.submit(digest.update, data)
            try:
                while len(data):  # a raw write may stop early
                    data = data[file.write(data) :]
            finally:
                hashed.result()

        append(memoryview(header))
        for name, tensor in ordered.items():
            numel = 0
            for block in tensor.slices():
                numel += block.numel()
                if block.device.type != "cpu" or block.dtype != tensor.dtype or not block.is_contiguous():
                    block = buffer.take(block.shape, tensor.dtype).copy_(block)
                append(bytes_of(block))
            if numel != tensor.numel:
                raise ValueError(f"{path}: {name!r} got {numel} values; expected shape {tensor.shape}.")
        os.fsync(file.fileno())
    return digest.hexdigest()
