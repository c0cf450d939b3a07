"""How images are prepared: options, shapes of aspect-ratio buckets, and orientation, resize, crop and flip with PIL.

The caller passes the random numbers, so that a crop depends on the sample and the epoch, not on the worker process.
An image's number of pixels is checked before they are allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.captions import CaptionOptions
from sd_lightning.data.order import Shape
from sd_lightning.data.source import BadSample
from sd_lightning.models.families.base import SIZE_MULTIPLE

if TYPE_CHECKING:
    from sd_lightning.models.latent_diffusion import LatentDiffusion

MAX_IMAGE_PIXELS = 128_000_000
"""Default limit on an image's pixels, before and after resizing: half a gigabyte, and more than cameras have."""
BUCKET_FIELDS = ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
"""Fields of ``ImageOptions`` of aspect-ratio buckets."""
MaskedLoss = Literal["none", "files", "alpha"]
"""Where masks of the loss are: nowhere, in files beside the images, or in the images' transparency."""
MASK_FIELDS = ("masked_loss", "unmasked_weight")
"""Fields of ``ImageOptions`` of masks."""


def bucket_shapes(resolution: int, *, min_side: int, max_side: int, step: int) -> list[Shape]:
    """Return the shapes with about as many pixels as the square, and none with more, from tall to wide.

    For each longer side, they have the largest shorter side, as in kohya's sd-scripts, and the next smaller one if at
    least 90 % of the pixels remain. At 1024 pixels, up to 2048 in steps of 64, these are the 41 shapes of SDXL
    (arXiv 2307.01952, appendix I).

    Args:
        resolution: Side of the square, a multiple of ``step``.
        min_side: Smallest side.
        max_side: Largest side.
        step: All sides are multiples of it.
    """
    shapes = set()
    for longer in range(resolution, max_side + 1, step):
        largest = resolution**2 // longer // step * step
        for shorter in (largest, largest - step):
            is_full = shorter == largest or 10 * shorter * longer >= 9 * resolution**2
            if is_full and shorter >= min_side:
                shapes |= {(longer, shorter), (shorter, longer)}
    return sorted(shapes, key=lambda shape: (shape[1] / shape[0], shape))


