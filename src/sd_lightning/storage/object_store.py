"""Locations in object stores, and :func:`open_location`, which opens one by its URL.

Requests that failed in passing are tried again, with growing waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sd_lightning._errors import UsageError
from sd_lightning.storage.atomic import new_file, no_space
from sd_lightning.storage.location import Entry, LocalFolder, Location, ends_early
from sd_lightning.storage.providers import PROVIDERS, Provider

log = logging.getLogger(__name__)

T = TypeVar("T")

PART_BYTES = 32 * 2**20
"""What one request reads, and what one part of a multipart upload holds (uploads of two parts and more)."""
WAITS = (0.2, 1.0, 3.0, 9.0, 27.0)
"""Seconds between tries; each is varied by half, so that many readers do not come back together."""
_PROBE = ".probe"


class _TryAgain(Exception):
    """An answer that a repeated request may not get."""


@dataclass
class _Connection:
    """The file system of an object store, opened anew in each process: its connections do not survive a fork."""

    provider: Provider
    who: str
    _file_systems: dict[int, Any] = field(default_factory=dict)
    """Process id -> file system. A forked process keeps its parent's unused: closing it would close the parent's
    connections, which share their file descriptors."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file_systems": {}}

    @property
    def file_system(self) -> Any:
        process = os.getpid()
        if process not in self._file_systems:
            self._file_systems.setdefault(process, self.provider.open(self.who))
        return self._file_systems[process]

    def call(self, action: str, request: Callable[[], T]) -> T:
        """Return what a request returns; try again what may pass, and explain what may not.

        Raises:
            FileNotFoundError: The file, not its bucket, is absent.
            UsageError: The user has to mend something, or the store keeps failing.
        """
        waits = WAITS[: self.provider.tries - 1]
        for tries in range(1, len(waits) + 2):
            try:
                return request()
            except UsageError:
                raise
            except Exception as error:
                if not isinstance(error, _TryAgain) and not self.provider.is_transient(error):
                    raise self.explain(action, error) from error
                reason = f"{type(error).__name__}: {error}"
                if tries > len(waits):
                    raise UsageError(
                        f"{self.who}: cannot {action}: tried {tries} times in about {sum(waits):.0f} s, at last "
                        f"{reason}; expected an answer from the store; check the network, the endpoint "
                        "(AWS_ENDPOINT_URL for s3://) and the store's status, then run the same command again."
                    ) from error
                if tries > 2:
                    log.warning("%s: cannot %s yet (%s); trying again.", self.who, action, reason)
            time.sleep(waits[tries - 1] * random.uniform(0.5, 1.5))
        raise AssertionError("the last try returns or raises")

    def explain(self, action: str, error: Exception) -> Exception:
        """Return the error to raise for one that does not pass."""
        if self.provider.is_absent(error):
            return FileNotFoundError(f"{self.who}: cannot {action}: there is no such file")
        complaint = self.provider.complaint(error)
        return error if complaint is None else UsageError(f"{self.who}: cannot {action}: {complaint}.")


