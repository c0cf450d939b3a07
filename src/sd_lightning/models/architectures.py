"""Configurations of the latent-diffusion models that can be built without downloading anything.

Each architecture lists the components of a diffusers pipeline: class name and configuration. The values of
``sd15``, ``sd21`` and ``sdxl`` are those published in the config files of the original releases; ``tiny`` has
the same classes, small enough to train in a minute on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Component:
    """What a pipeline folder records of one part: the library, the class and its configuration."""

    library: Literal["diffusers", "transformers"]
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """One latent-diffusion model: its networks, its noise schedule and the resolution it was made for."""

    pipeline_class: str
    """Name of the diffusers pipeline that runs it."""
    networks: dict[str, Component]
    """unet, vae, text_encoder and, for SDXL, text_encoder_2."""
    scheduler: Component
    resolution: int
    """Side of the square images it was trained on, pixels."""
    max_length: int = 77
    """Tokens per caption."""
    token_embedding_std: float | None = None
    """Standard deviation that token embeddings are re-initialised with; None keeps the library's."""


_BETAS = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}


def _clip_text(**config: Any) -> Component:
    return Component("transformers", "CLIPTextModel", config)


def _vae(**config: Any) -> Component:
    return Component(
        "diffusers",
        "AutoencoderKL",
        {
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "latent_channels": 4,
            **config,
        },
    )


def _unet(**config: Any) -> Component:
    return Component("diffusers", "UNet2DConditionModel", config)


_CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}

_TINY = Architecture(
    pipeline_class="StableDiffusionPipeline",
    networks={
        "unet": _unet(
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
        "vae": Component(
            "diffusers",
            "AutoencoderKL",
            {
                "down_block_types": ["DownEncoderBlock2D"] * 3,
                "up_block_types": ["UpDecoderBlock2D"] * 3,
                "block_out_channels": [8, 16, 16],
                "layers_per_block": 1,
                "latent_channels": 4,
                "norm_num_groups": 8,
                "sample_size": 32,
            },
        ),
        "text_encoder": _clip_text(
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=8,
        ),
    },
    scheduler=Component(
        "diffusers",
        "DPMSolverMultistepScheduler",
        {**_BETAS, "prediction_type": "v_prediction", "steps_offset": 1},
    ),
    resolution=32,
    max_length=8,
    token_embedding_std=1.0,
)

_SD15 = Architecture(
    pipeline_class="StableDiffusionPipeline",
    networks={
        "unet": _unet(sample_size=64, attention_head_dim=8, cross_attention_dim=768),
        "vae": _vae(sample_size=512, scaling_factor=0.18215),
        "text_encoder": _clip_text(**_CLIP_L),
    },
    scheduler=Component(
        "diffusers",
        "DDIMScheduler",
        {**_BETAS, "prediction_type": "epsilon", "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1},
    ),
    resolution=512,
)

_SD21 = Architecture(
    pipeline_class="StableDiffusionPipeline",
    networks={
        "unet": _unet(
            sample_size=96,
            attention_head_dim=[5, 10, 20, 20],
            cross_attention_dim=1024,
            use_linear_projection=True,
        ),
        "vae": _vae(sample_size=768, scaling_factor=0.18215),
        "text_encoder": _clip_text(
            vocab_size=49408,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=23,
            num_attention_heads=16,
            max_position_embeddings=77,
            hidden_act="gelu",
            projection_dim=512,
        ),
    },
    scheduler=Component(
        "diffusers",
        "DDIMScheduler",
        {
            **_BETAS,
            "prediction_type": "v_prediction",
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
        },
    ),
    resolution=768,
)

_SDXL = Architecture(
    pipeline_class="StableDiffusionXLPipeline",
    networks={
        "unet": _unet(
            sample_size=128,
            attention_head_dim=[5, 10, 20],
            block_out_channels=[320, 640, 1280],
            down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            transformer_layers_per_block=[1, 2, 10],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        "vae": _vae(sample_size=1024, scaling_factor=0.13025, force_upcast=True),
        "text_encoder": _clip_text(**_CLIP_L),
        "text_encoder_2": Component(
            "transformers",
            "CLIPTextModelWithProjection",
            {
                "vocab_size": 49408,
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_attention_heads": 20,
                "max_position_embeddings": 77,
                "hidden_act": "gelu",
                "projection_dim": 1280,
            },
        ),
    },
    scheduler=Component(
        "diffusers",
        "EulerDiscreteScheduler",
        {**_BETAS, "prediction_type": "epsilon", "timestep_spacing": "leading", "steps_offset": 1},
    ),
    resolution=1024,
)

ARCHITECTURES: dict[str, Architecture] = {"tiny": _TINY, "sd15": _SD15, "sd21": _SD21, "sdxl": _SDXL}


def contradiction(architecture: str, pipeline_class: str, unet_config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what of a pipeline cannot be of an architecture, and the name of the one that it is of.

    The pipeline's class decides, and within one class what the UNet attends to: ``cross_attention_dim`` is the width of
    the text encoder. A pipeline with a width of its own contradicts no architecture of its class, and other sizes
    (channels, blocks, layers) are free: variants of one family differ in them.

    Args:
        architecture: A name in ``ARCHITECTURES``.
        pipeline_class: Of the pipeline.
        unet_config: Of the pipeline's UNet.

    Returns:
        (what it is, the right name), None if they agree.
    """
    same_class = {name: each for name, each in ARCHITECTURES.items() if each.pipeline_class == pipeline_class}
    widths = {name: each.networks["unet"].config["cross_attention_dim"] for name, each in same_class.items()}
    width = unet_config.get("cross_attention_dim")
    if architecture not in same_class:
        own = [name for name in same_class if widths[name] == width]
        return f"a {pipeline_class}", (own or [name for name in same_class if name != "tiny"])[0]
    right = [name for name in same_class if widths[name] == width]
    if len(same_class) == 1 or not right or architecture in right:
        return None
    return f"a UNet with cross_attention_dim={width}, not {widths[architecture]}", right[0]
