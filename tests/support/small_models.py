"""Architectures small enough for a unit test, besides the `tiny` one that ships with the package."""

from dataclasses import replace

from sd_lightning import LatentDiffusion
from sd_lightning.models.components import load_network
from sd_lightning.models.families import FAMILIES, Architecture, Component, architecture
from sd_lightning.models.loading import TINY_VAE

_TINY = architecture("tiny")
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 8,
}

SMALL_SDXL: Architecture = replace(
    _TINY,
    pipeline_class="StableDiffusionXLPipeline",
    networks={
        "unet": Component(
            "diffusers",
            "UNet2DConditionModel",
            {
                **_TINY.networks["unet"].config,
                "cross_attention_dim": 32 + 48,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 6 * 8 + 24,
            },
        ),
        "vae": _TINY.networks["vae"],
        "text_encoder": Component("transformers", "CLIPTextModel", _CLIP),
        "text_encoder_2": Component(
            "transformers",
            "CLIPTextModelWithProjection",
            {**_CLIP, "hidden_size": 48, "projection_dim": 24, "hidden_act": "gelu"},
        ),
    },
)
"""Everything that SDXL has beyond Stable Diffusion 1.x: two text encoders, pooled embedding, time ids."""

SMALL_SD2: Architecture = replace(
    _TINY,
    networks={
        "unet": Component(
            "diffusers", "UNet2DConditionModel", {**_TINY.networks["unet"].config, "use_linear_projection": True}
        ),
        "vae": _TINY.networks["vae"],
        "text_encoder": Component("transformers", "CLIPTextModel", {**_CLIP, "hidden_size": 64, "hidden_act": "gelu"}),
    },
)
"""What Stable Diffusion 2.x changed: OpenCLIP as text encoder, linear layers around the UNet's attention."""

_FEW_BLOCKS: Architecture = replace(
    _TINY,
    networks={
        **_TINY.networks,
        "unet": Component(
            "diffusers",
            "UNet2DConditionModel",
            {
                **_TINY.networks["unet"].config,
                "block_out_channels": [32],
                "down_block_types": ["CrossAttnDownBlock2D"],
                "mid_block_type": None,
                "up_block_types": ["CrossAttnUpBlock2D"],
            },
        ),
        "text_encoder": Component(
            "transformers", "CLIPTextModel", {**_TINY.networks["text_encoder"].config, "num_hidden_layers": 1}
        ),
    },
)


RAGGED_LENGTH = 80
"""Tokens per caption of :func:`for_ragged_captions`."""


def for_ragged_captions(name: str, seed: int) -> LatentDiffusion:
    """Return the architecture of that name for captions of up to 80 tokens: Z-Image fills them up to 32, 64 or 96.

    Encoders with lengths of their own, such as CLIP, fill captions up to these.
    """
    known = architecture(name)
    length = RAGGED_LENGTH if isinstance(known.max_length, int) else known.max_length
    return LatentDiffusion.build(replace(known, max_length=length), seed=seed)


def few_blocks(seed: int) -> LatentDiffusion:
    """Return the `tiny` model with one level and no middle block: engines spend time on every module of a network."""
    model = LatentDiffusion.build(_FEW_BLOCKS, seed=seed)
    model.networks["vae"], model.components["vae"] = load_network(model.components["vae"], TINY_VAE)
    return model


TINY_TRANSFORMERS = [
    name
    for family in FAMILIES.values()
    if family.denoiser == "transformer"
    for name, each in family.architectures.items()
    if each.is_tiny
]
"""The tiny models of every family with a transformer."""
