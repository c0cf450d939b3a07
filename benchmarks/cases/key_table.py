"""A table of image hashes that need not fit into memory: writing, finding and removing, on synthetic hashes.

As in a store, no table has more than 2²⁸ rows, and removal writes one after the other anew. `--set rows=2000000000` are
the tables of two billion images: 48 GB, and 61 GB of disk while they are made and rewritten.
"""

import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sd_lightning.data.store.image_tables import MOST_ROWS
from sd_lightning.data.store.key_table import HASH_BYTES, ROW, KeyTable, rows_of, write_sorted, write_table

BARS = {"write_peak_mb": "<= 1000", "find_peak_mb": "<= 1000", "bytes_per_row": "<= 32"}
TABLE = {
    "bytes of a row in a table of image hashes": "{bytes_per_row}",
    "hashes found per second among 20 million": "{found_per_second}",
}

REVISION = 2

_BLOCK = 2**22
_LOOKED_UP = 2**20


def peers() -> dict[str, dict[str, str]]:
    """Return nothing: it is compared with nobody."""
    return {}


def measure(rows: int = 20_000_000, removed: float = 0.1, most_rows: int = MOST_ROWS) -> dict[str, float]:
    """Seconds and memory of each operation, on hashes of consecutive numbers.

    Args:
        rows: Rows of all tables.
        removed: Fraction of the rows that are removed; 0 removes none.
        most_rows: Rows of one table.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        parts = [range(begin, min(begin + most_rows, rows)) for begin in range(0, rows, most_rows)]
        paths = [Path(folder, f"table-{number}") for number in range(len(parts))]
        with _measured("write", found):
            for path, part in zip(paths, parts, strict=True):
                write_table(path, _blocks(part), shards=["a shard"])
        found["bytes_per_row"] = sum(path.stat().st_size for path in paths) // rows
        numbers = np.sort(np.random.default_rng(0).integers(0, 2 * rows, _LOOKED_UP))
        with _measured("find", found):
            start = time.perf_counter()
            hashes = _hashes(numbers)
            at = np.full(len(numbers), -1, np.int64)
            for path in paths:
                _find(KeyTable(path), hashes, at)
            found["found_per_second"] = _LOOKED_UP / (time.perf_counter() - start)
        # Every number below `rows` is there, none above it: what deduplication relies on.
        assert np.array_equal(at, np.where(numbers < rows, numbers % 2**32, -1))
        if removed:
            with _measured("remove", found):
                left = sum(_remove(path, removed) for path in paths)
            found["rows_left"] = left
            at[:] = -1
            for path in paths:
                _find(KeyTable(path), hashes, at)
            is_there = (numbers < rows) & _is_kept(numbers % 2**32, removed)
            assert np.array_equal(at, np.where(is_there, numbers % 2**32, -1))
    return found


def _find(table: KeyTable, hashes: np.ndarray, at: np.ndarray) -> None:
    """Write the row of every hash that a table has to ``at``."""
    found = table.find(hashes)
    hit = np.flatnonzero(found >= 0)
    at[hit] = table.at(found[hit])[1]


def _remove(path: Path, removed: float) -> int:
    """Write a table without some of its rows, and delete the old one."""
    table = KeyTable(path)
    new = path.with_suffix(".new")
    left = write_sorted(new, lambda: (block[_is_kept(block["row"], removed)] for block in table.blocks()))
    new.replace(path)
    return left


class _measured:
    """Notes the seconds and the peak of memory of a piece of work; mapped files are not counted."""

    def __init__(self, name: str, found: dict[str, float]) -> None:
        self._name, self._found = name, found

    def __enter__(self) -> None:
        tracemalloc.start()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._found[f"{self._name}_seconds"] = time.perf_counter() - self._start
        self._found[f"{self._name}_peak_mb"] = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()


def _blocks(part: range) -> Iterator[np.ndarray]:
    for begin in range(part.start, part.stop, _BLOCK):
        numbers = np.arange(begin, min(begin + _BLOCK, part.stop))
        rows = rows_of(_hashes(numbers), 0, (numbers % 2**32).astype(np.uint32))
        assert rows.dtype == ROW
        yield rows


def _hashes(numbers: np.ndarray) -> np.ndarray:
    """Return hashes (N, 16) uint8 of numbers: two rounds of splitmix64, a bijection each."""
    words = np.empty((len(numbers), 2), ">u8")
    for half in range(2):
        mixed = numbers.astype(np.uint64) + np.uint64(half * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 & 2**64 - 1)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[:, half] = mixed ^ (mixed >> np.uint64(31))
    return words.view(np.uint8).reshape(-1, HASH_BYTES)


def _is_kept(row: np.ndarray, removed: float) -> np.ndarray:
    return row % 1000 >= 1000 * removed
