"""Captions to token ids for a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sd_lightning.models.latent_diffusion import LatentDiffusion


@dataclass(frozen=True)
class Tokenizing:
    """Captions to token ids."""

    tokenize: Callable[[list[str]], Mapping[str, Tensor]]
    """Captions -> ids (B, L) by text encoder."""
    fingerprint: str
    """Hash of the tokenizers: stored token ids serve models with equal ones."""

    @classmethod
    def of(cls, model: LatentDiffusion) -> Tokenizing:
        """Return how a model's captions become token ids."""
        found = blake2b(digest_size=16)
        for name, tokenizer in sorted(model.tokenizers.items()):
            vocabulary = sorted(tokenizer.get_vocab().items())
            about = [name, tokenizer.model_max_length, vocabulary, str(tokenizer.special_tokens_map)]
            found.update(json.dumps(about).encode())
        return cls(model.tokenize, found.hexdigest())
