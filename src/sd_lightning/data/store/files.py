"""The two kinds of safetensors files of a store, written whole and read by row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.key_table import HASH_BYTES
from sd_lightning.data.store.seal import BLANK, UNREADABLE, is_sealed_file, seal_file
from sd_lightning.storage.safetensors_file import DTYPE_OF_NAME, NAME_OF_DTYPE
from sd_lightning.storage.untrusted import header_length, parse_json

ALTERED = "its bytes are not those that were written"
_ABOUT = "about"
"""The one entry of a file's metadata: JSON."""
CHECKS = "checks"
"""Column of the check sum of each row, compared whenever a row is read; older files have none."""


def name_of(*parts: bytes | bytearray | memoryview) -> str:
    """Return the name of a file whose contents these bytes decide: a hash, 32 hexadecimal digits."""
    found = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def hashes_of(parts: Sequence[bytes]) -> np.ndarray:
    """Return the 128-bit hashes (N, 16) uint8 of N byte strings."""
    joined = b"".join(blake2b(part, digest_size=HASH_BYTES).digest() for part in parts)
    return np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES)


def serialized(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """Return a safetensors file; equal arguments give equal bytes."""
    from safetensors.torch import save

    # One entry: safetensors writes several in an order that differs from process to process.
    return save(dict(tensors), {_ABOUT: json.dumps(metadata, sort_keys=True)})


def write_groups(path: Path, groups: Iterable[Mapping[str, Tensor]], *, rows: int) -> int:
    """Write a file of ``rows`` rows that need not fit into memory.

    Args:
        path: The file.
        groups: The columns of some rows, of the next ones, and so on.
        rows: Rows of all groups together, at least 1.

    Returns:
        Its bytes. Its metadata has ``rows`` and a seal; a column ``checks`` has the sum of each row.
    """
    columns: dict[str, Any] = {}
    begins: dict[str, int] = {}
    header, done, end = b"", 0, 0

    def header_of_columns() -> bytes:
        about = json.dumps({"rows": rows, "seal": BLANK}, sort_keys=True)
        text = json.dumps({"__metadata__": {_ABOUT: about}, **columns}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with open(path, "w+b") as file:
        for given in groups:
            sums = torch.stack([row_sums(tensor) for tensor in given.values()]).sum(0)
            group = {**given, CHECKS: sums}
            if not done:
                for name, tensor in group.items():
                    begin, end = end, end + rows * tensor[0].nbytes
                    dtype, shape = NAME_OF_DTYPE[tensor.dtype], [rows, *tensor.shape[1:]]
                    columns[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
                header = header_of_columns()
                begins = {name: len(header) + each["data_offsets"][0] for name, each in columns.items()}
            for name, tensor in group.items():
                file.seek(begins[name] + done * tensor[0].nbytes)
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            done += len(tensor)
        file.seek(0)
        file.write(header)
    seal_file(path)
    return len(header) + end


def row_sums(tensor: Tensor) -> Tensor:
    """Return the sum (N,) int64 of the bytes of each row (N, …), eight at a time; a flipped bit changes it."""
    return _sums(tensor.contiguous().view(-1).view(torch.uint8).view(len(tensor), -1))


def _sums(rows: Tensor) -> Tensor:
    return (rows.view(torch.int64) if rows.shape[1] % 8 == 0 else rows).sum(1, dtype=torch.int64)


def text_columns(name: str, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return strings as two tensors: their UTF-8 bytes one after the other, and the end of each (N,)."""
    encoded = [text.encode(errors="surrogatepass") for text in texts]
    ends = torch.tensor([len(each) for each in encoded], dtype=torch.int64).cumsum(0)
    return {name: torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8), f"{name}_end": ends}


@dataclass(frozen=True)
class Column:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Offset of its first row in the file."""

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


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

    def read(self, rows: np.ndarray, fds: np.ndarray, offsets: np.ndarray) -> bool:
        """Read some rows.

        Args:
            rows: (R,) int64, increasing: which rows of ``tensor``.
            fds: (R,) the open file of each.
            offsets: (R,) int64: where each begins in its file.

        Returns:
            Whether the files have all of them.
        """
        memory = [self._memory[row] for row in rows.tolist()] if len(rows) < len(self._memory) else self._memory
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
        self.name = name
        self._handle = handle
        self.fd = handle.fileno()
        given = os.fstat(self.fd).st_size
        try:
            length = header_length(os.pread(self.fd, 8, 0), given)
            header = parse_json(os.pread(self.fd, length, 8))
            self.metadata: dict[str, Any] = parse_json(header.pop("__metadata__")[_ABOUT])
            self._columns = {
                key: Column(DTYPE_OF_NAME[each["dtype"]], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
                for key, each in header.items()
            }
            end = 8 + length + max(each["data_offsets"][1] for each in header.values())
        except UNREADABLE as error:
            raise self.broken(f"its header cannot be read: {error}") from error
        if given != end or (size is not None and given != size):
            raise self.broken(f"it has {given} bytes instead of {end if given != end else size}")

    def broken(self, reason: str) -> UsageError:
        """Return the error for a file that is not what was written."""
        return UsageError(
            f"the latent store's file {self.name} is truncated or altered ({reason}); delete it with "
            "python -m sd_lightning.precompute verify store=<store> dry_run=false, and run precompute again"
        )

    def is_whole(self, path: Path) -> bool:
        """Return whether the file, which lies at ``path``, is what was written; all bytes are read."""
        if "seal" in self.metadata:
            return is_sealed_file(path, self.metadata["seal"])
        # Older versions hashed the columns, without the header.
        columns = (self.read(name).contiguous().view(-1).view(torch.uint8).numpy() for name in sorted(self.columns))
        return name_of(*(column.data for column in columns)) == self.metadata.get("digest")

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.metadata["rows"])

    @property
    def columns(self) -> Mapping[str, Column]:
        """The tensors by name."""
        return self._columns

    def read(self, column: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows [begin, end) of a column."""
        at = self._columns[column]
        end = at.shape[0] if end is None else end
        memory = bytearray((end - begin) * at.row_bytes)
        view, offset = memoryview(memory), at.begin + begin * at.row_bytes
        while len(view):
            count = os.preadv(self.fd, [view], offset)
            if not count:
                raise self.broken(f"{column} ends at byte {offset}")
            view, offset = view[count:], offset + count
        flat = torch.frombuffer(memory, dtype=at.dtype) if memory else torch.empty(0, dtype=at.dtype)
        return flat.view(end - begin, *at.shape[1:])


class SampleFile(StoreFile):
    """Captions, token ids and places of some samples; what is small is kept in memory once read."""

    def check(self) -> None:
        """Check that the file is what was written: its name is the hash of its bytes, which are all read.

        Raises:
            UsageError: It is not.
        """
        size, done = os.fstat(self.fd).st_size, bytearray()
        while len(done) < size and (more := os.pread(self.fd, size - len(done), len(done))):
            done += more
        if name_of(done) != PurePath(self.name).name.partition(".")[0]:
            raise self.broken(ALTERED)

    @cached_property
    def place(self) -> np.ndarray:
        """(N, 2) int64: the number of each sample's file in ``metadata["shards"]``, and its row there."""
        return self.read("place").numpy().astype(np.int64)

    @cached_property
    def first_caption(self) -> np.ndarray:
        """(N + 1,) int64: captions of sample i are number ``first_caption[i]`` to ``first_caption[i + 1] - 1``."""
        return np.concatenate([[0], self.read("caption_count").numpy().cumsum()])

    @cached_property
    def id_columns(self) -> list[str]:
        """Names of the columns of token ids."""
        return [name for name in self.columns if name.startswith("input_ids.")]

    @cached_property
    def _caption_end(self) -> np.ndarray:
        return np.concatenate([[0], self.read("captions_end").numpy()])

    @cached_property
    def _name_end(self) -> np.ndarray:
        return np.concatenate([[0], self.read("names_end").numpy()])

    def captions(self, row: int) -> list[str]:
        """Return the captions of a sample."""
        first, last = self.first_caption[row], self.first_caption[row + 1]
        return [self._text("captions", self._caption_end, i) for i in range(first, last)]

    def sample_name(self, row: int) -> str:
        """Return the name of a sample."""
        return self._text("names", self._name_end, row)

    def _text(self, column: str, ends: np.ndarray, number: int) -> str:
        data = self.read(column, int(ends[number]), int(ends[number + 1])).numpy().tobytes()
        return data.decode(errors="surrogatepass")
