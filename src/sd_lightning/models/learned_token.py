"""Textual inversion (arXiv 2208.01618): a new token, one trained row in each text encoder's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Family
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.storage.streamed_tensor import write_tensors

WEIGHTS_NAME = "learned_embeds.safetensors"
"""File name that diffusers uses."""


class LearnedEmbedding(nn.Embedding):
    """An embedding that trains only its last row; the gradient of all other rows is zero.

    Engines and files treat it as a plain embedding: its weight keeps name and shape.
    """

    def forward(self, input: Tensor) -> Tensor:
        fixed = F.embedding(input, self.weight.detach())
        is_new = (input == self.num_embeddings - 1).unsqueeze(-1)
        return torch.where(is_new, F.embedding(input, self.weight), fixed)


@dataclass(frozen=True)
class LearnedToken:
    """A new token and how its embedding is initialised."""

    placeholder_token: str = "S*"
    """The new word; the tokenizer must not have it."""
    initializer_token: str | None = None
    """A known word to copy the first embedding from; the mean of all embeddings if not given."""

    def __post_init__(self) -> None:
        if self.placeholder_token.split() != [self.placeholder_token]:
            raise UsageError(
                f"placeholder_token={self.placeholder_token!r}: expected one word without blanks, such as S*; write "
                f"placeholder_token={'-'.join(self.placeholder_token.split()) or 'S*'}"
            )

    def apply_(self, model: LatentDiffusion) -> None:
        """Add the token to each tokenizer of a model, and a row of its own to each text encoder's embedding.

        Raises:
            UsageError: A tokenizer has the word, lacks the initializer token, or does not fit its text encoder.
        """
        tokenizers = {name: model.tokenizers[model.family.tokenizer_of(name)] for name in model.text_encoders}
        starts = {name: self._check(name, tokenizer, model) for name, tokenizer in tokenizers.items()}
        for name, tokenizer in tokenizers.items():
            tokenizer.add_tokens([self.placeholder_token])
            encoder: Any = model.networks[name]
            old: Tensor = encoder.get_input_embeddings().weight.detach()
            start = starts[name]
            row = old.mean(0) if start is None else old[start]
            embedding = LearnedEmbedding(len(old) + 1, old.shape[1], _weight=torch.cat([old, row[None]]))
            encoder.set_input_embeddings(embedding)
            # Published configurations have eos_token_id=2, for which transformers takes the largest token id as the
            # caption's end. That would now be the new token, and SDXL's pooled embedding would ignore what follows.
            settings = {"vocab_size": len(old) + 1, "eos_token_id": tokenizer.eos_token_id}
            for holder in [encoder.config, *(m for m in encoder.modules() if "eos_token_id" in vars(m))]:
                holder.eos_token_id = tokenizer.eos_token_id
            encoder.config.vocab_size = len(old) + 1
            component = model.components[name]
            model.components[name] = replace(component, config={**component.config, **settings})
        model.forget_tokens()

    def _check(self, name: str, tokenizer: Any, model: LatentDiffusion) -> int | None:
        """Return the id of the initializer token for one text encoder, None if there is none."""
        if name in model.deferred:
            raise UsageError(
                f"SDLightningModule got learned_token= and a model with deferred weights of {name}, which get a row "
                "more; leave it out of deferred="
            )
        if _is_known(self.placeholder_token, tokenizer):
            free = next(word for word in map("S{}*".format, ("", *range(1, 1000))) if not _is_known(word, tokenizer))
            raise UsageError(
                f"placeholder_token={self.placeholder_token}: the tokenizer has this word; expected a new one; write "
                f"placeholder_token={free}, or learn_token=false to go on with what the word means"
            )
        rows = model.networks[name].get_input_embeddings().num_embeddings  # type: ignore[operator]
        if rows != len(tokenizer):
            raise UsageError(
                f"learn_token=true: {name} knows {rows} tokens, but its tokenizer {len(tokenizer)}; expected as many, "
                "so that a new one is the last of both; give the tokenizer that belongs to the text encoder"
            )
        if self.initializer_token is None:
            return None
        ids = tokenizer(self.initializer_token, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UsageError(
                f"initializer_token={self.initializer_token}: the tokenizer takes it for {len(ids)} tokens; expected a "
                "single, common word, e.g. initializer_token=dog, or null"
            )
        return int(ids[0])

    def write(self, file: Path, rows: Mapping[str, Tensor], family: Family) -> str:
        """Write the learned embeddings for ``pipeline.load_textual_inversion`` of the same model.

        Args:
            file: Path of the file.
            rows: By text encoder, (1, D), in the order of ``family.text_encoders``.
            family: Family of the model.

        Returns:
            The SHA-256 of the file.
        """
        return write_tensors(file, dict(zip(family.embedding_keys(self.placeholder_token), rows.values(), strict=True)))

    @staticmethod
    def names(networks: Mapping[str, nn.Module]) -> dict[str, str]:
        """Return, by network, the name of the learned embedding's weight."""
        return {
            name: f"{key}.weight"
            for name, network in networks.items()
            for key, module in network.named_modules()
            if isinstance(module, LearnedEmbedding)
        }

    @staticmethod
    def parameters(networks: Mapping[str, nn.Module]) -> list[nn.Parameter]:
        """Return the weights of the embeddings that hold the new token."""
        return [networks[name].get_parameter(key) for name, key in LearnedToken.names(networks).items()]


def _is_known(word: str, tokenizer: Any) -> bool:
    return len(tokenizer(word, add_special_tokens=False).input_ids) == 1
