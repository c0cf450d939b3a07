"""``precompute text=true``: the text embeddings of a store's captions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from sd_lightning.apps.encoding import Workers
from sd_lightning.apps.stage_progress import StageProgress
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.store.layout import Generation, LatentStore
from sd_lightning.data.store.texts import TextEncoder, Tokenizing, missing_texts, text_kind, text_tasks
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.latent_diffusion import LatentDiffusion

_COUNTED = 1000
"""Samples whose captions are counted for the prediction."""


@dataclass(frozen=True)
class Texts:
    """The text embeddings of a store by one model."""

    store: LatentStore
    kind: str
    """From ``text_kind``."""
    tokenizing: Tokenizing

    @classmethod
    def of(cls, model: LatentDiffusion, store: LatentStore, tokenizing: Tokenizing) -> Texts:
        """Hash the text encoders of a model, whose weights are as they were read."""
        return cls(store, text_kind(model), tokenizing)

    def encoder(self, encoder: LatentEncoder, device: torch.device) -> TextEncoder:
        """Return what encodes captions, in the types of the store's recipe."""
        return TextEncoder(encoder, self.kind, self.store.folder, self.store.recipe.dtype, device)

    def predicted(self, encoder: TextEncoder, sources: Sequence[Source]) -> str:
        """Return how large the embeddings will be; one caption is encoded, and those of some samples are counted."""
        row_bytes = sum(each.nbytes for each in encoder.embed(self.tokenizing.tokenize([""])).values())
        total, count, is_exact = 0.0, 0, True
        for source in sources:
            looked = range(0, len(source), -(-len(source) // _COUNTED) or 1)
            found = 0
            for index in looked:
                with suppress(BadSample):
                    found += len(source.captions(index))
            total += found * len(source) / max(len(looked), 1)
            count, is_exact = count + len(source), is_exact and len(looked) == len(source)
        most = "at most" if is_exact else f"about, with {total / max(count, 1):.3g} captions per image,"
        return (
            f"text=true: {row_bytes} bytes of text embeddings for each caption: {most} {total * row_bytes / 1e9:.3g} "
            f"GB more in {self.store.folder.url}/{self.kind}"
        )

    def update(self, generation: Generation, workers: Workers, progress: StageProgress, scratch: Path) -> str:
        """Encode the captions of sample files that have no text file yet; return what was done as a line."""
        missing = missing_texts(self.store, generation, self.kind)
        tasks = text_tasks(self.store, missing, self.tokenizing, scratch)
        captions = size = 0
        for each in progress.watch_texts(len(missing), workers.embed(tasks)):
            captions += each.captions
            size += each.size
        return f"texts: {captions} captions encoded, {size / 1e6:.3g} MB written in {len(missing)} files"
