"""Aspect-ratio buckets: which shapes there are, and an order in which each batch has one of them."""

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.order import BatchOrder, Bucket, Key, Locality, listed, shape_of
from sd_lightning.data.sampler import GlobalBatchSampler, bucket_validation_batches
from sd_lightning.data.transform import ImageOptions, bucket_shapes, nearest_shapes, place
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import Purpose
from shaped_data import picture

SDXL_PORTRAITS = {
    512: (2048, 1984, 1920, 1856),
    576: (1792, 1728, 1664),
    640: (1600, 1536),
    704: (1472, 1408, 1344),
    768: (1344, 1280),
    832: (1216, 1152),
    896: (1152, 1088),
    960: (1088, 1024),
}
"""Width -> heights of the upright shapes in the table of SDXL's paper (arXiv 2307.01952, appendix I)."""
KOHYA_512 = {512: (512,), 448: (576,), 384: (640,), 320: (704, 768), 256: (832, 896, 960, 1024)}
"""Height -> widths of the wide shapes that kohya's sd-scripts makes for 512 pixels."""
BUCKETS = (
    Bucket((32, 32), range(100, 203)),
    Bucket((16, 64), np.arange(0, 14, 2, dtype=np.int32)),
    Bucket((64, 16), np.arange(300, 341)),
    Bucket((24, 40), range(41, 42)),
)
INDICES = [*range(100, 203), *range(0, 14, 2), *range(300, 341), 41]


# Shapes


def test_shapes_at_1024_are_the_table_of_sdxl() -> None:
    portraits = {(height, width) for width, heights in SDXL_PORTRAITS.items() for height in heights}
    expected = portraits | {(width, height) for height, width in portraits} | {(1024, 1024)}
    shapes = bucket_shapes(1024, min_side=256, max_side=2048, step=64)
    assert len(shapes) == 41 and set(shapes) == expected
    assert [w / h for h, w in shapes] == sorted(w / h for h, w in shapes)


def test_shapes_contain_those_of_kohya() -> None:
    shapes = bucket_shapes(512, min_side=256, max_side=1024, step=64)
    assert {(h, w) for h, w in shapes if w >= h} == {(h, w) for h, widths in KOHYA_512.items() for w in widths}
    assert {(w, h) for h, w in shapes} == set(shapes)


@pytest.mark.parametrize(("resolution", "step"), [(512, 64), (32, 8), (512, 8), (1024, 32)])
def test_no_shape_has_more_pixels_than_the_square(resolution: int, step: int) -> None:
    shapes = bucket_shapes(resolution, min_side=2 * step, max_side=2 * resolution, step=step)
    assert (resolution, resolution) in shapes and len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert math.prod(shape) <= resolution**2
        assert all(side % step == 0 and 2 * step <= side <= 2 * resolution for side in shape)


def test_an_image_gets_the_nearest_aspect_ratio() -> None:
    shapes = bucket_shapes(512, min_side=256, max_side=2048, step=64)
    sizes = np.random.default_rng(0).integers(1, 4000, (2000, 2))
    found = nearest_shapes(sizes, shapes)

    def distance(size: np.ndarray, shape: tuple[int, int]) -> float:
        return abs(math.log(size[1] / size[0]) - math.log(shape[1] / shape[0]))

    for size, number in zip(sizes, found):
        assert distance(size, shapes[number]) <= min(distance(size, shape) for shape in shapes) + 1e-12
    assert [shapes[i] for i in nearest_shapes(np.array(shapes) * 3, shapes)] == shapes


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bucket_reso_steps": 20}, "data.bucket_reso_steps=20: .* multiple of 8.* write data.bucket_reso_steps=16"),
        ({"resolution": 520}, "data.resolution=520 with data.bucket_reso_steps=64: .* write data.resolution=512 or"),
        ({"resolution": 128}, "data.min_bucket_reso=256: expected 1 to data.resolution=128.* write .*=64"),
        ({"max_bucket_reso": 256}, "data.max_bucket_reso=256: expected at least data.resolution=512.* write .*=1024"),
        (
            {"resolution": 256},
            "is the only bucket .*=64; write .*_steps=64 .*min_bucket_reso=64 .*max_bucket_reso=512$",
        ),
        ({"resolution": 64, "min_bucket_reso": 8}, "is the only .* write .*_steps=8 .*min.*_reso=8 .*max.*_reso=128$"),
        ({"enable_bucket": False, "min_bucket_reso": 8}, "data.min_bucket_reso=8 has no effect .*enable_bucket=true"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], told: str) -> None:
    options = {"resolution": 512, "enable_bucket": True, **options}
    with pytest.raises(UsageError, match=told) as refusal:
        ImageOptions(**options)
    remedy = str(refusal.value).partition("write ")[2].split(" or ")[0]
    if remedy:
        changed = {name: int(value) for name, value in (word[5:].split("=") for word in remedy.split())}
        assert len(ImageOptions(**options | changed).shapes) > 1, "the remedy does not help"


