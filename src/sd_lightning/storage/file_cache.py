"""A bounded local cache of files from an object store."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from sd_lightning._errors import UsageError
from sd_lightning.storage.location import Location

_FETCHING = ".fetching-"
"""A lock file: held by who fetches a file, and as long (a sparse file) as the room that is reserved for it."""


class FileCache:
    """A bounded local cache of whole files, shared by all processes of a machine; least recently used ones go first.

    Files of a location must not change while they are cached. Files of local folders are opened in place.

    Args:
        folder: Where the files lie, on a local disk; created if absent. It holds nothing else.
        max_bytes: How much it may hold, files being fetched included.
        key: The setting that says ``max_bytes``, for messages.
    """

    def __init__(self, folder: Path, max_bytes: int, *, key: str = "data.cache_gb") -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.key = key

    def open(self, location: Location, name: str, size: int) -> BinaryIO:
        """Open a file of a location, unbuffered, after fetching it if it is not here.

        Of several processes and threads that ask at once, one fetches. The open file stays readable when it is evicted.

        Args:
            location: Where the file comes from.
            name: The file.
            size: Its size in bytes.

        Raises:
            FileNotFoundError: There is no such file.
            UsageError: It is larger than the cache or not of that size, or cannot be fetched.
        """
        place = location.path(name)
        if place is not None:
            return _of_size(open(place, "rb", buffering=0), size, f"{location.url}/{name}")
        self.check_fits(f"{location.url}/{name}", size)
        key = hashlib.sha256(f"{location.url}\0{name}".encode()).hexdigest()[:32]
        cached = self._cached(key)
        if cached is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._lock(key), thread_local=False, fallback_to_soft=False):
                cached = self._cached(key)  # who held the lock may have fetched it
                if cached is None:
                    cached = self._bring(location, name, size, key)
                else:
                    self._lock(key).unlink()
        return cached

    def check_fits(self, url: str, size: int) -> None:
        """Raise a ``UsageError`` if a file of ``size`` bytes is larger than the cache."""
        if size > self.max_bytes:
            raise UsageError(
                f"{self.key}={self.max_bytes / 1e9:g}: {url} has {size / 1e9:.2g} GB; expected a cache that holds at "
                f"least one file; set {self.key} to several times {size / 1e9:.2g}."
            )

    def fetch(self, location: Location, name: str, size: int) -> None:
        """Bring a file into the cache; see :meth:`open`. There is nothing to do for a local folder."""
        if location.path(name) is None:
            self.open(location, name, size).close()

    def _lock(self, key: str) -> Path:
        return self.folder / f"{_FETCHING}{key}"

    def _cached(self, key: str) -> BinaryIO | None:
        """Open a cached file and note its use; None if it is not here."""
        try:
            file = open(self.folder / key, "rb", buffering=0)
        except FileNotFoundError:
            return None
        os.utime(file.fileno())
        return file

    def _bring(self, location: Location, name: str, size: int, key: str) -> BinaryIO:
        """Fetch a file while its lock is held, and return it open."""
        while not self._reserve(key, size):
            time.sleep(0.05)  # all room belongs to files that others fetch
        partial = self.folder / f".{key}"
        try:
            location.fetch(name, partial)
            file = _of_size(open(partial, "rb", buffering=0), size, f"{location.url}/{name}")
        except BaseException:
            self._forget(key)
            raise
        with self._alone():
            partial.replace(self.folder / key)
            self._lock(key).unlink()
        return file

    def _alone(self) -> FileLock:
        return FileLock(self.folder / ".lock", thread_local=False, fallback_to_soft=False)

    def _reserve(self, key: str, size: int) -> bool:
        """Evict what was not used for longest until there is room for a file, and reserve it."""
        with self._alone():
            files = [(entry.stat(), entry.path) for entry in os.scandir(self.folder) if not entry.name.startswith(".")]
            files.sort(key=lambda file: file[0].st_mtime_ns)
            free = self.max_bytes - self._reserved(key) - sum(stat.st_size for stat, _ in files)
            while free < size and files:
                stat, path = files.pop(0)
                os.unlink(path)
                free += stat.st_size
            if free >= size:
                os.truncate(self._lock(key), size)
            return free >= size

    def _reserved(self, own: str) -> int:
        """Return the bytes that others are fetching; remove what killed processes left."""
        total = 0
        for path in self.folder.glob(f"{_FETCHING}*"):
            key = path.name.removeprefix(_FETCHING)
            if key == own:
                continue
            try:
                size = path.stat().st_size
            except FileNotFoundError:  # its fetch has just ended
                continue
            try:
                with FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False):
                    self._forget(key)
            except Timeout:
                total += size
        return total

    def _forget(self, key: str) -> None:
        """Remove what is left of a fetch, of which the lock is held."""
        for path in self.folder.glob(f".*{key}*"):
            path.unlink(missing_ok=True)


def _of_size(file: BinaryIO, size: int, url: str) -> BinaryIO:
    actual = os.fstat(file.fileno()).st_size
    if actual != size:
        file.close()
        raise UsageError(
            f"{url} has {actual} bytes; expected {size}: it was truncated or replaced after it was listed; delete it "
            "and run again what wrote it."
        )
    return file
