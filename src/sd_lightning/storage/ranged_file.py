"""A file of a bucket of which only some ranges are fetched, to their places in a nameless file on disk."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from sd_lightning._errors import UsageError
from sd_lightning.storage.location import Location

GAP_BYTES = 64 * 2**10
"""Ranges that are not further apart are fetched by one request, which takes longer than so many bytes."""
REQUEST_BYTES = 8 * 2**20
"""Most bytes of a request."""
_AT_A_TIME = 8
"""Requests at a time."""

Span = tuple[int, int]
"""Bytes ``[begin, end)`` of a file."""


class RangedFile:
    """A file of a location, of which ranges are fetched (not thread-safe).

    Args:
        location: Where the file lies.
        name: The file.
        folder: On the disk that gets the ranges; they are gone when the file is closed, or the process ends.

    Attributes:
        handle: The file, unbuffered; only ranges that were fetched hold its bytes.
    """

    def __init__(self, location: Location, name: str, folder: Path) -> None:
        self.handle: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)
        self._location, self._name = location, name
        self._here: list[Span] = []
        """What is here, in order, without overlaps."""

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch ranges that are not here yet, several at a time.

        Raises:
            UsageError: The file is absent or shorter, or the disk is full.
        """
        missing = joined((span for span in spans if not self._has(span)), GAP_BYTES)
        if not missing:
            return
        step = REQUEST_BYTES
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(
                pool.map(
                    self._bring, [(a, min(a + step, end)) for begin, end in missing for a in range(begin, end, step)]
                )
            )
        self._here = joined([*self._here, *missing], 0)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)``."""
        return self._location.read(self._name, begin, end)

    def _has(self, span: Span) -> bool:
        place = bisect_right(self._here, span[0], key=lambda each: each[0])
        return span[0] >= span[1] or (place > 0 and span[1] <= self._here[place - 1][1])

    def _bring(self, part: Span) -> None:
        try:
            begin, data = part[0], memoryview(self.read(*part))
            while data:
                count = os.pwrite(self.handle.fileno(), data, begin)
                begin, data = begin + count, data[count:]
        except OSError as error:  # the disk is full, or the file was deleted
            raise UsageError(
                f"{self._location.url}/{self._name}: its parts cannot be fetched ({error}); free space, choose another "
                "disk with SD_LIGHTNING_CACHE=<folder>, or use another checkpoint."
            ) from error


def joined(spans: Iterable[Span], gap: int) -> list[Span]:
    """Return ranges in order; those that overlap or have at most ``gap`` bytes between them are joined."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin - out[-1][1] <= gap:
            begin, end = out[-1][0], max(out.pop()[1], end)
        out.append((begin, end))
    return out
