"""Captions as they are written for a step: tags, wildcards and texts around them, by the sample's own randomness."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import small_store
from sd_lightning import LatentDiffusion
from sd_lightning._errors import UsageError
from sd_lightning.data.batch import CaptionedImages, tell_of_long_captions
from sd_lightning.data.builders import latents_data
from sd_lightning.data.captions import CaptionOptions
from sd_lightning.data.sources.dreambooth import Picture, SubjectAndClass
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.encoder import LatentEncoder
from square_data import Recorder, Squares, datamodule, tokenize, trainer

TAGS = "sks dog, beach, sunny, looking up, white fur"


class Tagged(Squares):
    """Squares whose captions are tags."""

    def captions(self, index: int) -> list[str]:
        return [f"{TAGS}, number {index}"]


class Uneven(Squares):
    """Squares with one tag more each."""

    def captions(self, index: int) -> list[str]:
        return [", ".join(f"tag {i}" for i in range(index + 1))]


def written(options: dict[str, Any], index: list[int], epoch: int = 0, seed: int = 3) -> list[str]:
    samples = CaptionedImages(Tagged(), tokenize, options=ImageOptions(16, **options), seed=seed)
    return samples.__getitems__([(epoch, i) for i in index])["captions"]


def test_without_settings_captions_stay_to_the_letter() -> None:
    strange = " {a|b} ,, c ;d  "
    assert CaptionOptions().written(strange.strip()) == strange.strip()
    assert written({}, [4]) == [f"{TAGS}, number 4"]


def test_shuffled_tags_are_all_there_and_the_first_ones_stay() -> None:
    seen = [written({"shuffle_tags": True, "keep_tags": 1}, [7], epoch)[0] for epoch in range(40)]
    for caption in seen:
        assert caption.startswith("sks dog, ")
        assert sorted(caption.split(", ")) == sorted(f"{TAGS}, number 7".split(", "))
    assert len(set(seen)) > 30
    seconds = Counter(caption.split(", ")[1] for caption in seen)
    assert len(seconds) == 5 and max(seconds.values()) < 20


def test_tags_are_left_out_in_proportion_and_kept_ones_never() -> None:
    kept = {"tag_dropout": 0.3, "keep_tags": 2}
    seen = [caption for epoch in range(30) for caption in written(kept, list(range(20)), epoch)]
    assert all(caption.startswith("sks dog, beach") for caption in seen)
    left = sum(len(caption.split(", ")) - 2 for caption in seen) / (4 * len(seen))
    assert abs(left - 0.7) < 0.03
    order = f"{TAGS}, number 0".split(", ")
    first = written(kept, [0])[0].split(", ")
    assert first == [tag for tag in order if tag in first], "tags are not shuffled"
    assert written({"tag_dropout": 1.0}, [0]) == [""]


def test_a_caption_is_the_same_in_every_batch_and_another_one_in_another_epoch_or_run() -> None:
    options = {"shuffle_tags": True, "tag_dropout": 0.2, "proportion_empty_prompts": 0.2}
    together = written(options, list(range(20)))
    assert together == [written(options, [i])[0] for i in range(20)]
    assert "" in together and together != written(options, list(range(20)), epoch=1)
    assert together != written(options, list(range(20)), seed=4)
    samples = CaptionedImages(Uneven(), tokenize, options=ImageOptions(16, **options), seed=0)
    alone = [samples[(1, i)]["captions"][0] for i in range(9)]
    assert samples.__getitems__([(1, i) for i in range(9)])["captions"] == alone, "whatever the longest one is"


@pytest.mark.parametrize("separator", [",", ";", "|", " "])
def test_a_separator_of_ones_own_divides_tags(separator: str) -> None:
    options = CaptionOptions(shuffle_tags=True, tag_separator=separator) if separator.strip() else None
    if options is None:
        with pytest.raises(UsageError, match="data.tag_separator=' ': expected a text"):
            CaptionOptions(shuffle_tags=True, tag_separator=separator)
        return
    caption = separator.join(["a b", " c", "d "])
    draws = [0.0, 0.9, 0.0, 0.5, 0.0, 0.1]
    assert options.num_draws(caption) >= len(draws)
    assert options.written(caption, draws) == f"{separator} ".join(["d", "c", "a b"])


def test_texts_around_captions_stay_in_place_and_are_no_tags() -> None:
    options = {"caption_prefix": "a photo of sks dog,", "caption_suffix": ", best quality", "shuffle_tags": True}
    for caption in written(options, list(range(10))):
        assert caption.startswith("a photo of sks dog, ") and caption.endswith(", best quality")
    spaced = CaptionOptions(caption_prefix="sks, ", caption_suffix=" , best").written("a dog")
    assert spaced == "sks, a dog, best"
    assert CaptionOptions(caption_suffix="in the style of zwx").written("a house") == "a house in the style of zwx"
    dropped = written(options | {"proportion_empty_prompts": 1.0}, [0, 1])
    assert dropped == ["", ""], "what is dropped for guidance is empty"


def test_wildcards_are_chosen_anew_in_every_epoch() -> None:
    class Wild(Squares):
        def captions(self, index: int) -> list[str]:
            return ["a {red|blue|big, green} {cat|dog}, {not one}"]

    samples = CaptionedImages(Wild(), tokenize, options=ImageOptions(16, enable_wildcard=True), seed=0)
    seen = Counter(samples[(epoch, i)]["captions"][0] for epoch in range(20) for i in range(10))
    assert len(seen) == 6 and max(seen.values()) < 60
    assert all("{not one}" in caption and "|" not in caption for caption in seen)
    assert CaptionOptions(enable_wildcard=True).written("a {red|blue} cat") == "a red cat"


def test_validation_has_captions_in_order_with_the_texts_around_them() -> None:
    options = ImageOptions(16, shuffle_tags=True, tag_dropout=0.5, caption_prefix="photo of")
    samples = CaptionedImages(Tagged(), tokenize, options=options.evaluation(), seed=0, wrong_captions=True)
    batch = samples.__getitems__([(0, 3), (0, 4)])
    assert batch["captions"] == [f"photo of {TAGS}, number {i}" for i in (3, 4)]
    expected = tokenize([f"photo of {TAGS}, number {i}" for i in (4, 5)])
    assert all(torch.equal(batch["wrong_input_ids"][name], ids) for name, ids in expected.items())


def test_captions_of_a_class_stay_as_they_are() -> None:
    photos = [Picture(f"photo-{i}", TAGS) for i in range(2)]
    source = SubjectAndClass(photos, [Picture("dog-0", "a dog, on a lawn")])
    source.source.image = lambda index: Squares().image(index)  # type: ignore[method-assign]
    options = ImageOptions(16, caption_prefix="sks", tag_dropout=1.0, keep_tags=1)
    samples = CaptionedImages(source, tokenize, options=options, seed=0)
    assert samples.__getitems__([(0, i) for i in range(4)])["captions"] == ["sks sks dog", "a dog, on a lawn"] * 2


def test_every_division_of_a_batch_and_every_resume_sees_the_same_captions() -> None:
    images = ImageOptions(16, shuffle_tags=True, tag_dropout=0.3, keep_tags=1, proportion_empty_prompts=0.2)

    def steps(max_steps: int, world: int = 1, accumulate: int = 1, skip: int = 0) -> list[Any]:
        runs = []
        for rank in range(world):
            module, data = Recorder(), datamodule(source=Tagged(), images=images)
            if skip:
                data.resume(*divmod(skip, 3))
            trainer(max_steps, accumulate, (world, rank)).fit(module, data)
            runs.append([sample for step in module.steps for sample in step])
        return sorted(sample for run in runs for sample in run)

    whole = steps(5)
    assert steps(5, world=2) == steps(5, world=4, accumulate=2) == whole
    assert sorted(steps(2) + steps(3, skip=2)) == whole


def test_tags_that_no_caption_has_are_refused() -> None:
    with pytest.raises(UsageError, match="no caption has tags with ',' between them; expected captions such as"):
        datamodule(images=ImageOptions(16, tag_dropout=0.5))
    datamodule(source=Tagged(), images=ImageOptions(16, tag_dropout=0.5))


def test_what_is_always_in_a_caption() -> None:
    options = CaptionOptions(caption_prefix="photo,", keep_tags=1, tag_dropout=0.3)
    assert options.kept(TAGS) == "photo, sks dog"
    shuffled = CaptionOptions(shuffle_tags=True)
    assert shuffled.kept(TAGS) == TAGS == CaptionOptions().kept(TAGS)


def test_captions_that_change_are_not_remembered_by_offloaded_encoders(caplog: pytest.LogCaptureFixture) -> None:
    for shuffle in (False, True):
        model = LatentDiffusion.build("tiny", seed=0)
        encoder = LatentEncoder(model, offload=True)
        module = Recorder()
        module.encoder = encoder
        options = ImageOptions(16, shuffle_tags=shuffle)
        with caplog.at_level(logging.WARNING, "sd_lightning"):
            trainer(1).fit(module, datamodule(source=Tagged(), images=options, cache_latents=False))
        for caption in ("a dog", "a cat"):
            encoder.embed(model.tokenize([caption]))
        assert len(encoder._captions) == (0 if shuffle else 2)
        told = [each for each in caplog.messages if "module.offload_encoders=false keeps" in each]
        assert len(told) == shuffle


def test_captions_of_a_class_are_measured_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    source = SubjectAndClass([Picture("a", "sks")], [Picture("b", "dog")])
    seen: list[str] = []
    tell_of_long_captions(source, lambda captions: seen.extend(captions) or [False] * len(captions), "x {}".format)
    assert seen == ["x sks", "dog"]


def test_captions_of_a_store_are_changed_although_it_has_their_token_ids(tmp_path: Path) -> None:
    for i in range(4):
        small_store.write_picture(tmp_path / "photos", f"{i}", colour=i, caption=f"{TAGS}, number {i}")
    small_store.update(tmp_path / "store", ImageFolder(tmp_path / "photos"))
    options: dict[str, Any] = {"proportion_empty_prompts": 0.0, "batch_size": 4, "num_workers": 0}
    data = latents_data(str(tmp_path / "store"), caption_prefix="sks,", shuffle_tags=True, **options)
    source: Any = data.source_train
    source._has_token_ids = True
    samples = CaptionedImages(source, tokenize, options=data.images, seed=0, latents=source.latents)
    batch = samples.__getitems__([(0, i) for i in range(4)])
    for i, caption in enumerate(batch["captions"]):
        assert caption.startswith("sks, ") and caption != f"sks, {source.captions(i)[0]}"
        assert sorted(caption[5:].split(", ")) == sorted(source.captions(i)[0].split(", "))
    expected = tokenize(batch["captions"])
    assert all(torch.equal(batch["input_ids"][name], ids) for name, ids in expected.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag_dropout": 1.5}, "data.tag_dropout=1.5: expected a fraction"),
        ({"keep_tags": -1, "shuffle_tags": True}, "data.keep_tags=-1: expected 0 or more"),
        ({"keep_tags": 1}, "data.keep_tags=1: it has no effect while tags stay; add data.shuffle_tags=true"),
        ({"tag_separator": ";"}, "data.tag_separator=';': it has no effect"),
    ],
)
def test_settings_without_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageOptions(16, **options)
    assert "shuffle_tags" in latents_data.__annotations__
