"""Captions for which a training keeps what the model predicts: those of the class, or the empty one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import small_store
from sd_lightning._errors import UsageError
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.builders import latents_data
from sd_lightning.data.preservation import Preservation, check_adapters
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.learned_token import LearnedToken
from square_data import Squares, datamodule, tokenize

DOG = Preservation(words={"sks dog": "dog", "sks": "animal", "S*": ""})


@pytest.mark.parametrize(
    ("caption", "kept"),
    [
        ("a photo of sks dog, sitting", "a photo of dog, sitting"),
        ("sks, sks dog and sksy", "animal, dog and sksy"),
        ("a photo of S* dog", "a photo of dog"),
        ("", ""),
    ],
)
def test_the_longest_whole_words_are_replaced_everywhere(caption: str, kept: str) -> None:
    assert DOG.caption(caption, 0.0) == kept


class Subject(Squares):
    """Squares whose captions have a rare word."""

    def captions(self, index: int) -> list[str]:
        return [f"sks number {index}"]


def kept(preservation: Preservation, keys: list[tuple[int, int]], seed: int = 3, **options: Any) -> dict[str, Any]:
    samples = CaptionedImages(
        Subject(), tokenize, options=ImageOptions(16, **options), seed=seed, preservation=preservation
    )
    return samples.__getitems__(keys)


def assert_captions(ids: dict[str, Any], captions: list[str]) -> None:
    assert all(torch.equal(ids[name], expected) for name, expected in tokenize(captions).items())


def test_the_class_of_a_caption_is_that_of_the_caption_as_it_was_written() -> None:
    batch = kept(DOG, [(0, 3), (0, 4)], caption_prefix="my sks dog,")
    assert batch["captions"] == ["my sks dog, sks number 3", "my sks dog, sks number 4"]
    assert_captions(batch["preserved_input_ids"], ["my dog, animal number 3", "my dog, animal number 4"])
    assert_captions(kept(DOG, [(0, 3)], proportion_empty_prompts=1.0)["preserved_input_ids"], [""])


def test_a_caption_without_words_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    samples = CaptionedImages(Squares(), tokenize, options=ImageOptions(16), seed=3, preservation=DOG)
    for _ in range(2):
        samples.__getitems__([(0, 3), (0, 4)])
    (told,) = (record.getMessage() for record in caplog.records if "preservation.words" in record.message)
    assert "is itself preserved: " in told
    kept(DOG, [(0, 3)])
    kept(Preservation(prompts=["a dog"]), [(0, 3)])
    kept(DOG, [(0, 3)], proportion_empty_prompts=1.0)
    assert len(caplog.records) == 1


def test_class_prompts_are_drawn_by_sample_and_epoch_whatever_the_batch() -> None:
    prompts = ["a dog", "a cat", "a cow"]
    keys = [(epoch, index) for epoch in range(10) for index in range(20)]
    together = kept(Preservation(prompts=prompts), keys)["preserved_input_ids"]["text_encoder"].tolist()
    alone = [kept(Preservation(prompts=prompts), [key])["preserved_input_ids"]["text_encoder"][0] for key in keys[:30]]
    assert together[:30] == [each.tolist() for each in alone]
    counts = Counter(map(tuple, together))
    assert len(counts) == 3 and min(counts.values()) > 40
    assert together != kept(Preservation(prompts=prompts), keys, seed=4)["preserved_input_ids"]["text_encoder"].tolist()
    assert_captions(kept(Preservation(prompts=[""]), [(0, 1)])["preserved_input_ids"], [""])


def test_of_a_store_words_are_replaced_although_it_has_the_token_ids_of_captions(tmp_path: Path) -> None:
    for i in range(4):
        small_store.write_picture(tmp_path / "photos", f"{i}", colour=i, caption=f"sks dog, number {i}")
    small_store.update(tmp_path / "store", ImageFolder(tmp_path / "photos"))
    data = latents_data(str(tmp_path / "store"), proportion_empty_prompts=0.0, batch_size=4, num_workers=0)
    source: Any = data.source_train
    source._has_token_ids = True
    samples = CaptionedImages(source, tokenize, options=data.images, seed=0, latents=source.latents, preservation=DOG)
    batch = samples.__getitems__([(0, i) for i in range(4)])
    captions = [source.captions(i)[0] for i in range(4)]
    assert_captions(batch["input_ids"], captions)
    assert_captions(batch["preserved_input_ids"], [each.replace("sks dog", "dog") for each in captions])
    source._texts = "all that the encoders make of captions"
    with pytest.raises(UsageError, match="this store has the text encoders' output .* write preservation=blank"):
        data.check_preservation(DOG)
    data.check_preservation(Preservation(prompts=[""]))


def test_the_empty_caption_of_a_store_is_read_where_captions_are_stored_encoded() -> None:
    class Encoded(Squares):
        def text_embeddings(self, index: Any, which: Any) -> Any:
            return {"hidden": torch.tensor([[-1.0 if number is None else number] for number in which])}

    def batch(preservation: Preservation) -> dict[str, Any]:
        options = ImageOptions(16, proportion_empty_prompts=0.0)
        samples = CaptionedImages(Encoded(), tokenize, options=options, seed=0, preservation=preservation)
        return samples.__getitems__([(0, i) for i in range(4)])

    blank = batch(Preservation(prompts=[""]))
    assert (blank["text_embeddings"]["hidden"] >= 0).all() and "preserved_input_ids" not in blank
    assert (blank["preserved_text_embeddings"]["hidden"] == -1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "preservation got neither words nor prompts; expected one of the two"),
        ({"words": {"sks": "dog"}, "prompts": ["a dog"]}, "preservation got both words and prompts"),
        ({"words": {"sks": "sks dog"}}, "preservation.words={sks:sks dog}: expected the words of the subject"),
        ({"words": {"sks": "a zwx", "zwx": "cat"}}, "preservation.words={sks:a zwx}: expected"),
        ({"words": {" ": "dog"}}, "expected the words of the subject"),
        ({"prompts": [""], "weight": 0.0}, "preservation.weight=0.0: expected a number above 0; write"),
        ({"prompts": [""], "weight": float("nan")}, "preservation.weight=nan: expected"),
    ],
)
def test_a_mistake_is_refused_with_its_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Preservation(**settings)
    assert message in str(caught.value)


def test_captions_without_the_words_and_captions_with_a_learned_word_are_refused() -> None:
    data = datamodule()  # whose captions are "first 3"
    with pytest.raises(UsageError, match="none of sks dog, sks, S.* is always in the caption 'first 0', which would"):
        data.check_preservation(DOG)
    data.check_preservation(Preservation(words={"first": "other", "second": "x", "third": "x"}))
    data.check_preservation(Preservation(prompts=["a S* dog"]))
    with pytest.raises(
        UsageError, match="the caption 'a S\\* dog' and learn_token=true, whose word S\\* means nothing"
    ):
        data.check_preservation(Preservation(prompts=["a dog", "a S* dog"]), LearnedToken("S*"))
    with pytest.raises(UsageError, match="the caption 'a S\\* dog' and learn_token=true"):
        Preservation(words={"sks": ""}).check(["a sks S* dog"], token="S*")
    Preservation(words={"S*": ""}).check(["a S* dog"], token="S*")
    with pytest.raises(UsageError, match="preservation needs adapters, .* write trainable=lora"):
        check_adapters(DOG, None)
    check_adapters(None, None)


def test_words_that_may_be_dropped_with_their_tag_are_refused() -> None:
    class Tagged(Squares):
        def captions(self, index: int) -> list[str]:
            return ["digit, sks, number"]

    data = datamodule(source=Tagged(), images=ImageOptions(16, tag_dropout=0.2))
    with pytest.raises(UsageError, match="none of sks is always in the caption"):
        data.check_preservation(Preservation(words={"sks": "any"}))
    first = datamodule(source=Tagged(), images=ImageOptions(16, tag_dropout=0.2, keep_tags=2))
    first.check_preservation(Preservation(words={"sks": "any"}))
