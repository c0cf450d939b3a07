"""Stable Diffusion XL: a UNet, two CLIP text encoders and size conditioning (arXiv 2307.01952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning.models.families.architecture import Component
from sd_lightning.models.families.base import SIZES, Layout
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.stable_diffusion import CLIP, TOKENIZER, UNET, VAE, UNetFamily


class SDXL(UNetFamily):
    """Stable Diffusion XL."""

    pipeline_class = "StableDiffusionXLPipeline"
    parts = {
        "unet": UNET,
        "vae": VAE,
        "text_encoder": CLIP,
        "text_encoder_2": CLIP,
        "tokenizer": TOKENIZER,
        "tokenizer_2": TOKENIZER,
    }
    # Training drops captions to "", so a model built here takes the encoded "" as unconditional input of guidance.
    # Published models take zeros instead, even where their model_index.json lacks the entry.
    pipeline_options = {"force_zeros_for_empty_prompt": False}
    stored_options = {"force_zeros_for_empty_prompt": True}
    vae_overflows = True

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Encode captions as in section 2.1 of the paper: with both encoders.

        Returns:
            ``encoder_hidden_states`` (B, L, D1 + D2), the penultimate hidden states of both, and ``added_cond_kwargs``
            with ``text_embeds`` (B, P), the pooled output of the second.
        """
        hidden, pooled = [], None
        for name in self.text_encoders:
            output = text_encoders[name](input_ids[name], output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
            pooled = output[0]
        return {"encoder_hidden_states": torch.cat(hidden, dim=-1), "added_cond_kwargs": {"text_embeds": pooled}}

    def conditioning(self, embeddings: Mapping[str, Any], batch: Mapping[str, Any]) -> Conditioning:
        """Add sizes as in section 2.2 of the paper: six numbers, which go through the time embedding.

        These are original size, crop corner and target size: ``time_ids`` (B, 6) in ``added_cond_kwargs``.
        """
        # Always float32: bfloat16 cannot represent odd sizes above 256.
        time_ids = torch.cat([batch[name] for name in SIZES], dim=1).float()
        return {**embeddings, "added_cond_kwargs": {**embeddings["added_cond_kwargs"], "time_ids": time_ids}}

    def embedding_keys(self, placeholder_token: str) -> tuple[str, ...]:
        return "clip_l", "clip_g"  # CLIP ViT-L and OpenCLIP ViT-bigG

    def single_file_layout(self, components: Mapping[str, Component]) -> Layout | None:
        return "xl"
