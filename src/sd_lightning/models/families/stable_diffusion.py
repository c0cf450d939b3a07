"""Stable Diffusion 1.x and 2.x: a UNet, one CLIP text encoder, an ``AutoencoderKL`` (arXiv 2112.10752).

The configurations of ``sd15`` and ``sd21`` are those of the original releases. ``tiny`` has the same classes and is
small enough to train in a minute on two CPU cores.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sd_lightning.models.families.architecture import Component, Part
from sd_lightning.models.families.base import Family, Layout
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import vae_factor
from sd_lightning.models.families.tensor_parallel import attention, feed_forward

UNET = Part("diffusers", ("UNet2DConditionModel",))
VAE = Part("diffusers", ("AutoencoderKL",))
CLIP = Part("transformers", ("CLIPTextModel", "CLIPTextModelWithProjection"))
TOKENIZER = Part("transformers", ("CLIPTokenizer", "CLIPTokenizerFast"))


class UNetFamily(Family):
    """Base of Stable Diffusion 1.x, 2.x and XL."""

    denoiser = "unet"
    block_classes = ("ResnetBlock2D", "Transformer2DModel", "CLIPEncoderLayer")
    width_key = "cross_attention_dim"  # the width of the text encoder
    divided_layers = {
        **attention("transformer_blocks.*.attn1"),
        **attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff", gated=True),
    }
    divided_heads = ("heads",)

    def resolution(self, components: Mapping[str, Component]) -> int:
        return int(components["unet"].config["sample_size"]) * vae_factor(components["vae"].config)

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        return denoiser(noisy_latents, timesteps, **conditioning).sample

    def samples_with(self, scheduler: Any) -> bool:
        """Return whether it has ``step(noise_pred, t, latents, …)`` and the attributes that pipelines use."""
        if not all(hasattr(scheduler, name) for name in ("step", "scale_model_input", "init_noise_sigma", "order")):
            return False
        parameters = list(inspect.signature(scheduler.step).parameters.values())
        return len(parameters) >= 3 and all(p.default is not p.empty for p in parameters[3:] if p.kind != p.VAR_KEYWORD)


class StableDiffusion(UNetFamily):
    """Stable Diffusion 1.x and 2.x."""

    pipeline_class = "StableDiffusionPipeline"
    parts = {"unet": UNET, "vae": VAE, "text_encoder": CLIP, "tokenizer": TOKENIZER}
    absent = ("safety_checker", "feature_extractor", "image_encoder")
    pipeline_options = {"requires_safety_checker": False}

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the last hidden state of the text encoder, ``encoder_hidden_states`` (B, L, D)."""
        return {"encoder_hidden_states": text_encoders["text_encoder"](input_ids["text_encoder"])[0]}

    def single_file_layout(self, components: Mapping[str, Component]) -> Layout | None:
        """Return v1 for CLIP (``quick_gelu``), v2 for OpenCLIP (``gelu``)."""
        layouts: dict[str, Layout] = {"quick_gelu": "v1", "gelu": "v2"}
        return layouts.get(components["text_encoder"].config.get("hidden_act", "quick_gelu"))
