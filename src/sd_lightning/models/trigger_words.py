"""The rare word of a subject's captions, and how the tokenizers of a model read it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from sd_lightning.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)

_RARE, _UNKNOWN = 0.1, 0.4
"""Shares of a vocabulary, which begins with the most frequent words: behind them, words may be, or are, rare."""


def trigger_word(model: LatentDiffusion, captions: Sequence[str], class_prompts: Iterable[str] = ()) -> str | None:
    """Return the word that names the subject: the rarest that all captions, and no class prompts, have; None without.

    None, too, where all are of several tokens, as in a small vocabulary, which tells nothing of how rare they are.
    Words of several tokens, and tokens late in the vocabulary of the first tokenizer, are rare. Of these, it is the one
    with the most bits per letter, if a token's probability falls with its number (Zipf's law).
    """
    of_class = set(_words(" ".join(class_prompts).lower()))
    shared = [word for word in _words(captions[0]) if word.lower() not in of_class]
    shared = [word for word in shared if all(word in _words(caption) for caption in captions)]
    tokenizer = next(iter(_tokenizers(model).values()))

    def rarity(word: str) -> tuple[bool, float]:
        tokens = _tokens(tokenizer, word)
        is_rare = len(tokens) > 1 or tokens[0] > _RARE * len(tokenizer)
        return is_rare, sum(math.log(token + 1) for token in tokens) / (len(word) if is_rare else 1)

    is_told = len(shared) == 1 or any(len(_tokens(tokenizer, word)) == 1 for word in shared)
    return max(shared, key=rarity) if is_told else None


def tell_of_trigger_word(model: LatentDiffusion, captions: Sequence[str], class_prompts: Iterable[str] = ()) -> None:
    """Log how tokenizers read the trigger word; warn if it means something already, or is cut off in a caption."""
    word, told = trigger_word(model, captions, class_prompts), []
    if word is None:
        log.info(
            "trigger word: the captions of a subject, of which %r is always there, share no word that is known to be "
            "rare; write 'data.caption_prefix=\"sks,\"' for one in front of all of them",
            captions[0],
        )
        return
    for name, tokenizer in _tokenizers(model).items():
        tokens = _tokens(tokenizer, word)
        place = f", number {tokens[0]} of {len(tokenizer)}" if len(tokens) == 1 else ""
        told.append(f"{name} reads {' '.join(tokenizer.convert_ids_to_tokens(tokens))} ({len(tokens)} token(s){place})")
        if len(tokens) == 1 and tokens[0] < _UNKNOWN * len(tokenizer):
            log.warning(
                "trigger word %r: it is among the %.0f %% most frequent words of the %s, and means something already, "
                "from which training starts; a rare word, such as sks, does not",
                *(word, 100 * tokens[0] / len(tokenizer) + 1, name),
            )
    log.info("trigger word %r: %s", word, "; ".join(told))
    heads = [caption[: caption.index(word) + len(word)] for caption in captions]
    cut = [caption for caption, is_cut in zip(captions, model.truncated(heads)) if is_cut]
    if cut:
        log.warning(
            "trigger word %r: the tokenizer cuts it off in %d of %d captions, as in %r; write it at the beginning, for "
            "instance with data.caption_prefix",
            *(word, len(cut), len(captions), cut[0]),
        )


def _words(text: str) -> list[str]:
    return re.findall(r"\w\w+", text)


def _tokenizers(model: LatentDiffusion) -> dict[str, Any]:
    names = map(model.family.tokenizer_of, model.text_encoders)
    return {name: model.tokenizers[name] for name in names}


def _tokens(tokenizer: Any, word: str) -> list[int]:
    """Return the tokens of a word amid a text."""
    return list(tokenizer(f" {word}", add_special_tokens=False).input_ids)