def nearest_shapes(sizes: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Return for each image the shape whose aspect ratio is nearest, by the ratio's logarithm.

    Args:
        sizes: (N, 2), (height, width) of the images, at least 1.
        shapes: Sorted by width / height, as from :func:`bucket_shapes`.

    Returns:
        (N,) int64, indices in ``shapes``. They have the same bits on every machine: only divisions and square roots
        are computed.
    """
    height, width = np.asarray(shapes, dtype=np.float64).T
    ratios = width / height
    middles = np.sqrt(ratios[:-1] * ratios[1:])
    return np.searchsorted(middles, sizes[:, 1] / sizes[:, 0])


@dataclass(frozen=True)
class Placed:
    """A transformed image and the sizes that SDXL is conditioned on (all in pixels)."""

    pixels: np.ndarray
    """(height, width, 3) uint8, the target shape; (height, width) of a mask."""
    original_size: tuple[int, int]
    """(height, width) before resizing."""
    crop_top_left: tuple[int, int]
    """(top, left) of the crop in the resized image."""


def to_rgb(image: Image.Image, *, background: str = "white") -> Image.Image:
    """Apply the EXIF orientation and convert to 8-bit RGB.

    Transparent parts get the colour of the background. 16-bit greyscale is scaled; PIL's own conversion clips it.

    Args:
        image: A decoded image of any mode.
        background: Name of a colour.

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
        behind = Image.new("RGBA", layer.size, background)
        return Image.alpha_composite(behind, layer).convert("RGB")
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


def place(
    image: Image.Image,
    shape: Shape,
    *,
    max_pixels: int = MAX_IMAGE_PIXELS,
    crop: tuple[float, float] | None = None,
    flip: bool = False,
    mode: Literal["RGB", "L"] = "RGB",
) -> Placed:
    """Resize an image so that it just covers a shape, and crop the rest (flip first, as in diffusers).

    Args:
        image: The image.
        shape: (height, width) of the result, in pixels.
        max_pixels: Limit on the image's pixels, before and after resizing.
        crop: Vertical and horizontal position of the crop as fractions in [0, 1); ``None`` crops
            the centre.
        flip: Mirror left and right.
        mode: What the image has to be; of a mask, L, resizing takes the mean of the pixels.

    Returns:
        The pixels with their original size and crop position.

    Raises:
        BadSample: It has no pixels, or too many.
        ValueError: It is of another mode.
    """
    check_size(image.size, max_pixels)
    if image.mode != mode:
        raise ValueError(f"the image's mode is {image.mode}; expected {mode}")
    width, height = image.size
    new_width, new_height = resized(image.size, shape, max_pixels)
    if (new_width, new_height) != (width, height):
        how, gap = (Image.Resampling.LANCZOS, 3.0) if mode == "RGB" else (Image.Resampling.BOX, None)
        image = image.resize((new_width, new_height), how, reducing_gap=gap)
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


@dataclass(frozen=True)
class ImageOptions(CaptionOptions):
    """How images and captions are prepared; names as in diffusers' training scripts, of buckets as in kohya's.

    Raises:
        UsageError: A value is out of range, has no effect, or contradicts another one.
    """

    resolution: int = 512
    """Side of the square training images, in pixels; with buckets, the square root of the most pixels."""
    center_crop: bool = False
    """Crop the centre of images of another shape instead of a random position."""
    random_flip: bool = False
    """Mirror half of the images."""
    proportion_empty_prompts: float = 0.0
    """Fraction of captions replaced by "" so that the model learns the unconditional prediction."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Limit on an image's pixels, before and after resizing; larger ones are bad samples."""
    enable_bucket: bool = False
    """Train on images of several shapes, one shape per global batch: aspect-ratio buckets."""
    min_bucket_reso: int = 256
    """Smallest side of a bucket, in pixels."""
    max_bucket_reso: int = 2048
    """Largest side of a bucket, in pixels."""
    bucket_reso_steps: int = 64
    """All sides of buckets are multiples of this number of pixels."""
    masked_loss: MaskedLoss = "none"
    """Where the masks are that say which parts of the images count in the loss."""
    unmasked_weight: float = 0.0
    """Weight in the loss of what is outside of a mask."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolution < SIZE_MULTIPLE or self.resolution % SIZE_MULTIPLE:
            raise UsageError(
                f"data.resolution={self.resolution}: expected a positive multiple of {SIZE_MULTIPLE}, which the VAE "
                f"can divide; write data.resolution={_nearest(self.resolution, SIZE_MULTIPLE)}"
            )
        if not 0 <= self.proportion_empty_prompts <= 1:
            raise UsageError(
                f"data.proportion_empty_prompts={self.proportion_empty_prompts}: expected a fraction in [0, 1]; "
                "write data.proportion_empty_prompts=0.1"
            )
        if self.max_image_pixels < self.resolution**2:
            raise UsageError(
                f"data.max_image_pixels={self.max_image_pixels}: expected at least the {self.resolution**2} pixels of "
                f"data.resolution={self.resolution}; write data.max_image_pixels={MAX_IMAGE_PIXELS}"
            )
        if not 0 <= self.unmasked_weight <= (self.masked_loss != "none"):
            raise UsageError(
                f"data.unmasked_weight={self.unmasked_weight} with data.masked_loss={self.masked_loss}: expected a "
                "number in [0, 1], and masks; write data.masked_loss=files data.unmasked_weight=0.1, or leave it out"
            )
        if self.enable_bucket:
            self._check_buckets()
        else:
            idle = [each for each in fields(self) if each.name in BUCKET_FIELDS[1:]]
            for each in idle:
                if getattr(self, each.name) != each.default:
                    raise UsageError(
                        f"data.{each.name}={getattr(self, each.name)} has no effect without buckets; add "
                        "data.enable_bucket=true or leave it out"
                    )

    def _check_buckets(self) -> None:
        side, step = self.resolution, self.bucket_reso_steps
        if step < SIZE_MULTIPLE or step % SIZE_MULTIPLE:
            raise UsageError(
                f"data.bucket_reso_steps={step}: expected a positive multiple of {SIZE_MULTIPLE}, which the VAE can "
                f"divide; write data.bucket_reso_steps={_nearest(step, SIZE_MULTIPLE)}"
            )
        if side % step:
            raise UsageError(
                f"data.resolution={side} with data.bucket_reso_steps={step}: expected a multiple of the step, which "
                f"all sides of buckets are; write data.resolution={_nearest(side, step)} or "
                f"data.bucket_reso_steps={SIZE_MULTIPLE}"
            )
        if not 1 <= self.min_bucket_reso <= side:
            raise UsageError(
                f"data.min_bucket_reso={self.min_bucket_reso}: expected 1 to data.resolution={side}, the side of the "
                f"square bucket; write data.min_bucket_reso={max(side // 2, step)}"
            )
        if self.max_bucket_reso < side:
            raise UsageError(
                f"data.max_bucket_reso={self.max_bucket_reso}: expected at least data.resolution={side}, the side of "
                f"the square bucket; write data.max_bucket_reso={2 * side}"
            )
        if len(self.shapes) == 1:
            step = step if step < side else SIZE_MULTIPLE
            wider = f"data.bucket_reso_steps={step} data.min_bucket_reso={step} data.max_bucket_reso={2 * side}"
            remedy = wider if side > SIZE_MULTIPLE else "data.enable_bucket=false"
            raise UsageError(
                f"data.enable_bucket=true: the square of data.resolution={side} is the only bucket with sides from "
                f"data.min_bucket_reso={self.min_bucket_reso} to data.max_bucket_reso={self.max_bucket_reso} in steps "
                f"of data.bucket_reso_steps={self.bucket_reso_steps}; write {remedy}"
            )

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the training images, from tall to wide: the square alone without buckets."""
        if not self.enable_bucket:
            return [(self.resolution, self.resolution)]
        return bucket_shapes(
            self.resolution,
            min_side=self.min_bucket_reso,
            max_side=self.max_bucket_reso,
            step=self.bucket_reso_steps,
        )

    def check_model(self, model: LatentDiffusion) -> None:
        """Check that a model takes images of these shapes.

        Raises:
            UsageError: It cannot divide them, or they are too large.
        """
        setting = "bucket_reso_steps" if self.enable_bucket else "resolution"
        sides = {setting: getattr(self, setting)}
        if self.enable_bucket:
            sides["max_bucket_reso"] = max(map(max, self.shapes))
        configs = {"vae_config": model.vae.config, "denoiser_config": model.denoiser.config}
        for name, side in sides.items():
            model.family.check_sizes(side, **configs, setting=f"data.{name}")

    def check_cacheable(self) -> None:
        """Check that each image can be encoded once, and that all latents have one shape (``data.cache_latents``).

        Raises:
            UsageError: They change every epoch, or have several shapes.
        """
        if self.random_flip or not self.center_crop:
            random = "data.random_flip=true" if self.random_flip else "data.center_crop=false"
            raise UsageError(
                f"data.cache_latents=true encodes each image once, but {random} changes it every epoch; write "
                "data.center_crop=true data.random_flip=false, or data.cache_latents=false"
            )
        if self.enable_bucket:
            raise UsageError(
                "data.enable_bucket=true with data.cache_latents=true: the latents in memory all have one shape; write "
                "data.cache_latents=false, or data.enable_bucket=false"
            )

    def evaluation(self) -> ImageOptions:
        """Return the options for validation: without randomness, and without masks, so that runs are comparable."""
        masks: dict[str, Any] = {"masked_loss": "none", "unmasked_weight": 0.0}
        return replace(self, center_crop=True, random_flip=False, proportion_empty_prompts=0.0, **masks)


def _nearest(value: int, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)
