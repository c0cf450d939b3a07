"""Reading of tar files: the headers of all members in one scan, then any member at random."""

from __future__ import annotations

import io
import os
import re
import tarfile
from contextlib import suppress
from typing import BinaryIO, NoReturn

from sd_lightning._errors import UsageError
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import open_file

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files."""


class TarMember(io.RawIOBase):
    """A member of a tar, opened for reading."""

    def __init__(self, path: str, begin: int, size: int) -> None:
        """Open the tar at ``path``, and show its bytes ``[begin, begin + size)``.

        Raises:
            BadSample: It cannot be opened, or has become too short.
        """
        self._tar = open_file(path)
        self._begin, self._size, self._position = begin, size, 0
        if os.fstat(self._tar.fileno()).st_size < begin + size:
            self._tar.close()
            raise BadSample(f"{path} has changed since it was opened: it ends within this file")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer)[: max(0, self._size - self._position)]
        count = os.preadv(self._tar.fileno(), [view], self._begin + self._position)
        self._position += count
        return count

    def readall(self) -> bytes:
        data = bytearray(max(0, self._size - self._position))
        view = memoryview(data)
        while count := self.readinto(view):  # one call reads at most 2 GiB
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        self._tar.close()
        super().close()


def read_headers(path: str) -> tuple[list[tarfile.TarInfo], str | None]:
    """Read the headers of all members of a tar.

    Returns:
        Its regular files, and what is wrong with a tar that is cut off or damaged; None if nothing is.

    Raises:
        UsageError: It cannot be read, is compressed, or is no tar.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            if not start:
                return [], "the tar is empty"
            kind = next((kind for first, kind in _COMPRESSED.items() if start.startswith(first)), None)
            if kind is not None:
                refuse_compressed(path, kind)
            file.seek(0)
            return _read_headers(file, path)
    except OSError as error:
        raise UsageError(f"WebDatasetTars cannot read {path} ({error.strerror}); mend or remove it") from error


def _read_headers(file: BinaryIO, path: str) -> tuple[list[tarfile.TarInfo], str | None]:
    try:
        tar = tarfile.open(fileobj=file, mode="r:")
    except tarfile.ReadError as error:
        raise UsageError(f"WebDatasetTars got {path}, which is no tar ({error}); mend or remove it") from error
    files = []
    with suppress(tarfile.ReadError):
        for member in tar:
            if member.isreg() and not member.issparse():
                files.append(member)
    # tarfile is silent about a damaged header, and about an end without the block of zeros that marks it.
    file.seek(tar.offset)
    is_whole = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    problem = f"the tar is cut off or damaged at byte {min(tar.offset, file.tell())}; make or copy it again"
    return files, None if is_whole else problem


def refuse_compressed(path: str, kind: str) -> NoReturn:
    """Raise a ``UsageError`` about a compressed tar."""
    raise UsageError(
        f"WebDatasetTars got {path}, compressed with {kind}, whose files cannot be read at random; expected plain "
        "tars; decompress it, or pack its files again with tar -cf"
    )


_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand_braces(pattern: str) -> list[str]:
    """Return what shells expand a pattern to: ``{08..10}`` to 08, 09 and 10, ``{a,b}`` to a and b."""
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    numbers = _RANGE.fullmatch(braces[1])
    if numbers is None:
        values = braces[1].split(",")
    else:
        width = len(numbers[1]) if numbers[1].startswith("0") else 0
        values = [f"{number:0{width}}" for number in range(int(numbers[1]), int(numbers[2]) + 1)]
    return [
        each for value in values for each in expand_braces(pattern[: braces.start()] + value + pattern[braces.end() :])
    ]
