"""The safetensors files of a store: sealed, written whole and read by row.

A *seal* is the hash of a whole file, written into its header, taken with ``BLANK`` where it stands. A flipped bit
anywhere in the file breaks it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.safetensors_file import (
    Column,
    Header,
    bytes_of,
    file_bytes,
    header_bytes,
    opened,
    read_exactly,
)
from sd_lightning.storage.untrusted import parse_json

HASH_BYTES = 16
ALTERED = "its bytes are not those that were written"
BLANK = "-" * 2 * HASH_BYTES
"""What stands in place of a seal before there is one."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What is raised when an altered file is parsed."""
HASHES = "caption_hashes"
"""Column of the hash of each caption."""
CHECKS = "checks"
"""Column of the check sum of each row, compared whenever a row is read."""
_ABOUT = "about"
"""The one entry of a file's metadata: JSON."""
_BLOCK = 2**22
Shard = tuple[str, int]
"""Name and bytes of a latent file."""


def name_of(*parts: bytes | bytearray | memoryview) -> str:
    """Return the name of a file whose contents these bytes decide: a hash, 32 hexadecimal digits."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hashes_of(parts: Sequence[bytes]) -> np.ndarray:
    """Return the 128-bit hashes (N, 16) uint8 of N byte strings."""
    joined = b"".join(blake2b(part, digest_size=HASH_BYTES).digest() for part in parts)
    return np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES)


def captions_hash(captions: Sequence[Sequence[str]]) -> str:
    """Return a hash of the captions of some samples, 32 hexadecimal digits; it also depends on which are whose."""
    counts = np.array([len(each) for each in captions], np.int64)
    return name_of(counts.tobytes(), *(utf8(text) for each in captions for text in each))


def utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def sealed(data: bytes) -> bytes:
    """Return data in which ``BLANK`` stands once, with their seal instead."""
    return data.replace(BLANK.encode(), _hash(data, BLANK, iter(())).encode(), 1)


def is_sealed(data: bytes, seal: object) -> bool:
    """Return whether data are what was sealed; ``seal`` is the one that was read from them."""
    return seal == _hash(data, seal, iter(()))


def seal_file(path: Path) -> None:
    """Put a safetensors file's seal in place of the ``BLANK`` in its header; memory holds a few megabytes of it."""
    with open(path, "r+b") as file:
        head = _head(file)
        seal = _hash(head, BLANK, _blocks(file))
        file.seek(0)
        file.write(head.replace(BLANK.encode(), seal.encode(), 1))


def is_sealed_file(path: Path, seal: object) -> bool:
    """Return whether a safetensors file is what was sealed; ``seal`` is the one that was read from its header."""
    with open(path, "rb") as file:
        return seal == _hash(_head(file), seal, _blocks(file))


def _head(file: BinaryIO) -> bytes:
    length = file.read(8)
    return length + file.read(int.from_bytes(length, "little"))


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _hash(head: bytes, seal: object, rest: Iterator[bytes]) -> str:
    digest = blake2b(head.replace(str(seal).encode(), BLANK.encode(), 1), digest_size=HASH_BYTES)
    for block in rest:
        digest.update(block)
    return digest.hexdigest()


def about(header: Header) -> dict[str, Any]:
    """Return what the header of a store's file says of it."""
    return parse_json(header.metadata[_ABOUT])


def serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Return a file; equal arguments give equal bytes."""
    return file_bytes(tensors, {_ABOUT: json.dumps(metadata, sort_keys=True)})


def write_groups(
    path: Path,
    groups: Iterable[Mapping[str, Tensor]],
    *,
    hashes: np.ndarray,
    lengths: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> int:
    """Write a file of rows that need not fit into memory.

    Args:
        path: The file.
        groups: The columns of some rows, of the next ones, and so on.
        hashes: (R, 16) uint8, what identifies each row, at least one; the column ``HASHES``.
        lengths: By padded length L, the tokens of each row (R,) that are not zeros. Columns (R, L, …) of three
            dimensions or more are *ragged*: only these tokens are written, one after the other, and a column
            ``<name>_end`` (R,) has where those of a row end.

    Returns:
        Its bytes. Its metadata has ``rows``, a seal and the padded length of the ragged columns; a column ``checks``
        has the sum of each row.
    """
    rows, done, end = len(hashes), 0, 0
    at: dict[str, int] = {}
    with open(path, "wb") as file:
        for columns in groups:
            checks = torch.stack([row_sums(tensor) for tensor in columns.values()]).sum(0)
            here = slice(done, done + len(checks))
            done = here.stop
            ragged = {name: lengths[t.shape[1]] for name, t in columns.items() if is_ragged(t, lengths)}
            group = {**columns, CHECKS: checks, HASHES: torch.from_numpy(hashes[here].copy())}
            for name, each in ragged.items():
                is_real = torch.arange(columns[name].shape[1]) < torch.from_numpy(each[here])[:, None]
                group |= {name: columns[name][is_real], f"{name}_end": torch.from_numpy(each.cumsum()[here].copy())}
            if not at:
                padded = {name: columns[name].shape[1] for name in ragged}
                text = json.dumps({"rows": rows, "seal": BLANK, "padded": padded}, sort_keys=True)
                counts = {name: int(each.sum()) for name, each in ragged.items()}
                shapes = {name: (t.dtype, (counts.get(name, rows), *t.shape[1:])) for name, t in group.items()}
                header = header_bytes(shapes, {_ABOUT: text})
                end = file.write(header)
                for name, (dtype, shape) in shapes.items():
                    at[name], end = end, end + math.prod(shape) * dtype.itemsize
            for name, tensor in group.items():
                file.seek(at[name])
                at[name] += file.write(bytes_of(tensor.contiguous()))
    seal_file(path)
    return end


def is_ragged(tensor: Tensor, lengths: Mapping[int, np.ndarray]) -> bool:
    """Return whether a column is written without padding: (N, L, …) with L in ``lengths``."""
    return tensor.ndim > 2 and tensor.shape[1] in lengths


def row_sums(tensor: Tensor) -> Tensor:
    """Return the sum (N,) int64 of the bytes of each row (N, …), eight at a time; a flipped bit changes it."""
    return _sums(tensor.contiguous().view(-1).view(torch.uint8).view(len(tensor), -1))


def _sums(rows: Tensor) -> Tensor:
    return (rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows).sum(1, dtype=torch.int64)


class RowBuffer:
    """Rows of a column, each read from a file and place of its own.

    Attributes:
        tensor: (B, …) in the stored type.
    """

    def __init__(self, num_rows: int, column: Column) -> None:
        """Make room for some rows; of the column only shape, type and bytes per row matter."""
        self.tensor, self.row_bytes = torch.empty(num_rows, *column.shape[1:], dtype=column.dtype), column.row_bytes
        self._bytes = self.tensor.view(torch.uint8).flatten(1)
        self._memory = list(self._bytes.numpy())

    def read(self, rows: np.ndarray, fds: np.ndarray, offsets: np.ndarray, num_bytes: np.ndarray | None = None) -> bool:
        """Read some rows.

        Args:
            rows: (R,) int64, increasing: which rows of ``tensor``.
            fds: (R,) the open file of each.
            offsets: (R,) int64: where each begins in its file.
            num_bytes: (R,) int64: bytes of each there; zeros fill the rest. Whole rows if None.

        Returns:
            Whether the files have all of them.
        """
        memory = [self._memory[row] for row in rows.tolist()] if len(rows) < len(self._memory) else self._memory
        if num_bytes is not None:
            self._bytes.zero_()
            memory = [each[:num] for each, num in zip(memory, num_bytes.tolist())]
            return list(map(os.preadv, fds.tolist(), zip(memory), offsets.tolist())) == num_bytes.tolist()
        return {self.row_bytes}.issuperset(map(os.preadv, fds.tolist(), zip(memory), offsets.tolist()))

    def sums(self) -> np.ndarray:
        """Return the :func:`row_sums` (B,) of what was read."""
        return _sums(self._bytes).numpy()


class StoreFile:
    """A file of a store that is open for reading rows."""

    def __init__(self, handle: BinaryIO, *, name: str, size: int | None = None) -> None:
        """Read the header.

        Args:
            handle: An unbuffered file; it is closed by :meth:`close`.
            name: The file, as messages name it.
            size: Bytes that the file has to have.

        Raises:
            UsageError: It is not what was written.
        """
        self.name, self._handle, self.fd = name, handle, handle.fileno()
        num_bytes = os.fstat(self.fd).st_size
        try:
            header = opened(handle).header
            self.columns, self.metadata = header.columns, about(header)
        except UNREADABLE as error:
            raise self.broken(f"its header cannot be read: {error}") from error
        if num_bytes != header.end or (size is not None and num_bytes != size):
            raise self.broken(f"it has {num_bytes} bytes instead of {header.end if num_bytes != header.end else size}")

    @cached_property
    def checks(self) -> np.ndarray:
        """(R,) int64: the check sum of each row.

        Raises:
            UsageError: The file has none.
        """
        if CHECKS not in self.columns:
            raise UsageError(
                f"the latent store's file {self.name} has no check sums; expected a file that this version of "
                "sd_lightning wrote; run precompute into a new store"
            )
        return self.read(CHECKS).numpy()

    def broken(self, reason: str) -> UsageError:
        """Return the error for a file that is not what was written."""
        return UsageError(
            f"the latent store's file {self.name} is truncated or altered ({reason}); delete it with "
            "python -m sd_lightning.precompute verify store=<store> dry_run=false, and run precompute again (text "
            "embeddings: with text=true)"
        )

    def is_whole(self, path: Path) -> bool:
        """Return whether the file, which lies at ``path``, is what was written; all bytes are read."""
        return is_sealed_file(path, self.metadata.get("seal"))

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.metadata["rows"])

    def read(self, column: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows [begin, end) of a column."""
        at = self.columns[column]
        end = at.shape[0] if end is None else end
        memory = bytearray((end - begin) * at.row_bytes)
        if not read_exactly(self._handle, memoryview(memory), at.begin + begin * at.row_bytes):
            raise self.broken(f"{column} ends too early")
        flat = torch.frombuffer(memory, dtype=at.dtype) if memory else torch.empty(0, dtype=at.dtype)
        return flat.view(end - begin, *at.shape[1:])