def test_a_picture_covers_its_bucket_and_the_rest_is_cropped() -> None:
    image = picture(9)  # 40 x 90
    placed = place(image, (24, 40))  # 24 / 40 of its height: 54 x 24
    resized = image.resize((54, 24), Image.Resampling.LANCZOS, reducing_gap=3.0)
    assert np.array_equal(placed.pixels, np.asarray(resized.crop((7, 0, 47, 24))))
    assert (placed.original_size, placed.crop_top_left) == ((40, 90), (0, 7))
    tall = place(image, (32, 48), crop=(0.0, 0.99))  # 72 x 32
    assert (tall.pixels.shape, tall.crop_top_left) == ((32, 48, 3), (0, 24))


# Order


def orders(drop_last: bool = False, seed: int = 3, batch_size: int = 8, **options: Any) -> BatchOrder:
    return BatchOrder(BUCKETS, batch_size, seed, drop_last=drop_last, **options)


def batches(order: BatchOrder, epoch: int = 0) -> list[list[int]]:
    batch = order.of_epoch(epoch)
    return [batch(number).tolist() for number in range(order.batches_per_epoch)]


IN_FILES = tuple(Bucket(b.shape, b.members, Locality(np.array([*range(4, len(b), 4), len(b)]), 3)) for b in BUCKETS)


@pytest.mark.parametrize(
    "order",
    [orders(), orders(shuffle=False), BatchOrder(IN_FILES, 8, 3)],
    ids=["shuffled", "in order", "in files"],
)
def test_every_sample_is_in_one_batch_and_every_batch_in_one_bucket(order: BatchOrder) -> None:
    found = batches(order)
    assert Counter(index for batch in found for index in batch) == Counter(INDICES)
    assert len(found) == order.batches_per_epoch == 13 + 1 + 6 + 1
    assert order.samples_per_epoch == order.num_samples == len(INDICES)
    for batch in found:
        assert len({shape_of(BUCKETS, index) for index in batch}) == 1


def test_incomplete_batches_are_left_out_if_that_is_asked_for() -> None:
    order = orders(drop_last=True)
    found = batches(order)
    assert {len(batch) for batch in found} == {8} and len(found) == order.batches_per_epoch == 12 + 5
    assert len({index for batch in found for index in batch}) == order.samples_per_epoch == 17 * 8
    seen = {index for epoch in range(30) for batch in batches(order, epoch) for index in batch}
    assert seen == {*range(100, 203), *range(300, 341)}, "of a whole bucket, other samples in each epoch"
    assert order.described() == [
        "bucket 32 x 32 (height x width): 103 images, 12 batches, 7 images left out",
        "bucket 16 x 64 (height x width): 7 images, 0 batches, 7 images left out",
        "bucket 64 x 16 (height x width): 41 images, 5 batches, 1 image left out",
        "bucket 24 x 40 (height x width): 1 image, 0 batches, 1 image left out",
        "4 aspect-ratio buckets: 152 images, 17 batches of 8 in an epoch; incomplete batches lose 16 images",
    ]
    told = "larger than the largest of 4 aspect-ratio buckets of 103 samples; write .*=103 or data.drop_last=false"
    with pytest.raises(UsageError, match=told):
        GlobalBatchSampler(orders(drop_last=True, batch_size=104))


def test_ranges_and_lists_of_the_same_samples_have_the_same_order() -> None:
    as_lists = tuple(Bucket(b.shape, np.asarray(b.members)) for b in BUCKETS)
    assert batches(BatchOrder(as_lists, 8, 3)) == batches(orders())


