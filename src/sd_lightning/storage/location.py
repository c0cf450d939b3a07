"""A folder of files, on a local disk or in an object store, in which a file appears whole or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from sd_lightning._errors import UsageError


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
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, whether or not it exists; readers see the old or the new content."""

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
