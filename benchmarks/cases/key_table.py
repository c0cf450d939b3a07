"""A table of image hashes that need not fit into memory: writing and finding, on synthetic hashes.

`--set rows=2000000000` is the table of two billion images: 48 GB.
"""

import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sd_lightning.data.store.files import HASH_BYTES
from sd_lightning.data.store.index import ROW, HashTable, rows_of

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


def measure(rows: int = 20_000_000) -> dict[str, float]:
    """Seconds and memory of each operation, on hashes of consecutive numbers."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with _measured("write", found):
            table = HashTable(Path(folder, "table"), _blocks(range(rows)))
        found["bytes_per_row"] = table.path.stat().st_size // rows
        numbers = np.sort(np.random.default_rng(0).integers(0, 2 * rows, _LOOKED_UP))
        with _measured("find", found):
            start = time.perf_counter()
            _, at = table.find(_hashes(numbers))
            found["found_per_second"] = _LOOKED_UP / (time.perf_counter() - start)
        # Every number below `rows` is there, none above it: what deduplication relies on.
        assert np.array_equal(at, np.where(numbers < rows, numbers % 2**32, -1))
    return found


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
