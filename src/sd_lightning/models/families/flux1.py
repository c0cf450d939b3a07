"""Flux.1: a transformer of two kinds of blocks, CLIP, T5, and a VAE of 16 channels.

Blocks, position ids, time and guidance are those of Black Forest Labs' reference, as diffusers has them. The sizes of
``flux1_dev`` are those of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.lora_names import LoraNames, flux_names
from sd_lightning.models.families.stable_diffusion import CLIP, TOKENIZER, VAE
from sd_lightning.models.families.tensor_parallel import modulation
from sd_lightning.models.families.transformer import (
    T5,
    T5_TOKENIZER,
    TransformerFamily,
    image_positions,
)

_DOUBLE_STREAM = {
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
}
_SINGLE_STREAM = {
    **{f"attn.to_{part}": "linear1" for part in "qkv"},
    "proj_mlp": "linear1",
    "proj_out": "linear2",
    "norm.linear": "modulation.lin",
}
_NAMES = flux_names(_DOUBLE_STREAM, _SINGLE_STREAM)


class Flux1(TransformerFamily):
    """Flux.1. All tokens of a caption are the denoiser's input, padding too, and T5 masks nothing.

    The denoiser of FLUX.1-dev takes the guidance scale as an input and draws in one pass; those without, such as
    de-distilled ones, draw with classifier-free guidance. The files of FLUX.1-schnell, which is distilled to four
    steps, do not tell it from these.
    """

    pipeline_class = "FluxPipeline"
    guides_in_turn = True
    parts = {
        "transformer": Part("diffusers", ("FluxTransformer2DModel",)),
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": T5,
        "tokenizer": TOKENIZER,
        "tokenizer_2": T5_TOKENIZER,
    }
    frozen = ("text_encoder_2",)
    absent = ("image_encoder", "feature_extractor")
    max_sequence_length = 512
    num_inference_steps = 28
    guidance_scale = 3.5
    guidance_option = "true_cfg_scale"
    divided_layers = modulation(
        "transformer_blocks.*.norm1.linear",
        "transformer_blocks.*.norm1_context.linear",
        "single_transformer_blocks.*.norm.linear",
    )
    lora_targets = (
        *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
        *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    lora_names = LoraNames(kohya=_NAMES, comfyui=_NAMES)

    def embeds_guidance(self, denoiser_config: Mapping[str, Any]) -> bool:
        return bool(denoiser_config.get("guidance_embeds"))

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return T5's last hidden state, ``encoder_hidden_states`` (B, L, D), and CLIP's ``pooled_projections``."""
        pooled = text_encoders["text_encoder"](input_ids["text_encoder"]).pooler_output
        hidden = text_encoders["text_encoder_2"](input_ids["text_encoder_2"])[0]
        return {"encoder_hidden_states": hidden, "pooled_projections": pooled}

    def token_inputs(self, denoiser: Any, latents: Tensor, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        rows, columns = (side // self.patch_size for side in latents.shape[2:])
        given = dict(conditioning)
        guidance = given.pop("guidance", torch.ones(len(latents), device=latents.device))
        return given | {
            "guidance": guidance if self.embeds_guidance(denoiser.config) else None,
            "txt_ids": torch.zeros(given["encoder_hidden_states"].shape[1], 3, device=latents.device),
            "img_ids": image_positions(rows, columns, 3, latents.device),
        }
