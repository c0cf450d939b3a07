"""Everything that stored latents depend on, and its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.shapes import Shape
from sd_lightning.storage.untrusted import parse_json

CODE_VERSION = 1
"""Version of the code between an image's bytes and its latents; raised when that code changes their values."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Recipe:
    """Everything that the numbers of stored latents depend on.

    Raises:
        UsageError: A value is out of range.
    """

    family: str
    """Class of the model's diffusers pipeline."""
    vae: str
    """Hash of the VAE: :func:`network_hash`."""
    resolution: int
    """Side of the square images, in pixels; with buckets, the square root of the most pixels."""
    shapes: tuple[Shape, ...] = ()
    """Shapes of aspect-ratio buckets, from tall to wide; none: all images become squares."""
    crop: Literal["center", "random"] = "center"
    """Where images of another shape are cropped."""
    flip: bool = False
    """Whether half of the encodings are mirrored."""
    variants: int = 1
    """Encodings per image, each with a crop and flip of its own."""
    latents: Literal["moments", "draw"] = "moments"
    """Moments of the VAE's posterior, from which every epoch draws, or one draw, scaled."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Type of the stored numbers."""
    compute_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type in which the VAE computes."""
    interpolation: str = "lanczos"
    code_version: int = CODE_VERSION

    def __post_init__(self) -> None:
        if self.latents not in ("moments", "draw"):
            raise UsageError(f"precompute got latents={self.latents}; expected moments or draw")
        for key in ("dtype", "compute_dtype"):
            if getattr(self, key) not in DTYPES:
                raise UsageError(f"precompute got {key}={getattr(self, key)}; expected one of {', '.join(DTYPES)}")
        if self.variants < 1:
            raise UsageError(f"precompute got variants={self.variants}; expected 1 or more encodings per image")
        if self.variants > 1 and not self.is_random:
            raise UsageError(
                f"precompute got variants={self.variants}, but every encoding of an image is the same with "
                "data.center_crop=true data.random_flip=false; write variants=1, or data.center_crop=false"
            )

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        """The shapes of the images: the square alone without buckets."""
        return self.shapes or ((self.resolution, self.resolution),)

    @property
    def is_random(self) -> bool:
        """Whether the encodings of an image differ."""
        return self.crop == "random" or self.flip

    @property
    def fingerprint(self) -> str:
        """Hash of all fields: "r" and 16 hexadecimal digits, which no command line takes for a number."""
        return "r" + blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the fields as JSON; equal recipes have equal text."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> Recipe:
        """Read the output of :meth:`to_json`.

        Raises:
            UsageError: It is not one, or a newer version wrote it.
        """
        try:
            given = parse_json(text)
            return cls(**{**given, "shapes": tuple((height, width) for height, width in given["shapes"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{where} is no recipe of a latent store ({error}); expected what sd_lightning.precompute wrote; "
                "install the version of sd_lightning that wrote it, or encode the store again"
            ) from error

    def told(self) -> str:
        """Return the recipe as the settings that make it, for messages."""
        crop = f"data.center_crop={str(self.crop == 'center').lower()}"
        flip = f"data.random_flip={str(self.flip).lower()}"
        buckets = f" data.enable_bucket=true ({len(self.shapes)} shapes)" if self.shapes else ""
        return (
            f"data.resolution={self.resolution}{buckets} {crop} {flip} variants={self.variants} latents={self.latents} "
            f"dtype={self.dtype}"
        )


def network_hash(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> str:
    """Return a hash of a network's weights and configuration, 32 hexadecimal digits.

    Args:
        state_dict: The weights, on the CPU.
        config: Its configuration; entries that begin with "_" (versions, paths) do not count.
    """
    known = {key: value for key, value in config.items() if not key.startswith("_")}
    found = blake2b(json.dumps(known, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(state_dict.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
