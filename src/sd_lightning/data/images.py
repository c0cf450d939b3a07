"""Captioned images from a folder or a Hugging Face dataset.

What can be seen without decoding (missing files, missing or empty captions) is found when the
source is opened and listed in ``dropped``; broken images are found when they are decoded.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.source import BadSample
from sd_lightning.data.transform import to_rgb

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
METADATA = "metadata.jsonl"


def decode(file: str | io.BytesIO) -> Image.Image:
    """Decode an image completely.

    Args:
        file: Path or buffer.

    Returns:
        An upright RGB image.

    Raises:
        BadSample: It cannot be decoded. PIL raises whatever its format plug-ins do (OSError,
            SyntaxError, ValueError, struct.error, ...), so every exception but lack of memory counts.
    """
    try:
        with Image.open(file) as image:
            image.load()
            return to_rgb(image)
    except MemoryError:
        raise
    except Exception as error:
        # PIL's own message repeats the path, or the address of the buffer.
        reason = "not an image" if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise BadSample(f"cannot decode the image: {reason}") from error


def read_text(path: str | Path) -> str:
    """Read a text file in UTF-8, with or without a byte-order mark.

    Raises:
        BadSample: It cannot be read, or is in another encoding.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadSample(f"cannot read the file {path} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadSample(f"the file {path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    if "\0" in text:  # UTF-16 of English is UTF-8 with these
        raise BadSample(f"the file {path} is not UTF-8 text (it has zero bytes); save it as UTF-8")
    return text


def clean_captions(value: Any) -> list[str]:
    """Return the captions in a string or list of strings, without blanks around them and without empty ones."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v.strip() for v in values if isinstance(v, str) and v.strip()]


class ImageFolder:
    """Images in a folder, captioned by ``metadata.jsonl`` or by a ``.txt`` file beside each image.

    Every line of ``metadata.jsonl`` is an object with ``file_name`` (relative to the folder) and the
    caption, a string or a list of strings. Without that file all images below the folder are used,
    each with the ``.txt`` of the same name; every line of it is one caption.

    Attributes:
        dropped: Unusable entries and why.
    """

    def __init__(self, root: str | Path, *, caption_column: str = "text") -> None:
        """Find the images and check that files and captions exist.

        Args:
            root: The folder.
            caption_column: Key of the caption in ``metadata.jsonl``.

        Raises:
            UsageError: There is no such folder or column, not one usable image, or ``metadata.jsonl`` is not UTF-8.
        """
        self.root = Path(root)
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
                f"ImageFolder: {str(self.root)!r} holds no usable captioned image ({self._why_empty()}); expected "
                f"images ({', '.join(sorted(SUFFIXES))}) with {METADATA} or a .txt caption beside each"
            )

    def __len__(self) -> int:
        """Return the number of usable entries."""
        return len(self._paths)

    def image(self, index: int) -> Image.Image:
        """Decode an image as upright RGB; ``BadSample`` if it is broken."""
        return decode(self._paths[index])

    def captions(self, index: int) -> list[str]:
        """Return an image's captions; ``BadSample`` if its caption file is blank or not text."""
        if self._captions is not None:
            return self._captions[index]
        path = os.path.splitext(self._paths[index])[0] + ".txt"
        captions = clean_captions(read_text(path).splitlines())
        if not captions:
            raise BadSample(f"the caption file {path} is empty")
        return captions

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return self._paths[index]

    def _read_metadata(self) -> None:
        assert self._captions is not None
        for number, row in self._rows():
            file_name = row.get("file_name")
            if not isinstance(file_name, str) or not file_name:
                self.dropped[f"{self.root / METADATA}:{number}"] = "no file_name"
                continue
            if self.caption_column not in row and not self._paths:
                raise UsageError(
                    f"ImageFolder: {self.root / METADATA} line {number} has no {self.caption_column!r}; it has "
                    f"{', '.join(row)}. Write data.caption_column=<one of them>"
                )
            path = str(self.root / file_name)
            captions = clean_captions(row.get(self.caption_column))
            if not captions:
                self.dropped[path] = "its caption is empty"
            elif problem := _file_problem(path):
                self.dropped[path] = problem
            else:
                self._paths.append(path)
                self._captions.append(captions)

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield line numbers and objects of the metadata file."""
        try:
            text = read_text(self.root / METADATA)
        except BadSample as reason:
            raise UsageError(f"ImageFolder got data.train_data_dir={self.root}: {reason}") from reason
        for number, line in enumerate(text.split("\n"), 1):  # not splitlines: U+2028 may stand in a caption
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                self.dropped[f"{self.root / METADATA}:{number}"] = f"not a JSON object: {line.strip()[:60]!r}"

    def _find_sidecars(self) -> None:
        """Collect the images below the root in a stable order; one scan finds their captions, too."""
        for folder, subfolders, names in os.walk(self.root, followlinks=True):
            subfolders.sort()
            present = set(names)
            for name in sorted(names):
                stem, suffix = os.path.splitext(name)
                if suffix.lower() not in SUFFIXES:
                    continue
                path, caption = os.path.join(folder, name), stem + ".txt"
                if caption not in present:
                    self.dropped[path] = f"it has no caption file {caption}"
                elif problem := _file_problem(path) or _file_problem(os.path.join(folder, caption)):
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
        return None if os.stat(path).st_size else f"the file {path} is empty"
    except OSError:
        return f"there is no file {path}"


class HuggingFaceImages:
    """A split of a Hugging Face dataset with an image and a caption column.

    Attributes:
        dropped: Rows without a caption.
    """

    def __init__(
        self, dataset: str | Path, *, split: str = "train", image_column: str = "image", caption_column: str = "text"
    ) -> None:
        """Open the dataset and check its columns and captions.

        Args:
            dataset: A folder written by ``Dataset.save_to_disk``, or a name for ``load_dataset``.
            split: Split of it.
            image_column: Column of images.
            caption_column: Column of captions, each a string or a list of strings.

        Raises:
            UsageError: ``datasets`` is not installed, or there is no such dataset, split or column.
        """
        self._name = str(dataset)
        self.dropped: dict[str, str] = {}
        table = _open_dataset(self._name, split)
        for option, column in (("image_column", image_column), ("caption_column", caption_column)):
            if column not in table.column_names:
                raise UsageError(
                    f"data.{option}={column}: the dataset {self._name} has the columns "
                    f"{', '.join(table.column_names)}; write data.{option}=<one of them>"
                )
        datasets = require("datasets", extra="datasets", who="data=huggingface")
        try:
            # Encoded bytes: a broken image must be found sample by sample, by us.
            self._images = table.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
        except Exception as error:
            raise UsageError(
                f"data.image_column={image_column}: the column of {self._name} is not images "
                f"({table.features[image_column]}); write data.image_column=<one of {', '.join(table.column_names)}>"
            ) from error
        self._captions = table.select_columns([caption_column])
        self._image_column, self._caption_column, self._split = image_column, caption_column, split
        self._rows = list(self._with_caption(self._captions))
        if not self._rows:
            raise UsageError(
                f"data.caption_column={caption_column}: not one of the {len(table)} rows of {self._name} has a caption "
                f"in it; write data.caption_column=<one of {', '.join(table.column_names)}>"
            )

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
        return decode(io.BytesIO(entry["bytes"]) if entry.get("bytes") else entry["path"])

    def captions(self, index: int) -> list[str]:
        """Return the captions of a row."""
        return clean_captions(self._captions[self._rows[index]][self._caption_column])

    def name(self, index: int) -> str:
        """Return the dataset, its split and the number of the row."""
        return f"{self._name}/{self._split}/{self._rows[index]}"


def _open_dataset(name: str, split: str) -> Any:
    """Load one split from a saved folder or by name."""
    datasets = require("datasets", extra="datasets", who="data=huggingface")
    saved = any(Path(name, marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        table = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split)
    except Exception as error:
        raise UsageError(
            f"data.dataset_name={name}: cannot load its split {split!r} ({type(error).__name__}: {error}); expected "
            "the name of a Hugging Face dataset, or a folder that Dataset.save_to_disk wrote"
        ) from error
    if isinstance(table, dict):
        if split not in table:
            raise UsageError(
                f"data.split={split}: the dataset {name} has the splits {', '.join(table)}; "
                "write data.split=<one of them>"
            )
        table = table[split]
    return table
