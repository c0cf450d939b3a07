"""Qwen-Image: a transformer with one stream of image and one of caption tokens, and Qwen2.5-VL (arXiv 2508.02324).

Positions, time and guidance are those of the Qwen team's reference, as diffusers has them. The sizes of
``qwen_image`` are those of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sd_lightning.models.families.architecture import Architecture, Component, Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.qwen import FILM_VAE, PREFIX_TOKENS, QwenFamily, film_vae, tiny_film_vae
from sd_lightning.models.families.transformer import CHAT_TOKENIZER, flow_euler, to_latents, to_tokens


def qwen25_vl(mrope_section: list[int], vision_config: dict[str, Any], **config: Any) -> Component:
    """Return a Qwen2.5-VL text encoder (arXiv 2502.13923), its configuration flat as that of published files."""
    rope = {"rope_type": "default", "mrope_section": mrope_section}
    own = {"rms_norm_eps": 1e-6, "rope_parameters": rope, "vision_config": vision_config}
    return Component("transformers", "Qwen2_5_VLForConditionalGeneration", own | config)


class QwenImage(QwenFamily):
    """Qwen-Image. After guidance, its pipelines give each token's prediction the length that it has without."""

    pipeline_class = "QwenImagePipeline"
    parts = {
        "transformer": Part("diffusers", ("QwenImageTransformer2DModel",)),
        "vae": FILM_VAE,
        "text_encoder": Part("transformers", ("Qwen2_5_VLForConditionalGeneration",)),
        "tokenizer": CHAT_TOKENIZER,
    }
    width_key = "num_attention_heads"
    guidance_option = "true_cfg_scale"

    def unused_parameters(self, denoiser: nn.Module) -> list[str]:
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}."  # type: ignore[arg-type]
        layers = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        return [f"{last}{layer}.weight" for layer in layers]

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the last hidden state, ``encoder_hidden_states`` (B, L, D), and its mask (B, L), 0 where padded."""
        states = self.hidden_states(text_encoders, input_ids)[-1]
        mask = input_ids[f"text_encoder{MASK}"].to(states.dtype)
        return {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask}

    def prompt_options(self, conditioning: Conditioning) -> dict[str, Any]:
        names = {"prompt_embeds": "encoder_hidden_states", "prompt_embeds_mask": "encoder_hidden_states_mask"}
        return {ours: conditioning[theirs] for ours, theirs in names.items()}

    def denoise(
        self, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, conditioning: Mapping[str, Any]
    ) -> Tensor:
        count, _, height, width = noisy_latents.shape
        size = self.patch_size
        packed: Tensor = denoiser(
            hidden_states=to_tokens(noisy_latents, size),
            timestep=timesteps.expand(count) / 1000,
            img_shapes=[[(1, height // size, width // size)]] * count,
            return_dict=False,
            **conditioning,
        )[0]
        return to_latents(packed, height, width, size)

    architectures = {
        "tiny_qwen_image": Architecture(
            pipeline_class,
            networks={
                "transformer": Component(
                    "diffusers",
                    "QwenImageTransformer2DModel",
                    {
                        "in_channels": 16,
                        "out_channels": 4,
                        "num_layers": 3,
                        "attention_head_dim": 16,
                        "num_attention_heads": 4,
                        "joint_attention_dim": 32,
                        "axes_dims_rope": [4, 6, 6],
                    },
                ),
                "vae": tiny_film_vae(),
                "text_encoder": qwen25_vl(
                    [2, 1, 1],
                    {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
                    hidden_size=32,
                    intermediate_size=64,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                ),
            },
            scheduler=flow_euler(shift=1.0, max_image_seq_len=16),
            max_length=16 + PREFIX_TOKENS,
            token_embedding_std=1.0,
            is_tiny=True,
            shipped_vae="film_vae",
        ),
        "qwen_image": Architecture(
            pipeline_class,
            networks={
                "transformer": Component("diffusers", "QwenImageTransformer2DModel", {"num_attention_heads": 24}),
                "vae": film_vae(),
                "text_encoder": qwen25_vl(
                    [16, 24, 24],
                    {"hidden_size": 1280},
                    vocab_size=152064,
                    hidden_size=3584,
                    intermediate_size=18944,
                    num_hidden_layers=28,
                    num_attention_heads=28,
                    num_key_value_heads=4,
                ),
            },
            scheduler=flow_euler(use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02),
            max_length=512 + PREFIX_TOKENS,
            licence="Apache 2.0",
        ),
    }
