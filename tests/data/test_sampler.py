"""Sampler: the global batches are the same however they are divided, and an epoch continues where it was left."""

import pytest

from sd_lightning._errors import UsageError
from sd_lightning.data.sampler import GlobalBatchSampler, micro_batch_size
from sd_lightning.diffusion.randomness import permutation

DIVISIONS = [(world, accumulate) for world in (1, 2, 4) for accumulate in (1, 2, 3)]


def samplers(num_samples: int, batch_size: int, world: int, accumulate: int, seed: int = 7) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(
            num_samples, batch_size=batch_size, world_size=world, rank=rank, accumulate=accumulate, seed=seed
        )
        for rank in range(world)
    ]


def global_batches(ranks: list[GlobalBatchSampler]) -> list[list[tuple[int, int]]]:
    """Put the ranks' micro-batches together again: [m=0: rank 0, rank 1, ...], [m=1: ...]."""
    micro = [sum(parts, []) for parts in zip(*ranks, strict=True)]
    accumulate = ranks[0].accumulate
    return [sum(micro[i : i + accumulate], []) for i in range(0, len(micro), accumulate)]


@pytest.mark.parametrize(("world", "accumulate"), DIVISIONS)
def test_global_batches_do_not_depend_on_ranks_and_accumulation(world: int, accumulate: int) -> None:
    ranks = samplers(100, 24, world, accumulate)
    for sampler in ranks:
        sampler.set_epoch(2)
    order = permutation(7, 2, 100).tolist()
    assert global_batches(ranks) == [[(2, i) for i in order[g * 24 : (g + 1) * 24]] for g in range(4)]
    assert {len(part) for sampler in ranks for part in sampler} == {24 // (world * accumulate)}


@pytest.mark.parametrize(("world", "accumulate"), DIVISIONS)
def test_resume_yields_exactly_the_rest_at_any_division(world: int, accumulate: int) -> None:
    whole = samplers(100, 24, 1, 1)
    whole[0].set_epoch(1)
    expected = global_batches(whole)
    for done in range(5):
        ranks = samplers(100, 24, world, accumulate)
        for sampler in ranks:
            sampler.resume(1, done)
            sampler.set_epoch(1)
        assert global_batches(ranks) == expected[done:]


def test_length_is_that_of_a_whole_epoch_even_after_resume() -> None:
    (sampler,) = samplers(100, 24, 1, 2)
    assert len(sampler) == 8 == len(list(sampler))
    sampler.resume(0, 3)
    assert len(sampler) == 8
    assert len(list(sampler)) == 2


def test_another_epoch_forgets_the_resume_position() -> None:
    (sampler,) = samplers(100, 24, 1, 1)
    sampler.resume(3, 2)
    sampler.set_epoch(3)
    assert len(list(sampler)) == 2
    sampler.set_epoch(4)
    assert len(list(sampler)) == 4


def test_first_epoch_after_resume_is_the_resumed_one_however_the_caller_counts() -> None:
    (sampler,) = samplers(100, 24, 1, 1)
    sampler.resume(3, 2)
    for told, epoch, batches in ((4, 3, 2), (4, 3, 2), (5, 4, 4), (6, 5, 4)):
        sampler.set_epoch(told)
        assert [{e for e, _ in batch} for batch in sampler] == [{epoch}] * batches


def test_epochs_and_seeds_permute_differently_and_no_sample_comes_twice() -> None:
    (sampler,) = samplers(96, 24, 1, 1)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([index for batch in sampler for _, index in batch])
    (other,) = samplers(96, 24, 1, 1, seed=8)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(96))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [index for batch in other for _, index in batch]


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    sampler = GlobalBatchSampler(7, batch_size=3, seed=0, shuffle=False)
    assert list(sampler) == [[(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4), (0, 5)]]
    assert (sampler.samples_per_epoch, sampler.batches_per_epoch) == (6, 2)


def test_lightning_finds_set_epoch() -> None:
    from lightning.fabric.utilities.data import _set_sampler_epoch

    from sd_lightning.data.loader import EpochLoader, LoaderOptions

    (sampler,) = samplers(100, 24, 1, 1)
    loader = EpochLoader(LoaderOptions(0).build([0] * 100, sampler, on_cuda=False), sampler)
    _set_sampler_epoch(loader, 5)
    assert sampler.epoch == 5


@pytest.mark.parametrize(
    ("batch_size", "world", "accumulate", "message"),
    [
        (10, 4, 1, "data.batch_size=10 .* 4 process.* 1 accumulated .* write data.batch_size=8 or 12"),
        (2, 4, 1, "write data.batch_size=4$"),
        (12, 2, 4, "2 process.* x 4 accumulated .* = 8 equal parts; write data.batch_size=8 or 16"),
        (0, 1, 1, "write data.batch_size=1$"),
    ],
)
def test_indivisible_batch_is_refused_with_the_nearest_valid_sizes(
    batch_size: int, world: int, accumulate: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        micro_batch_size(batch_size, world, accumulate)


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data.batch_size=24 .* of 10 samples; write data.batch_size=8, or"):
        samplers(10, 24, 4, 1)


def test_resume_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(UsageError, match="resume: 5 batches of epoch 1 are done, but an epoch has 4"):
        samplers(100, 24, 1, 1)[0].resume(1, 5)
