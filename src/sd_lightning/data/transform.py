"""Image transforms with PIL: orientation, colour, resize, crop and flip.

The caller passes the random numbers, so that a crop depends on the sample and the epoch, not on the worker process.
An image's number of pixels is checked before they are allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.shapes import Shape
from sd_lightning.data.source import BadSample, Source

MAX_IMAGE_PIXELS = 128_000_000
"""Default limit on an image's pixels, before and after resizing: half a gigabyte, and more than cameras have."""


@dataclass(frozen=True)
class Placed:
    """A transformed image and the sizes that SDXL is conditioned on (all in pixels)."""

    pixels: np.ndarray
    """(height, width, 3) uint8, the target shape."""
    original_size: tuple[int, int]
    """(height, width) before resizing."""
    crop_top_left: tuple[int, int]
    """(top, left) of the crop in the resized image."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation and convert to 8-bit RGB.

    Transparent parts become white. 16-bit greyscale is scaled; PIL's own conversion clips it.

    Args:
        image: A decoded image of any mode.

    Returns:
        The image in mode ``RGB``.

    Raises:
        ValueError: Its pixels are floating-point numbers, whose range is unknown.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of an unknown range; save it with 8 or 16 bits")
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Check an image's size, (width, height), from its header.

    Raises:
        BadSample: It has no pixels, or more than ``max_pixels``.
    """
    width, height = size
    if width < 1 or height < 1:
        raise BadSample(f"the image has no pixels ({width} x {height})")
    if width * height > max_pixels:
        raise BadSample(
            f"the image has {width} x {height} pixels, more than data.max_image_pixels={max_pixels} allows; make it "
            f"smaller, or write data.max_image_pixels={width * height}"
        )


def resized(size: tuple[int, int], shape: Shape, max_pixels: int) -> tuple[int, int]:
    """Return the size after resizing to the smallest one that covers a shape, with the aspect ratio kept.

    Args:
        size: (width, height) of the image.
        shape: (height, width) to cover.
        max_pixels: Limit on the pixels.

    Returns:
        (width, height).

    Raises:
        BadSample: It has more than ``max_pixels`` (a very long image).
    """
    width, height = size
    if width * shape[0] >= height * shape[1]:
        width, height = round(width * shape[0] / height), shape[0]
    else:
        width, height = shape[1], round(height * shape[1] / width)
    if width * height > max_pixels:
        raise BadSample(
            f"the image of {size[0]} x {size[1]} pixels would become {width} x {height} to cover {shape[1]} x "
            f"{shape[0]}, more than data.max_image_pixels={max_pixels} allows; crop it, or write "
            f"data.max_image_pixels={width * height}"
        )
    return width, height


@contextmanager
def any_error_is_a_bad_sample() -> Iterator[None]:
    """Turn every error but ``UsageError`` and ``MemoryError`` into ``BadSample``."""
    try:
        yield
    except (BadSample, UsageError, MemoryError):
        raise
    except Exception as error:
        raise BadSample(f"{type(error).__name__}: {error}") from error


def read_placed(
    source: Source,
    index: int,
    shape: Shape,
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
) -> Placed:
    """Read a sample and :func:`place` its image.

    Raises:
        BadSample: It cannot be read or placed, whatever the error, except ``UsageError`` and ``MemoryError``.
    """
    with any_error_is_a_bad_sample():
        source.captions(index)
        return place(source.image(index), shape, max_pixels=max_pixels, crop=crop, flip=flip)


def place(
    image: Image.Image,
    shape: Shape,
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
) -> Placed:
    """Resize an image so that it just covers a shape, and crop the rest (flip first, as in diffusers).

    Args:
        image: RGB image.
        shape: (height, width) of the result, in pixels.
        max_pixels: Limit on the image's pixels, before and after resizing.
        crop: Vertical and horizontal position of the crop as fractions in [0, 1); ``None`` crops
            the centre.
        flip: Mirror left and right.

    Returns:
        The pixels with their original size and crop position.

    Raises:
        BadSample: It has no pixels, or too many.
        ValueError: It is not RGB.
    """
    check_size(image.size, max_pixels)
    if image.mode != "RGB":
        raise ValueError(f"the image's mode is {image.mode}; expected RGB")
    width, height = image.size
    new_width, new_height = resized(image.size, shape, max_pixels)
    if (new_width, new_height) != (width, height):
        image = image.resize((new_width, new_height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    if flip:
        image = ImageOps.mirror(image)
    room = (new_height - shape[0], new_width - shape[1])
    top, left = (room[0] // 2, room[1] // 2) if crop is None else tuple(int(c * (r + 1)) for c, r in zip(crop, room))
    if room != (0, 0):
        image = image.crop((left, top, left + shape[1], top + shape[0]))
    return Placed(np.asarray(image), (height, width), (top, left))


def to_model_range(pixels: Tensor) -> Tensor:
    """Turn pixels (B, H, W, 3) uint8 into (B, 3, H, W) float32 in [-1, 1]."""
    return (pixels.permute(0, 3, 1, 2).to(torch.float32).contiguous() / 127.5).sub_(1.0)
