"""Floating-point operations of a model, counted on the meta device without computing anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sd_lightning.models.conditioning import map_conditioning
from sd_lightning.models.latent_diffusion import LatentDiffusion


def training_flops_per_sample(
    latent_diffusion: LatentDiffusion, latents: Tensor, input_ids: Tensor, conditioning: dict[str, Any] | None
) -> int:
    """Count the operations of forward and backward for one sample.

    Backward counts as twice the forward; activations computed again by checkpointing do not count, as in the model
    FLOPs utilisation of PaLM (arXiv 2204.02311, appendix B).

    Args:
        latent_diffusion: The model.
        latents: (B, C, h, w); only shapes are used.
        input_ids: (B, E, L).
        conditioning: Ready keyword arguments of the UNet; None if the text encoder is trained, and then counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def one(tensor: Tensor) -> Tensor:
        return torch.empty((1, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    names = ["unet"] if conditioning is not None else ["unet", *latent_diffusion.text_encoders]
    networks = latent_diffusion.meta_networks(names)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if conditioning is None:
            sizes = {k: torch.empty(1, 2, device="meta") for k in ("original_size", "crop_top_left", "target_size")}
            conditioning = latent_diffusion.condition(
                [networks[name] for name in names[1:]], {"input_ids": one(input_ids), **sizes}
            )
        else:
            conditioning = map_conditioning(conditioning, one)
        networks["unet"](one(latents).float(), torch.zeros(1, device="meta"), **conditioning)
    return 3 * counter.get_total_flops()