@dataclass(frozen=True)
class ObjectStore(Location):
    """A folder in an object store.

    Attributes:
        connection: The store, shared with :meth:`child`.
    """

    url: str
    connection: _Connection

    def child(self, name: str) -> ObjectStore:
        return ObjectStore(self._url(name), self.connection)

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")

    def _call(self, verb: str, name: str, request: Callable[[Any, str], T]) -> T:
        """Make a request of the file system and the path of a file."""
        path = self._url(name).partition("://")[2]
        return self.connection.call(f"{verb} {self._url(name)}", lambda: request(self.connection.file_system, path))

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is None:
            # Without a range: of an empty file no range can be asked.
            limits: dict[str, int] = {"start": begin} if begin else {}
        elif begin < end:
            limits = {"start": begin, "end": end}
        else:
            return b""

        def request(file_system: Any, path: str) -> bytes:
            try:
                data: bytes = file_system.cat_file(path, **limits)
            except Exception as error:
                if limits and self.connection.provider.is_beyond_end(error):
                    data = b""
                else:
                    raise
            if end is not None and len(data) != end - begin:
                size = file_system.info(path)["size"]
                if size < end:
                    raise ends_early(self, name, size, end, who=self.connection.who)
                raise _TryAgain(f"{len(data)} of {end - begin} bytes")
            return data

        return self._call("read", name, request)

    def size(self, name: str) -> int | None:
        def request(file_system: Any, path: str) -> int | None:
            info = file_system.info(path)
            return int(info["size"]) if info["type"] == "file" else None

        try:
            return self._call("look for", name, request)
        except FileNotFoundError:
            return None

    def entries(self, prefix: str = "") -> list[Entry]:
        def request(file_system: Any, path: str) -> list[Entry]:
            root = self.url.partition("://")[2] + "/"
            files = sorted(file_system.find(path, detail=True).items())
            entries = [Entry(name.removeprefix(root), info["size"]) for name, info in files if info["type"] == "file"]
            return [entry for entry in entries if entry.name.startswith(prefix) and not _is_temporary(entry.name)]

        try:
            return self._call("list", prefix.rpartition("/")[0], request)
        except FileNotFoundError:
            return []

    def create(self, name: str, data: bytes | Path) -> bool:
        provider = self.connection.provider
        self.connection.provider.check_can_write(self.connection.who)
        # Whoever's answer got lost finds their own mark in the file that "exists" at the next try.
        writer = secrets.token_hex(8)

        def request(file_system: Any, path: str) -> bool:
            try:
                _upload(file_system, path, data, mode="create", **provider.metadata(writer))
                return True
            except Exception as error:
                if not provider.exists_already(error):
                    raise
            try:
                return provider.writer(file_system, path) == writer
            except FileNotFoundError as error:
                raise _TryAgain("it was deleted meanwhile") from error

        return self._written("create", name, request)

    def _written(self, verb: str, name: str, request: Callable[[Any, str], T]) -> T:
        try:
            return self._call(verb, name, request)
        except FileNotFoundError as error:
            who = self.connection.who
            raise UsageError(
                f"{who}: cannot {verb} {self._url(name)}: there is no such bucket; create it, or correct the URL."
            ) from error

    def replace(self, name: str, data: bytes | Path) -> None:
        self.connection.provider.check_can_write(self.connection.who)
        self._written("write", name, lambda file_system, path: _upload(file_system, path, data))

    def copy(self, source: str, name: str) -> None:
        self.connection.provider.check_can_write(self.connection.who)
        origin = self._url(source).partition("://")[2]
        self._call("copy to", name, lambda file_system, path: file_system.cp_file(origin, path))

    def delete(self, name: str) -> None:
        self.connection.provider.check_can_write(self.connection.who)
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", name, lambda file_system, path: file_system.rm_file(path))

    def fetch(self, name: str, path: Path) -> None:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(f"{self.connection.who}: there is no file {self._url(name)}")
        try:
            with new_file(path) as tmp, open(tmp, "wb") as file:
                for begin in range(0, size, PART_BYTES):
                    file.write(self.read(name, begin, min(begin + PART_BYTES, size)))
        except OSError as error:
            if reason := no_space(error):
                raise UsageError(
                    f"{self.connection.who}: cannot copy {name} ({size / 1e9:.2f} GB) to {path.parent}: {reason}; free "
                    "space there or choose a folder on another disk."
                ) from error
            raise

    def path(self, name: str) -> None:
        return None

    def check_writable(self) -> None:
        self.create(_PROBE, b"")  # it stays: writers may be allowed to delete nothing, and others probe too
        overwrites = self.create(_PROBE, b"") or self._call("probe", _PROBE, self.connection.provider.overwrites)
        if overwrites:
            raise UsageError(
                f"{self.connection.who}: the store overwrites a file that was to be created only if absent; expected "
                "one that honours If-None-Match for PutObject and CompleteMultipartUpload, as Amazon S3 does; choose "
                "another, or a local folder."
            )


def _is_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/")) or not name or name.endswith("/")


def _upload(file_system: Any, path: str, data: bytes | Path, **options: Any) -> None:
    if isinstance(data, Path):
        file_system.put_file(str(data), path, chunksize=PART_BYTES, **options)
    else:
        file_system.pipe_file(path, data, chunksize=PART_BYTES, **options)


def open_location(url: str | os.PathLike[str], *, key: str) -> Location:
    """Open a folder that may not exist yet; object stores are not asked before they are used.

    Args:
        url: A local path, or ``s3://bucket/…``, ``gs://bucket/…``, ``hf://datasets/…`` (read only).
        key: The setting that holds it, for messages, e.g. ``"data.store"``.

    Raises:
        UsageError: It is no folder, names no bucket, its protocol is not supported, or the package for it is not
            installed.
    """
    text = os.fspath(url)
    who = f"{key}={text}"
    protocol, separator, rest = text.partition("://")
    if separator and protocol != "file":
        if protocol not in PROVIDERS:
            raise UsageError(
                f"{who}: {protocol}:// is not known, or cannot create a file only if it is absent; expected a local "
                f"folder, or a URL that begins with {', '.join(f'{name}://' for name in PROVIDERS)}."
            )
        if not rest.strip("/"):
            raise UsageError(f"{who} names no bucket; expected for instance {protocol}://bucket/folder.")
        connection = _Connection(PROVIDERS[protocol], who)
        connection.file_system  # noqa: B018  tells at once that a package is missing
        return ObjectStore(text.rstrip("/"), connection)
    folder = Path(rest if separator else text).expanduser().absolute()
    if not text:
        raise UsageError(f"{key} is empty; expected a folder, or a URL such as s3://bucket/folder.")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{who} is a file; expected a folder, which need not exist; choose another path.")
    return LocalFolder(text.rstrip("/") or "/", folder, who)
