"""One safetensors file, written and opened piece by piece: one small host buffer is all it takes.

The format is 8 bytes of header length, a JSON header, and the tensors' bytes in a row
(https://github.com/huggingface/safetensors#format). The library's own writer wants all tensors
in memory at once, so the few lines that can stream are here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from sd_lightning._errors import UsageError

SLICE_BYTES = 16 * 2**20
"""Host memory used for one copy; also how much is hashed and written at a time."""

# The names of the safetensors format.
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


@dataclass(frozen=True)
class PieceSpec:
    """One tensor of a safetensors file, before its values are known."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def flat_blocks(tensor: Tensor, begin: int, end: int, max_numel: int) -> Iterator[Tensor]:
    """Cut the row-major range ``[begin, end)`` of a tensor into views of at most ``max_numel``.

    No values are copied: the views, flattened and concatenated in order, are the range, whatever
    the strides. Contiguous stretches come as 1-D views.
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
    """The memory of a contiguous CPU tensor."""
    # as_strided and not view(-1): a contiguous tensor of one element may have any stride.
    return block.as_strided((block.numel(),), (1,)).view(torch.uint8).numpy().data


class HostBuffer:
    """A host buffer that is allocated at the first use and then reused for every slice."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous view of at most ``SLICE_BYTES``; invalidates the last one."""
        if self._memory is None:
            self._memory = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        numel = math.prod(shape)
        return self._memory[: numel * dtype.itemsize].view(dtype).view(tuple(shape))


