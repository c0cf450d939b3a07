"""Floating-point operations of a model, counted on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sd_lightning.models.families.base import map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.meta import meta_batch, meta_networks


def training_flops_per_sample(
    latent_diffusion: LatentDiffusion, latents: Tensor, conditioning: dict[str, Any] | None
) -> int:
    """Return the floating-point operations of forward and backward for one sample.

    Backward counts as twice the forward. Recomputation by activation checkpointing does not count, as in the model
    FLOPs utilisation of PaLM (arXiv 2204.02311, appendix B).

    Args:
        latent_diffusion: The model.
        latents: (B, C, h, w); only the shape is used.
        conditioning: Encoded captions; None if the text encoder is trained and must be counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def one(tensor: Tensor) -> Tensor:
        return torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    model, family = latent_diffusion, latent_diffusion.family
    encoders = list(model.text_encoders) if conditioning is None else []
    networks = meta_networks(model, [family.denoiser, *encoders])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if conditioning is None:
            conditioning = model.condition(networks, meta_batch(model, 1))
        else:
            conditioning = map_conditioning(conditioning, one)
        family.denoise(networks[family.denoiser], one(latents).float(), torch.zeros(1, device="meta"), conditioning)
    return 3 * counter.get_total_flops()
