"""Sorted tables of 128-bit hashes: lookup, deduplication and removal without holding them in memory.

A table is a safetensors file of four columns, sorted by ``high``: ``high`` and ``low`` (the two halves of the hash),
``shard`` and ``row``, 24 bytes per row. Columns are memory-mapped, so a lookup reads a few pages of the file
whatever its size. Larger tables than memory are sorted by partitions on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.data.store.seal import BLANK, UNREADABLE, is_sealed_file, seal_file
from sd_lightning.storage.atomic import no_space
from sd_lightning.storage.untrusted import header_length, parse_json

HASH_BYTES = 16
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("shard", "<u4"), ("row", "<u4")])
"""A row of a table; rows are sorted by ``high``."""
_COLUMNS = {"high": ("U64", "<u8"), "low": ("U64", "<u8"), "shard": ("U32", "<u4"), "row": ("U32", "<u4")}
_SORTED_AT_ONCE = 2**22
"""Rows (100 MB) that are sorted in memory."""
_PARTITION_BITS = 8
"""256 partitions: 190 MB each for two billion rows."""


def halves(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two halves (N,) uint64 of hashes (N, 16) uint8."""
    words = np.ascontiguousarray(hashes).view(">u8")
    return words[:, 0].astype(np.uint64), words[:, 1].astype(np.uint64)


def rows_of(hashes: np.ndarray, shard: np.ndarray | int, row: np.ndarray) -> np.ndarray:
    """Return table rows (N,) for hashes (N, 16) uint8."""
    rows = np.empty(len(hashes), ROW)
    rows["high"], rows["low"] = halves(hashes)
    rows["shard"], rows["row"] = shard, row
    return rows


class KeyTable:
    """A memory-mapped table."""

    def __init__(self, path: Path) -> None:
        """Open a table that :func:`write_table` wrote.

        Raises:
            UsageError: It is truncated or altered.
        """
        size = path.stat().st_size
        try:
            with open(path, "rb") as file:
                length = header_length(file.read(8), size)
                header = parse_json(file.read(length))
            about = header["__metadata__"]
            self.shards: list[str] = parse_json(about.pop("shards"))
            self.seal: str | None = about.pop("seal", None)
            """None in tables of older versions."""
            if about:
                raise ValueError(f"unknown entries {', '.join(about)}")
            self._column = {}
            for name, (_, dtype) in _COLUMNS.items():
                (count,), begin = header[name]["shape"], header[name]["data_offsets"][0]
                empty = np.empty(0, dtype)
                self._column[name] = np.memmap(path, dtype, "r", 8 + length + begin, (count,)) if count else empty
        except UNREADABLE as error:
            raise UsageError(
                f"the latent store's table {path.name} is truncated or altered ({error}); delete it with python -m "
                "sd_lightning.precompute verify store=<store> dry_run=false, and run precompute again"
            ) from error
        self._count, self._path = len(self._column["high"]), path

    def __len__(self) -> int:
        return self._count

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the position of each hash in the table, -1 where it is not there.

        Args:
            hashes: (N, 16) uint8. Sorted ones read neighbouring pages.

        Returns:
            (N,) int64.
        """
        high, low = halves(hashes)
        # A searched value of another type would make numpy convert the whole column.
        at = np.searchsorted(self._column["high"], high)
        found = np.full(len(hashes), -1, np.int64)
        waiting = np.flatnonzero(at < self._count)
        while len(waiting):  # more than once only where two hashes have the same first half
            position = at[waiting]
            is_same = self._column["high"][position] == high[waiting]
            is_found = is_same & (self._column["low"][position] == low[waiting])
            found[waiting[is_found]] = position[is_found]
            waiting = waiting[is_same & ~is_found]
            at[waiting] += 1
            waiting = waiting[at[waiting] < self._count]
        return found

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return shard and row, (N,) uint32 each, at positions that :meth:`find` returned; of an altered table any."""
        return self._column["shard"][positions], self._column["row"][positions]

    def is_sound(self) -> bool:
        """Return whether all bytes are what was written; without a seal, whether rows are sorted and name shards."""
        if self.seal is not None:
            return is_sealed_file(self._path, self.seal)
        last = (0, 0)
        for rows in self.blocks():
            high, low = rows["high"], rows["low"]
            is_sorted = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] >= low[:-1]))
            if not is_sorted.all() or (int(high[0]), int(low[0])) < last or rows["shard"].max() >= len(self.shards):
                return False
            last = int(high[-1]), int(low[-1])
        return True

    def blocks(self, length: int = _SORTED_AT_ONCE) -> Iterator[np.ndarray]:
        """Yield all rows in order, ``length`` at a time."""
        for begin in range(0, self._count, length):
            rows = np.empty(min(length, self._count - begin), ROW)
            for name, column in self._column.items():
                rows[name] = column[begin : begin + len(rows)]
            yield rows


