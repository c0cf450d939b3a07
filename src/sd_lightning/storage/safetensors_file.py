"""The safetensors format, read and written in slices through one small host buffer.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format). Files are not memory-mapped: mapped pages count as resident memory,
so loading would appear to need (and under a memory limit would need) as much memory as the file has bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import MAX_BYTES, parse_json, read_json

SLICE_BYTES = 16 * 2**20
"""Size of the host buffer and of the slices that are hashed and written."""

# Dtype names of the safetensors format, in the order in which that package writes tensors.
NAME_OF_DTYPE = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_OF_NAME = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}


def flat_blocks(tensor: Tensor, begin: int, end: int, max_numel: int) -> Iterator[Tensor]:
    """Cut the row-major range ``[begin, end)`` of a tensor into views of at most ``max_numel`` elements.

    No values are copied. The views, flattened and concatenated in order, are the range, for any strides. Contiguous
    stretches are 1-D views.
    """
    if begin >= end:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(begin, end, max_numel):
            yield flat[start : min(start + max_numel, end)]
        return
    row_numel = tensor.numel() // tensor.shape[0]
    row, column = divmod(begin, row_numel)
    while begin < end:
        if column == 0 and row_numel <= max_numel and end - begin >= row_numel:
            num_rows = min((end - begin) // row_numel, max_numel // row_numel)
            yield tensor[row : row + num_rows]
            row, begin = row + num_rows, begin + num_rows * row_numel
        else:  # the part of one row that is wanted, or a row too large for one block
            stop = min(row_numel, column + end - begin)
            yield from flat_blocks(tensor[row], column, stop, max_numel)
            row, begin, column = row + 1, begin + stop - column, 0


def bytes_of(block: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # as_strided and not view(-1): a contiguous tensor of one element may have any stride.
    return block.as_strided((block.numel(),), (1,)).view(torch.uint8).numpy().data


class HostBuffer:
    """A host buffer that is allocated at its first use and reused for every slice."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous view of at most ``SLICE_BYTES``; earlier views become invalid."""
        if self._memory is None:
            self._memory = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        numel = math.prod(shape)
        return self._memory[: numel * dtype.itemsize].view(dtype).view(tuple(shape))


@dataclass(frozen=True)
class Column:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, of all but the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.begin + self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What the header of a file tells."""

    columns: Mapping[str, Column]
    """The tensors by name."""
    metadata: Mapping[str, str]
    begin: int
    """Offset of the tensors' first byte."""

    @property
    def end(self) -> int:
        """Bytes of the whole file."""
        return max((column.end for column in self.columns.values()), default=self.begin)


def read_header(read: Callable[[int, int], bytes], file_bytes: int | None = None) -> Header:
    """Read a header.

    Args:
        read: Returns the bytes ``[begin, end)`` of the file.
        file_bytes: Size of the file, if it is known.

    Raises:
        ValueError: It is not a safetensors file. Whether the tensors' bytes are there is not checked.
    """
    length = int.from_bytes(prefix := read(0, 8), "little")
    if len(prefix) < 8 or (file_bytes is not None and length > file_bytes - 8):
        raise ValueError("its header is truncated")
    if length > MAX_BYTES:
        raise ValueError(f"its header has {length:,} bytes; the format allows {MAX_BYTES:,}")
    entries, start = parse_json(read(8, 8 + length)), 8 + length
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    metadata = entries.pop("__metadata__", {})
    try:
        columns = {}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            columns[name] = column = Column(DTYPE_OF_NAME[entry["dtype"]], tuple(entry["shape"]), start + begin)
            if column.end != start + end or begin < 0:
                raise ValueError(f"it ends within {name!r}")
        return Header(columns, dict(metadata), start)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"its header tells no tensors ({error!r})") from error


def header_bytes(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file of tensors that lie one after the other in that order.

    Args:
        tensors: Name -> dtype and shape.
        metadata: Extra strings.

    Raises:
        UsageError: A dtype cannot be stored.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        if name == "__metadata__":
            raise ValueError("A safetensors file cannot hold a tensor named '__metadata__'.")
        if dtype not in NAME_OF_DTYPE:
            raise UsageError(f"Tensor {name!r} has dtype {dtype}, which safetensors cannot store; convert it first.")
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the file of some tensors: the bytes that the package safetensors writes."""
    rank = {dtype: number for number, dtype in enumerate(NAME_OF_DTYPE)}
    ordered = dict(sorted(tensors.items(), key=lambda item: (rank[item[1].dtype], item[0])))
    header = header_bytes({name: (each.dtype, each.shape) for name, each in ordered.items()}, metadata)
    return b"".join([header, *(bytes_of(each.contiguous()) for each in ordered.values())])


@dataclass(frozen=True)
class OpenFile:
    """A safetensors file that is open for reading."""

    handle: BinaryIO
    header: Header


def read_exactly(handle: BinaryIO, memory: memoryview, begin: int) -> bool:
    """Fill ``memory`` with the bytes of an unbuffered file from ``begin`` on; return False if it ends too early."""
    while len(memory):
        count = os.preadv(handle.fileno(), [memory], begin)
        if not count:
            return False
        memory, begin = memory[count:], begin + count
    return True


def open_safetensors(path: Path) -> OpenFile:
    """Open a file and read its header.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a safetensors file.
    """
    handle: BinaryIO = open(path, "rb", buffering=0)
    try:
        return opened(handle)
    except BaseException:
        handle.close()
        raise


def opened(handle: BinaryIO) -> OpenFile:
    """Read the header of an unbuffered file.

    Raises:
        ValueError: It is not a safetensors file.
    """
    fd = handle.fileno()
    return OpenFile(handle, read_header(lambda begin, end: os.pread(fd, end - begin, begin), os.fstat(fd).st_size))


def indexed_files(path: Path, *, variant: str | None = None) -> list[Path]:
    """Return a safetensors file, or its shards if an index beside it lists several.

    Args:
        path: Path of a single file: ``folder/model.safetensors``.
        variant: Variant in its name: "fp16" for ``folder/model.fp16.safetensors``.

    Raises:
        UsageError: The index cannot be read. A missing file is only noticed when it is opened.
    """
    file = path if variant is None else path.with_suffix(f".{variant}{path.suffix}")
    index = path.with_name(".".join([path.name, "index", *([variant] if variant else []), "json"]))
    if file.is_file() or not index.is_file():
        return [file]
    return [path.with_name(name) for name in shard_names(index)]


def shard_names(index: Path) -> list[str]:
    """Return the names of the files that an index lists, sorted.

    Raises:
        UsageError: The index cannot be read, or names another kind of file or one in another folder.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        wrong = next((name for name in names if Path(name).name != name or not name.endswith(".safetensors")), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index}: cannot be read ({error}); copy or download that folder again") from error
    if wrong is not None:
        raise UsageError(
            f"{index}: weight_map names {wrong}; expected safetensors files beside it; copy or download that folder "
            "again"
        )
    return names
