"""Flux.2-klein: a transformer of two kinds of blocks, Qwen3, and a VAE whose patches are normalised.

Blocks, position ids and time are those of Black Forest Labs' reference, as diffusers has them. The sizes of
``klein_4b`` and ``klein_9b`` are those of the published base checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.latents import LatentSpace, vae_factor
from sd_lightning.models.families.lora_names import LoraNames, flux_names
from sd_lightning.models.families.tensor_parallel import modulation
from sd_lightning.models.families.transformer import (
    CHAT_TOKENIZER,
    QWEN3,
    ChatFamily,
    image_positions,
)

HIDDEN_STATES = (9, 18, 27)
"""The text encoder's hidden states that are the denoiser's input: ``text_encoder_out_layers`` of the pipeline."""
PATCH = 2
"""Side of the patches of the VAE's latents that are one pixel of the denoiser's."""
_DOUBLE_STREAM = {
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_NAMES = flux_names(_DOUBLE_STREAM, {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"})
_LORA_NAMES = LoraNames(kohya=_NAMES, comfyui=_NAMES)
"""``Flux2Transformer2DModel``: both have Black Forest Labs' names. musubi-tuner reads adapters in blocks only."""


class Flux2Klein(ChatFamily):
    """Flux.2-klein. All tokens of a caption are the denoiser's input, padding too; its text encoder masks padding.

    Its pipelines draw with the shift of ``compute_empirical_mu``, which also depends on the number of inference steps;
    training, which has none, draws noise levels with the scheduler's own (:class:`DynamicShift`) or a number.
    """

    pipeline_class = "Flux2KleinPipeline"
    guides_in_turn = True
    parts = {
        "transformer": Part("diffusers", ("Flux2Transformer2DModel",)),
        "vae": Part("diffusers", ("AutoencoderKLFlux2",)),
        "text_encoder": QWEN3,
        "tokenizer": CHAT_TOKENIZER,
    }
    pipeline_options = {"is_distilled": False}
    stored_options = {"is_distilled": False}
    divided_layers = modulation(
        "double_stream_modulation_img.linear", "double_stream_modulation_txt.linear", "single_stream_modulation.linear"
    )
    lora_targets = (
        *("to_k", "to_q", "to_v", "to_out.0"),
        *("to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"),
    )
    lora_names = _LORA_NAMES
    patch_size = 1  # of latents that are patches already
    base_checkpoint = "the base checkpoint, such as black-forest-labs/FLUX.2-klein-base-4B"

    def size_multiple(self, vae_config: Mapping[str, Any]) -> int:
        return vae_factor(vae_config) * PATCH

    def latent_space(self, vae: Any) -> LatentSpace:
        """Return the space of 2 x 2 patches, normalised by the running statistics of the VAE's ``bn``."""
        config, size = vae.config, PATCH
        return LatentSpace(
            channels=int(config["latent_channels"]) * size**2,
            factor=vae_factor(config),
            patch_size=size,
            shift=vae.bn.running_mean,
            scale=(vae.bn.running_var.float() + config["batch_norm_eps"]).rsqrt(),
        )

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return three hidden states side by side, ``encoder_hidden_states`` (B, L, 3 * D)."""
        states = self.hidden_states(text_encoders, input_ids)
        return {"encoder_hidden_states": torch.cat([states[number] for number in HIDDEN_STATES], dim=-1)}

    def token_inputs(self, denoiser: Any, latents: Tensor, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        text, device = conditioning["encoder_hidden_states"], latents.device
        # Positions (time, row, column, token): an image has rows and columns, a caption tokens.
        text_ids = torch.zeros(text.shape[1], 4, device=device)
        text_ids[:, 3] = torch.arange(text.shape[1], device=device)
        image_ids = image_positions(latents.shape[2], latents.shape[3], 4, device)
        return {"encoder_hidden_states": text, "guidance": None, "txt_ids": text_ids, "img_ids": image_ids}
