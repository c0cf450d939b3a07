"""T5 v1.1, the text encoder of Stable Diffusion 3 and Flux.1 (arXiv 1910.10683; its gated layers, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

from sd_lightning.models.families.architecture import Component, Part

T5 = Part("transformers", ("T5EncoderModel",))
T5_TOKENIZER = Part("transformers", ("PreTrainedTokenizerFast", "T5TokenizerFast", "T5Tokenizer"))
"""The shipped tokenizer is no unigram model, which the others are."""


def t5(**config: Any) -> Component:
    """Return the encoder of T5 v1.1 XXL, or one with other values."""
    own = {
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return Component("transformers", "T5EncoderModel", own | config)


def t5_xxl() -> Component:
    """Return the published encoder: 4.762 billion weights."""
    return t5(vocab_size=32128)


def tiny_t5(width: int) -> Component:
    """Return the text encoder of the tiny models, without dropout, for the shipped tokenizer's vocabulary."""
    return t5(d_model=width, d_kv=16, d_ff=2 * width, num_layers=2, num_heads=4, dropout_rate=0.0)
