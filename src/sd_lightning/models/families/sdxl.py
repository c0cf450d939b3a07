"""Stable Diffusion XL: a UNet, two CLIP text encoders and size conditioning (arXiv 2307.01952)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sd_lightning.models.families.base import SIZES, Architecture, Component, Conditioning, Layout
from sd_lightning.models.families.stable_diffusion import BETAS, CLIP, TOKENIZER, UNET, VAE, UNetFamily, clip, unet, vae


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

    def condition(self, text_encoders: Mapping[str, nn.Module], batch: Mapping[str, Any]) -> Conditioning:
        """Encode captions and sizes as in section 2.2 of the paper.

        The penultimate hidden states of both encoders are concatenated. The pooled output of the second encoder and
        six numbers (original size, crop corner, target size) go through the time embedding.

        Returns:
            ``encoder_hidden_states`` (B, L, D1 + D2) and ``added_cond_kwargs`` with ``text_embeds`` (B, P) and
            ``time_ids`` (B, 6).
        """
        hidden, pooled = [], None
        for name in self.text_encoders:
            output = text_encoders[name](batch["input_ids"][name], output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
            pooled = output[0]
        time_ids = torch.cat([batch[name] for name in SIZES], dim=1)
        return {
            "encoder_hidden_states": torch.cat(hidden, dim=-1),
            # Always float32: bfloat16 cannot represent odd sizes above 256.
            "added_cond_kwargs": {"text_embeds": pooled, "time_ids": time_ids.float()},
        }

    def embedding_keys(self, placeholder_token: str) -> tuple[str, ...]:
        return "clip_l", "clip_g"  # CLIP ViT-L and OpenCLIP ViT-bigG

    def single_file_layout(self, text_encoder_config: Mapping[str, Any]) -> Layout | None:
        return "xl"

    architectures = {
        "sdxl": Architecture(
            pipeline_class,
            networks={
                "unet": unet(
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
                "vae": vae(sample_size=1024, scaling_factor=0.13025, force_upcast=True),
                "text_encoder": clip(768, 12, "quick_gelu", 768),
                "text_encoder_2": clip(1280, 32, "gelu", 1280, class_name="CLIPTextModelWithProjection"),
            },
            scheduler=Component(
                "diffusers",
                "EulerDiscreteScheduler",
                {**BETAS, "prediction_type": "epsilon", "timestep_spacing": "leading", "steps_offset": 1},
            ),
        )
    }
