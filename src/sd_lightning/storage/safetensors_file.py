"""The safetensors format, read and written in slices through one small host buffer.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format). Files are not memory-mapped: mapped pages count as resident memory,
so loading would appear to need (and under a memory limit would need) as much memory as the file has bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import header_length, parse_json, read_json

SLICE_BYTES = 16 * 2**20
"""Size of the host buffer and of the slices that are hashed and written."""

# Dtype names of the safetensors format.
NAME_OF_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
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
class OpenFile:
    """A safetensors file that is open for reading."""

    handle: BinaryIO
    header: dict[str, Any]
    data_start: int
    """Offset of the tensors' first byte."""


def open_safetensors(path: Path) -> OpenFile:
    """Open a file and read its header.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a safetensors file.
    """
    handle: BinaryIO = open(path, "rb", buffering=0)
    try:
        length = header_length(handle.read(8), os.fstat(handle.fileno()).st_size)
        header = parse_json(handle.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return OpenFile(handle, header, 8 + length)
    except BaseException:
        handle.close()
        raise


def read_exactly(handle: BinaryIO, memory: memoryview) -> bool:
    """Fill ``memory`` from an unbuffered file; return False if the file ends too early."""
    while len(memory):
        count = handle.readinto(memory)  # type: ignore[attr-defined]
        if not count:
            return False
        memory = memory[count:]
    return True


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