class PieceWriter:
    """Write one safetensors file, tensor by tensor, hashing it on the way.

    Usage: ``for piece in writer.pieces: writer.write(piece.key, tensor)``, then ``close()``.

    Args:
        path: File to create; it must not exist.
        pieces: What will be written. The file's order is ``writer.pieces``: wide dtypes first,
            as safetensors does, so that every tensor is aligned; otherwise the order given.
        metadata: Free strings for the header (diffusers expects ``{"format": "pt"}``).

    Raises:
        OSError: The disk is full, or the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pieces: Sequence[PieceSpec],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
        header = _header(self.pieces, metadata)
        self._next = 0
        self._buffer = HostBuffer()
        self._digest = hashlib.sha256()
        self._file = open(self.path, "xb", buffering=0)
        # hashlib and write() both release the GIL: hashing costs nothing where a core is free.
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="sha256")
        try:
            self._append(memoryview(header))
        except BaseException:
            self.abort()
            raise

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the next piece from a tensor of any strides and device; the dtype is converted."""
        itemsize = self._expect(key, tensor.numel()).dtype.itemsize
        detached = tensor.detach()
        self.write_slices(key, flat_blocks(detached, 0, tensor.numel(), SLICE_BYTES // itemsize))

    def write_slices(self, key: str, slices: Iterable[Tensor]) -> None:
        """Write the next piece from successive slices, each at most ``SLICE_BYTES`` in the file."""
        piece = self._expect(key)
        numel = 0
        for block in slices:
            numel += block.numel()
            if block.device.type != "cpu" or block.dtype != piece.dtype or not block.is_contiguous():
                block = self._buffer.take(block.shape, piece.dtype).copy_(block)
            self._append(bytes_of(block))
        self._expect(key, numel)
        self._next += 1

    def close(self) -> str:
        """Finish the file durably on disk.

        Returns:
            The SHA-256 of the whole file, as hexadecimal digits.
        """
        if self._next != len(self.pieces):
            raise ValueError(f"{self.path} was closed before {self.pieces[self._next].key!r} was written.")
        self._hasher.shutdown()
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return self._digest.hexdigest()

    def abort(self) -> None:
        """Give up and release the file handle; what was written stays for the caller to delete."""
        self._hasher.shutdown()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.abort()  # harmless after close()

    def _expect(self, key: str, numel: int | None = None) -> PieceSpec:
        piece = self.pieces[self._next] if self._next < len(self.pieces) else None
        if piece is None or piece.key != key:
            expected = "the end" if piece is None else repr(piece.key)
            raise ValueError(f"{self.path}: got piece {key!r}; expected {expected}. Follow writer.pieces.")
        if numel is not None and numel != math.prod(piece.shape):
            raise ValueError(f"{self.path}: {key!r} got {numel} values; expected shape {piece.shape}.")
        return piece

    def _append(self, data: memoryview) -> None:
        hashed = self._hasher.submit(self._digest.update, data)
        try:
            rest = data
            while len(rest):  # a raw write may stop early
                rest = rest[self._file.write(rest) :]
        finally:
            hashed.result()


def _header(pieces: Sequence[PieceSpec], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for piece in pieces:
        if piece.key in header or piece.key == "__metadata__":
            raise ValueError(f"A safetensors file cannot hold two tensors named {piece.key!r}.")
        if piece.dtype not in NAME_OF_DTYPE:
            raise UsageError(
                f"Tensor {piece.key!r} has dtype {piece.dtype}, which safetensors cannot store; convert it first."
            )
        offsets = [offset, offset + piece.nbytes]
        header[piece.key] = {"dtype": NAME_OF_DTYPE[piece.dtype], "shape": list(piece.shape), "data_offsets": offsets}
        offset += piece.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class OpenFile:
    handle: BinaryIO
    header: dict[str, Any]
    data_start: int


def open_safetensors(path: Path) -> OpenFile:
    handle: BinaryIO = open(path, "rb", buffering=0)
    try:
        length = int.from_bytes(handle.read(8), "little")
        if length > os.fstat(handle.fileno()).st_size:
            raise ValueError("its header is truncated")
        return OpenFile(handle, json.loads(handle.read(length)), 8 + length)
    except BaseException:
        handle.close()
        raise


def indexed_files(path: Path, *, variant: str | None = None) -> list[Path]:
    """Return the file, or the files that the index beside it names where there are several.

    Args:
        path: What a single file is called: ``folder/model.safetensors``.
        variant: The second but last part of its name: "fp16" for ``folder/model.fp16.safetensors``.

    Raises:
        UsageError: The index cannot be read. A file that is missing shows when it is opened.
    """
    file = path if variant is None else path.with_suffix(f".{variant}{path.suffix}")
    index = path.with_name(".".join([path.name, "index", *([variant] if variant else []), "json"]))
    if file.is_file() or not index.is_file():
        return [file]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(path.with_name(Path(name).name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index}: cannot be read ({error}); copy or download that folder again") from error


def tensors_in(path: Path) -> dict[PieceSpec, int]:
    """Return what a safetensors file holds, with the byte at which each tensor begins.

    Raises:
        UsageError: There is no such file, or it is damaged.
    """
    remedy = "copy or download that file again"
    try:
        file = open_safetensors(path)
        file.handle.close()
        size = path.stat().st_size
        tensors = {}
        for name, entry in file.header.items():
            if name == "__metadata__":
                continue
            begin, end = (file.data_start + offset for offset in entry["data_offsets"])
            spec = PieceSpec(name, DTYPE_OF_NAME[entry["dtype"]], tuple(entry["shape"]))
            if end > size or end - begin != spec.nbytes:
                raise ValueError(f"it ends within {name!r}")
            tensors[spec] = begin
        return tensors
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file; expected weights in safetensors files; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a complete safetensors file ({error}); {remedy}") from error


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> str:
    """Write tensors as one ordinary safetensors file, in slices; a file that is there is replaced, not overwritten.

    Returns:
        The SHA-256 of the file.
    """
    Path(path).unlink(missing_ok=True)  # it may be a hard link shared with a checkpoint
    specs = [PieceSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with PieceWriter(path, specs, metadata={"format": "pt", **(metadata or {})}) as writer:
        for piece in writer.pieces:
            writer.write(piece.key, tensors[piece.key])
        return writer.close()
