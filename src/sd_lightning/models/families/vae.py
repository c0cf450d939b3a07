"""The VAE ``AutoencoderKL``, and the configuration of the one that ships with the package."""

from __future__ import annotations

from typing import Any

from sd_lightning.models.families.architecture import Component, Part

VAE = Part("diffusers", ("AutoencoderKL",))
TINY_VAE_CONFIG: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [8, 16, 16],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": 32,
}
"""Configuration of the VAE that ships with the package: digits of 32 x 32 pixels, 8 x 8 latents."""
TINY_SCALING = 0.857535183429718
"""Its scaling factor: ``tests/support/make_tiny.py`` measures it."""


def vae_16(scaling_factor: float, shift_factor: float) -> Component:
    """Return the VAE of 16 channels of Stable Diffusion 3 and Flux.1."""
    own = {"sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False}
    return vae(latent_channels=16, scaling_factor=scaling_factor, shift_factor=shift_factor, **own)


def vae(**config: Any) -> Component:
    """Return the VAE of the published models."""
    own = {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": 4,
    }
    return Component("diffusers", "AutoencoderKL", own | config)
