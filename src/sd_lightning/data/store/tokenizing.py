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
        """Return how a model's captions become token ids; all of a tokenizer counts, such as its merges."""
        found = blake2b(digest_size=16)
        for name, tokenizer in sorted(model.tokenizers.items()):
            rules = json.loads(tokenizer.backend_tokenizer.to_str())
            for call in ("padding", "truncation"):  # what the last call asked for
                rules.pop(call)
            about = [name, tokenizer.model_max_length, rules, str(tokenizer.special_tokens_map)]
            found.update(json.dumps(about).encode())
        return cls(model.tokenize, found.hexdigest())
