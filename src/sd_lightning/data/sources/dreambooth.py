"""Photos of a subject and pictures of its class, for DreamBooth (arXiv 2208.12242).

The photos lie in one folder, or in folders named as for kohya's scripts (``10_sks dog``: ten repeats, with the caption
"sks dog"), or in such a folder for each of several subjects. Pictures of the class lie in one folder per class prompt;
see :func:`class_folder`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from PIL import Image

from sd_lightning._errors import UsageError
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
from sd_lightning.data.sources.masks import FOLDER, find_masks, image_evidence, read_mask, without_masks
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, MaskedLoss, resized

_LEAST_PHOTOS = 2


@dataclass(frozen=True)
class Picture:
    """An image file and its caption."""

    path: str
    caption: str
    mask: str | None = None
    """Path of its mask; see :func:`read_mask`."""


@dataclass(frozen=True)
class Subject:
    """One of several subjects."""

    dir: str
    """Folder of its photos, as of a single subject."""
    prompt: str | None = None
    """Caption of its photos; None for those that lie beside them."""
    class_prompt: str | None = None
    """Caption of pictures of its class, for prior preservation."""
    repeats: int | None = None
    """How often each photo is listed; None for as many photos in an epoch as others have."""
    validation_prompt: str | None = None
    """For the pictures drawn during the run; None for the captions of its photos."""


_SUBJECT = {field.name for field in fields(Subject)}


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

    def mask(self, index: int) -> Image.Image | None:
        picture = self.pictures[index]
        return read_mask(picture.path, picture.mask, max_pixels=self.max_image_pixels)

    def has_mask(self, index: int) -> bool:
        return self.pictures[index].mask is not None

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
        return identity, image_evidence(picture.path, picture.mask, thorough=thorough), picture.caption

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
        if class_pictures:
            self.is_prior = torch.tensor([False, True]).repeat(count)
        weights = [2.0, 2.0 * prior_loss_weight] if class_pictures else [1.0]
        self.loss_weights = torch.tensor(weights).repeat(count)

    @property
    def distinct(self) -> Source:
        """The source that holds each file once."""
        return self.source


def find_subjects(
    subjects: Sequence[Mapping[str, Any]] | None, folder: str | None = None, prompt: str | None = None
) -> list[Subject]:
    """Return the subjects of ``subjects=``, or the one of ``instance_data_dir=`` and ``instance_prompt=``.

    Raises:
        UsageError: Both or neither are given, a subject has other keys or values, or two have the same prompt.
    """
    example = "'subjects=[{dir:photos/rex,prompt:a photo of sks dog},{dir:photos/tom,prompt:a photo of zwx cat}]'"
    if bool(subjects) == (folder is not None) or (subjects and prompt is not None):
        raise UsageError(
            f"dreambooth got {'subjects and instance_data_dir or instance_prompt' if subjects else 'no photos'}; "
            f"write instance_data_dir=<folder with a few photos of the subject>, or for several subjects {example}"
        )
    found: list[Subject] = []
    for given in subjects or [{"dir": str(folder), "prompt": prompt}]:
        number, texts = given.get("repeats"), [given.get(name) for name in _SUBJECT - {"repeats"}]
        is_whole = number is None or (type(number) is int and number >= 1)
        is_text = given.get("dir") and all(text is None or isinstance(text, str) for text in texts)
        is_twin = given.get("prompt") in [other.prompt for other in found if other.prompt]
        if not given.keys() <= _SUBJECT or not is_whole or not is_text or is_twin:
            raise UsageError(
                f"dreambooth got the subject {dict(given)}; expected {', '.join(sorted(_SUBJECT))}, texts of which dir "
                f"has to be there, repeats of at least 1, a prompt of its own with another rare word; write {example}"
            )
        found.append(Subject(**given))
    return found


def balanced(photos: Mapping[Subject, Sequence[Picture]]) -> list[Picture]:
    """Return the photos of all subjects, each as often as its subject's ``repeats`` say.

    Without ``repeats``, a subject's photos are repeated until there are about as many as of the one shown most.
    """
    most = max(len(own) * (subject.repeats or 1) for subject, own in photos.items())
    return [each for subject, own in photos.items() for each in [*own] * (subject.repeats or round(most / len(own)))]


def photos_of(
    subjects: Sequence[Subject], *, caption_extension: str = ".txt", masked_loss: MaskedLoss = "none"
) -> dict[Subject, list[Picture]]:
    """Return the photos of each subject, with their masks; see :func:`find_photos` and :func:`find_masks`.

    Raises:
        UsageError: Photos of a subject cannot be used, or no caption files are read.
    """
    if caption_extension != ".txt" and all(each.prompt for each in subjects):
        raise UsageError(
            f"data.caption_extension={caption_extension}: every subject has a prompt, which is the caption of all its "
            "photos; leave one of the two out"
        )
    key = "dir" if len(subjects) > 1 else "instance_data_dir"
    found = {
        each: find_photos(each.dir, each.prompt, caption_extension=caption_extension, key=key) for each in subjects
    }
    masks = find_masks((photo.path for photos in found.values() for photo in photos), masked_loss)
    return {each: [replace(photo, mask=masks.get(photo.path)) for photo in own] for each, own in found.items()}


def find_photos(
    folder: str | Path,
    prompt: str | None,
    *,
    caption_extension: str = ".txt",
    key: str = "instance_data_dir",
    apart: Collection[Path] = (),
) -> list[Picture]:
    """Return the photos of a subject; those in ``10_sks dog/`` are listed ten times.

    Args:
        folder: Folder of photos, or of kohya folders with photos, or one of these.
        prompt: Caption of all photos. Without it, a photo's caption is the first line of the caption file beside it, or
            the text in the name of its kohya folder.
        caption_extension: Ending of the caption files.
        key: Setting that gave the folder, for messages.
        apart: Resolved paths that must not be among them.

    Raises:
        UsageError: There are no photos, only one, or one without a caption that can be read.
    """
    root, extension = Path(folder), f".{caption_extension.removeprefix('.')}"
    who = f"dreambooth got {key}={folder}"
    if not root.is_dir():
        raise UsageError(
            f"{who}, which is not a folder; expected a folder with a few photos of the subject; write {key}=<folder>"
        )
    photos: list[Picture] = []
    for part in (root, *sorted(path for path in root.iterdir() if path.is_dir())):
        kohya = KOHYA_FOLDER.fullmatch(part.absolute().name)
        number = 1 if part is root else int(kohya[1]) if kohya else 0
        captions = {path: _caption(path, prompt, kohya and kohya[2], extension) for path in photos_in(part) if number}
        photos += [Picture(str(path), caption) for path, caption in captions.items()] * number
    if len(set(photos)) < _LEAST_PHOTOS:
        found = f"one photo ({photos[0].path})" if photos else "no photos"
        ignored = ignored_photos(root)
        remedy = "add photos from other angles" if ignored is None else f"not counted: {ignored}"
        raise UsageError(
            f"{who} with {found} in it; expected at least {_LEAST_PHOTOS} ({', '.join(sorted(SUFFIXES))}), 3 to 5 are "
            f"usual: from a single one the model learns the photo and not the subject; {remedy}"
        )
    if twin := next((photo.path for photo in photos if Path(photo.path).resolve() in apart), None):
        raise UsageError(f"{who}, and {twin} is trained on; move photos for validation elsewhere")
    without = next((photo for photo in photos if not photo.caption), None)
    if without is not None:
        prompt_of_all = "write 'instance_prompt=a photo of sks dog', with a rare word for the subject"
        own = f"put a {extension} file with its caption beside each photo of {key}"
        raise UsageError(
            f"{who} without instance_prompt, and {without.path} has no caption of its own; "
            f"{own if apart else prompt_of_all}"
        )
    return photos


def held_out(
    folder: str,
    trained: Mapping[Subject, Sequence[Picture]],
    *,
    caption_extension: str,
    masked_loss: MaskedLoss,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> Pictures:
    """Return the photos of ``data.val_data_dir``, which are for validation alone, captioned as those of a subject.

    Raises:
        UsageError: As for :func:`find_photos`, or one is trained on.
    """
    key, prompt = "data.val_data_dir", next(iter(trained)).prompt if len(trained) == 1 else None
    known = {Path(photo.path).resolve() for photos in trained.values() for photo in photos}
    found = dict.fromkeys(find_photos(folder, prompt, caption_extension=caption_extension, key=key, apart=known))
    masks = find_masks((photo.path for photo in found), masked_loss)
    photos = [replace(photo, mask=masks.get(photo.path)) for photo in found]
    return Pictures(photos, max_image_pixels=max_image_pixels)


def photos_in(folder: Path) -> list[Path]:
    """Return the image files of a folder that are no masks of others."""
    names = [path.name for path in images_in(folder)]
    return [folder / name for name in without_masks(str(folder), names)]


def ignored_photos(folder: str | Path, *, masked_loss: MaskedLoss = "none") -> str | None:
    """Return which files look like photos that :func:`find_photos` ignores, and the remedy; None if there are none.

    Photos in a folder with zero repeats (``0_left out``) are left out on purpose, and not named.
    """
    root = Path(folder)
    parts = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    numbers = {part: KOHYA_FOLDER.fullmatch(part.name) for part in parts}
    used = [root, *(part for part, kohya in numbers.items() if kohya and int(kohya[1]))]
    unknown = [path for part in used for path in _files(part, OTHER_SUFFIXES)]
    unnumbered = [part for part, kohya in numbers.items() if not kohya and part.name != FOLDER]
    misplaced = [path for part in unnumbered for path in [*images_in(part), *_files(part, OTHER_SUFFIXES)]]
    reasons = []
    masks = [path for part in used for path in set(images_in(part)) - set(photos_in(part))]
    if masks and masked_loss != "files":
        reasons.append(f"{_named(sorted(masks))} with names of masks: write data.masked_loss=files")
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
    """Check that all photos and their masks can be used: of a handful, each one counts.

    Raises:
        UsageError: Some cannot be decoded, have too many pixels before or after resizing, or a mask that is none.
    """
    bad = {}
    for path, mask in dict.fromkeys((photo.path, photo.mask) for photo in photos):
        try:
            resized(decode(path, max_pixels=max_pixels).size, (resolution, resolution), max_pixels)
            read_mask(path, mask, max_pixels=max_pixels)
        except BadSample as reason:
            bad[path] = str(reason)
    if bad:
        shown = "; ".join(f"{path}: {reason}" for path, reason in list(bad.items())[:5])
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise UsageError(
            f"dreambooth cannot read {len(bad)} of the {len(set(photos))} photos ({shown}{more}); mend or remove them"
        )


def find_class_pictures(folder: str | Path, prompts: Sequence[str], count: int) -> list[Picture]:
    """Return the existing class pictures, at most :func:`num_per_prompt` of each prompt, these in turn."""
    found = []
    for prompt, number in num_per_prompt(prompts, count).items():
        own = images_in(class_folder(folder, prompt, prompts))[:number]
        found += [(i / len(own), Picture(str(path), prompt)) for i, path in enumerate(own)]
    return [picture for _, picture in sorted(found, key=lambda each: each[0])]


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
        UsageError: There are such pictures, and several prompts they could belong to; or kohya's folders.
    """
    root = Path(folder)
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "class"
    own = root / f"{slug}-{hashlib.sha256(prompt.encode()).hexdigest()[:6]}"
    kohya = [part for part in sorted(root.glob("*_*")) if KOHYA_FOLDER.fullmatch(part.name) and images_in(part)]
    if kohya:
        raise UsageError(
            f"dreambooth got class_data_dir={folder} with pictures in kohya's folder {kohya[0].name}; expected them in "
            f"the folder itself; write 'class_data_dir={kohya[0]}'"
        )
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


def _caption(path: Path, prompt: str | None, of_folder: str | None, extension: str) -> str:
    """Return the caption of a photo, "" if it has none."""
    if prompt:
        return prompt
    beside, captions = path.with_suffix(extension), [(of_folder or "").strip()]
    other = next((each for each in (".txt", ".caption") if path.with_suffix(each).is_file()), None)
    if other and not beside.is_file():
        raise UsageError(
            f"dreambooth expected captions in {extension} files, and {path} has {path.with_suffix(other).name}; write "
            f"data.caption_extension={other}, or instance_prompt=<caption of all>"
        )
    if beside.is_file():
        try:
            captions = read_captions(beside) or captions
        except BadSample as reason:
            raise UsageError(
                f"dreambooth cannot read the caption of {path}: {reason}, or write instance_prompt=<caption of all>"
            ) from reason
    return captions[0]
