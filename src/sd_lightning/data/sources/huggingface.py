"""Captioned images from a Hugging Face dataset."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import (
    EncodedImages,
    check_column,
    choose,
    clean_captions,
    nearest,
    open_file,
)
from sd_lightning.data.transform import MAX_IMAGE_PIXELS
from sd_lightning.storage.atomic import unused

if TYPE_CHECKING:
    from datasets import Dataset

_LOOKED_AT = 20
"""Number of rows checked to decide whether a text column holds image paths."""


class HuggingFaceImages(EncodedImages):
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
            split: Split of the dataset.
            image_column: Column of images.
            caption_column: Column of captions, each a string or a list of strings.
            max_image_pixels: Limit on an image's pixels.

        Raises:
            UsageError: ``datasets`` is not installed, there is no such dataset, split or column, or a column holds
                no images or captions.
        """
        self._name, self._split = str(dataset), split
        self._image_column, self._caption_column = image_column, caption_column
        self.max_image_pixels = max_image_pixels
        table = _open_dataset(self._name, split)
        for option, column in (("image_column", image_column), ("caption_column", caption_column)):
            check_column(option, column, table.column_names, f"the dataset {self._name}")
        texts = [name for name, feature in table.features.items() if _is_text(feature)]
        if caption_column not in texts:
            raise UsageError(
                f"data.caption_column={caption_column}: the column of {self._name} is not text "
                f"({table.features[caption_column]}); {choose('caption_column', texts)}"
            )
        self.fingerprint = table._fingerprint
        self._images = self._open_images(table)
        self._captions = table.select_columns([caption_column])
        with_caption = [bool(clean_captions(entry[caption_column])) for entry in self._captions]
        self._rows = [row for row, has in enumerate(with_caption) if has]
        self.dropped = {
            f"{self._name}/{split}/{row}": "its caption is empty" for row, has in enumerate(with_caption) if not has
        }
        if not self._rows:
            texts.remove(caption_column)
            raise UsageError(
                f"data.caption_column={caption_column}: not one of the {len(table)} rows of {self._name} has a caption "
                f"in it; {choose('caption_column', texts)}"
            )

    def _open_images(self, table: Dataset) -> Dataset:
        """Return the image column undecoded: we decode each image, so that a broken one is a bad sample."""
        datasets = require("datasets", extra="datasets", who="data=huggingface")
        column = self._image_column
        feature = table.features[column]
        try:
            images = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        except Exception:
            images = None
        if images is not None and not isinstance(feature, datasets.Image):
            # A text column may hold paths.
            first = [entry for entry in (images[row][column] for row in range(min(_LOOKED_AT, len(images)))) if entry]
            if not any(entry.get("bytes") or os.path.isfile(entry["path"]) for entry in first):
                images = None
        if images is None:
            columns = [name for name, each in table.features.items() if isinstance(each, datasets.Image)]
            raise UsageError(
                f"data.image_column={column}: the column of {self._name} is not images ({feature}); "
                f"{choose('image_column', columns)}"
            )
        return images

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, index: int) -> BinaryIO:
        entry = self._images[self._rows[index]][self._image_column]
        if not entry or not (entry.get("bytes") or entry.get("path")):
            raise BadSample("it has no image")
        return io.BytesIO(entry["bytes"]) if entry.get("bytes") else open_file(entry["path"])

    def captions(self, index: int) -> list[str]:
        return clean_captions(self._captions[self._rows[index]][self._caption_column])

    def name(self, index: int) -> str:
        return f"{self._name}/{self._split}/{self._rows[index]}"

    def key(self, index: int) -> str:
        """Return the number of the row."""
        return str(self._rows[index])


def _is_text(feature: Any) -> bool:
    """Return whether a column of a Hugging Face dataset holds strings, or lists of strings."""
    inner = getattr(feature, "feature", feature)  # only the features of lists have one
    return getattr(inner, "dtype", None) in ("string", "large_string", "string_view")  # some features have no dtype


def check_not_scanned(name: str, run_dir: Path) -> None:
    """Check that a run is not inside a folder that ``datasets`` scans.

    Args:
        name: The dataset.
        run_dir: Folder of the run.

    Raises:
        UsageError: Its pictures would become data.
    """
    is_scanned = Path(name).is_dir() and not _is_saved_dataset(name)
    if is_scanned and run_dir.resolve().is_relative_to(Path(name).resolve()):
        raise UsageError(
            f"data.dataset_name={name}: output_dir={run_dir} lies in it, and the run's pictures would become data; "
            f"expected two folders apart; write output_dir={unused(f'{Path(name)}-runs/{run_dir.name}')}"
        )


def _is_saved_dataset(name: str) -> bool:
    """Return whether ``Dataset.save_to_disk`` wrote a folder: it lists its files, other folders are scanned."""
    return any(Path(name, marker).is_file() for marker in ("state.json", "dataset_dict.json"))


def _open_dataset(name: str, split: str) -> Dataset:
    """Load one split from a saved folder or by name."""
    datasets = require("datasets", extra="datasets", who="data=huggingface")
    try:
        table = datasets.load_from_disk(name) if _is_saved_dataset(name) else datasets.load_dataset(name, split=split)
    except Exception as error:
        raise UsageError(
            f"data.dataset_name={name}: cannot load its split {split!r} ({type(error).__name__}: {error}); give "
            "the name of a Hugging Face dataset, or a folder that Dataset.save_to_disk wrote"
        ) from error
    if isinstance(table, dict) and split not in table:
        near = nearest(split, table, next(iter(table), "<split>"))
        raise UsageError(
            f"data.split={split}: the dataset {name} has the splits {', '.join(table)}; write data.split={near}"
        )
    return table[split] if isinstance(table, dict) else table
