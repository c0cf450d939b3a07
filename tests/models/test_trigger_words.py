"""The word of a subject: found among its captions, and how the tokenizer reads it."""

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sd_lightning import LatentDiffusion
from sd_lightning.models.trigger_words import tell_of_trigger_word, trigger_word

WORDS = ["a", "of", "photo", "in", "dog", "the", "lily", "beach", *(f"word{i}" for i in range(80)), "sks", "o", "hwx"]


@pytest.fixture
def model(tiny_words: PreTrainedTokenizerFast) -> LatentDiffusion:
    """A model whose tokenizer knows words by how frequent they are, as CLIP's does."""
    made = LatentDiffusion.build("tiny", device="meta")
    made.tokenizers["tokenizer"] = tiny_words
    return made


@pytest.fixture
def tiny_words() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*WORDS, *"abcdefghijklmnpqrstuvwxyz"[1:], "[UNK]"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8, unk_token="[UNK]", pad_token="[UNK]")


@pytest.mark.parametrize(
    ("captions", "class_prompts", "word"),
    [
        (["a photo of sks dog"], [], "sks"),
        (["a photo of ohwx dog in the beach"], [], "ohwx"),
        (["a photo of sks dog", "sks asleep"], [], "sks"),
        (["a photo of lily dog"], ["a photo of a dog"], "lily"),
        (["a photo of lily dog"], [], "lily"),
        (["a photo of a dog"], ["a photo of a dog"], None),
        (["sks", "dog"], [], None),
        (["kiq dxg"], [], None),
        (["ohwx"], [], "ohwx"),
    ],
)
def test_the_rarest_shared_word_names_the_subject(
    model: LatentDiffusion, captions: list[str], class_prompts: list[str], word: str | None
) -> None:
    assert trigger_word(model, captions, class_prompts) == word


def test_a_rare_word_is_told_without_a_warning(model: LatentDiffusion, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sd_lightning"):
        tell_of_trigger_word(model, ["a photo of sks dog"])
        tell_of_trigger_word(model, ["ohwx dog"])
        tell_of_trigger_word(model, ["sks asleep", "the dog"])
    messages = [record.getMessage() for record in caplog.records]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"trigger word 'sks': tokenizer reads sks (1 token(s), number 88 of {len(WORDS) + 25})"),
        ("INFO", "trigger word 'ohwx': tokenizer reads o hwx (2 token(s))"),
        ("INFO", messages[2]),
    ]
    assert (
        "of which 'sks asleep' is always there, share no word" in messages[2] and "'data.caption_prefix=" in messages[2]
    )


def test_a_word_that_means_something_or_is_cut_off_is_warned_of(
    model: LatentDiffusion, caplog: pytest.LogCaptureFixture
) -> None:
    long = "a photo of the dog in the beach of the sks"
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        tell_of_trigger_word(model, ["a photo of lily dog"])
        tell_of_trigger_word(model, ["sks dog", long])
    common, cut = (record.getMessage() for record in caplog.records)
    assert "'lily': it is among the 6 % most frequent words of the tokenizer, and means something already" in common
    assert f"'sks': the tokenizer cuts it off in 1 of 2 captions, as in '{long}'; write it at the beginning" in cut
