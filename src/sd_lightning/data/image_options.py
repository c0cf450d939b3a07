"""How images and captions are prepared for training."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from sd_lightning._errors import UsageError
from sd_lightning.data.shapes import Shape, bucket_shapes
from sd_lightning.data.transform import MAX_IMAGE_PIXELS

BUCKET_FIELDS = ("enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps")
"""Fields of ``ImageOptions`` of aspect-ratio buckets."""


@dataclass(frozen=True)
class ImageOptions:
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

    def __post_init__(self) -> None:
        if self.resolution < 8 or self.resolution % 8:
            raise UsageError(
                f"data.resolution={self.resolution}: expected a positive multiple of 8, which the VAE can divide; "
                f"write data.resolution={_nearest(self.resolution, 8)}"
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
        if step < 8 or step % 8:
            raise UsageError(
                f"data.bucket_reso_steps={step}: expected a positive multiple of 8, which the VAE can divide; "
                f"write data.bucket_reso_steps={_nearest(step, 8)}"
            )
        if side % step:
            raise UsageError(
                f"data.resolution={side} with data.bucket_reso_steps={step}: expected a multiple of the step, which "
                f"all sides of buckets are; write data.resolution={_nearest(side, step)} or data.bucket_reso_steps=8"
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
            raise UsageError(
                f"data.enable_bucket=true: the square of data.resolution={side} is the only bucket with sides from "
                f"data.min_bucket_reso={self.min_bucket_reso} to data.max_bucket_reso={self.max_bucket_reso} in steps "
                f"of data.bucket_reso_steps={step}; write {self._wider()}"
            )

    def _wider(self) -> str:
        """Return settings with which there is more than the square, or no buckets."""
        step = self.bucket_reso_steps if self.resolution > self.bucket_reso_steps else 8
        if self.resolution == step:
            return "data.enable_bucket=false"
        changed = "" if step == self.bucket_reso_steps else f" data.bucket_reso_steps={step}"
        return f"data.min_bucket_reso={step} data.max_bucket_reso={2 * self.resolution}{changed}"

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
        """Return the options for validation, without randomness."""
        return replace(self, center_crop=True, random_flip=False, proportion_empty_prompts=0.0)


def _nearest(value: int, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)
