"""A UNet of sd21's widths with one layer per block, random weights: 583 of its 866 million parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sd21_blocks(*, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Build it."""
    from sd_lightning.models.families import Component, architecture
    from sd_lightning.models.pipeline_folder import instantiate

    config = architecture("sd21").networks["unet"].config | {"layers_per_block": 1}
    torch.manual_seed(seed)
    return instantiate(Component("diffusers", "UNet2DConditionModel", config)).eval().to(device, dtype)


def step(*, side: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Callable[[Any], Tensor]:
    """Return a function that calls a UNet once as guidance does, with two rows, on latents of this side."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, side, side, generator=generator).to(device, dtype)
    hidden = torch.randn(2, 77, 1024, generator=generator).to(device, dtype)
    timesteps = torch.tensor([100, 700], device=device)

    @torch.inference_mode()
    def call(unet: Any) -> Tensor:
        return unet(latents, timesteps, hidden).sample

    return call


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())