def write_table(
    path: Path, blocks: Iterable[np.ndarray], *, shards: Sequence[str] = (), sorted_at_once: int = _SORTED_AT_ONCE
) -> int:
    """Sort rows by hash and write them as a table.

    More than ``sorted_at_once`` rows are first partitioned on disk, beside ``path``, by the first bits of their hashes.
    Partitions are deleted as they are written, so the disk holds each row once.

    Args:
        path: The file to write.
        blocks: Arrays of ``ROW``; hashes are uniformly distributed.
        shards: The names that the column ``shard`` counts.
        sorted_at_once: Rows to sort in memory.

    Returns:
        The number of rows.

    Raises:
        UsageError: The disk is full.
    """
    partitions = _Partitions(path, sorted_at_once)
    try:
        with _full_disk_named(path):
            for block in blocks:
                partitions.add(block)
            _write_rows(path, partitions.count, partitions.sorted(), shards)
    finally:
        partitions.delete()
    return partitions.count


def write_sorted(path: Path, blocks: Callable[[], Iterable[np.ndarray]], *, shards: Sequence[str] = ()) -> int:
    """Write rows that are sorted already as a table, in constant memory.

    Args:
        path: The file to write.
        blocks: Yields arrays of ``ROW``, all together sorted; it is called twice, first to count them.
        shards: The names that the column ``shard`` counts.

    Returns:
        The number of rows.

    Raises:
        UsageError: The disk is full.
    """
    count = sum(map(len, blocks()))
    with _full_disk_named(path):
        _write_rows(path, count, blocks(), shards)
    return count


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if reason := no_space(error):
            raise UsageError(
                f"precompute: cannot write {path}: {reason}; free space there, or set TMPDIR to a folder on another "
                "disk, then run the same command again"
            ) from error
        raise


def _write_rows(path: Path, count: int, blocks: Iterable[np.ndarray], shards: Sequence[str]) -> None:
    with open(path, "wb") as file:
        begins = _write_header(file, count, shards)
        done = 0
        for rows in blocks:
            for name, begin in begins.items():
                file.seek(begin + done * ROW[name].itemsize)
                file.write(rows[name].tobytes())
            done += len(rows)
        file.truncate(begins["row"] + count * ROW["row"].itemsize)
    seal_file(path)


def _write_header(file: object, count: int, shards: Sequence[str]) -> dict[str, int]:
    """Write the safetensors header; return the offset of each column."""
    header: dict[str, object] = {"__metadata__": {"shards": json.dumps(list(shards)), "seal": BLANK}}
    offsets, end = {}, 0
    for name, (dtype, _) in _COLUMNS.items():
        offsets[name], end = end, end + count * ROW[name].itemsize
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [offsets[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)  # type: ignore[attr-defined]
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


class _Partitions:
    """Rows by the first bits of their hashes; on disk once they are too many."""

    def __init__(self, path: Path, sorted_at_once: int) -> None:
        self._path, self._limit = path, sorted_at_once
        self._memory: list[np.ndarray] = []
        self._held = self.count = 0
        self._files: list[Path] = []

    def add(self, block: np.ndarray) -> None:
        self._memory.append(block)
        self._held += len(block)
        self.count += len(block)
        if self._held > self._limit:
            self._spill()

    def _spill(self) -> None:
        rows, self._memory, self._held = np.concatenate([np.empty(0, ROW), *self._memory]), [], 0
        if not self._files:
            self._files = [self._path.with_name(f"{self._path.name}.part-{i:03}") for i in range(2**_PARTITION_BITS)]
        parts = (rows["high"] >> np.uint64(64 - _PARTITION_BITS)).astype(np.uint8)
        rows = rows[np.argsort(parts, kind="stable")]
        ends = np.cumsum(np.bincount(parts, minlength=2**_PARTITION_BITS))
        for file, begin, end in zip(self._files, [0, *ends], ends):
            with open(file, "ab") as handle:
                handle.write(rows[begin:end].tobytes())

    def sorted(self) -> Iterator[np.ndarray]:
        """Yield the rows in order; files are deleted as they are read."""
        if not self._files:
            yield _sorted(np.concatenate([np.empty(0, ROW), *self._memory]))
            return
        self._spill()
        for file in self._files:
            rows = np.fromfile(file, ROW)
            file.unlink()
            yield _sorted(rows)

    def delete(self) -> None:
        for file in self._files:
            if os.path.exists(file):
                file.unlink()


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(np.ascontiguousarray(rows["high"]))]
