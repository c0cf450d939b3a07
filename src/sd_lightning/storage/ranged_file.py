"""A file of a bucket of which only some ranges are fetched, to their places in a nameless file on disk."""

from __future__ import annotations

import errno
import os
import tempfile
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

    def fetch(self, spans: Iterable[Span]) -> None:
        """Fetch ranges that are not here yet, several at a time; those with small gaps between them together.

        Raises:
            UsageError: The file is absent or shorter, or the disk is full.
        """
        missing: list[Span] = []
        for begin, end in sorted(spans):
            if missing and begin - missing[-1][1] <= GAP_BYTES:
                missing[-1] = (missing[-1][0], max(missing[-1][1], end))
            elif not any(first <= begin and end <= last for first, last in self._here):
                missing.append((begin, end))
        step = REQUEST_BYTES
        parts = [(a, min(a + step, end)) for begin, end in missing for a in range(begin, end, step)]
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(self._bring, parts))
        self._here += missing

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes ``[begin, end)``."""
        return self._location.read(self._name, begin, end)

    def _bring(self, part: Span) -> None:
        try:
            data = self.read(*part)
            if os.pwrite(self.handle.fileno(), data, part[0]) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # the disk is full, or the file was deleted
            raise UsageError(
                f"{self._location.url}/{self._name}: its parts cannot be fetched ({error}); free space, choose another "
                "disk with SD_LIGHTNING_CACHE=<folder>, or use another checkpoint."
            ) from error
