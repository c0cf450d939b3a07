"""Masks of the loss beside images: found, checked and read.

The mask of ``photo.jpg`` is ``photo-mask.png`` beside it, or ``photo.png`` in a folder ``masks`` beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from PIL import Image, ImageOps

from sd_lightning._errors import UsageError
from sd_lightning.data.fingerprint import file_evidence
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import is_image, open_file, opened, read_size
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, MaskedLoss, to_rgb

FOLDER = "masks"
ENDINGS = ("-mask", ".mask", "_mask", "-masklabel")
"""What the name of a mask beside an image has more than the image's; the last one is OneTrainer's."""
_EXPECTED = {
    "alpha": "is transparent anywhere; save them as PNG or WebP with an alpha channel, or write data.masked_loss=files",
    "files": "has a mask, white where the loss counts; expected photo-mask.png beside photo.jpg, or photo.png in a "
    "folder 'masks' there",
}
_LOOKED_AT = 1000
"""Number of images of which one has to be transparent."""


def masks_in(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Return the masks of images in a folder: path of the image -> path of its mask.

    Args:
        folder: The folder.
        names: Of all files in it.
    """
    images = {name: os.path.splitext(name)[0] for name in sorted(names) if is_image(name)}
    masks = {stem: os.path.join(folder, name) for name, stem in images.items()}
    inside = os.path.join(folder, FOLDER)
    apart = sorted(filter(is_image, os.listdir(inside))) if os.path.isdir(inside) else []
    masks |= {f"{FOLDER}/{os.path.splitext(name)[0]}": os.path.join(inside, name) for name in apart}
    found = {}
    for name, stem in images.items():
        known = (f"{prefix}{stem}{ending}" for prefix in (f"{FOLDER}/", "") for ending in ("", *ENDINGS))
        mask = next((masks[each] for each in known if each in masks and each != stem), None)
        if mask is not None:
            found[os.path.join(folder, name)] = mask
    return found


def find_masks(paths: Iterable[str], masked_loss: MaskedLoss, where: str) -> dict[str, str]:
    """Return the masks of images: path of the image -> path of its mask.

    Args:
        paths: Of the images.
        masked_loss: Where their masks are; an image whose transparency is its mask is named as its own mask.
        where: The setting that names the images.

    Raises:
        UsageError: None of the images has a mask.
    """
    images = list(dict.fromkeys(paths))
    if masked_loss == "alpha":
        found = {path: path for path in images}
        has_any = any(map(_is_transparent, images[:: max(len(images) // _LOOKED_AT, 1)]))
    else:
        folders = dict.fromkeys(map(os.path.dirname, images)) if masked_loss == "files" else ()
        masks = {path: mask for each in folders for path, mask in masks_in(each, os.listdir(each or ".")).items()}
        found = {path: masks[path] for path in images if path in masks}
        has_any = bool(found)
    if not has_any and masked_loss != "none":
        raise UsageError(
            f"data.masked_loss={masked_loss}: none of the {len(images)} images of {where} {_EXPECTED[masked_loss]}"
        )
    return found


def without_masks(folder: str, names: Sequence[str]) -> list[str]:
    """Return the names of a folder's files that are no masks of other files there."""
    masks = set(masks_in(folder, names).values())
    return [name for name in names if os.path.join(folder, name) not in masks]


def read_mask(path: str, mask: str | None, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image | None:
    """Return the mask of an image, mode L, in the image's size: 255 where the loss counts.

    Args:
        path: Path of the image.
        mask: Path of its mask, white where the loss counts; the image itself, which counts where it is not transparent;
            or None.
        max_pixels: Limit on the pixels of either.

    Returns:
        The mask; None if there is none, or the image is not transparent.

    Raises:
        BadSample: It cannot be read, has another shape than the image, or nothing counts.
    """
    if mask is None:
        return None
    with open_file(mask) as file, opened(file, max_pixels) as image:
        image.load()
        if path != mask:
            read = to_rgb(image, background="black").convert("L")
        elif image.has_transparency_data:
            read = ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
        else:
            return None
    if not read.getbbox():
        raise BadSample(f"its mask {mask} is black or transparent everywhere: nothing counts")
    with open_file(path) as file:
        height, width = read_size(file, max_pixels=max_pixels)
    if abs(read.width * height - read.height * width) > max(*read.size, width, height):
        raise BadSample(f"its mask {mask}, {read.width} x {read.height}, has another shape than {width} x {height}")
    return read if read.size == (width, height) else read.resize((width, height), Image.Resampling.BOX)


def image_evidence(path: str, mask: str | None, *, thorough: bool) -> str:
    """Return what a fingerprint hashes of an image and its mask; see :func:`file_evidence`."""
    return "".join(file_evidence(each, thorough=thorough) for each in dict.fromkeys((path, mask)) if each)


def _is_transparent(path: str) -> bool:
    try:
        with Image.open(path) as image:
            return image.has_transparency_data
    except Exception:  # who reads it tells what is wrong
        return False
