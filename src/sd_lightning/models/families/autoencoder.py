"""``AutoencoderKL``, the VAE of most families: scale factor and tiled decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

TILE = 256
"""Side of the tiles of tiled decoding, pixels. diffusers uses the native size of the VAE, 512 or more, so that an
image of 512 x 512 would be a single tile."""


def scale_factor(config: Mapping[str, Any]) -> int:
    """Return the image pixels per latent pixel along one side."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


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
