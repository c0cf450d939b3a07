"""The order of an epoch: every sample once, anywhere at once, in constant memory, and local where it is asked to be."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lightning.data.order import BatchOrder, Bucket, EpochOrder, Locality

FAR = 2_000_000_000


def whole(num_samples: int, *, seed: int = 1, epoch: int = 0, **options: object) -> np.ndarray:
    return EpochOrder(num_samples, seed=seed, epoch=epoch, **options).at(np.arange(num_samples))  # type: ignore[arg-type]


def is_permutation(values: np.ndarray) -> bool:
    return values.dtype == np.int64 and np.array_equal(np.sort(values), np.arange(len(values)))


def equal_files(num: int, size: int, window: int) -> Locality:
    """Files of `size` samples, the last one perhaps of less."""
    return Locality(np.array([*range(size, num, size), num]), window)


@settings(max_examples=100, deadline=None)
@given(groups=st.integers(1, 800), group_size=st.integers(1, 3), epoch=st.integers(0, 1000))
def test_every_sample_comes_once_and_positions_can_be_asked_alone(groups: int, group_size: int, epoch: int) -> None:
    num = groups * group_size
    order = EpochOrder(num, seed=1, epoch=epoch, group_size=group_size)
    everything = order.at(np.arange(num))
    assert is_permutation(everything)
    some = np.arange(num // 3, num, 7)
    assert np.array_equal(order.at(some), everything[some])
    starts = everything[::group_size]
    for member in range(group_size):
        assert np.array_equal(everything[member::group_size], starts + member)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=30), window=st.integers(1, 9), epoch=st.integers(0, 1000)
)
def test_files_are_read_one_window_after_the_other(sizes: list[int], window: int, epoch: int) -> None:
    ends = np.cumsum(sizes)
    num = int(ends[-1])
    order = EpochOrder(num, seed=1, epoch=epoch, locality=Locality(ends, window))
    everything = order.at(np.arange(num))
    assert is_permutation(everything)
    some = np.arange(num // 3, num, 7)
    assert np.array_equal(order.at(some), everything[some])
    files = ends.searchsorted(everything, side="right")
    first = {file: int(np.flatnonzero(files == file)[0]) for file in range(len(sizes))}
    by_window = [sorted(first, key=lambda file: first[file])[i : i + window] for i in range(0, len(sizes), window)]
    begin = 0
    for opened in by_window:
        end = begin + sum(sizes[file] for file in opened)
        assert set(files[begin:end].tolist()) == set(opened)  # each file lies in one window
        begin = end


@pytest.mark.parametrize("locality", [None, equal_files(FAR, 8192, 32)], ids=["everywhere", "files"])
def test_a_batch_amid_two_billion_samples_takes_a_millisecond_and_no_memory(locality: Locality | None) -> None:
    batches = BatchOrder([Bucket((8, 8), range(FAR), locality)], 1024, seed=1)
    middle, seconds = batches.batches_per_epoch // 2, []
    batch_at = batches.of_epoch(3)
    for number in range(middle, middle + 50):
        begin = time.perf_counter()
        indices = batch_at(number)
        seconds.append(time.perf_counter() - begin)
        assert len(np.unique(indices)) == 1024 and indices.min() >= 0 and indices.max() < FAR
    assert min(seconds) < 3e-3, f"{min(seconds)} s"  # a millisecond on an idle core; all samples would take seconds
    tracemalloc.start()
    try:
        batches.of_epoch(4)(middle)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1e6 if locality is None else 3e7), f"{peak} bytes"  # 100 bytes for each of 244,141 files


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
    for options in ({}, {"locality": equal_files(5000, 100, 8)}):
        base = whole(5000, **options)
        assert np.array_equal(whole(5000, **options), base)
        for other in (whole(5000, epoch=1, **options), whole(5000, seed=2, **options)):
            assert (other == base).mean() < 0.005


def test_a_window_mixes_its_files() -> None:
    order = whole(9600, locality=equal_files(9600, 100, 8))
    for begin in range(0, 9600, 800):
        first_half = np.sort(order[begin : begin + 400])
        stretches = int((np.diff(first_half) > 1).sum()) + 1
        assert stretches > 400 / 3


def test_files_and_places_in_the_epoch_are_shuffled_evenly() -> None:
    num, draws = 60, 3000
    table = np.zeros((num, num))
    for epoch in range(draws):
        table[np.arange(num), whole(num, epoch=epoch, locality=equal_files(num, 5, 3))] += 1
    # Samples of a file share their window, so cells vary less independently than in a full shuffle.
    assert np.abs(table / draws * num - 1).max() < 0.7
    by_window = table.reshape(4, 15, num).sum(axis=1)
    assert np.abs(by_window / draws * 4 - 1).max() < 0.13
