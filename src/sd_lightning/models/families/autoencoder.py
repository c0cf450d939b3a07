"""``AutoencoderKL``, the VAE of most families: posterior, scale factor and tiled decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TILE = 256
"""Side of the tiles of tiled decoding, pixels. diffusers uses the native size of the VAE, 512 or more, so that an
image of 512 x 512 would be a single tile."""


def scale_factor(config: Mapping[str, Any]) -> int:
    """Return the image pixels per latent pixel along one side."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


def latents(config: Mapping[str, Any], moments: Tensor, noise: Tensor) -> Tensor:
    """Sample the posterior (Kingma & Welling 2013, arXiv 1312.6114, section 2.4), then shift and scale.

    Args:
        config: Configuration of the VAE.
        moments: Mean and log-variance (B, 2C, h, w).
        noise: Standard normal (B, C, h, w).
    """
    mean, log_variance = moments.chunk(2, dim=1)
    sample = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise
    return (sample - (config.get("shift_factor") or 0.0)) * float(config.get("scaling_factor", 0.18215))


@contextmanager
def decoding_in_tiles(vae: Any, tiling: bool) -> Iterator[None]:
    """Make the VAE decode in tiles of at most ``TILE`` pixels per side if ``tiling``."""
    names = ("use_tiling", "tile_sample_min_size", "tile_latent_min_size")
    before = {name: getattr(vae, name) for name in names}
    if tiling:
        vae.enable_tiling()
        vae.tile_sample_min_size = min(TILE, vae.tile_sample_min_size)
        vae.tile_latent_min_size = vae.tile_sample_min_size // scale_factor(vae.config)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)
