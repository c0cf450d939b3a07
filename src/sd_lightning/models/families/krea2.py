"""Krea 2: a transformer of one stream of caption and image tokens, layers of Qwen3-VL and the VAE of Qwen-Image.

Template, tokens and time are those of Krea's reference, as diffusers has them. The sizes of ``krea2`` are those of the
published Raw checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.lora_names import LoraNames, block_names
from sd_lightning.models.families.qwen import FILM_VAE, SUFFIX, QwenFamily
from sd_lightning.models.families.tensor_parallel import attention, modulation
from sd_lightning.models.families.transformer import CHAT_TOKENIZER, image_positions

SELECT_LAYERS = tuple(range(2, 36, 3))
"""The text encoder's hidden states that are the denoiser's input, where ``model_index.json`` names none."""
_LAYERS = {
    **{f"attn.to_{part}": f"attn.w{part}" for part in "qkv"},
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    **{f"ff.{part}": f"mlp.{part}" for part in ("gate", "up", "down")},
}
_NAMES = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "text_fusion.projector": "txtfusion.projector",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "final_layer.linear": "last.linear",
}
_BLOCKS = {"transformer_blocks": "blocks"}
_BLOCKS |= {f"text_fusion.{each}": f"txtfusion.{each}" for each in ("layerwise_blocks", "refiner_blocks")}
_NAMES |= {k: v for ours, theirs in _BLOCKS.items() for k, v in block_names(ours, theirs, _LAYERS).items()}
"""Of Krea's reference, which musubi-tuner and ComfyUI have."""


class Krea2(QwenFamily):
    """Krea 2. Padding is at the end: the denoiser has no positions in captions, and a mask hides what is padded.

    The pipeline pads before :data:`SUFFIX`, with positions that do not count padding, which makes the same.
    """

    pipeline_class = "Krea2Pipeline"
    parts = {
        "transformer": Part("diffusers", ("Krea2Transformer2DModel",)),
        "vae": FILM_VAE,
        "text_encoder": Part("transformers", ("Qwen3VLModel",)),
        "tokenizer": CHAT_TOKENIZER,
    }
    pipeline_options = {"is_distilled": False, "text_encoder_select_layers": SELECT_LAYERS}
    stored_options = pipeline_options
    select_layers = SELECT_LAYERS
    lora_names = LoraNames(kohya=_NAMES, comfyui=_NAMES)
    divided_layers = {
        **attention("*.attn", "to_q to_k to_v to_gate"),
        **attention("*.ff", "gate up", "down"),
        **modulation("time_mod_proj"),
    }
    divided_heads = ("num_heads", "num_kv_heads")
    num_inference_steps = 28
    guidance_scale = 4.5
    no_guidance = 0.0  # cond + s * (cond - uncond)
    distilled_takes_guidance = True
    base_checkpoint = "the Raw checkpoint, krea/Krea-2-Raw"

    def of_options(self, options: Mapping[str, Any]) -> Krea2:
        made = copy.copy(self)
        made.select_layers = tuple(options.get("text_encoder_select_layers") or SELECT_LAYERS)
        if options.get("is_distilled"):
            made.num_inference_steps, made.guidance_scale = 8, self.no_guidance
        return made

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, 34 + L) and a mask (B, L): a caption that is too long loses its end, not the suffix."""
        found = super().tokenize(tokenizers, captions)
        is_full = found[f"text_encoder{MASK}"][:, -1] == 1
        suffix = torch.tensor(tokenizers["tokenizer"](SUFFIX).input_ids)
        found["text_encoder"][is_full, -len(suffix) :] = suffix
        return found

    def embed(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return hidden states (B, L, layers, D), and a mask (B, L), 0 where padded."""
        states = self.hidden_states(text_encoders, input_ids)
        stacked = torch.stack([states[number] for number in self.select_layers], dim=2)
        mask = input_ids[f"text_encoder{MASK}"].to(stacked.dtype)
        return {"encoder_hidden_states": stacked, "encoder_hidden_states_mask": mask}

    def token_inputs(self, denoiser: Any, latents: Tensor, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        text, mask = conditioning["encoder_hidden_states"], conditioning["encoder_hidden_states_mask"].bool()
        rows, columns = (side // self.patch_size for side in latents.shape[2:])
        positions = image_positions(rows, columns, 3, latents.device)
        ids = torch.cat([positions.new_zeros(text.shape[1], 3), positions])
        return {"encoder_hidden_states": text, "encoder_attention_mask": mask, "position_ids": ids}
