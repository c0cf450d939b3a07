"""Captioned images from a folder or a Hugging Face dataset.

What can be seen without decoding (missing files, missing or empty captions) is found when the
source is opened and listed in ``dropped``; broken images are found when they are decoded.
"""

from __future__ import annotations

import difflib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.fingerprint import file_evidence
from sd_lightning.data.source import BadSample, caption_evidence
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, check_size, to_rgb
from sd_lightning.storage.run_folder import is_run

log = logging.getLogger(__name__)

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
METADATA = "metadata.jsonl"
MAX_CAPTION_BYTES = 2**20
"""Length of a caption file, or of a line of ``metadata.jsonl``: captions are some words."""
_LOOKED_AT = 20
"""Rows that tell whether a column of text names images."""


def decode(file: str | io.BytesIO, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """Decode an image completely.

    Args:
        file: Path or buffer.
        max_pixels: Pixels that it may have; its header is asked before any are allocated.

    Returns:
        An upright RGB image.

    Raises:
        BadSample: It is too large, or cannot be decoded. PIL raises whatever its format plug-ins do (OSError,
            SyntaxError, ValueError, struct.error, ...), so every exception but lack of memory counts.
    """
    try:
        with _pil_limit(max_pixels), Image.open(file) as image:
            check_size(image.size, max_pixels)
            image.load()
            return to_rgb(image)
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


@contextmanager
def _pil_limit(max_pixels: int) -> Iterator[None]:
    """Let PIL's own limit, which its plug-ins ask before they allocate, be ours."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, max_pixels
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def read_captions(path: str | Path) -> list[str]:
    """Return the captions in a text file in UTF-8, with or without a byte-order mark, one on each line.

    Raises:
        BadSample: It cannot be read, is too long, or is in another encoding.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
    except OSError as error:
        raise BadSample(f"cannot read the file {path} ({error.strerror})") from error
    if len(data) > MAX_CAPTION_BYTES:
        raise BadSample(_too_long(path))
    return clean_captions(_utf8(data, path).splitlines())


def _too_long(path: str | Path) -> str:
    return f"the file {path} is longer than captions are ({MAX_CAPTION_BYTES} bytes)"


def _utf8(data: bytes, path: str | Path) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample(f"the file {path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    if "\0" in text:  # UTF-16 of English is UTF-8 with these
        raise BadSample(f"the file {path} is not UTF-8 text (it has zero bytes); save it as UTF-8")
    return text


def clean_captions(value: Any) -> list[str]:
    """Return the captions in a string or list of strings, without blanks around them and without empty ones."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.strip() for v in values if isinstance(v, str) and v.strip()]


def _caption_problem(value: Any) -> str:
    """Return what is wrong with a value that holds no captions."""
    values = value if isinstance(value, (list, tuple)) else [value]
    other = next((v for v in values if v is not None and not isinstance(v, str)), None)
    if other is None:
        return "its caption is empty"
    given = json.dumps(other, default=str)[:60]
    return f"its caption {given} is no text; write " + (
        f'"{given}", in quotes' if isinstance(other, int | float) else "one string, or a list of strings"
    )


class ImageFolder:
    """Images in a folder, captioned by ``metadata.jsonl`` or by a ``.txt`` file beside each image.

    Every line of ``metadata.jsonl`` is an object with ``file_name`` (relative to the folder) and the
    caption, a string or a list of strings. Without that file all images below the folder are used,
    but for the folders of runs, each with the ``.txt`` of the same name; every line of it is one caption.

    Attributes:
        dropped: Unusable entries and why.
    """

    def __init__(
        self, root: str | Path, *, caption_column: str = "text", max_image_pixels: int = MAX_IMAGE_PIXELS
    ) -> None:
        """Find the images and check that files and captions exist.

        Args:
            root: The folder.
            caption_column: Key of the caption in ``metadata.jsonl``.
            max_image_pixels: Pixels that an image may have.

        Raises:
            UsageError: There is no such folder or column, not one usable image, or ``metadata.jsonl`` is not UTF-8.
        """
        self.root = Path(root)
        self.max_image_pixels = max_image_pixels
        self.caption_column = caption_column
        self.dropped: dict[str, str] = {}
        self._paths: list[str] = []
        self._captions: list[list[str]] | None = None
        if not self.root.is_dir():
            raise UsageError(
                f"ImageFolder: there is no folder {str(self.root)!r}; expected a folder of images. "
                "Write data.train_data_dir=<folder>"
            )
        if (self.root / METADATA).is_file():
            self._captions = []
            self._read_metadata()
        else:
            self._find_sidecars()
        if not self._paths:
            raise UsageError(
                f"ImageFolder: {str(self.root)!r} holds no usable captioned image ({self._why_empty()}); give a "
                f"folder of images ({', '.join(sorted(SUFFIXES))}) with {METADATA} or a .txt caption beside each"
            )

    def __len__(self) -> int:
        """Return the number of usable entries."""
        return len(self._paths)

    def image(self, index: int) -> Image.Image:
        """Decode an image as upright RGB; ``BadSample`` if it is broken."""
        return decode(self._paths[index], max_pixels=self.max_image_pixels)

    def captions(self, index: int) -> list[str]:
        """Return an image's captions; ``BadSample`` if its caption file is blank or not text."""
        if self._captions is not None:
            return self._captions[index]
        path = os.path.splitext(self._paths[index])[0] + ".txt"
        captions = read_captions(path)
        if not captions:
            raise BadSample(f"the caption file {path} is empty")
        return captions

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self._paths[index]

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Return what tells whether a sample is still the same: its path below the folder, image and captions."""
        path = self._paths[index]
        if self._captions is None and not thorough:
            captions = file_evidence(os.path.splitext(path)[0] + ".txt", thorough=False)
        else:
            captions = caption_evidence(self, index)
        return path.removeprefix(f"{self.root}{os.sep}"), file_evidence(path, thorough=thorough), captions

    def _read_metadata(self) -> None:
        assert self._captions is not None
        for number, row in self._rows():
            file_name = row.get("file_name")
            if not isinstance(file_name, str) or not file_name:
                self.dropped[f"{self.root / METADATA}:{number}"] = "no file_name"
                continue
            if not self._paths:
                self._check_column(number, row)
            path = str(self.root / file_name)
            captions = clean_captions(row.get(self.caption_column))
            if not captions:
                self.dropped[path] = _caption_problem(row.get(self.caption_column))
            elif problem := _file_problem(path):
                self.dropped[path] = problem
            else:
                self._paths.append(path)
                self._captions.append(captions)

    def _check_column(self, number: int, row: dict[str, Any]) -> None:
        """Refuse a caption column that a line does not have, or that names the image."""
        others = [name for name in row if name != "file_name"]
        if self.caption_column in others:
            return
        column = next((name for name in others if clean_captions(row[name])), "<key of the caption>")
        wrong = "names the image" if self.caption_column == "file_name" else f"is no key of line {number}"
        has = f"which has {', '.join(row)}" if others else "which has no other key than file_name"
        raise UsageError(
            f"ImageFolder got data.caption_column={self.caption_column}, which {wrong} of {self.root / METADATA}, "
            f"{has}; {'' if others else 'add captions to it, and '}write data.caption_column={column}"
        )

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield line numbers and objects of the metadata file."""
        for number, line in self._lines():
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # no JSON, a number without end, brackets without end
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                self.dropped[f"{self.root / METADATA}:{number}"] = f"not a JSON object: {line.strip()[:60]!r}"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines of the metadata file with their numbers; too long ones are dropped."""
        path = self.root / METADATA
        try:
            with open(path, "rb") as file:  # whose lines end with "\n" only: U+2028 may stand in a caption
                number = 0
                while line := file.readline(MAX_CAPTION_BYTES + 1):
                    number += 1
                    if len(line) <= MAX_CAPTION_BYTES:
                        yield number, _utf8(line, path)
                        continue
                    self.dropped[f"{path}:{number}"] = f"longer than captions are ({MAX_CAPTION_BYTES} bytes)"
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_CAPTION_BYTES)
        except OSError as error:
            raise UsageError(f"ImageFolder cannot read {path} ({error.strerror}); mend that, or remove it") from error
        except BadSample as reason:
            raise UsageError(f"ImageFolder got data.train_data_dir={self.root}: {reason}") from reason

    def _find_sidecars(self) -> None:
        """Collect the images below the root in a stable order; one scan finds their captions, too.

        Runs below it are left out: a run would train on pictures that it has drawn itself.
        """
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            if Path(folder) != self.root and is_run(Path(folder)):
                log.info("data: %s is the folder of a run, and left out", folder)
                subfolders.clear()
                continue
            subfolders.sort()
            present = set(names)
            for name in sorted(names):
                stem, suffix = os.path.splitext(name)
                if suffix.lower() not in SUFFIXES:
                    continue
                path, caption = os.path.join(folder, name), stem + ".txt"
                if caption not in present:
                    self.dropped[path] = f"it has no caption file {caption}"
                elif problem := _file_problem(path) or _caption_file_problem(os.path.join(folder, caption)):
                    self.dropped[path] = problem
                else:
                    self._paths.append(path)

    def _why_empty(self) -> str:
        if not self.dropped:
            return "it is empty"
        name, reason = next(iter(self.dropped.items()))
        return f"{len(self.dropped)} unusable, the first is {name}: {reason}"


def _file_problem(path: str) -> str | None:
    """Return what is wrong with a file as far as its directory entry tells."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a name with a zero byte
        return f"there is no file {path}"
    if not stat.S_ISREG(status.st_mode):  # reading from a pipe would wait for ever
        return f"{path} is not a file"
    return None if status.st_size else f"the file {path} is empty"


def _caption_file_problem(path: str) -> str | None:
    return _file_problem(path) or (_too_long(path) if os.stat(path).st_size > MAX_CAPTION_BYTES else None)


class HuggingFaceImages:
    """A split of a Hugging Face dataset with an image and a caption column.

    Attributes:
        dropped: Rows without a caption.
    """

    def __init__(
        self,
        dataset: str | Path,
        *,
        split: str = "train",
        image_column: str = "image",
        caption_column: str = "text",
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        """Open the dataset and check its columns and captions.

        Args:
            dataset: A folder written by ``Dataset.save_to_disk``, or a name for ``load_dataset``.
            split: Split of it.
            image_column: Column of images.
            caption_column: Column of captions, each a string or a list of strings.
            max_image_pixels: Pixels that an image may have.

        Raises:
            UsageError: ``datasets`` is not installed, there is no such dataset, split or column, or a column holds
                something else than images or captions.
        """
        self._name = str(dataset)
        self.max_image_pixels = max_image_pixels
        self.dropped: dict[str, str] = {}
        table = _open_dataset(self._name, split)
        for option, column in (("image_column", image_column), ("caption_column", caption_column)):
            if column not in table.column_names:
                near = next(iter(difflib.get_close_matches(column, table.column_names, n=1)), "<one of them>")
                raise UsageError(
                    f"data.{option}={column}: the dataset {self._name} has the columns "
                    f"{', '.join(table.column_names)}; write data.{option}={near}"
                )
        if not _is_text(table.features[caption_column]):
            columns = [name for name, feature in table.features.items() if _is_text(feature)]
            raise UsageError(
                f"data.caption_column={caption_column}: the column of {self._name} is not text "
                f"({table.features[caption_column]}); {_choose('caption_column', columns)}"
            )
        self.fingerprint: str | None = getattr(table, "_fingerprint", None)
        self._images = self._open_images(table, image_column)
        self._captions = table.select_columns([caption_column])
        self._image_column, self._caption_column, self._split = image_column, caption_column, split
        self._rows = list(self._with_caption(self._captions))
        if not self._rows:
            columns = [name for name, each in table.features.items() if _is_text(each) and name != caption_column]
            raise UsageError(
                f"data.caption_column={caption_column}: not one of the {len(table)} rows of {self._name} has a caption "
                f"in it; {_choose('caption_column', columns)}"
            )

    def _open_images(self, table: Any, column: str) -> Any:
        """Return the column of images, as encoded bytes: a broken image must be found sample by sample, by us."""
        datasets = require("datasets", extra="datasets", who="data=huggingface")
        feature = table.features[column]
        try:
            images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        except Exception:
            images = None
        if images is not None and not isinstance(feature, datasets.Image):
            # Text may be paths.
            first = [entry for entry in (images[row][column] for row in range(min(_LOOKED_AT, len(images)))) if entry]
            if not any(entry.get("bytes") or os.path.isfile(entry["path"]) for entry in first):
                images = None
        if images is None:
            columns = [name for name, each in table.features.items() if isinstance(each, datasets.Image)]
            raise UsageError(
                f"data.image_column={column}: the column of {self._name} is not images ({feature}); "
                f"{_choose('image_column', columns)}"
            )
        return images

    def _with_caption(self, table: Iterable[dict[str, Any]]) -> Iterator[int]:
        for row, entry in enumerate(table):
            if clean_captions(entry[self._caption_column]):
                yield row
            else:
                self.dropped[f"{self._name}/{self._split}/{row}"] = "its caption is empty"

    def __len__(self) -> int:
        """Return the number of rows with a caption."""
        return len(self._rows)

    def image(self, index: int) -> Image.Image:
        """Decode an image as upright RGB; ``BadSample`` if it is broken or missing."""
        entry = self._images[self._rows[index]][self._image_column]
        if not entry or not (entry.get("bytes") or entry.get("path")):
            raise BadSample("it has no image")
        file = io.BytesIO(entry["bytes"]) if entry.get("bytes") else entry["path"]
        return decode(file, max_pixels=self.max_image_pixels)

    def captions(self, index: int) -> list[str]:
        """Return the captions of a row."""
        return clean_captions(self._captions[self._rows[index]][self._caption_column])

    def name(self, index: int) -> str:
        """Return the dataset, its split and the number of the row."""
        return f"{self._name}/{self._split}/{self._rows[index]}"

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Return the number of a row and its captions; the data set's own fingerprint stands for the images."""
        return str(self._rows[index]), "", caption_evidence(self, index) if thorough else ""


def _is_text(feature: Any) -> bool:
    """Tell whether a column of a Hugging Face dataset holds strings, or lists of strings."""
    inner = getattr(feature, "feature", feature)  # of a list
    return getattr(inner, "dtype", None) in ("string", "large_string", "string_view")


def _choose(option: str, columns: list[str]) -> str:
    if not columns:
        return "it has none; choose another dataset"
    return f"write data.{option}={columns[0]}" + (f", or {', '.join(columns[1:])}" if len(columns) > 1 else "")


def is_saved_dataset(name: str) -> bool:
    """Whether a folder is one that ``Dataset.save_to_disk`` wrote, which names its files; others are scanned."""
    return any(Path(name, marker).is_file() for marker in ("state.json", "dataset_dict.json"))


def _open_dataset(name: str, split: str) -> Any:
    """Load one split from a saved folder or by name."""
    datasets = require("datasets", extra="datasets", who="data=huggingface")
    try:
        table = datasets.load_from_disk(name) if is_saved_dataset(name) else datasets.load_dataset(name, split=split)
    except Exception as error:
        raise UsageError(
            f"data.dataset_name={name}: cannot load its split {split!r} ({type(error).__name__}: {error}); give "
            "the name of a Hugging Face dataset, or a folder that Dataset.save_to_disk wrote"
        ) from error
    if isinstance(table, dict):
        if split not in table:
            near = next(iter(difflib.get_close_matches(split, table, n=1)), next(iter(table), "<split>"))
            raise UsageError(
                f"data.split={split}: the dataset {name} has the splits {', '.join(table)}; write data.split={near}"
            )
        table = table[split]
    return table
