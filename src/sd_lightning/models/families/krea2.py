"""Krea 2: a transformer of one stream of caption and image tokens, layers of Qwen3-VL and the VAE of Qwen-Image.

Template, tokens and time are those of Krea's reference, as diffusers has them. The sizes of ``krea2`` are those of the
published Raw checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Architecture, Component, Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.lora_names import LoraNames, block_names
from sd_lightning.models.families.qwen import FILM_VAE, PREFIX_TOKENS, SUFFIX, QwenFamily, film_vae, tiny_film_vae
from sd_lightning.models.families.transformer import (
    CHAT_TOKENIZER,
    flow_euler,
    image_positions,
    qwen3_4b,
    tiny_qwen3,
    to_latents,
    to_tokens,
)

SELECT_LAYERS = tuple(range(2, 36, 3))
"""The text encoder's hidden states that are the denoiser's input, where ``model_index.json`` names none."""
_LAYERS = {
    **{f"attn.to_{part}": f"attn.w{part}" for part in "qkv"},
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    **{f"ff.{part}": f"mlp.{part}" for part in ("gate", "up", "down")},
}
_OURS: tuple[str, ...] = (
    "img_in",
    "time_embed.linear_1",
    "time_embed.linear_2",
    "time_mod_proj",
    "text_fusion.projector",
)
_OURS += ("txt_in.linear_1", "txt_in.linear_2", "final_layer.linear")
_THEIRS = ("first", "tmlp.0", "tmlp.2", "tproj.1", "txtfusion.projector", "txtmlp.1", "txtmlp.3", "last.linear")
_BLOCKS = {"transformer_blocks": "blocks"}
_BLOCKS |= {f"text_fusion.{each}": f"txtfusion.{each}" for each in ("layerwise_blocks", "refiner_blocks")}
_NAMES = dict(zip(_OURS, _THEIRS, strict=True))
_NAMES |= {k: v for ours, theirs in _BLOCKS.items() for k, v in block_names(ours, theirs, _LAYERS).items()}
"""Of Krea's reference, which musubi-tuner and ComfyUI have."""


def qwen3_vl(text: Component, sections: Sequence[int], **vision: Any) -> Component:
    """Return a Qwen3-VL with the language model of a Qwen3 (arXiv 2511.21631)."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [*sections], "mrope_interleaved": True}
    config = {
        "text_config": {**text.config, "max_position_embeddings": 262144, "rope_parameters": rope},
        "vision_config": {**vision, "out_hidden_size": text.config["hidden_size"]},
        "tie_word_embeddings": True,
    }
    return Component("transformers", "Qwen3VLModel", config)


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
    width_key = "num_attention_heads"
    lora_names = LoraNames(kohya=_NAMES, comfyui=_NAMES)
    num_inference_steps = 28
    guidance_scale = 4.5
    no_guidance = 0.0  # cond + s * (cond - uncond)
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
        ids, mask = input_ids["text_encoder"], input_ids[f"text_encoder{MASK}"]
        # transformers would look at the values of a mask, and of positions on one axis
        attended = None if mask.is_meta else F.pad(mask, (PREFIX_TOKENS, 0), value=1)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        options = {
            "attention_mask": attended,
            "position_ids": positions,
            "output_hidden_states": True,
            "use_cache": False,
        }
        states = text_encoders["text_encoder"].get_decoder()(ids, **options).hidden_states
        stacked = torch.stack([states[number][:, PREFIX_TOKENS:] for number in self.select_layers], dim=2)
        return {"encoder_hidden_states": stacked, "encoder_attention_mask": mask.to(stacked.dtype)}

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        mask = conditioning["encoder_attention_mask"].bool()
        return {"prompt_embeds": conditioning["encoder_hidden_states"], "prompt_embeds_mask": mask}

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count, _, height, width = noisy_latents.shape
        size, text = self.patch_size, conditioning["encoder_hidden_states"]
        positions = image_positions(height // size, width // size, 3, noisy_latents.device)
        packed: Tensor = denoiser(
            hidden_states=to_tokens(noisy_latents, size),
            encoder_hidden_states=text,
            timestep=timesteps.expand(count) / 1000,
            position_ids=torch.cat([positions.new_zeros(text.shape[1], 3), positions]),
            encoder_attention_mask=conditioning["encoder_attention_mask"].bool(),
            return_dict=False,
        )[0]
        return to_latents(packed, height, width, size)

    vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    tiny_vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "deepstack_visual_indexes": []}
    tiny_sizes = {"in_channels": 16, "num_layers": 3, "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6]}
    tiny_sizes |= {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 170}
    tiny_sizes |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 2, "num_layerwise_text_blocks": 1}
    tiny_sizes |= {"text_hidden_dim": 32, "text_intermediate_size": 86}
    architectures = {
        "tiny_krea2": Architecture(
            pipeline_class,
            networks={
                "transformer": Component("diffusers", "Krea2Transformer2DModel", tiny_sizes),
                "vae": tiny_film_vae(),
                "text_encoder": qwen3_vl(
                    tiny_qwen3(36), (2, 1, 1), num_heads=2, patch_size=2, num_position_embeddings=4, **tiny_vision
                ),
            },
            scheduler=flow_euler(shift=1.0, max_image_seq_len=16),
            max_length=16 + PREFIX_TOKENS,
            token_embedding_std=1.0,
            is_tiny=True,
            shipped_vae="film_vae",
        ),
        "krea2": Architecture(
            pipeline_class,
            networks={
                "transformer": Component("diffusers", "Krea2Transformer2DModel", {"num_attention_heads": 48}),
                "vae": film_vae(),
                "text_encoder": qwen3_vl(qwen3_4b(), (24, 20, 20), num_heads=16, **vision),
            },
            scheduler=flow_euler(use_dynamic_shifting=True, max_image_seq_len=6400),
            max_length=512 + PREFIX_TOKENS,
            licence="Krea 2, free under $1M revenue",
        ),
    }
