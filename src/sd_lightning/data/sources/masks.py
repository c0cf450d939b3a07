"""Masks of the loss beside images: found, checked, read, cut as the images are, and brought to the latents' size.

The mask of ``photo.jpg`` is ``photo-mask.png`` beside it, or ``photo.png`` in a folder ``masks`` beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sd_lightning.data.fingerprint import file_evidence
from sd_lightning.data.order import Shape
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import is_image, open_file, opened, read_size
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, MaskedLoss, place, to_rgb

FOLDER = "masks"
Crop = tuple[float, float]
"""Vertical and horizontal position as fractions in [0, 1); see :func:`place`."""
ENDINGS = ("-mask", ".mask", "_mask", "-masklabel")
"""What the name of a mask beside an image has more than the image's; the last one is OneTrainer's."""
EXPECTED = {
    "alpha": "is transparent anywhere; save them as PNG or WebP with an alpha channel, or write data.masked_loss=files",
    "files": "has a mask, white where the loss counts; expected photo-mask.png beside photo.jpg, or photo.png in a "
    "folder 'masks' there",
}
"""What is to be done where no image has a mask, by ``masked_loss``."""
_LOOKED_AT = 200
"""Number of images that are decoded to find transparent ones; of more, all may be transparent if one of these is."""
_LEAST = 128
"""The brightest value of a mask is at least this, else it is no mask of 0 to 255: some programs write 0 and 1."""


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


def find_masks(paths: Iterable[str], masked_loss: MaskedLoss) -> dict[str, str]:
    """Return the masks of images: path of the image -> path of its mask.

    Args:
        paths: Of the images.
        masked_loss: Where their masks are; an image whose transparency is its mask is named as its own mask.
    """
    images = list(dict.fromkeys(paths))
    if masked_loss == "alpha":
        step = -(-len(images) // _LOOKED_AT)
        transparent = filter(_is_transparent, images[::step])
        found = transparent if step == 1 else images if any(transparent) else ()
        return {path: path for path in found}
    folders = dict.fromkeys(map(os.path.dirname, images)) if masked_loss == "files" else ()
    masks = {path: mask for each in folders for path, mask in masks_in(each, os.listdir(each or ".")).items()}
    return {path: masks[path] for path in images if path in masks}


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
        BadSample: It cannot be read, has another shape than the image, or nothing in it is bright.
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
    brightest: Any = read.getextrema()[1]
    if brightest < _LEAST:
        raise BadSample(f"its mask {mask} has values up to {brightest}: nothing counts; expected 255 for what does")
    with open_file(path) as file:
        height, width = read_size(file, max_pixels=max_pixels)
    if abs(read.width * height - read.height * width) > max(*read.size, width, height):
        raise BadSample(f"its mask {mask}, {read.width} x {read.height}, has another shape than {width} x {height}")
    return read if read.size == (width, height) else read.resize((width, height), Image.Resampling.BOX)


def place_mask(
    mask: Image.Image, shape: Shape, *, max_pixels: int, crop: Crop | None = None, flip: bool = False
) -> tuple[np.ndarray, Crop | None]:
    """Cut a mask as its image will be; a random crop that has nothing of the mask is moved there.

    Args:
        mask: Mode L, as large as its image.
        shape: (height, width) of the result, in pixels.
        max_pixels: Limit on its pixels, before and after resizing.
        crop: Position of the crop; None for the centre, which is not moved.
        flip: Mirror left and right.

    Returns:
        (height, width) uint8, and where to crop the image.

    Raises:
        BadSample: Nothing counts in the crop.
    """
    for at in (crop, crop and _around(ImageOps.mirror(mask) if flip else mask)):
        pixels = place(mask, shape, max_pixels=max_pixels, crop=at, flip=flip, mode="L").pixels
        if pixels.any():
            return pixels, at
    raise BadSample(
        f"nothing of what its mask has counts in the crop of {shape[1]} x {shape[0]}; crop the image around it, or "
        "write data.enable_bucket=true data.cache_latents=false"
    )


def _around(mask: Image.Image) -> Crop:
    """Return a crop that has the middle one of the pixels that count."""
    counted = np.flatnonzero(np.asarray(mask))
    y, x = divmod(int(counted[len(counted) // 2]), mask.width)
    return (y + 0.5) / mask.height, (x + 0.5) / mask.width  # at c of the room, a crop has what is at c of the image


def loss_weights(mask: np.ndarray, stride: int, unmasked_weight: float) -> Tensor:
    """Return the weight of each of a sample's latents in its loss.

    Args:
        mask: (H, W) uint8, from :func:`place_mask`: 255 where the loss counts, 0 where it does not.
        stride: Image pixels per latent along one side; the mean of their mask is that of the latent.
        unmasked_weight: Weight where the mask is 0.

    Returns:
        (1, H / stride, W / stride) float32 in [``unmasked_weight``, 1].
    """
    height, width = mask.shape
    shares = mask.reshape(height // stride, stride, width // stride, stride).mean((1, 3)) / 255
    return torch.from_numpy(unmasked_weight + (1 - unmasked_weight) * shares).float()[None]


def image_evidence(path: str, mask: str | None, *, thorough: bool) -> str:
    """Return what a fingerprint hashes of an image and its mask; see :func:`file_evidence`."""
    return "".join(file_evidence(each, thorough=thorough) for each in dict.fromkeys((path, mask)) if each)


def _is_transparent(path: str) -> bool:
    try:
        with open_file(path) as file, opened(file, MAX_IMAGE_PIXELS) as image:
            return image.has_transparency_data and any(image.convert("RGBA").getchannel("A").histogram()[:255])
    except Exception:  # who reads it tells what is wrong
        return False
