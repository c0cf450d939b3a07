"""Qwen-Image: a transformer with one stream of image and one of caption tokens, and Qwen2.5-VL (arXiv 2508.02324).

Positions, time and guidance are those of the Qwen team's reference, as diffusers has them. The sizes of
``qwen_image`` are those of the published checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sd_lightning.models.families.architecture import Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import Conditioning
from sd_lightning.models.families.qwen import FILM_VAE, QwenFamily
from sd_lightning.models.families.tensor_parallel import modulation
from sd_lightning.models.families.transformer import CHAT_TOKENIZER


class QwenImage(QwenFamily):
    """Qwen-Image. After guidance, its pipelines give each token's prediction the length that it has without."""

    pipeline_class = "QwenImagePipeline"
    parts = {
        "transformer": Part("diffusers", ("QwenImageTransformer2DModel",)),
        "vae": FILM_VAE,
        "text_encoder": Part("transformers", ("Qwen2_5_VLForConditionalGeneration",)),
        "tokenizer": CHAT_TOKENIZER,
    }
    guidance_option = "true_cfg_scale"
    divided_layers = modulation("transformer_blocks.*.img_mod.1", "transformer_blocks.*.txt_mod.1")

    def unused_parameters(self, denoiser: nn.Module) -> list[str]:
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}."  # type: ignore[arg-type]
        layers = ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        return [f"{last}{layer}.weight" for layer in layers]

    def embed(self, text_encoders: Mapping[str, nn.Module], input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the last hidden state, ``encoder_hidden_states`` (B, L, D), and its mask (B, L), 0 where padded."""
        states = self.hidden_states(text_encoders, input_ids)[-1]
        mask = input_ids[f"text_encoder{MASK}"].to(states.dtype)
        return {"encoder_hidden_states": states, "encoder_hidden_states_mask": mask}

    def token_inputs(self, denoiser: Any, latents: Tensor, conditioning: Mapping[str, Any]) -> dict[str, Any]:
        rows, columns = (side // self.patch_size for side in latents.shape[2:])
        return {"img_shapes": [[(1, rows, columns)]] * len(latents), **conditioning}
