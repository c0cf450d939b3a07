"""Samples: images placed as diffusers' scripts do, captions chosen and dropped by the sample's own randomness."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data import source as source_module
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.source import BadSample, Source, SourceSubset, hold_out
from sd_lightning.data.sources.digits import PROMPTS, WORDS, DigitClassifier, Digits
from sd_lightning.data.transform import ImageOptions, place, to_model_range, to_rgb


def noise(height: int, width: int, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels)


def lengths(captions: list[str]) -> dict[str, Tensor]:
    return {"text_encoder": torch.tensor([[len(caption)] for caption in captions])}


def test_centre_crop_is_resize_of_the_shorter_side_and_the_middle_square() -> None:
    image = noise(40, 90)
    placed = place(image, (16, 16))
    resized = np.asarray(image.resize((36, 16), Image.Resampling.LANCZOS))
    assert np.abs(placed.pixels.astype(int) - resized[:, 10:26]).max() <= 2  # reducing_gap is not exact
    assert (placed.original_size, placed.crop_top_left) == ((40, 90), (0, 10))


def test_crop_fractions_reach_every_position_and_flip_comes_first() -> None:
    image = noise(16, 19)
    positions = {place(image, (16, 16), crop=(0.5, u)).crop_top_left for u in np.linspace(0, 0.9999, 50)}
    assert positions == {(0, left) for left in range(4)}
    flipped = place(image, (16, 16), crop=(0.0, 0.0), flip=True)
    assert np.array_equal(flipped.pixels, np.asarray(ImageOps.mirror(image))[:, :16])


def test_square_of_the_right_size_keeps_its_bits() -> None:
    image = noise(24, 24)
    assert np.array_equal(place(image, (24, 24), crop=(0.9, 0.9)).pixels, np.asarray(image))


def test_small_and_extreme_images_still_fill_the_square() -> None:
    for height, width in ((1, 1), (3, 700), (700, 3), (15, 17)):
        assert place(noise(height, width), (16, 16)).pixels.shape == (16, 16, 3)


def test_transparent_parts_become_white() -> None:
    layer = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    layer.putpixel((1, 0), (10, 20, 30, 0))
    palette = Image.new("P", (2, 1), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((1, 0), 0)
    palette.info["transparency"] = 0
    for image in (layer, palette):
        assert np.asarray(to_rgb(image)).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    values = np.array([[0, 255, 32768, 65535]], dtype=np.uint16)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 0, 128, 255]


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "LA", "YCbCr"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert to_rgb(noise(4, 4).convert("L" if mode == "LA" else mode).convert(mode)).mode == "RGB"


def test_exif_orientation_is_applied(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter turn
    noise(10, 20).save(tmp_path / "turned.png", exif=exif)
    assert to_rgb(Image.open(tmp_path / "turned.png")).size == (10, 20)


def test_pixels_map_to_minus_one_and_one() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(1, 1, 3)[None].reshape(1, 1, 1, 3)
    torch.testing.assert_close(to_model_range(pixels).flatten(), torch.tensor([-1.0, -0.6, 1.0]))


def test_captions_are_chosen_evenly_and_dropped_in_proportion() -> None:
    data = CaptionedImages(Digits(), lengths, options=ImageOptions(32, True, False, 0.1), seed=3)
    counts = Counter()
    for epoch in range(4):
        counts.update(data.__getitems__([(epoch, index) for index in range(len(data))])["captions"])
    total = 4 * len(data)
    assert abs(counts[""] / total - 0.1) < 0.015
    assert abs(counts["a handwritten digit"] / total - 0.1) < 0.015
    assert 43 > len(counts) >= 42  # 40 that name the digit, the generic one, the empty one


def test_a_sample_is_the_same_in_every_batch() -> None:
    options = ImageOptions(24, random_flip=True, proportion_empty_prompts=0.5)
    data = CaptionedImages(Digits(), lengths, options=options, seed=3)
    keys = [(1, 7), (0, 7), (1, 900)]
    batch, backwards = data.__getitems__(keys), data.__getitems__(keys[::-1])
    for i, key in enumerate(keys):
        for other, j in ((backwards, 2 - i), (data[key], 0)):
            assert torch.equal(batch["pixel_values"][i], other["pixel_values"][j])
            assert batch["captions"][i] == other["captions"][j]


def test_wrong_caption_names_another_digit() -> None:
    digits = Digits("val")
    data = CaptionedImages(digits, lengths, options=ImageOptions(32).evaluation(), seed=0, wrong_captions=True)
    for index in range(40):
        wrong = digits.captions(data._with_wrong_caption(index))[0]
        assert wrong in PROMPTS and wrong != PROMPTS[digits.labels[index]]


def test_digits_are_stratified_and_splits_are_disjoint() -> None:
    train, val = Digits("train"), Digits("val")
    assert (len(train), len(val)) == (1437, 360)
    assert all(abs(val.labels.count(d) - train.labels.count(d) / 4) <= 1.5 for d in range(10))
    assert train.image(0).size == (32, 32) and train.image(0).mode == "RGB"
    assert all(WORDS[train.labels[5]] in caption for caption in train.captions(5)[:8])
    with pytest.raises(UsageError, match="split='test'; expected 'train' or 'val'"):
        Digits("test")  # type: ignore[arg-type]


def test_judge_reads_digits_it_was_not_fitted_on_at_any_size() -> None:
    classifier, digits = DigitClassifier(), Digits("train")
    assert classifier.real_accuracy > 0.97
    images = [digits.image(i) for i in range(300)]
    assert classifier.accuracy(images, digits.labels[:300]) > 0.96
    large = [image.resize((100, 100), Image.Resampling.BICUBIC) for image in images]
    assert classifier.accuracy(large, digits.labels[:300]) > 0.96
    shifted = [(label + 1) % 10 for label in digits.labels[:300]]
    assert classifier.accuracy(images, shifted) < 0.05
    with pytest.raises(ValueError, match="300 images and 1 labels"):
        classifier.accuracy(images, [0])


def test_evaluation_prompts_ask_for_every_digit_equally() -> None:
    prompts, labels = DigitClassifier.prompts(25)
    assert labels[:11] == [*range(10), 0] and prompts[3] == "a handwritten three" and len(prompts) == 25


@pytest.mark.parametrize(("asked", "held"), [(None, 64), (10, 10), (359, 359)])
def test_hold_out_splits_without_overlap(asked: int | None, held: int) -> None:
    source = SourceSubset(Digits("train"), range(1437)) if asked is None else Digits("val")
    train, val = hold_out(source, asked)
    names = [[part.name(i) for i in range(len(part))] for part in (train, val)]
    assert len(names[1]) == held and len(set(names[0]) | set(names[1])) == len(source) == len(names[0]) + held


class Own(Source):
    """A source with some of what it could leave out."""

    loss_weights = torch.tensor([1.0, 3.0])

    def __len__(self) -> int:
        return 2

    def image(self, index: int) -> Image.Image:
        return noise(8, 8)

    def captions(self, index: int) -> list[str]:
        return [f"caption {index}"]

    def name(self, index: int) -> str:
        return f"own {index}"


def test_a_source_with_four_methods_has_defaults_for_the_rest() -> None:
    own = pickle.loads(pickle.dumps(Own()))
    assert (len(own), own.name(1), own.captions(1), own.image(0).size) == (2, "own 1", ["caption 1"], (8, 8))
    assert (own.group_size, own.rows, own.classifier, own.fingerprint, dict(own.dropped)) == (1, None, None, None, {})
    assert own.distinct is own
    assert own.evidence(1, thorough=True) == ("own 1", "", "caption 1") and own.evidence(1, thorough=False)[2] == ""
    data = CaptionedImages(Own(), lengths, options=ImageOptions(8), seed=0)
    assert data.__getitems__([(0, 1), (0, 0)])["loss_weight"].tolist() == [3.0, 1.0]


def test_hold_out_none_or_too_many() -> None:
    source = Digits("val")
    assert hold_out(source, 0) == (source, None)
    with pytest.raises(UsageError, match="data.num_val_samples=360: expected 0 to 359"):
        hold_out(source, 360)


class Numbered(Source):
    """Images that are numbers, by name."""

    def __init__(self, images: dict[str, int]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> Image.Image:
        raise BadSample("only its bytes are looked at")

    def captions(self, index: int) -> list[str]:
        return ["a number"]

    def name(self, index: int) -> str:
        return list(self.images)[index]

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        return self.name(index), str(self.images[self.name(index)]), "a number"

    def content(self, index: int) -> bytes:
        raise AssertionError("no image is read whole")


def names_of(part: Source | None) -> list[str]:
    return [] if part is None else [part.name(i) for i in range(len(part))]


def test_what_is_held_out_depends_on_the_images_alone() -> None:
    images = {f"{i:03}": i for i in range(100)}
    train, val = hold_out(Numbered(images), 7)
    other = {f"x{i:03}": i for i in reversed(range(100))}
    held = {name[-3:] for name in names_of(hold_out(Numbered(other), 7)[1])}
    assert len(held) == 7 and held == set(names_of(val))
    assert names_of(train) == sorted(set(images) - held), "in order"


def test_copies_of_an_image_are_on_one_side() -> None:
    images = {f"{i:03}": i // 2 for i in range(100)}
    train, val = hold_out(Numbered(images), 7)
    sides = [{images[name] for name in names_of(part)} for part in (train, val)]
    assert len(names_of(val)) == 6 and not sides[0] & sides[1]
    assert len(names_of(hold_out(Numbered(images), 1)[1])) == 2
    assert len(names_of(hold_out(Numbered(dict.fromkeys("abc", 5)), 1)[1])) == 1, "nothing but copies"


def test_images_without_cheap_evidence_are_held_out_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbered, "evidence", Source.evidence)
    images = {f"{i:03}": 5 for i in range(100)}
    assert len(names_of(hold_out(Numbered(images), 7)[1])) == 7


@pytest.mark.parametrize("by_key", [False, True])
def test_what_was_held_out_stays_when_data_grow(by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_key:
        monkeypatch.setattr(source_module, "_BY_CONTENT", 10)
    images = {f"{i:03}": i for i in range(100)}
    held = set(names_of(hold_out(Numbered(images), 7)[1]))
    more = images | {f"new {i}": 1000 + i for i in range(400)}
    later = set(names_of(hold_out(Numbered(more), 9, was_held=held.__contains__)[1]))
    assert len(later) == 9 and held < later
    fewer = set(names_of(hold_out(Numbered(more), 5, was_held=held.__contains__)[1]))
    assert len(fewer) == 5 and fewer < held


def test_hold_out_of_two_billion_samples_reads_none() -> None:
    class Many(Own):
        def __len__(self) -> int:
            return 2 * 10**9

    train, val = hold_out(Many(), 10**6)
    assert isinstance(train, SourceSubset) and isinstance(val, SourceSubset)
    assert (len(train), train.indices[0], train.indices[1999]) == (2 * 10**9 - 10**6, 1, 2001)
    assert (len(val), val.indices[10**6 - 1]) == (10**6, 2 * 10**9 - 2000)


def test_the_weight_of_an_uneven_batch_multiplies_that_of_a_sample() -> None:
    source = SourceSubset(Digits("train"), range(4))
    data = CaptionedImages(source, lengths, options=ImageOptions(32), seed=0)
    assert "loss_weight" not in data.__getitems__([(0, 1), (0, 0)])
    assert data.__getitems__([(0, 1, 0.75), (0, 0, 0.75)])["loss_weight"].tolist() == [0.75, 0.75]
    source.loss_weights = torch.tensor([1.0, 3.0, 1.0, 1.0])
    assert data.__getitems__([(0, 1, 0.75), (0, 0, 0.75)])["loss_weight"].tolist() == [2.25, 0.75]
