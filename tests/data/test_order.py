"""The order of an epoch: every sample once, anywhere at once, in constant memory, and local where it is asked to be."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lightning._errors import UsageError
from sd_lightning.data.order import EpochBatches, EpochOrder, Locality
from sd_lightning.diffusion.randomness import permutation

FAR = 2_000_000_000


def whole(num_samples: int, *, seed: int = 1, epoch: int = 0, **options: object) -> np.ndarray:
    return EpochOrder(num_samples, seed=seed, epoch=epoch, **options).at(np.arange(num_samples))  # type: ignore[arg-type]


def is_permutation(values: np.ndarray) -> bool:
    return values.dtype == np.int64 and np.array_equal(np.sort(values), np.arange(len(values)))


@settings(max_examples=150, deadline=None)
@given(
    groups=st.integers(1, 800),
    together=st.integers(1, 3),
    block=st.integers(1, 60),
    window=st.integers(1, 9),
    epoch=st.integers(0, 1000),
)
def test_every_sample_comes_once_and_positions_can_be_asked_alone(
    groups: int, together: int, block: int, window: int, epoch: int
) -> None:
    num = groups * together
    for locality in (None, Locality(block, window)):
        order = EpochOrder(num, seed=1, epoch=epoch, together=together, locality=locality)
        everything = order.at(np.arange(num))
        assert is_permutation(everything)
        some = np.arange(num // 3, num, 7)
        assert np.array_equal(order.at(some), everything[some])
        starts = everything[::together]
        for member in range(together):
            assert np.array_equal(everything[member::together], starts + member)


@pytest.mark.parametrize("locality", [None, Locality(16_384, 64)])
def test_a_batch_amid_two_billion_samples_takes_a_millisecond_and_no_memory(locality: Locality | None) -> None:
    batches = EpochBatches(FAR, 1024, seed=1, locality=locality)
    middle, seconds = batches.batches_per_epoch // 2, []
    batch_at = batches.of_epoch(3)
    for number in range(middle, middle + 50):
        begin = time.perf_counter()
        indices = batch_at(number)
        seconds.append(time.perf_counter() - begin)
        assert len(np.unique(indices)) == 1024 and indices.min() >= 0 and indices.max() < FAR
    assert min(seconds) < 1e-3, f"{min(seconds)} s"
    tracemalloc.start()
    try:
        batches.of_epoch(4)(middle)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1e6, f"{peak} bytes"


def test_neighbours_of_one_epoch_lie_apart_in_the_next() -> None:
    num = 20_000
    order = whole(num)
    place = np.empty(num, np.int64)
    place[whole(num, epoch=1)] = np.arange(num)
    for pairs in (order, np.arange(num)):  # neighbours of the epoch before, and of the data
        distance = np.abs(place[pairs[1:]] - place[pairs[:-1]])
        assert abs(distance.mean() / (num / 3) - 1) < 0.03
        assert (distance < 10).sum() < 45  # 20 are expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    for options in ({}, {"locality": Locality(100, 8)}):
        base = whole(5000, **options)
        assert np.array_equal(whole(5000, **options), base)
        for other in (whole(5000, epoch=1, **options), whole(5000, seed=2, **options)):
            assert (other == base).mean() < 0.005


def runs_of(indices: np.ndarray) -> int:
    """How many stretches of consecutive indices a set of samples is."""
    return int((np.diff(np.sort(indices)) > 1).sum()) + 1


@pytest.mark.parametrize(("num", "block", "window"), [(10_007, 50, 6), (9_600, 100, 8), (730, 100, 8), (90, 100, 8)])
def test_a_window_holds_few_blocks_and_mixes_them(num: int, block: int, window: int) -> None:
    tails = set()
    for epoch in range(4):
        order = whole(num, epoch=epoch, locality=Locality(block, window))
        last = max(0, -(-(num // block) // window) - 1) * window * block
        begins = [*range(0, last, window * block), last]
        for begin, end in zip(begins, [*begins[1:], num], strict=True):
            opened = order[begin:end]
            assert runs_of(opened) <= -(-(end - begin) // block) + 1  # the ring's ends may cut one in two
            assert len(np.unique(opened // block)) <= 2 * (window + 1)  # shards of that size, read for the window
            if end - begin == window * block:
                first_half = opened[: len(opened) // 2]
                assert runs_of(first_half) > len(first_half) / 3
        if num % block and num > window * block:
            in_last = np.sort(order[last:])
            tails.add(tuple(in_last[:3].tolist()))
    assert len(tails) in (0, 4)


def test_blocks_and_places_in_the_epoch_are_shuffled_evenly() -> None:
    num, block, window, draws = 60, 5, 3, 3000
    table = np.zeros((num, num))
    for epoch in range(draws):
        table[np.arange(num), whole(num, epoch=epoch, locality=Locality(block, window))] += 1
    # Samples of a block share their window, so cells vary less independently than in a full shuffle.
    assert np.abs(table / draws * num - 1).max() < 0.7
    by_window = table.reshape(4, 15, num).sum(axis=1)
    assert np.abs(by_window / draws * 4 - 1).max() < 0.13


def test_the_first_version_is_the_order_of_earlier_releases() -> None:
    assert np.array_equal(whole(1000, epoch=4, version=1), permutation(1, 4, 1000).numpy())
    pairs = whole(1000, epoch=4, together=2, version=1)
    assert np.array_equal(pairs[::2], permutation(1, 4, 500).numpy() * 2)


@pytest.mark.parametrize("version", [0, 3])
def test_an_unknown_version_is_refused(version: int) -> None:
    with pytest.raises(UsageError, match=rf"order version {version}; expected 1 to 2; update sd-lightning, or .*init_"):
        EpochOrder(10, seed=0, epoch=0, version=version)


@pytest.mark.parametrize(("block", "window"), [(0, 8), (8, 0)])
def test_a_locality_without_samples_is_refused(block: int, window: int) -> None:
    with pytest.raises(UsageError, match=f"block={block} window={window}; expected at least one .* write block="):
        Locality(block, window)
