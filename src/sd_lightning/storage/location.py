"""A folder of files, on a local disk or in an object store, in which a file appears whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage.atomic import hidden, new_file, no_space, sync

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@dataclass(frozen=True)
class Entry:
    """A file of a location."""

    name: str
    """Relative to the location, with "/" between folders."""
    size: int
    """Bytes."""


class Location(ABC):
    """A folder on a local disk or in an object store.

    Names of files are relative and have "/" between folders. A name of which a part begins with a dot is temporary:
    :meth:`entries` leaves it out. A location can be pickled, and used by several threads and by forked processes.

    Every method raises ``UsageError`` for what the user has to mend: no access, a full disk, an endpoint that does not
    answer.

    Attributes:
        url: The location as messages name it, without a trailing slash.
    """

    url: str

    @abstractmethod
    def child(self, name: str) -> Location:
        """Return a folder of this location."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read the bytes ``[begin, end)`` of a file; to its end if ``end`` is None.

        Raises:
            FileNotFoundError: There is no such file.
            UsageError: The file ends before ``end``.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if there is no such file."""

    @abstractmethod
    def entries(self, prefix: str = "") -> list[Entry]:
        """Return all files at any depth whose names begin with ``prefix``, sorted by name; temporary ones left out."""

    @abstractmethod
    def create(self, name: str, data: bytes | Path) -> bool:
        """Create a file unless it exists; of several writers one wins. Nothing half-written is ever visible.

        Args:
            name: The file to create.
            data: Its content, or a local file that holds it.

        Returns:
            Whether this call created it; False if it existed.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes | Path) -> None:
        """Write a file, whether or not it exists; readers see the old or the new content.

        Args:
            name: The file to write.
            data: Its content, or a local file that holds it.
        """

    @abstractmethod
    def copy(self, source: str, name: str) -> None:
        """Copy one file of this location to another, which is replaced; object stores do it by themselves.

        Raises:
            FileNotFoundError: There is no such file.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; it need not exist."""

    @abstractmethod
    def fetch(self, name: str, path: Path) -> None:
        """Copy a file to a new local path, which is complete or absent afterwards.

        Raises:
            FileNotFoundError: There is no such file.
        """

    @abstractmethod
    def path(self, name: str) -> Path | None:
        """Return the local path of a file if the location is a local folder, else None."""

    def clean(self) -> None:
        """Delete what killed writers left where that takes space; nobody may be writing."""
        return

    @abstractmethod
    def check_writable(self) -> None:
        """Raise a ``UsageError`` unless :meth:`create` works here."""


def ends_early(location: Location, name: str, size: int, end: int, *, who: str) -> UsageError:
    """Return the error about a file that is shorter than it has to be; sizes in bytes."""
    return UsageError(
        f"{who}: {location.url}/{name} ends after {size} bytes; expected at least {end}: it was truncated or replaced; "
        "delete it and run again what wrote it."
    )


@dataclass(frozen=True)
class LocalFolder(Location):
    """A folder on a local disk; it is created with the first file.

    Attributes:
        folder: Its absolute path.
        who: Start of messages.
    """

    url: str
    folder: Path
    who: str

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(f"{self.url}/{name}", self.folder / name, self.who)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._explained("read", name), open(self.folder / name, "rb") as file:
            file.seek(begin)
            data = file.read(-1 if end is None else end - begin)
        if end is not None and len(data) < end - begin:
            raise ends_early(self, name, begin + len(data), end, who=self.who)
        return data

    def size(self, name: str) -> int | None:
        try:
            with self._explained("read", name):
                return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def entries(self, prefix: str = "") -> list[Entry]:
        entries = []
        with self._explained("list", prefix):
            for folder, folders, names in os.walk(self.folder / prefix.rpartition("/")[0], onerror=_unless_absent):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for path in (Path(folder, name) for name in names if not name.startswith(".")):
                    name = path.relative_to(self.folder).as_posix()
                    size = self.size(name) if name.startswith(prefix) else None
                    if size is not None:  # None: deleted since it was seen
                        entries.append(Entry(name, size))
        return sorted(entries, key=lambda entry: entry.name)

    def create(self, name: str, data: bytes | Path) -> bool:
        path = self.folder / name
        tmp = hidden(path)
        with self._explained("write", name):
            if path.exists():  # the link below decides; this only saves the copy
                return False
            _make_folder(path.parent)
            try:
                _write(tmp, data)
                created = self._link(tmp, path)
            finally:
                tmp.unlink(missing_ok=True)
            sync(path.parent)
        return created

    def _link(self, tmp: Path, path: Path) -> bool:
        try:
            os.link(tmp, path)
        except FileExistsError:
            return tmp.stat().st_nlink > 1  # over NFS a link may be made although its answer got lost
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            raise UsageError(
                f"{self.who}: the file system of {path.parent} has no hard links ({error.strerror}), by which a file "
                "appears whole or not at all; expected one that has them, such as ext4, xfs or NFS; choose another "
                "folder, or an object store (s3://, gs://)."
            ) from error
        return True

    def replace(self, name: str, data: bytes | Path) -> None:
        path = self.folder / name
        with self._explained("write", name):
            _make_folder(path.parent)
            with new_file(path) as tmp:
                _write(tmp, data)
            sync(path.parent)

    def copy(self, source: str, name: str) -> None:
        self.replace(name, self.folder / source)

    def delete(self, name: str) -> None:
        with self._explained("delete", name):
            (self.folder / name).unlink(missing_ok=True)

    def fetch(self, name: str, path: Path) -> None:
        with self._explained("read", name), new_file(path) as tmp:
            shutil.copyfile(self.folder / name, tmp)

    def path(self, name: str) -> Path:
        return self.folder / name

    def clean(self) -> None:
        with self._explained("delete", ""):
            for path in self.folder.rglob(".tmp-*"):
                path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        name = f".tmp-probe-{secrets.token_hex(4)}"
        made = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        self.create(name, b"probe")
        self.delete(name)
        for folder in made:
            with suppress(OSError):  # somebody uses it already
                folder.rmdir()

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """Turn what the user has to mend into a ``UsageError``."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = no_space(error)
            if reason is not None:
                remedy = "free space or choose a folder on another disk, then run the same command again"
            elif isinstance(error, PermissionError) or error.errno == errno.EROFS:
                remedy = f"expected a folder that this user may {verb}; change its permissions or choose another"
            elif isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError):
                remedy = "expected a folder of files; choose another, or remove what is in the way"
            else:
                raise
            raise UsageError(
                f"{self.who}: cannot {verb} {self.folder / name}: {reason or error.strerror}; {remedy}."
            ) from error


def _unless_absent(error: OSError) -> None:
    """Let ``os.walk`` raise; it skips folders that it cannot read by itself."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _write(path: Path, data: bytes | Path) -> None:
    if isinstance(data, Path):
        shutil.copyfile(data, path)
    else:
        path.write_bytes(data)
    sync(path)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents such that they outlive a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)
