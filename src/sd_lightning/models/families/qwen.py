"""What Qwen-Image, Qwen-Image 2.1 and Krea 2 share: the text around captions, and, but for 2.1, the VAE.

The VAE is one of films (Wan 2.1, arXiv 2503.20314, with a decoder for images: arXiv 2508.02324, section 2.3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_lightning.models.families.architecture import Component, Part
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.latents import LatentSpace, vae_factor
from sd_lightning.models.families.transformer import ChatFamily

FILM_VAE = Part("diffusers", ("AutoencoderKLQwenImage",))
PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"
PREFIX_TOKENS = 34
"""Of :data:`PREFIX`, whose hidden states are no input of the denoiser: ``prompt_template_encode_start_idx``."""


class QwenFamily(ChatFamily):
    """Base of a family with the VAE of Qwen-Image and its text around captions; a mask hides padding."""

    masks_padding = True
    guides_in_turn = True
    chat_template: str | None = None
    max_sequence_length = 512 + PREFIX_TOKENS
    prefix, suffix, prefix_tokens = PREFIX, SUFFIX, PREFIX_TOKENS
    words = r"<\|\w+\|>| ?\w+|."
    """Tokens of the text around captions, as the published tokenizer has them."""

    def adapt(self, tokenizer: Any) -> None:
        """Make the text around captions as many tokens as in the published tokenizer: words, marks and newlines."""
        from tokenizers import AddedToken

        words = dict.fromkeys(re.findall(self.words, self.prefix + self.suffix, re.DOTALL))
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
        tokenizer.backend_tokenizer.post_processor = None  # it would add a first and a last token

    # Captions

    def prompts(self, tokenizer: Any, captions: Sequence[str]) -> list[str]:
        return [self.prefix + caption + self.suffix for caption in captions]

    def tokenize(self, tokenizers: Mapping[str, Any], captions: Sequence[str]) -> dict[str, Tensor]:
        """Return token ids (B, prefix_tokens + L), and a mask (B, L) of the others."""
        found = super().tokenize(tokenizers, captions)
        return {name: each[:, self.prefix_tokens :] if name.endswith(MASK) else each for name, each in found.items()}

    def hidden_states(self, text_encoders: Mapping[str, Any], input_ids: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return all hidden states (B, L, D) after the prefix."""
        mask = f"text_encoder{MASK}"
        whole = {**input_ids, mask: F.pad(input_ids[mask], (self.prefix_tokens, 0), value=1)}
        return tuple(each[:, self.prefix_tokens :] for each in super().hidden_states(text_encoders, whole))

    # Pixels: an image is a film of one frame.

    def resolution(self, components: Mapping[str, Component]) -> int:
        """Return the pipelines' 1024 pixels, or fewer if the scheduler's shift knows fewer tokens."""
        tokens = int(components["scheduler"].config.get("max_image_seq_len", 4096))
        return min(1024, math.isqrt(tokens) * self.size_multiple(components["vae"].config))

    def latent_space(self, vae: Any) -> LatentSpace:
        """Return a space whose channels have statistics of their own, in the VAE's configuration."""
        config = vae.config
        return LatentSpace(
            channels=int(config["z_dim"]),
            factor=vae_factor(config),
            shift=torch.tensor(config["latents_mean"]),
            scale=1 / torch.tensor(config["latents_std"]),
        )

    def encode(self, vae: Any, pixel_values: Tensor) -> Tensor:
        moments: Tensor = vae.encode(pixel_values.unsqueeze(2)).latent_dist.parameters
        return moments.squeeze(2)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        return super().decode(vae, latents.unsqueeze(2)).squeeze(2)
