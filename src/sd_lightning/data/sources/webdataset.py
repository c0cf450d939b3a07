"""Captioned images from tar files in webdataset's convention, read at random and without that package."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from sd_lightning._errors import UsageError
from sd_lightning.data.fingerprint import part_evidence
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import (
    MAX_CAPTION_BYTES,
    SUFFIXES,
    EncodedImages,
    captions_in,
    clean_captions,
    files_below,
    nearest,
    nothing_usable,
    open_file,
    too_long,
    utf8,
)
from sd_lightning.data.transform import MAX_IMAGE_PIXELS

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files."""
_PACKED = (".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_LOOKED_AT = 20
"""Number of samples checked to decide whether a key holds captions."""
_COLUMNS = 6


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
                raise UsageError(
                    f"WebDatasetTars got {path}, compressed with {kind}, whose files cannot be read at random; "
                    "expected plain tars; decompress it, or pack its files again with tar -cf"
                )
            file.seek(0)
            tar, files = tarfile.open(fileobj=file, mode="r:"), []
            with suppress(tarfile.ReadError):
                for member in tar:
                    if member.isreg() and not member.issparse():
                        files.append(member)
            # tarfile is silent about a damaged header, and about an end without the block of zeros that marks it.
            file.seek(tar.offset)
            is_whole = file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
            problem = f"the tar is cut off or damaged at byte {min(tar.offset, file.tell())}; make or copy it again"
            return files, None if is_whole else problem
    except tarfile.ReadError as error:
        raise UsageError(f"WebDatasetTars got {path}, which is no tar ({error}); mend or remove it") from error
    except OSError as error:
        raise UsageError(f"WebDatasetTars cannot read {path} ({error.strerror}); mend or remove it") from error


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


@dataclass(slots=True)
class _Files:
    """The files of one sample in a tar."""

    image: tarfile.TarInfo | None = None
    caption: tarfile.TarInfo | None = None
    dotted: list[str] = field(default_factory=list)
    """Images with another dot in their names, such as ``00017.mask.png``, which are not read."""
    problem: str | None = None


class WebDatasetTars(EncodedImages):
    """Images and captions in ``.tar`` files.

    The files of a sample have the same path up to the first dot of the file name: ``00017.jpg`` and ``00017.txt``. Of
    several images of a sample, the first in the tar is used. Captions are the lines of the ``.txt`` file, or stand in
    the ``.json`` file: a string or a list of strings.

    Opening reads the headers of all tars, and nothing is written beside them. A sample takes about 60 bytes of memory
    and the length of its name.

    Attributes:
        dropped: Name -> reason of unusable samples, and of tars that end too early.
    """

    def __init__(
        self, root: str | Path, *, caption_key: str | None = None, max_image_pixels: int = MAX_IMAGE_PIXELS
    ) -> None:
        """Read the headers of all tars.

        Args:
            root: A folder of tars, one tar, or a pattern with braces: ``tars/{000..099}.tar``, ``{a,b}.tar``.
            caption_key: Key of the caption in the ``.json`` files; None for ``.txt`` files.
            max_image_pixels: Limit on an image's pixels.

        Raises:
            UsageError: There are no such tars, one is compressed or cannot be read, no sample is usable, or there are
                no captions under the key.
        """
        self.max_image_pixels = max_image_pixels
        self.caption_key = caption_key
        self.dropped: dict[str, str] = {}
        self._caption_suffix = "txt" if caption_key is None else "json"
        folder, self._tars = _find_tars(str(root))
        self._keys = [os.path.relpath(path, folder).replace(os.sep, "/") for path in self._tars]
        # Arrays, not objects: data sets have tens of millions of samples.
        self._table = array("q")  # by sample: tar, begin, size and date of the image, begin and size of the caption
        self._names, self._ends = bytearray(), array("q", [0])  # the images' names, one behind the other
        for number, path in enumerate(self._tars):
            self._add(number, path)
        if not len(self):
            kinds = ", ".join(sorted(SUFFIXES))
            remedy = f"tars with images ({kinds}), each with a .{self._caption_suffix} file of the same name"
            if caption_key is None:
                remedy += ", or write data.caption_key=<key> for captions in .json files"
            raise nothing_usable("WebDatasetTars", root, self.dropped, remedy)
        if caption_key is not None:
            self._check_key(caption_key)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def open(self, index: int) -> BinaryIO:
        path, begin, size, _, _, _ = self._row(index)
        return io.BufferedReader(TarMember(path, begin, size))

    def captions(self, index: int) -> list[str]:
        data = self._caption_file(index)
        if self.caption_key is None:
            name = f"{self._row(index)[0]}/{_stem(self._member(index))}.txt"
            captions = clean_captions(utf8(data, name).splitlines())
            if not captions:
                raise BadSample(f"the caption file {name} is empty")
            return captions
        return captions_in(_parsed(data).get(self.caption_key))

    def name(self, index: int) -> str:
        return f"{self._row(index)[0]}/{self._member(index)}"

    def key(self, index: int) -> str:
        """Return the tar's path within the folder, and the sample's in the tar."""
        return f"{self._keys[self._table[index * _COLUMNS]]}/{_stem(self._member(index))}"

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        path, begin, size, date, _, caption_size = self._row(index)
        if thorough:
            return self.key(index), part_evidence(path, begin, size), self.caption_evidence(index)
        return self.key(index), f"{size} {date}", str(caption_size)

    def _row(self, index: int) -> tuple[str, int, int, int, int, int]:
        """Return path of the tar; begin, size and date of the image; begin and size of the caption."""
        tar, *rest = self._table[index * _COLUMNS : (index + 1) * _COLUMNS]
        begin, size, date, caption_begin, caption_size = rest
        return self._tars[tar], begin, size, date, caption_begin, caption_size

    def _member(self, index: int) -> str:
        return self._names[self._ends[index] : self._ends[index + 1]].decode(errors="surrogateescape")

    def _caption_file(self, index: int) -> bytes:
        path, _, _, _, begin, size = self._row(index)
        with TarMember(path, begin, size) as file:
            return file.readall()

    def _add(self, number: int, path: str) -> None:
        """Add the samples of a tar to the table, and what is unusable to ``dropped``."""
        members, problem = read_headers(path)
        if problem:
            self.dropped[path] = problem
        num_bytes = os.path.getsize(path)
        for stem, files in _grouped(members, self._caption_suffix).items():
            image, caption = files.image, files.caption
            if files.image is None and files.dotted:
                why = "its name has two dots, and the first one ends a sample's name; rename it"
                self.dropped |= {f"{path}/{name}": why for name in files.dotted}
                continue
            problem = self._problem(files, stem, num_bytes)
            if problem or image is None or caption is None:
                self.dropped[f"{path}/{stem}"] = str(problem)
                continue
            self._table.extend((number, image.offset_data, image.size, int(image.mtime)))
            self._table.extend((caption.offset_data, caption.size))
            self._names += _clean(image.name).encode(errors="surrogateescape")
            self._ends.append(len(self._names))

    def _problem(self, files: _Files, stem: str, num_bytes: int) -> str | None:
        """Return what is wrong with a sample of a tar that is ``num_bytes`` long; None if nothing is."""
        caption = f"{stem}.{self._caption_suffix}"
        if files.problem:
            return files.problem
        if files.image is None:
            return f"it has no image {stem}.jpg, or of another kind"
        if files.caption is None:
            return f"it has no caption file {caption}"
        for file in (files.image, files.caption):
            if file.offset_data + file.size > num_bytes:
                return f"the tar ends within its file {file.name}"
            if not file.size:
                return f"its file {file.name} is empty"
        return too_long(caption) if files.caption.size > MAX_CAPTION_BYTES else None

    def _check_key(self, key: str) -> None:
        """Raise if none of the first samples has a text under ``caption_key``."""
        keys: dict[str, None] = {}
        for index in range(min(_LOOKED_AT, len(self))):
            with suppress(BadSample):
                values = _parsed(self._caption_file(index))
                keys |= dict.fromkeys(name for name, value in values.items() if clean_captions(value))
        if key not in keys:
            near = nearest(key, keys, next(iter(keys), "<key of the caption>"))
            raise UsageError(
                f"WebDatasetTars got data.caption_key={key}; the .json files have text under "
                f"{', '.join(keys) or 'no key'}; write data.caption_key={near}"
            )


def _grouped(members: Iterable[tarfile.TarInfo], caption_suffix: str) -> dict[str, _Files]:
    """Return the images and captions of a tar by sample."""
    samples: dict[str, _Files] = {}
    for member in members:
        stem = _stem(_clean(member.name))
        suffix = member.name.rpartition("/")[2].partition(".")[2].lower()
        role = "image" if f".{suffix}" in SUFFIXES else "caption" if suffix == caption_suffix else None
        is_dotted = role is None and f".{suffix.rpartition('.')[2]}" in SUFFIXES
        if (role is None and not is_dotted) or not stem or stem.endswith("/"):  # a hidden file
            continue
        files = samples.setdefault(stem, _Files())
        if role is None:
            files.dotted.append(_clean(member.name))
            continue
        known = getattr(files, role)
        if known is None:
            setattr(files, role, member)
        elif known.name == member.name:
            files.problem = f"the tar has two files {member.name}"
    return {stem: files for stem, files in samples.items() if files.image or files.caption or files.dotted}


def _clean(name: str) -> str:
    """Return a member's name without the ``./`` of ``tar -cf x.tar .``."""
    return name.removeprefix("./")


def _stem(name: str) -> str:
    """Return a path up to the first dot of its file name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _parsed(data: bytes) -> dict[str, Any]:
    """Parse a ``.json`` file.

    Raises:
        BadSample: It holds no JSON object.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"its .json file is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadSample("its .json file is no JSON object")
    return value


def _find_tars(root: str) -> tuple[str, list[str]]:
    """Return the folder that keys are relative to, and the paths of the tars in order."""
    if os.path.isdir(root):
        found = files_below(root, (".tar", *_PACKED))
        found = sorted(found, key=lambda path: not path.endswith(_PACKED))  # these are refused when they are opened
        if not found:
            raise UsageError(
                f"WebDatasetTars: {root!r} holds no .tar file; expected tars of images; write "
                "data.train_data_dir=<folder>"
            )
        return root, found
    paths = [root] if os.path.exists(root) else expand_braces(root)
    missing = [path for path in paths if not os.path.isfile(path)]
    if missing:
        of = f", nor {len(missing) - 1} others of {len(paths)}" if len(missing) > 1 else ""
        raise UsageError(
            f"WebDatasetTars: there is no file {missing[0]!r}{of}; expected a folder of tars, one tar, or a pattern "
            "such as tars/{000..099}.tar; write data.train_data_dir=<folder>"
        )
    return os.path.dirname(root.partition("{")[0]) or ".", paths
