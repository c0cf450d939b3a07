"""A new word for a subject: one row of the text encoder's embedding that is trained (arXiv 2208.01618)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.latent_diffusion import LatentDiffusion

_SINGLE_ENCODER = "StableDiffusionPipeline"


class LearnedEmbedding(nn.Embedding):
    """An embedding of which only the last row is trained: the others never have a gradient other than zero.

    Its weight keeps name and shape, so that engines and files know nothing of it.
    """

    def forward(self, input: Tensor) -> Tensor:
        fixed = F.embedding(input, self.weight.detach())
        is_new = (input == self.num_embeddings - 1).unsqueeze(-1)
        return torch.where(is_new, F.embedding(input, self.weight), fixed)


@dataclass(frozen=True)
class LearnedToken:
    """The word, and what it means at first."""

    placeholder_token: str = "S*"
    """A word that the tokenizer does not have."""
    initializer_token: str | None = None
    """A word whose meaning it begins with; the mean of all words if not given."""

    def apply_(self, model: LatentDiffusion) -> None:
        """Add the word to the tokenizer and to the text encoder of a model.

        Raises:
            UsageError: The tokenizer has the word, or the model has several text encoders.
        """
        if model.pipeline_class != _SINGLE_ENCODER:
            raise UsageError(
                f"learn_token=true: a {model.pipeline_class} pools where its largest token is, which a new one would "
                "be; expected Stable Diffusion 1.x or 2.x; leave learn_token out"
            )
        (tokenizer,), encoder = model.tokenizers.values(), model.networks["text_encoder"]
        start = None if self.initializer_token is None else self._id_of(self.initializer_token, tokenizer)
        if len(tokenizer(self.placeholder_token, add_special_tokens=False).input_ids) == 1:
            raise UsageError(
                f"placeholder_token={self.placeholder_token}: the tokenizer has this word; expected a new one, e.g. "
                "placeholder_token=S*"
            )
        tokenizer.add_tokens([self.placeholder_token])
        model.forget_tokens()
        old: Tensor = encoder.get_input_embeddings().weight.detach()  # type: ignore[operator]
        row = old.mean(0) if start is None else old[start]
        embedding = LearnedEmbedding(len(old) + 1, old.shape[1], _weight=torch.cat([old, row[None]]))
        encoder.set_input_embeddings(embedding)  # type: ignore[operator]
        encoder.config.vocab_size = len(old) + 1  # type: ignore[union-attr]
        component = model.components["text_encoder"]
        model.components["text_encoder"] = replace(component, config={**component.config, "vocab_size": len(old) + 1})

    @staticmethod
    def parameters(networks: Mapping[str, nn.Module]) -> list[nn.Parameter]:
        """Return the embeddings that hold the word."""
        modules = (module for network in networks.values() for module in network.modules())
        return [p for module in modules if isinstance(module, LearnedEmbedding) for p in module.parameters()]

    @staticmethod
    def _id_of(word: str, tokenizer: Any) -> int:
        ids = tokenizer(word, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UsageError(
                f"initializer_token={word}: the tokenizer takes it for {len(ids)} tokens; expected a single, common "
                "word, e.g. initializer_token=dog, or null"
            )
        return int(ids[0])
