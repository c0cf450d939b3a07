"""The space in which a family denoises: from what its VAE encodes to latents of about unit variance, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Normal = Callable[[tuple[int, ...]], Tensor]
"""Shape without batch (C, h, w) -> standard normal numbers (B, C, h, w)."""
Encode = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) in [-1, 1] -> sampled latents (B, C, h, w) of about unit variance."""


def vae_factor(config: Mapping[str, Any]) -> int:
    """Return the image pixels per pixel of the VAE's own latents along one side, by its configuration."""
    levels = config["block_out_channels"] if "block_out_channels" in config else config["dim_mult"]
    return int(2 ** (len(levels) - 1))


@dataclass(frozen=True, eq=False)
class LatentSpace:
    """How the encoded images of a VAE become a denoiser's latents (B, C, h, w), and how these are decoded."""

    channels: int
    """Channels C of the denoiser's latents."""
    factor: int
    """Image pixels per pixel of the VAE's own latents along one side."""
    patch_size: int = 1
    """Side of the patches of the VAE's latents that are one pixel of the denoiser's."""
    is_sampled: bool = True
    """Whether the VAE gives a posterior, mean and log-variance, instead of latents."""
    shift: float | Tensor = 0.0
    """Subtracted from latents; a tensor has one number per channel (C,)."""
    scale: float | Tensor = 1.0
    """Factor of shifted latents; a tensor has one number per channel (C,)."""

    @property
    def stride(self) -> int:
        """Image pixels per pixel of the denoiser's latents along one side."""
        return self.factor * self.patch_size

    def shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape (C, h, w) of the denoiser's latents of an image of ``height`` x ``width`` pixels."""
        return self.channels, height // self.stride, width // self.stride

    def encoded_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape of one image in the result of :meth:`Family.encode`, which stores keep."""
        channels, h, w = self.shape(height, width)
        size = self.patch_size
        return channels // size**2 * (2 if self.is_sampled else 1), h * size, w * size

    def latents(self, encoded: Tensor, normal: Normal) -> Tensor:
        """Sample latents (B, C, h, w) of about unit variance from the result of :meth:`Family.encode`.

        The posterior is sampled (Kingma & Welling 2013, arXiv 1312.6114, section 2.4), patches become channels, and
        these are shifted and scaled.

        Args:
            encoded: (B, *:meth:`encoded_shape`), float32.
            normal: Draws the noise of the posterior.
        """
        if self.is_sampled:
            mean, log_variance = encoded.chunk(2, dim=1)
            noise = normal(tuple(mean.shape[1:]))
            encoded = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise
        latents = F.pixel_unshuffle(encoded, self.patch_size)
        return (latents - _on(self.shift, latents)) * _on(self.scale, latents)

    def decodable(self, latents: Tensor) -> Tensor:
        """Return what the VAE decodes: the inverse of the patches, shift and scale of :meth:`latents`."""
        return F.pixel_shuffle(latents / _on(self.scale, latents) + _on(self.shift, latents), self.patch_size)


def _on(value: float | Tensor, latents: Tensor) -> Any:
    """Return a number, or one per channel, to compute with (B, C, h, w)."""
    if not isinstance(value, Tensor):
        return value
    return value.to(latents.device, latents.dtype, non_blocking=True).view(1, -1, 1, 1)