def test_the_order_depends_on_seed_epoch_and_bucket() -> None:
    found = [batches(orders(), 0), batches(orders(), 1), batches(orders(seed=4), 0)]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])
    twins = BatchOrder((Bucket((8, 8), range(40)), Bucket((8, 16), range(40, 80))), 40, 0)
    one, other = sorted(batches(twins), key=min)
    assert one != [index - 40 for index in other]


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_sorted_by_their_times(shuffle: bool) -> None:
    order = orders(shuffle=shuffle)
    offsets = randomness.integers(3, 7, torch.arange(4), Purpose.BUCKETS, 2**31).tolist() if shuffle else [0] * 4
    times = [
        (Fraction(j * 2**31 + offset, n * 2**31), number)
        for number, (n, offset) in enumerate(zip(order.batches_per_bucket, offsets))
        for j in range(n)
    ]
    found = [shape_of(BUCKETS, batch[0]) for batch in batches(order, 7)]
    assert found == [BUCKETS[number].shape for _, number in sorted(times)]


def test_the_batches_of_a_bucket_are_spread_evenly() -> None:
    order = orders(batch_size=1)
    done: Counter[tuple[int, int]] = Counter()
    for number, batch in enumerate(batches(order), start=1):
        done[shape_of(BUCKETS, batch[0])] += 1
        for bucket in BUCKETS:
            share = len(bucket) / order.num_samples
            assert abs(done[bucket.shape] - number * share) <= 1 + len(BUCKETS) * share


def test_two_billion_samples_take_no_memory() -> None:
    num = 2_000_000_000
    many = tuple(Bucket((i, i), range(i * num // 40, (i + 1) * num // 40)) for i in range(40))
    tracemalloc.start()
    order = BatchOrder(many, 2048, 0)
    batch = order.of_epoch(5)
    found = [batch(number) for number in range(0, order.batches_per_epoch, order.batches_per_epoch // 50)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
    assert len(np.unique(np.concatenate(found))) == sum(map(len, found))
    for indices in found:
        assert len({shape_of(many, int(index)) for index in (indices.min(), indices.max())}) == 1


# Ranks


ONE_BUCKET = BatchOrder([Bucket((8, 8), range(21))], 8, 3)
ORDERS = {"buckets": orders(), "whole batches": orders(True), "one bucket": ONE_BUCKET}


def micro_batches(order: Any, world: int, accumulate: int, done: int = 0) -> Iterator[list[list[Key]]]:
    """The micro-batches of all ranks, by global batch."""
    samplers = [GlobalBatchSampler(order, world_size=world, rank=r, accumulate=accumulate) for r in range(world)]
    for sampler in samplers:
        sampler.resume(2, done)
    ranks = [iter(sampler) for sampler in samplers]
    for _ in range(done, order.batches_per_epoch):
        yield [keys for rank in ranks for keys in islice(rank, accumulate)]
    assert all(next(rank, None) is None for rank in ranks)


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 1), (2, 3)])
@pytest.mark.parametrize("order", [orders(), orders(True), ONE_BUCKET], ids=lambda o: str(o)[:60])
def test_ranks_share_each_batch_with_the_weights_of_its_mean(order: Any, world: int, accumulate: int) -> None:
    """Also from the middle of an epoch that another number of ranks began, and with fewer samples than ranks."""
    expected = [order.of_epoch(2)(number).tolist() for number in range(order.batches_per_epoch)]
    done = 2 if world > 1 else 0
    for batch, micros in zip(expected[done:], micro_batches(order, world, accumulate, done), strict=True):
        assert all(micros), "a rank without a sample would leave the others waiting in a collective"
        mean, seen = 0.0, []
        for keys in micros:
            _, indices, *weights = zip(*keys)
            index, weight = torch.tensor(indices), torch.tensor(weights[0] if weights else [1.0] * len(keys))
            mean += float((index * weight).mean()) / len(micros)
            seen += index[weight > 0].tolist()
        assert sorted(seen) == sorted(batch)
        assert mean == pytest.approx(sum(batch) / len(batch), rel=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_validation_shares_have_every_sample_once_and_one_shape_per_batch(world: int) -> None:
    shares = [bucket_validation_batches(BUCKETS, 4, world, rank) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    for together in zip(*shares):
        keys = [key for mine in together for key in mine]
        assert len({shape_of(BUCKETS, key[1]) for key in keys}) == 1 and max(map(len, together)) <= 4
    seen = [key[1] for share in shares for batch in share for key in batch if key[2:] == (1.0,)]
    assert sorted(seen) == sorted(INDICES)


def test_listed_buckets_leave_out_who_is_in_none() -> None:
    found = listed(np.array([1, -1, 0, 1], dtype=np.int16), [(8, 8), (8, 16), (8, 24)])
    assert [(b.shape, b.at(np.arange(len(b))).tolist()) for b in found] == [((8, 8), [2]), ((8, 16), [0, 3])]
