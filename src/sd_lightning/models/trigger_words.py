"""The rare word of a subject's captions, and how the tokenizers of a model read it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sd_lightning.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)

_FREQUENT = 0.4
"""Share of a vocabulary, which is sorted by how frequent its tokens are, that counts as known words."""


def trigger_word(model: LatentDiffusion, captions: Sequence[str], class_prompts: Iterable[str] = ()) -> str | None:
    """Return the word that names the subject: the rarest that all captions, and no class prompts, have; None without.

    A word is rare if the first tokenizer takes several tokens for it, or has it late in its vocabulary.
    """
    of_class = set(_words(" ".join(class_prompts).lower()))
    shared = [word for word in _words(captions[0]) if word.lower() not in of_class]
    shared = [word for word in shared if all(word in _words(caption) for caption in captions)]
    tokenizer = next(iter(_tokenizers(model).values()))

    def rarity(word: str) -> tuple[float, float, int]:
        tokens = _tokens(tokenizer, word)
        frequency = tokens[0] / len(tokenizer) if len(tokens) == 1 else 1.0
        return frequency, len(tokens) / len(word), -len(word)

    return max(shared, key=rarity, default=None)


def tell_of_trigger_word(model: LatentDiffusion, word: str, captions: Sequence[str]) -> None:
    """Log how tokenizers read a trigger word; warn if it means something already, or is cut off in a caption."""
    readings: dict[str, list[str]] = {}
    for name, tokenizer in _tokenizers(model).items():
        tokens = _tokens(tokenizer, word)
        pieces = " ".join(tokenizer.convert_ids_to_tokens(tokens))
        place = f", number {tokens[0]} of {len(tokenizer)}" if len(tokens) == 1 else ""
        readings.setdefault(f"{len(tokens)} token{'s' * (len(tokens) > 1)} ({pieces}{place})", []).append(name)
        if len(tokens) == 1 and tokens[0] < _FREQUENT * len(tokenizer):
            log.warning(
                "trigger word %r: it is among the %.0f %% most frequent words of the %s, and has a meaning already, "
                "from which training starts; a rare word, such as sks, has none",
                *(word, 100 * tokens[0] / len(tokenizer) + 1, name),
            )
    shown = "; ".join(f"{' and '.join(names)}: {reading}" for reading, names in readings.items())
    log.info("trigger word %r: %s", word, shown)
    heads = [caption[: re.search(rf"\b{re.escape(word)}\b", caption).end()] for caption in captions]  # type: ignore[union-attr]
    cut = [caption for caption, is_cut in zip(captions, model.truncated(heads)) if is_cut]
    if cut:
        log.warning(
            "trigger word %r: it is cut off in %d of %d captions, which are longer than the tokenizer reads (%r); "
            "write it at the beginning, for instance with data.caption_prefix",
            *(word, len(cut), len(captions), cut[0]),
        )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _tokenizers(model: LatentDiffusion) -> dict[str, Any]:
    names = map(model.family.tokenizer_of, model.text_encoders)
    return {name: model.tokenizers[name] for name in names}


def _tokens(tokenizer: Any, word: str) -> list[int]:
    """Return the tokens of a word amid a text."""
    return list(tokenizer(f" {word}", add_special_tokens=False).input_ids)
