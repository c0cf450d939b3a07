"""Images in aspect-ratio buckets: assigned from their headers, cropped to their shape, and trained on by all ranks."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sd_lightning._errors import UsageError
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.sampler import find_buckets
from sd_lightning.data.transform import ImageOptions
from shaped_data import IN_BUCKETS, NUM, OPTIONS, SIZES, TINY, Shapes
from square_data import Recorder, datamodule, tokenize, trainer


def test_images_are_assigned_from_their_sizes_and_misfits_named() -> None:
    source = Shapes(headless=(0, 20))
    found, bad = find_buckets(source, OPTIONS)
    assert {b.shape: len(b) for b in found} == {**IN_BUCKETS, (32, 32): 11, (24, 40): 5}
    assert bad == [(0, "no header"), (20, "no header")]
    for bucket in found:
        assert all(index in bucket for index in bucket.at(np.arange(len(bucket))))
    assert [sum(index in bucket for bucket in found) for index in range(NUM)] == [i not in (0, 20) for i in range(NUM)]
    few = ImageOptions(32, max_image_pixels=3000, **TINY)
    names = {index for index, (height, width) in enumerate(SIZES) if height * width > 3000}
    assert {index for index, _ in find_buckets(Shapes(), few)[1]} == names


def test_the_ranks_share_the_reading_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[int, Any] = {}

    def find(rank: int) -> tuple[list[tuple[Any, list[int]]], Any]:
        def gather(out: list[Any], own: Any) -> None:
            parts[rank] = own
            out[:] = [parts.get(other, own) for other in range(3)]

        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "all_gather_object", gather)
        found, bad = find_buckets(Shapes(headless=(2, 26)), OPTIONS)
        return [(bucket.shape, bucket.at(np.arange(len(bucket))).tolist()) for bucket in found], bad

    alone = find(0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for rank in range(3):
        find(rank)
    assert [find(rank) for rank in range(3)] == [alone] * 3
    assert sum(len(numbers) for own in parts.values() for numbers, _ in own) == NUM


def test_whatever_goes_wrong_with_a_header_is_a_bad_sample() -> None:
    class Fragile(Shapes):
        def size(self, index: int) -> tuple[int, int]:
            return super().size(index) if index else (1, 1 // index)

    assert find_buckets(Fragile(), OPTIONS)[1][0][1].startswith("ZeroDivisionError: ")


def test_images_of_which_none_fits_a_bucket_are_refused() -> None:
    with pytest.raises(UsageError, match="none of the 2 images fits a bucket .square-0: no header; .*mend or"):
        find_buckets(Shapes(2, headless=(0, 1)), OPTIONS)


def test_samples_that_share_images_are_each_in_a_bucket() -> None:
    class Repeated(Shapes):
        rows = torch.tensor([3, 10, 3])

        def __len__(self) -> int:
            return 3

        @property
        def distinct(self) -> Any:
            return Shapes(headless=(10,))

    found, bad = find_buckets(Repeated(), OPTIONS)
    assert [(b.shape, b.at(np.arange(len(b))).tolist()) for b in found] == [((32, 32), [0, 2])]
    assert bad == [(1, "no header")]


def test_batches_hold_sizes_as_sdxl_wants_them() -> None:
    found, _ = find_buckets(Shapes(), OPTIONS)
    options = ImageOptions(32, center_crop=True, **TINY)
    samples = CaptionedImages(Shapes(), tokenize, options=options, seed=0, buckets=found)
    batch = samples.__getitems__([(0, 13), (0, 14)])  # 120 x 30 in 64 x 16
    assert batch["pixel_values"].shape == (2, 3, 64, 16)
    assert batch["original_size"].tolist() == [[120, 30]] * 2
    assert batch["crop_top_left"].tolist() == [[0, 0]] * 2
    assert batch["target_size"].tolist() == [[64, 16]] * 2
    batch = samples.__getitems__([(0, 9)])  # 40 x 90 in 16 x 48, resized to 21 x 48
    assert batch["crop_top_left"].tolist() == [[2, 0]] and batch["target_size"].tolist() == [[16, 48]]
    assert batch["pixel_values"].shape == (1, 3, 16, 48)


def test_a_broken_image_is_replaced_by_one_cropped_to_the_shape_of_the_batch() -> None:
    source = Shapes(cut=(12,))
    found, bad = find_buckets(source, OPTIONS)
    assert not bad
    samples = CaptionedImages(source, tokenize, options=OPTIONS, seed=0, buckets=found)
    batch = samples.__getitems__([(0, 12), (0, 11)])
    assert batch["bad"] == [(12, "torn")] and batch["pixel_values"].shape == (2, 3, 16, 48)
    assert batch["original_size"].tolist() == [list(SIZES[13]), list(SIZES[11])]


def fit(max_steps: int, world: int = 1, accumulate: int = 1, **options: Any) -> list[Counter[tuple[int, int, str]]]:
    """Train with buckets on one rank after another; return what was seen in each step, samples of weight 0 too."""
    steps = [Counter[tuple[int, int, str]]() for _ in range(max_steps)]
    for rank in range(world):
        module, data = Recorder(), datamodule(source=Shapes(), images=OPTIONS, batch_size=4, **options)
        trainer(max_steps, accumulate, (world, rank)).fit(module, data)
        for number, micro in enumerate(module.steps):
            steps[number // accumulate].update(micro)
    return steps


def test_every_division_sees_the_same_bits() -> None:
    one = fit(10)
    per_epoch = sum(-(-number // 4) for number in IN_BUCKETS.values())
    assert per_epoch == 8 and sum(map(len, one[:8])) == NUM
    for world, accumulate, workers in ((2, 1, 0), (2, 2, 2), (3, 1, 0)):
        other = fit(10, world, accumulate, loader=LoaderOptions(workers))
        assert [set(step) for step in other] == [set(step) for step in one]


def test_validation_has_every_picture_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sd_lightning")
    seen: list[int] = []
    for rank in range(2):
        module = Recorder()
        data = datamodule(source=Shapes(), val=Shapes(), images=OPTIONS, batch_size=4)
        trainer(1, ranks=(2, rank), limit_val_batches=1.0, val_check_interval=1).fit(module, data)
        for batch in module.val_batches:
            weight = batch["sample_weight"]
            seen += batch["index"][weight > 0].tolist()
            assert batch["target_size"][0].tolist() == list(batch["pixel_values"].shape[-2:])
    assert sorted(seen) == list(range(NUM))
    told = [record.getMessage() for record in caplog.records]
    assert "data: bucket 64 x 16 (height x width): 5 images, 2 batches, 1 image in the last" in told
    lost = "data: 4 aspect-ratio buckets: 27 images, 8 batches of 4 in an epoch; incomplete batches lose 0 images"
    assert lost in told


def test_without_buckets_an_incomplete_batch_is_kept_if_that_is_asked_for() -> None:
    images = ImageOptions(16)
    data = datamodule(source=Shapes(), images=images, loader=LoaderOptions(drop_last=False))
    module = Recorder()
    trainer(4).fit(module, data)
    assert sorted(index for step in module.steps for _, index, _ in step) == list(range(NUM))
    assert [len(step) for step in module.steps] == [8, 8, 8, 3]


def test_a_checkpoint_knows_the_buckets_of_its_order() -> None:
    def data(**changes: Any) -> Any:
        images = {"resolution": 32, **TINY, **changes.pop("images", {})}
        return datamodule(source=changes.pop("source", Shapes()), images=ImageOptions(**images), **changes)

    saved = data().fingerprint()
    assert data().change_since(saved) is None
    plain = datamodule(source=Shapes(), images=ImageOptions(32))
    others: list[Callable[[], Any]] = [
        lambda: data(images={"resolution": 24, "max_bucket_reso": 48}),
        lambda: data(images={"min_bucket_reso": 16}),
        lambda: data(loader=LoaderOptions(drop_last=True)),
        lambda: plain,
    ]
    for other in others:
        change = other().change_since(saved)
        assert change is not None and change.moves and change.reorders
        assert f"instead of {saved['order']}" in change.description


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cache_latents": True}, "data.enable_bucket=true with data.cache_latents=true: .*write data.cache_latents=f"),
        ({"source": type("Pairs", (Shapes,), {"group_size": 2})(26)}, "groups of 2, .*write data.enable_bucket=false"),
    ],
)
def test_what_has_one_shape_only_goes_without_buckets(options: dict[str, Any], told: str) -> None:
    images = ImageOptions(32, center_crop=True, **TINY)
    with pytest.raises(UsageError, match=told):
        datamodule(**{"source": Shapes(), "images": images, **options})
