"""Stable Diffusion 3.5: a transformer of joint blocks, two CLIP text encoders and T5 (arXiv 2403.03206).

The sizes of ``sd35_medium`` and ``sd35_large`` are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.lora_names import LoraNames, block_names
from sd_lightning.models.families.stable_diffusion import TOKENIZER, VAE
from sd_lightning.models.families.tensor_parallel import attention, feed_forward, modulation
from sd_lightning.models.families.transformer import T5, T5_TOKENIZER, TransformerFamily

CLIP = "CLIPTextModelWithProjection"
T5_LENGTH = 256
"""Tokens of a caption for T5: ``max_sequence_length`` of the pipeline."""
_LAYERS = {
    **{f"attn.to_{part}": "x_block.attn.qkv" for part in "qkv"},
    **{f"attn.add_{part}_proj": "context_block.attn.qkv" for part in "qkv"},
    **{f"attn2.to_{part}": "x_block.attn2.qkv" for part in "qkv"},
    "attn.to_out.0": "x_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "attn.to_add_out": "context_block.attn.proj",
}
_NAMES = block_names("transformer_blocks", "joint_blocks", _LAYERS)
"""``SD3Transformer2DModel``: sd-scripts and ComfyUI have Stability AI's names."""


class StableDiffusion3(TransformerFamily):
    """Stable Diffusion 3 and 3.5. A pipeline may lack T5: zeros take the place of its embeddings."""

    pipeline_class = "StableDiffusion3Pipeline"
    parts = {
        "transformer": Part("diffusers", ("SD3Transformer2DModel",)),
        "vae": VAE,
        **dict.fromkeys(("text_encoder", "text_encoder_2"), Part("transformers", (CLIP,))),
        **dict.fromkeys(("tokenizer", "tokenizer_2"), TOKENIZER),
        "text_encoder_3": T5,
        "tokenizer_3": T5_TOKENIZER,
    }
    absent = ("image_encoder", "feature_extractor")
    optional = ("text_encoder_3",)
    frozen = ("text_encoder_3",)
    max_sequence_length = T5_LENGTH
    num_inference_steps = 28
    guidance_scale = 7.0
    divided_layers = {
        **attention("transformer_blocks.*.attn"),
        **attention("transformer_blocks.*.attn", "add_q_proj add_k_proj add_v_proj", "to_add_out"),
        **attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff"),
        **feed_forward("transformer_blocks.*.ff_context"),
        **modulation("transformer_blocks.*.norm1.linear", "transformer_blocks.*.norm1_context.linear"),
    }
    divided_heads = ("heads",)
    lora_targets = (
        *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
        *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    lora_names = LoraNames(kohya=_NAMES, comfyui=_NAMES)

    def largest_side(self, vae_config: Mapping[str, Any], denoiser_config: Mapping[str, Any]) -> int:
        return int(denoiser_config.get("pos_embed_max_size", 96)) * self.size_multiple(vae_config)

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Encode captions as in section 4 of the paper. T5 reads padding too, as in the pipeline.

        Returns:
            ``encoder_hidden_states`` (B, L, D), the penultimate hidden states of both CLIP encoders side by side,
            filled up with zeros to the width D of T5's, which follow; without T5 those of CLIP alone. And
            ``pooled_projections`` (B, P), the pooled output of both.
        """
        names = ("text_encoder", "text_encoder_2")
        outputs = [text_encoders[name](input_ids[name], output_hidden_states=True) for name in names]
        hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        if "text_encoder_3" in text_encoders:
            t5 = text_encoders["text_encoder_3"](input_ids["text_encoder_3"])[0]
            hidden = torch.cat([F.pad(hidden, (0, t5.shape[-1] - hidden.shape[-1])), t5], dim=1)
        return {"encoder_hidden_states": hidden, "pooled_projections": torch.cat([each[0] for each in outputs], dim=-1)}

    def encode_prompts(self, pipeline: Any, captions: Sequence[str]) -> dict[str, Any]:
        given = super().encode_prompts(pipeline, captions)
        return {**given, "prompt_embeds": _filled(given["prompt_embeds"], pipeline.transformer)}

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        text = {**conditioning, "encoder_hidden_states": _filled(conditioning["encoder_hidden_states"], denoiser)}
        return denoiser(noisy_latents, timestep=timesteps.expand(len(noisy_latents)), **text).sample


def _filled(hidden: Tensor, denoiser: Any) -> Tensor:
    """Return the embeddings of captions with zeros in place of T5's if they are of CLIP alone."""
    missing = int(denoiser.config.joint_attention_dim) - hidden.shape[-1]
    return F.pad(hidden, (0, missing, 0, T5_LENGTH)) if missing else hidden
