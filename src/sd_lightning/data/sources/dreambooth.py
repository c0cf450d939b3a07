"""Photos of a subject and pictures of its class, for DreamBooth (arXiv 2208.12242).

The photos lie in one folder, or in folders named as for kohya's scripts (``10_sks dog``: ten repeats, with the caption
"sks dog"). Pictures of the class lie in one folder per class prompt; see :func:`class_folder`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.fingerprint import file_evidence
from sd_lightning.data.source import BadSample, Source, SourceSubset
from sd_lightning.data.sources.image_files import (
    KOHYA_FOLDER,
    OTHER_SUFFIXES,
    SUFFIXES,
    EncodedImages,
    decode,
    open_file,
    read_captions,
    repeats,
)
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, resized

_LEAST_PHOTOS = 2


@dataclass(frozen=True)
class Picture:
    """An image file and its caption."""

    path: str
    caption: str


class Pictures(EncodedImages):
    """Source of image files with one caption each; files are not checked before they are decoded."""

    def __init__(self, pictures: Sequence[Picture], *, max_image_pixels: int = MAX_IMAGE_PIXELS) -> None:
        self.pictures = list(pictures)
        self.max_image_pixels = max_image_pixels
        self._repeats = repeats(map(self._in_folder, range(len(self.pictures))))

    def __len__(self) -> int:
        return len(self.pictures)

    def open(self, index: int) -> BinaryIO:
        return open_file(self.pictures[index].path)

    def captions(self, index: int) -> list[str]:
        return [self.pictures[index].caption]

    def name(self, index: int) -> str:
        return self.pictures[index].path

    def key(self, index: int) -> str:
        """Return a picture's file name with its folder: photos and class pictures may have the same names."""
        return self._in_folder(index) + self._repeats.get(index, "")

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Identify a picture by its file name, and by its kohya folder if it has one."""
        picture, name = self.pictures[index], self._in_folder(index)
        folder, _, file = name.rpartition("/")
        identity = name if KOHYA_FOLDER.fullmatch(folder) else file
        return identity, file_evidence(picture.path, thorough=thorough), picture.caption

    def _in_folder(self, index: int) -> str:
        path = Path(self.pictures[index].path)
        return f"{path.parent.name}/{path.name}"


class SubjectAndClass(SourceSubset):
    """Source of photos of a subject, each followed by a picture of its class if there are any.

    An epoch shows every photo equally often. With prior preservation it has as many class pictures as photos, in pairs
    that stay together when shuffled (``group_size``), so that even a batch of two has one of each.

    Attributes:
        loss_weights: (N,) float32. The mean of the weighted losses over a batch is DreamBooth's
            ``instance_loss + prior_loss_weight * prior_loss`` (arXiv 2208.12242, equation 2).
    """

    def __init__(
        self,
        photos: Sequence[Picture],
        class_pictures: Sequence[Picture] = (),
        *,
        prior_loss_weight: float = 1.0,
        min_samples: int = 1,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
    ) -> None:
        """Arrange the samples of an epoch.

        Args:
            photos: Photos of the subject; a photo listed n times is shown n times as often.
            class_pictures: Pictures of the class, for prior preservation.
            prior_loss_weight: Loss weight of the class pictures.
            min_samples: Minimum length of an epoch; photos are repeated to reach it.
            max_image_pixels: Limit on an image's pixels.

        Raises:
            UsageError: The weight is negative.
        """
        if not prior_loss_weight >= 0:
            raise UsageError(
                f"dreambooth got prior_loss_weight={prior_loss_weight}; expected a number of at least 0; write "
                "prior_loss_weight=1"
            )
        groups = [group for group in (photos, class_pictures) if group]
        files = list(dict.fromkeys([*photos, *class_pictures]))
        row = {picture: i for i, picture in enumerate(files)}
        self.group_size = len(groups)
        least = max(len(class_pictures), -(-min_samples // self.group_size))
        count = -(-least // len(photos)) * len(photos)
        rows = [row[group[i % len(group)]] for i in range(count) for group in groups]
        super().__init__(Pictures(files, max_image_pixels=max_image_pixels), rows)
        self.rows = torch.tensor(rows)
        weights = [2.0, 2.0 * prior_loss_weight] if class_pictures else [1.0]
        self.loss_weights = torch.tensor(weights).repeat(count)

    @property
    def distinct(self) -> Source:
        """The source that holds each file once."""
        return self.source


def find_photos(folder: str | Path, prompt: str | None) -> list[Picture]:
    """Return the photos of the subject; those in ``10_sks dog/`` are listed ten times.

    Args:
        folder: Folder of photos, or of kohya folders with photos.
        prompt: Caption of all photos. Without it, a photo's caption is the first line of the ``.txt`` file beside it,
            or the text in the name of its kohya folder.

    Raises:
        UsageError: There are no photos, only one, or one without a caption that can be read.
    """
    root = Path(folder)
    who = f"dreambooth got instance_data_dir={folder}"
    if not root.is_dir():
        raise UsageError(
            f"{who}, which is not a folder; expected a folder with a few photos of the subject; write "
            "instance_data_dir=<folder>"
        )
    photos = [Picture(str(path), _caption(path, prompt, None)) for path in images_in(root)]
    for part in sorted(path for path in root.iterdir() if path.is_dir()):
        kohya = KOHYA_FOLDER.fullmatch(part.name)
        if kohya and int(kohya[1]) > 0:
            pictures = [Picture(str(path), _caption(path, prompt, kohya[2].strip())) for path in images_in(part)]
            photos += pictures * int(kohya[1])
    if len(set(photos)) < _LEAST_PHOTOS:
        found = f"one photo ({photos[0].path})" if photos else "no photos"
        ignored = ignored_photos(root)
        remedy = "add photos from other angles" if ignored is None else f"not counted: {ignored}"
        raise UsageError(
            f"{who} with {found} in it; expected at least {_LEAST_PHOTOS} ({', '.join(sorted(SUFFIXES))}), 3 to 5 are "
            f"usual: from a single one the model learns the photo and not the subject; {remedy}"
        )
    without = next((photo for photo in photos if not photo.caption), None)
    if without is not None:
        raise UsageError(
            f"{who} without instance_prompt, and {without.path} has no caption of its own; write "
            "'instance_prompt=a photo of sks dog', with a rare word for the subject"
        )
    return photos


def ignored_photos(folder: str | Path) -> str | None:
    """Return which files look like photos that :func:`find_photos` ignores, and the remedy; None if there are none.

    Photos in a folder with zero repeats (``0_left out``) are left out on purpose, and not named.
    """
    root = Path(folder)
    parts = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    numbers = {part: KOHYA_FOLDER.fullmatch(part.name) for part in parts}
    used = [root, *(part for part, kohya in numbers.items() if kohya and int(kohya[1]))]
    unknown = [path for part in used for path in _files(part, OTHER_SUFFIXES)]
    unnumbered = [part for part, kohya in numbers.items() if not kohya]
    misplaced = [path for part in unnumbered for path in [*images_in(part), *_files(part, OTHER_SUFFIXES)]]
    reasons = []
    if unknown:
        reasons.append(f"{_named(unknown)} of a kind that cannot be read: convert to JPEG")
    if misplaced:
        part = misplaced[0].parent.name
        reasons.append(
            f"{_named(misplaced)} in folders without a number of repeats: rename {part} to '10_{part}', with what its "
            "photos are captioned with, or move its photos up"
        )
    return "; ".join(reasons) or None


def check_readable(photos: Sequence[Picture], *, resolution: int, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
    """Check that all photos can be decoded: of a handful, each one counts.

    Raises:
        UsageError: Some cannot be decoded, or have too many pixels before or after resizing.
    """
    bad = {}
    for path in dict.fromkeys(photo.path for photo in photos):
        try:
            resized(decode(path, max_pixels=max_pixels).size, (resolution, resolution), max_pixels)
        except BadSample as reason:
            bad[path] = str(reason)
    if bad:
        shown = "; ".join(f"{path}: {reason}" for path, reason in list(bad.items())[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UsageError(
            f"dreambooth cannot read {len(bad)} of the {len(set(photos))} photos ({shown}{more}); mend or remove them"
        )


def find_class_pictures(folder: str | Path, prompts: Sequence[str], count: int) -> list[Picture]:
    """Return the existing class pictures, at most :func:`num_per_prompt` of each prompt."""
    return [
        Picture(str(path), prompt)
        for prompt, number in num_per_prompt(prompts, count).items()
        for path in images_in(class_folder(folder, prompt, prompts))[:number]
    ]


def num_per_prompt(prompts: Sequence[str], count: int) -> dict[str, int]:
    """Divide ``num_class_images`` among the class prompts; a prompt listed twice gets twice as many.

    The first prompts get the remainder, so that the sum is ``num_class_images``.
    """
    each, left = divmod(count, len(prompts))
    shares = dict.fromkeys(prompts, 0)
    for i, prompt in enumerate(prompts):
        shares[prompt] += each + (i < left)
    return shares


def class_folder(folder: str | Path, prompt: str, prompts: Sequence[str]) -> Path:
    """Return the folder of a class prompt's pictures: its own subfolder, or ``class_data_dir`` itself.

    With one class prompt, pictures directly in ``class_data_dir`` are used, where diffusers' scripts put them.

    Raises:
        UsageError: There are such pictures, and several prompts that they could belong to.
    """
    root = Path(folder)
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "class"
    own = root / f"{slug}-{hashlib.sha256(prompt.encode()).hexdigest()[:6]}"
    if not images_in(root):
        return own
    if len(set(prompts)) > 1:
        raise UsageError(
            f"dreambooth got class_data_dir={folder} with pictures in it and {len(set(prompts))} class prompts; "
            f"expected pictures in a folder per prompt, as in {own}; move them, or choose another class_data_dir"
        )
    return root


def images_in(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name; none if it does not exist."""
    return _files(folder, SUFFIXES)


def _files(folder: Path, suffixes: frozenset[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (path for path in folder.iterdir() if path.suffix.lower() in suffixes and not path.name.startswith("."))
    return sorted(path for path in files if path.is_file())


def _named(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return f"{len(files)} file(s) ({', '.join(map(str, files[:3]))}{more})"


def _caption(path: Path, prompt: str | None, of_folder: str | None) -> str:
    """Return the caption of a photo, "" if it has none."""
    if prompt:
        return prompt
    beside = path.with_suffix(".txt")
    captions: list[str] = []
    if beside.is_file():
        try:
            captions = read_captions(beside)
        except BadSample as reason:
            raise UsageError(
                f"dreambooth cannot read the caption of {path}: {reason}, or write instance_prompt=<caption of all>"
            ) from reason
    return captions[0] if captions else of_folder or ""
