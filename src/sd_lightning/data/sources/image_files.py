"""What sources of encoded images share: readers of image, caption and table files.

They raise ``BadSample`` with the reason if one is unusable.
"""

from __future__ import annotations

import difflib
import io
import json
import logging
import os
import re
import stat
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from sd_lightning._errors import UsageError
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, check_size, to_rgb

log = logging.getLogger(__name__)

_SIDEWAYS = frozenset({5, 6, 7, 8})
"""EXIF orientations that exchange width and height."""
_PNG_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"})
OTHER_SUFFIXES = frozenset(
    {".heic", ".heif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".rw2", ".orf", ".psd"}
)
"""Image file endings of cameras and phones that cannot be decoded here."""
KOHYA_FOLDER = re.compile(r"(\d+)_(.+)")
"""Name of a folder of images for kohya's scripts: repeats and caption."""
MAX_CAPTION_BYTES = 2**20
"""Largest caption file, or line of ``metadata.jsonl``; captions are only some words."""


def decode(file: str | BinaryIO, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode an image completely.

    Args:
        file: Path or buffer.
        max_pixels: Limit on its pixels, checked in its header before any are allocated.

    Returns:
        An upright RGB image.

    Raises:
        BadSample: It is too large, or cannot be decoded.
    """
    with opened(file, max_pixels) as image:
        image.load()
        return to_rgb(image)


def read_size(file: BinaryIO, *, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """Return (height, width) of an upright image, from its header.

    Args:
        file: The image; it has to be seekable.
        max_pixels: Limit on its pixels.

    Raises:
        BadSample: It is too large, or has no header that can be read.
    """
    with opened(file, max_pixels) as image:
        if isinstance(image, PngImageFile) and _has_late_metadata(file):
            image.load()
        # Not `image.getexif()`, which decodes every PNG without an orientation to look behind its pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        # PIL has already turned the size of a TIFF whose own tag says so.
        is_turned = isinstance(image, TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2
        width, height = image.size
        return (width, height) if orientation in _SIDEWAYS and not is_turned else (height, width)


@contextmanager
def opened(file: str | BinaryIO, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image and check its size; raise ``BadSample`` if that, or what is done with it, fails.

    PIL's format plug-ins raise many types (OSError, SyntaxError, ValueError, struct.error, ...), so every exception but
    MemoryError counts.
    """
    if Image.MAX_IMAGE_PIXELS is not None:  # PIL's own limit, which its plug-ins check before they allocate
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        with Image.open(file) as image:
            check_size(image.size, max_pixels)
            yield image
    except (BadSample, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        pixels = next(iter(re.findall(r"\((\d+) pixels\)", str(error))), "many more")
        raise BadSample(
            f"the image has {pixels} pixels, more than data.max_image_pixels={max_pixels} allows; make it smaller"
        ) from error
    except Exception as error:
        # PIL's own message repeats the path, or the address of the buffer.
        reason = "not an image" if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise BadSample(f"cannot decode the image: {reason}") from error


def _has_late_metadata(file: BinaryIO) -> bool:
    """Return whether a PNG has metadata behind its pixels, where an orientation may be."""
    position, file_position, behind_pixels = 8, file.tell(), False
    try:
        while len(header := _read_at(file, position, 8)) == 8 and header[4:] != b"IEND":
            length, kind = int.from_bytes(header[:4], "big"), header[4:]
            if behind_pixels and kind in _PNG_METADATA:
                return True
            behind_pixels |= kind == b"IDAT"
            position += length + 12
        return False
    finally:
        file.seek(file_position)


def _read_at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


def is_image(name: str) -> bool:
    """Return whether a file is an image, by its ending."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def walk(root: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (folder, subfolders, names of files) of a folder and all below it, in order.

    Links are followed, but each folder is visited once: a link to a folder above it would have no end.
    """
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            log.warning("data: %s is left out: the folder is read already, by another path", folder)
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders.sort(key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
        yield folder, subfolders, sorted(names)


def files_below(root: str | Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the paths of all files below a folder with one of some endings, sorted, without hidden ones."""
    return sorted(
        os.path.join(folder, name)
        for folder, _, names in walk(root)
        for name in names
        if name.lower().endswith(suffixes) and not name.startswith(".")
    )


def is_outside(path: str, root: str | Path) -> bool:
    """Return whether a path, absolute or relative to a folder, names a place outside of it; links do not count."""
    top = os.path.abspath(root)
    return not os.path.normpath(os.path.join(top, path)).startswith(top.rstrip(os.sep) + os.sep)


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        BadSample: It cannot be opened.
    """
    try:
        return open(path, "rb")
    except OSError as error:
        raise BadSample(f"cannot read the file {path} ({error.strerror})") from error


def read_captions(path: str | Path) -> list[str]:
    """Return the captions of a UTF-8 text file, one per line, with or without a byte-order mark.

    Raises:
        BadSample: It cannot be read, is too long, or is in another encoding.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
    except OSError as error:
        raise BadSample(f"cannot read the file {path} ({error.strerror})") from error
    if len(data) > MAX_CAPTION_BYTES:
        raise BadSample(too_long(path))
    return clean_captions(utf8(data, path).splitlines())


def utf8(data: bytes, path: str | Path) -> str:
    """Decode the bytes of a text file.

    Raises:
        BadSample: It is in another encoding than UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"the file {path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    if "\0" in text:  # English text in UTF-16 is valid UTF-8 with zero bytes
        raise BadSample(f"the file {path} is not UTF-8 text (it has zero bytes); save it as UTF-8")
    return text


def clean_captions(value: object) -> list[str]:
    """Return the captions in a string or list of strings, stripped and without empty ones."""
    return [v.strip() for v in _values(value) if isinstance(v, str) and v.strip()]


def captions_in(value: object) -> list[str]:
    """Return the captions in a string or list of strings, stripped; raise ``BadSample`` if there are none."""
    captions = clean_captions(value)
    if not captions:
        raise BadSample(caption_problem(value))
    return captions


def caption_problem(value: object) -> str:
    """Return what is wrong with a value that holds no captions."""
    other = next((v for v in _values(value) if v is not None and not isinstance(v, str)), None)
    if other is None:
        return "its caption is empty"
    shown = json.dumps(other, default=str)[:60]
    remedy = f'"{shown}", in quotes' if isinstance(other, int | float) else "one string, or a list of strings"
    return f"its caption {shown} is no text; write {remedy}"


def file_problem(path: str, *, max_bytes: float = float("inf")) -> str | None:
    """Return what is wrong with a file according to its directory entry; None if nothing is."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name with a zero byte
        return f"there is no file {path}"
    if not stat.S_ISREG(status.st_mode):  # reading from a pipe would wait for ever
        return f"{path} is not a file"
    if not status.st_size:
        return f"the file {path} is empty"
    return too_long(path) if status.st_size > max_bytes else None


def _values(value: object) -> list[object] | tuple[object, ...]:
    return value if isinstance(value, list | tuple) else [value]


def too_long(path: str | Path) -> str:
    """Return what is wrong with a file that is longer than captions are."""
    return f"the file {path} is longer than captions are ({MAX_CAPTION_BYTES} bytes)"


def repeats(names: Iterable[str]) -> dict[int, str]:
    """Return what tells repeated names apart: "#2" for the position where a name comes the second time."""
    seen: Counter[str] = Counter()
    found = {}
    for position, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            found[position] = f"#{seen[name]}"
    return found


class EncodedImages(Source):
    """Source of encoded images; a subclass opens them.

    Attributes:
        max_image_pixels: Limit on an image's pixels; larger ones are bad samples.
    """

    max_image_pixels: int = MAX_IMAGE_PIXELS

    @abstractmethod
    def open(self, index: int) -> BinaryIO:
        """Open an encoded image for reading; raise ``BadSample`` if there is none."""

    def image(self, index: int) -> Image.Image:
        with self.open(index) as file:
            return decode(file, max_pixels=self.max_image_pixels)

    def content(self, index: int) -> bytes:
        with self.open(index) as file:
            try:
                return file.read()
            except OSError as error:
                raise BadSample(f"cannot read {self.name(index)} ({error.strerror})") from error

    def decode(self, content: bytes) -> Image.Image:
        return decode(io.BytesIO(content), max_pixels=self.max_image_pixels)

    def size(self, index: int) -> tuple[int, int]:
        with self.open(index) as file:
            return read_size(file, max_pixels=self.max_image_pixels)


def check_column(option: str, column: str, columns: Sequence[str], where: str) -> None:
    """Raise a ``UsageError`` if a table has no such column.

    Args:
        option: The setting that names the column, e.g. ``image_column``.
        column: Its value.
        columns: All columns of the table.
        where: The table, for the message.
    """
    if column not in columns:
        raise UsageError(
            f"data.{option}={column}: {where} has the columns {', '.join(columns)}; write "
            f"data.{option}={nearest(column, columns, '<one of them>')}"
        )


def nearest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return which of some names is the most similar one to a name, ``otherwise`` if none is."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), otherwise)


def nothing_usable(source: str, root: object, dropped: Mapping[str, str], remedy: str) -> UsageError:
    """Return the error for data of which nothing can be used."""
    name, reason = next(iter(dropped.items()), ("", ""))
    why = f"{len(dropped)} unusable, the first is {name}: {reason}" if dropped else "no images"
    return UsageError(f"{source}: {str(root)!r} holds no usable captioned image ({why}); give {remedy}")


def choose(option: str, columns: Sequence[str]) -> str:
    """Return the remedy for a column of the wrong kind, given those of the right one."""
    if not columns:
        return "it has none; choose another dataset"
    return f"write data.{option}={columns[0]}" + (f", or {', '.join(columns[1:])}" if len(columns) > 1 else "")
