"""Stable Diffusion 1.x and 2.x: a UNet, one CLIP text encoder, an ``AutoencoderKL`` (arXiv 2112.10752).

The configurations of ``sd15`` and ``sd21`` are those of the original releases. ``tiny`` has the same classes and is
small enough to train in a minute on two CPU cores.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sd_lightning.models.families.architecture import Architecture, Component, Part
from sd_lightning.models.families.base import Family, Layout
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import vae_factor
from sd_lightning.models.families.vae import TINY_SCALING, TINY_VAE_CONFIG, VAE, vae

UNET = Part("diffusers", ("UNet2DConditionModel",))
CLIP = Part("transformers", ("CLIPTextModel", "CLIPTextModelWithProjection"))
TOKENIZER = Part("transformers", ("CLIPTokenizer", "CLIPTokenizerFast"))
BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def unet(**config: Any) -> Component:
    """Return a UNet, with diffusers' defaults for what is not given."""
    return Component("diffusers", "UNet2DConditionModel", config)


def clip(width: int, layers: int, activation: str, projection: int, *, class_name: str = "CLIPTextModel") -> Component:
    """Return a text encoder in the proportions of the published ones: attention heads of 64 channels, 77 tokens."""
    config = {
        "vocab_size": 49408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "max_position_embeddings": 77,
        "hidden_act": activation,
        "projection_dim": projection,
    }
    return Component("transformers", class_name, config)


def tiny_clip(width: int, *, class_name: str = "CLIPTextModel", **config: Any) -> Component:
    """Return the text encoder of the tiny models: 8 tokens."""
    own = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8}
    sizes = {"hidden_size": width, "intermediate_size": 4 * width}
    return Component("transformers", class_name, {**sizes, **own, **config})


def ddim(prediction_type: str) -> Component:
    """Return the sampling scheduler of Stable Diffusion 1.5 and 2.1."""
    own = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    return Component("diffusers", "DDIMScheduler", {**BETAS, "prediction_type": prediction_type, **own})


class UNetFamily(Family):
    """Base of Stable Diffusion 1.x, 2.x and XL."""

    denoiser = "unet"
    block_classes = ("ResnetBlock2D", "Transformer2DModel", "CLIPEncoderLayer")
    width_key = "cross_attention_dim"  # the width of the text encoder

    def resolution(self, components: Mapping[str, Component]) -> int:
        return int(components["unet"].config["sample_size"]) * vae_factor(components["vae"].config)

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        prediction: Tensor = denoiser(noisy_latents, timesteps, **conditioning).sample
        return prediction

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

    architectures = {
        "tiny": Architecture(
            pipeline_class,
            networks={
                "unet": unet(
                    sample_size=8,
                    in_channels=4,
                    out_channels=4,
                    layers_per_block=1,
                    block_out_channels=[32, 64],
                    norm_num_groups=16,
                    cross_attention_dim=64,
                    attention_head_dim=4,
                    down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
                    up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"],
                ),
                "vae": vae(**TINY_VAE_CONFIG, scaling_factor=TINY_SCALING),
                "text_encoder": tiny_clip(64),
            },
            scheduler=Component(
                "diffusers",
                "DPMSolverMultistepScheduler",
                {**BETAS, "prediction_type": "v_prediction", "steps_offset": 1},
            ),
            max_length=8,
            token_embedding_std=1.0,
            is_tiny=True,
        ),
        "sd15": Architecture(
            pipeline_class,
            networks={
                "unet": unet(sample_size=64, attention_head_dim=8, cross_attention_dim=768),
                "vae": vae(sample_size=512, scaling_factor=0.18215),
                "text_encoder": clip(768, 12, "quick_gelu", 768),
            },
            scheduler=ddim("epsilon"),
            licence="CreativeML Open RAIL-M",
        ),
        "sd21": Architecture(
            pipeline_class,
            networks={
                "unet": unet(
                    sample_size=96,
                    attention_head_dim=[5, 10, 20, 20],
                    cross_attention_dim=1024,
                    use_linear_projection=True,
                ),
                "vae": vae(sample_size=768, scaling_factor=0.18215),
                "text_encoder": clip(1024, 23, "gelu", 512),
            },
            scheduler=ddim("v_prediction"),
            licence="CreativeML Open RAIL++-M",
        ),
    }
