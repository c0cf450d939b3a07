"""Sampler: the global batches are the same however they are divided, and an epoch continues where it was left."""

import numpy as np
import pytest

from sd_lightning._errors import UsageError
from sd_lightning.data.loading import EpochLoader, LoaderOptions
from sd_lightning.data.order import BatchOrder, Bucket, EpochOrder, Key
from sd_lightning.data.sampler import GlobalBatchSampler, check_division

DIVISIONS = [(world, accumulate) for world in (1, 2, 3, 4, 8) for accumulate in (1, 2, 3)]


def samplers(num_samples: int, batch_size: int, world: int, accumulate: int, seed: int = 7) -> list[GlobalBatchSampler]:
    order = BatchOrder([Bucket((8, 8), range(num_samples))], batch_size, seed, drop_last=True)
    return [GlobalBatchSampler(order, world_size=world, rank=rank, accumulate=accumulate) for rank in range(world)]


def loader_of(sampler: GlobalBatchSampler) -> tuple[EpochLoader, GlobalBatchSampler]:
    return EpochLoader(LoaderOptions(0).build([0] * 100, sampler, on_cuda=False), sampler), sampler


def global_batches(ranks: list[GlobalBatchSampler]) -> list[list[Key]]:
    """Put the ranks' micro-batches together again, without weights: [m=0: rank 0, rank 1, ...], [m=1: ...]."""
    micro = [[key[:2] for part in parts for key in part] for parts in zip(*ranks, strict=True)]
    accumulate = ranks[0].accumulate
    return [sum(micro[i : i + accumulate], []) for i in range(0, len(micro), accumulate)]


@pytest.mark.parametrize(("world", "accumulate"), DIVISIONS)
def test_global_batches_do_not_depend_on_ranks_and_accumulation(world: int, accumulate: int) -> None:
    ranks = samplers(100, 24, world, accumulate)
    for sampler in ranks:
        sampler.set_epoch(2)
    order = EpochOrder(100, seed=7, epoch=2).at(np.arange(100)).tolist()
    assert global_batches(ranks) == [[(2, i) for i in order[g * 24 : (g + 1) * 24]] for g in range(4)]
    parts = world * accumulate
    sizes = {len(part) for sampler in ranks for part in sampler}
    assert sizes == {24 // parts, -(-24 // parts)}
    assert {len(key) for sampler in ranks for part in sampler for key in part} == {3 if 24 % parts else 2}


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


@pytest.mark.parametrize("version", [1, 3])
def test_a_position_in_another_order_is_refused(version: int) -> None:
    loader, _ = loader_of(samplers(100, 24, 1, 1)[0])
    state = {**loader.state_dict(), "order_version": version}
    with pytest.raises(UsageError, match=rf"order version {version}; expected 2; install the release .*init_from="):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("batch_size", "world", "accumulate"), [(10, 3, 1), (10, 4, 1), (7, 2, 3), (8, 8, 1), (5, 1, 4)]
)
def test_parts_differ_by_one_sample_and_weights_make_their_mean_that_of_the_batch(
    batch_size: int, world: int, accumulate: int
) -> None:
    parts = world * accumulate
    losses = np.random.default_rng(0).random(40)
    mean, sizes = 0.0, []
    for sampler in samplers(40, batch_size, world, accumulate):
        for keys in list(sampler)[:accumulate]:
            _, indices, *weights = zip(*keys)
            assert (not weights) == (batch_size % parts == 0)
            each = losses[list(indices)] * (np.array(weights[0]) if weights else 1)
            mean += each.mean() / parts
            sizes.append(len(keys))
    whole = [key[1] for key in list(samplers(40, batch_size, 1, 1)[0])[0]]
    assert mean == pytest.approx(losses[whole].mean(), rel=1e-6)
    assert sum(sizes) == batch_size and max(sizes) - min(sizes) <= 1


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
        assert [{key[0] for key in batch} for batch in sampler] == [{epoch}] * batches


def test_epochs_and_seeds_permute_differently_and_no_sample_comes_twice() -> None:
    (sampler,) = samplers(96, 24, 1, 1)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([key[1] for batch in sampler for key in batch])
    (other,) = samplers(96, 24, 1, 1, seed=8)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(96))
    assert epochs[0] != epochs[1]
    assert epochs[0] != [key[1] for batch in other for key in batch]


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    sampler = GlobalBatchSampler(BatchOrder([Bucket((8, 8), range(7))], 3, seed=0, shuffle=False, drop_last=True))
    assert list(sampler) == [[(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4), (0, 5)]]
    assert (sampler.order.samples_per_epoch, sampler.order.batches_per_epoch) == (6, 2)


def test_lightning_finds_set_epoch() -> None:
    from lightning.fabric.utilities.data import _set_sampler_epoch

    loader, sampler = loader_of(samplers(100, 24, 1, 1)[0])
    _set_sampler_epoch(loader, 5)
    assert sampler.epoch == 5


@pytest.mark.parametrize(
    ("batch_size", "world", "accumulate", "message"),
    [
        (3, 4, 1, "data.batch_size=3 .* 4 process.* 1 accumulated .* write data.batch_size=4 or more"),
        (7, 2, 4, "2 process.* x 4 accumulated .* = 8 parts of at least one sample; write data.batch_size=8 or more"),
        (0, 1, 1, "write data.batch_size=1 or more$"),
    ],
)
def test_a_batch_without_a_sample_for_every_part_is_refused_with_the_sizes_that_work(
    batch_size: int, world: int, accumulate: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_division(batch_size, world, accumulate)


def test_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data.batch_size=24 .* of 10 samples; write .*=10 or data.drop_last"):
        samplers(10, 24, 4, 1)


def test_resume_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(UsageError, match="resume: 5 batches of epoch 1 are done, but an epoch has 4"):
        samplers(100, 24, 1, 1)[0].resume(1, 5)
