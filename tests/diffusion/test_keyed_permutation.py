"""The keyed permutation: a permutation of every length, uniform, pinned, and without memory."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.randomness import LONGEST, KeyedPermutation

PINNED = [6, 9, 7, 1, 2, 5, 11, 10, 3, 4, 8, 0]
PINNED_BIG = [96503714, 1557679004, 1034859042]


def whole(length: int, *, seed: int = 0, epoch: int = 0, stream: int = 0) -> np.ndarray:
    return KeyedPermutation(length, seed=seed, epoch=epoch, stream=stream)(np.arange(length))


def is_permutation(values: np.ndarray) -> bool:
    return values.dtype == np.int64 and np.array_equal(np.sort(values), np.arange(len(values)))


def deviation(observed: np.ndarray, expected: float, degrees: int) -> float:
    """Chi-squared as standard deviations from its mean; of a uniform table, within 4.5 in all but one of 10**5."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return abs(statistic * degrees / (observed.size - 1) - degrees) / math.sqrt(2 * degrees)


def test_every_short_length_has_permutations() -> None:
    for length in range(260):
        assert is_permutation(whole(length, seed=length, epoch=3)), length


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 30_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**31))
def test_any_length_seed_and_epoch_give_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert is_permutation(whole(length, seed=seed, epoch=epoch))


@pytest.mark.parametrize("length", [2_000_000_000, 2**40 + 1, LONGEST - 1, LONGEST])
def test_positions_of_a_long_permutation_are_distinct_and_spread_over_the_range(length: int) -> None:
    positions = np.concatenate([np.arange(30_000), np.arange(length - 30_000, length)])
    values = KeyedPermutation(length, seed=5, epoch=1)(positions)
    assert len(np.unique(values)) == len(values) and values.min() >= 0 and values.max() < length
    bins = np.bincount((values / length * 100).astype(int), minlength=100)
    assert deviation(bins, 600, 99) < 4.5


def test_each_value_is_as_likely_at_each_position() -> None:
    length, draws = 40, 3000
    table = np.zeros((length, length))
    for epoch in range(draws):
        table[np.arange(length), whole(length, seed=9, epoch=epoch)] += 1
    # Rows and columns have fixed sums; the variance of a cell is (1 - 1 / length) of a Poisson variable's.
    statistic = float(((table - draws / length) ** 2 / (draws / length)).sum()) * (length - 1) / length
    degrees = (length - 1) ** 2
    assert abs(statistic - degrees) < 4.5 * math.sqrt(2 * degrees)


def test_the_permutations_of_five_are_equally_likely() -> None:
    number = {order: i for i, order in enumerate(itertools.permutations(range(5)))}
    counts = np.bincount([number[tuple(whole(5, seed=seed).tolist())] for seed in range(6000)], minlength=120)
    assert deviation(counts, 50, 119) < 4.5


def test_seeds_epochs_and_streams_are_unrelated() -> None:
    base = whole(10_000, seed=1)
    others = [whole(10_000, seed=2), whole(10_000, seed=1, epoch=1), whole(10_000, seed=1, stream=1)]
    for one, other in itertools.combinations([base, *others], 2):
        assert (one == other).mean() < 0.001
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.045


def test_values_are_pinned_because_a_resumed_run_must_read_the_same() -> None:
    assert whole(12, seed=42, epoch=3).tolist() == PINNED
    big = KeyedPermutation(2_000_000_000, seed=42, epoch=3)(np.array([0, 1, 1_999_999_999]))
    assert big.tolist() == PINNED_BIG


def test_a_position_outside_the_range_and_a_seed_out_of_range_are_refused() -> None:
    for position in (-1, 10):
        with pytest.raises(AssertionError, match="range"):
            KeyedPermutation(10, seed=0, epoch=0)(np.array([position]))
    with pytest.raises(UsageError, match="seed=-1"):
        KeyedPermutation(10, seed=-1, epoch=0)
