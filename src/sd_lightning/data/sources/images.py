"""Captioned images from a folder.

Missing files and missing or empty captions are found when the folder is opened, and listed in ``dropped``; broken
images are found when they are decoded.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.fingerprint import file_evidence
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources import masks
from sd_lightning.data.sources.image_files import (
    KOHYA_FOLDER,
    MAX_CAPTION_BYTES,
    OTHER_SUFFIXES,
    SUFFIXES,
    EncodedImages,
    caption_problem,
    clean_captions,
    file_problem,
    is_image,
    is_outside,
    nothing_usable,
    open_file,
    read_captions,
    repeats,
    utf8,
    walk,
)
from sd_lightning.data.sources.masks import find_masks, image_evidence, read_mask
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, MaskedLoss
from sd_lightning.storage.runs import is_run

log = logging.getLogger(__name__)

METADATA = ("metadata.jsonl", "metadata.csv")
"""Files with a line for each image; the first one that is there counts, a table only with a column file_name."""
_IF_MASK = "; if it is a mask, write data.masked_loss=files"


class ImageFolder(EncodedImages):
    """Images in a folder, captioned by ``metadata.jsonl`` or by a ``.txt`` file beside each image.

    Every line of ``metadata.jsonl`` is an object with ``file_name`` (relative to the folder) and the
    caption, a string or a list of strings; ``metadata.csv`` has columns of these names. Without them, all images
    below the folder are used (run folders are skipped), each with the ``.txt`` file of the same name, which has one
    caption per line.

    Attributes:
        dropped: Name -> reason of unusable entries.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        caption_column: str = "text",
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        allow_outside: bool = False,
        caption_extension: str = ".txt",
        folder_repeats: bool = False,
        masked_loss: MaskedLoss = "none",
    ) -> None:
        """Find the images and check that files and captions exist.

        Args:
            root: The folder.
            caption_column: Key of the caption in ``metadata.jsonl``.
            max_image_pixels: Limit on an image's pixels.
            allow_outside: Whether ``metadata.jsonl`` may name images outside of the folder.
            caption_extension: Ending of the caption files beside the images.
            folder_repeats: Whether the images of a subfolder ``10_sks dog`` count ten times and have the caption "sks
                dog" unless a caption file is beside them, as for kohya's scripts.
            masked_loss: Where masks of the loss are; masks in files are no images then.

        Raises:
            UsageError: There is no such folder or column, no usable image, or ``metadata.jsonl`` is not UTF-8 or names
                images outside of the folder.
        """
        self.root = Path(root)
        self.max_image_pixels = max_image_pixels
        self.caption_column = caption_column
        self.allow_outside = allow_outside
        self._extension = f".{caption_extension.removeprefix('.')}"
        self._folder_repeats = folder_repeats
        self._masks_are_files = masked_loss == "files"
        self._of_folder: dict[str, str] = {}
        """Path -> caption of the images whose folder gives it."""
        self.dropped: dict[str, str] = {}
        self._paths: list[str] = []
        self._captions: list[list[str]] | None = None
        if not self.root.is_dir():
            raise UsageError(
                f"ImageFolder: there is no folder {str(self.root)!r}; expected a folder of images. "
                "Write data.train_data_dir=<folder>"
            )
        self._metadata = next((path for path in map(self.root.joinpath, METADATA) if _names_images(path)), None)
        if self._metadata is not None:
            self._captions = self._read_metadata()
        else:
            self._find_sidecars()
        self._repeats = {} if self._captions is None and not folder_repeats else repeats(self._paths)
        if not self._paths:
            kinds = ", ".join(sorted(SUFFIXES))
            remedy = f"a folder of images ({kinds}) with {METADATA[0]} or a {self._extension} caption beside each"
            raise nothing_usable("ImageFolder", root, self.dropped, remedy)
        self._masks = find_masks(self._paths, masked_loss)

    def __len__(self) -> int:
        return len(self._paths)

    def open(self, index: int) -> BinaryIO:
        return open_file(self._paths[index])

    def captions(self, index: int) -> list[str]:
        if self._captions is not None:
            return self._captions[index]
        if self._paths[index] in self._of_folder:
            return [self._of_folder[self._paths[index]]]
        path = self._sidecar(self._paths[index])
        captions = read_captions(path)
        if not captions:
            raise BadSample(f"the caption file {path} is empty")
        return captions

    def mask(self, index: int) -> Image.Image | None:
        path = self._paths[index]
        return read_mask(path, self._masks.get(path), max_pixels=self.max_image_pixels)

    def has_mask(self, index: int) -> bool:
        return self._paths[index] in self._masks

    def name(self, index: int) -> str:
        return self._paths[index]

    def key(self, index: int) -> str:
        """Return the path within the folder; with its count if ``metadata.jsonl`` names the file again."""
        return self._relative(index) + self._repeats.get(index, "")

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        path = self._paths[index]
        if self._captions is None and not thorough:
            captions = file_evidence(self._sidecar(path), thorough=False)
        else:
            captions = self.caption_evidence(index)
        return self._relative(index), image_evidence(path, self._masks.get(path), thorough=thorough), captions

    def _relative(self, index: int) -> str:
        return self._paths[index].removeprefix(f"{self.root}{os.sep}").replace(os.sep, "/")

    def _read_metadata(self) -> list[list[str]]:
        """Collect the image paths of the metadata file, and return their captions."""
        found: list[list[str]] = []
        for number, row in self._rows():
            file_name = row.get("file_name")
            if not isinstance(file_name, str) or not file_name:
                self.dropped[f"{self._metadata}:{number}"] = "no file_name"
                continue
            if not self._paths:
                self._check_column(number, row)
            if not self.allow_outside and is_outside(file_name, self.root):
                raise UsageError(
                    f"ImageFolder: line {number} of {self._metadata} names {file_name}, which is outside of the "
                    "folder; expected paths within it; move the images, or write data.allow_outside=true if you trust "
                    "who wrote the file"
                )
            path = str(self.root / file_name)
            captions = clean_captions(row.get(self.caption_column))
            problem = file_problem(path) if captions else caption_problem(row.get(self.caption_column))
            if problem:
                self.dropped[path] = problem
            else:
                self._paths.append(path)
                found.append(captions)
        self._warn_of_unnamed()
        return found

    def _warn_of_unnamed(self) -> None:
        """Log how many images of the folder the metadata file does not name."""
        named = {os.path.normpath(path) for path in (*self._paths, *self.dropped)}
        unnamed = []
        for folder, names in self._folders():
            paths = (os.path.join(folder, name) for name in names if is_image(name))
            unnamed += [path for path in paths if os.path.normpath(path) not in named]
        if unnamed:
            log.warning(
                "data: %d images in %s are left out, because %s does not name them (the first: %s)",
                *(len(unnamed), self.root, os.path.basename(str(self._metadata)), unnamed[0]),
            )

    def _folders(self) -> Iterator[tuple[str, list[str]]]:
        """Yield path and files of the root and of all folders below it but runs, whose pictures are generated ones."""
        for folder, subfolders, names in walk(self.root):
            if Path(folder) != self.root and is_run(Path(folder)):
                log.info("data: %s is the folder of a run, and left out", folder)
                subfolders.clear()
            elif self._masks_are_files:
                subfolders[:] = [name for name in subfolders if name != masks.FOLDER]
                yield folder, masks.without_masks(folder, names)
            else:
                yield folder, names

    def _check_column(self, number: int, row: dict[str, object]) -> None:
        """Raise if a line has no caption column, or if that column names the image."""
        others = [name for name in row if name != "file_name"]
        if self.caption_column in others:
            return
        column = next((name for name in others if clean_captions(row[name])), "<key of the caption>")
        wrong = "names the image" if self.caption_column == "file_name" else f"is no key of line {number}"
        has = f"which has {', '.join(row)}" if others else "which has no other key than file_name"
        raise UsageError(
            f"ImageFolder got data.caption_column={self.caption_column}, which {wrong} of {self._metadata}, "
            f"{has}; {'' if others else 'add captions to it, and '}write data.caption_column={column}"
        )

    def _rows(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Yield (line number, object) of each metadata line; drop lines that are too long or hold no object."""
        path = self._metadata
        assert path is not None
        try:
            if path.suffix == ".csv":
                with open(path, newline="", encoding="utf-8-sig") as table:
                    rows = csv.DictReader(table)
                    yield from ((rows.line_num, {name: row[name] for name in row if name}) for row in rows)
                return
            with open(path, "rb") as file:  # binary: lines end with "\n" only, a caption may contain U+2028
                for number in itertools.count(1):
                    line = file.readline(MAX_CAPTION_BYTES + 1)
                    if not line:
                        return
                    if len(line) > MAX_CAPTION_BYTES:
                        self.dropped[f"{path}:{number}"] = f"longer than captions are ({MAX_CAPTION_BYTES} bytes)"
                        while line and not line.endswith(b"\n"):
                            line = file.readline(MAX_CAPTION_BYTES)
                    elif (text := utf8(line, path)).strip():
                        row = _parsed(text)
                        if isinstance(row, dict):
                            yield number, row
                        else:
                            self.dropped[f"{path}:{number}"] = f"not a JSON object: {text.strip()[:60]!r}"
        except OSError as error:
            raise UsageError(f"ImageFolder cannot read {path} ({error.strerror}); mend that, or remove it") from error
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"ImageFolder cannot read {path} ({error}); save it as CSV in UTF-8") from error
        except BadSample as reason:
            raise UsageError(f"ImageFolder got data.train_data_dir={self.root}: {reason}") from reason

    def _find_sidecars(self) -> None:
        """Collect the images with captions below the root, in a stable order and in one scan."""
        for folder, names in self._folders():
            kohya = KOHYA_FOLDER.fullmatch(os.path.basename(folder)) if self._folder_repeats else None
            present, count = set(names), int(kohya[1]) if kohya else 1
            captioned = set(masks.without_masks(folder, names)) if kohya else set()  # by the folder
            for name in names:
                path, caption = os.path.join(folder, name), self._sidecar(name)
                if os.path.splitext(name)[1].lower() in OTHER_SUFFIXES and caption in present:
                    self.dropped[path] = "it is of a kind that cannot be read; convert it to JPEG"
                if not is_image(name):
                    continue
                problem = file_problem(path)
                if caption in present:
                    problem = problem or file_problem(self._sidecar(path), max_bytes=MAX_CAPTION_BYTES)
                elif kohya is not None and name in captioned and not self._other_captions(name, present):
                    self._of_folder[path] = kohya[2].strip()
                else:
                    problem = self._without_caption(folder, name, present)
                if problem:
                    self.dropped[path] = problem
                else:
                    self._paths += [path] * count
        left = [path for path, problem in self.dropped.items() if problem.endswith(_IF_MASK) and self._paths]
        if left:
            log.warning("data: %d images named like masks are left out, such as %s%s", len(left), left[0], _IF_MASK)
        for path in left:  # no training images that cannot be read
            del self.dropped[path]

    def _without_caption(self, folder: str, name: str, present: set[str]) -> str:
        """Return what is wrong with an image without a caption file, and the setting that finds another one."""
        problem, others = f"it has no caption file {self._sidecar(name)}", self._other_captions(name, present)
        if others:
            return f"{problem}; for {others[0]} write data.caption_extension={os.path.splitext(others[0])[1]}"
        if os.path.splitext(name)[0].endswith(masks.ENDINGS) or os.path.basename(folder) == masks.FOLDER:
            return problem + _IF_MASK
        if KOHYA_FOLDER.fullmatch(os.path.basename(folder)):
            return f"{problem}; if its folder names repeats and caption, write data.folder_repeats=true"
        return problem

    @staticmethod
    def _other_captions(name: str, present: set[str]) -> list[str]:
        """Return the files beside an image that have captions for other settings."""
        return [other for ending in (".txt", ".caption") if (other := os.path.splitext(name)[0] + ending) in present]

    def _sidecar(self, path: str) -> str:
        """Return the caption file of an image."""
        return os.path.splitext(path)[0] + self._extension


def _names_images(path: Path) -> bool:
    """Return whether a file is there and has a line for each image; tables of other programs have the same name."""
    if path.suffix != ".csv" or not path.is_file():
        return path.is_file()
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as table:
            return "file_name" in next(csv.reader([table.readline(MAX_CAPTION_BYTES)]), [])
    except (OSError, csv.Error):
        return True  # who reads it tells what is wrong


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number with too many digits, brackets nested too deeply
        return None
