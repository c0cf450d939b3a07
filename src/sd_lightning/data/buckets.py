"""Aspect-ratio buckets: samples of one shape each, and the order of their batches.

All samples of a global batch are of one bucket. In an epoch, batch ``j`` of the ``n`` batches of a bucket has the time
``(j + offset) / n`` with a random offset in [0, 1), and batches are ordered by time. So the batches of every bucket
are spread evenly over the epoch, and the batch of any number is found by bisection, without a list of all batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.order import ORDER_VERSION, EpochOrder, Locality, num_batches
from sd_lightning.data.sampler import Key
from sd_lightning.data.shapes import Shape
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import Purpose

_TICK_BITS = 31
"""Bits of the resolution of the batches' times; batches of the same time follow in the order of their buckets."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """The samples of one shape."""

    shape: Shape
    """(height, width) in pixels."""
    members: range | np.ndarray
    """Indices of the samples, ascending: a range of step 1, or (N,) integers."""
    locality: Locality | None = None
    """How far its samples are spread, with ends counted within the bucket; over all of an epoch if None."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.members)

    def __contains__(self, index: int) -> bool:
        """Return whether a sample is in the bucket."""
        if isinstance(self.members, range):
            return index in self.members
        place = int(np.searchsorted(self.members, index))
        return place < len(self.members) and int(self.members[place]) == index

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the indices (N,) int64 of the samples at ``places`` (N,) int64 of the bucket."""
        if isinstance(self.members, range):
            return self.members.start + places
        return self.members[places].astype(np.int64)


def listed(assigned: np.ndarray, shapes: Sequence[Shape]) -> tuple[Bucket, ...]:
    """Return the buckets of listed samples, without the empty ones.

    Args:
        assigned: (N,) integers, the index in ``shapes`` of each sample; others (-1) are in no bucket.
        shapes: Shapes of the buckets.
    """
    dtype = np.int32 if len(assigned) < 2**31 else np.int64
    found = (Bucket(shape, np.flatnonzero(assigned == i).astype(dtype)) for i, shape in enumerate(shapes))
    return tuple(bucket for bucket in found if len(bucket))


def shape_of(buckets: Sequence[Bucket], index: int) -> Shape:
    """Return the shape of a sample's bucket."""
    return next(bucket.shape for bucket in buckets if index in bucket)


@dataclass(frozen=True)
class BucketOrder:
    """The order of an epoch in which each global batch is of one bucket; a ``BatchOrder``.

    Args:
        buckets: The samples.
        batch_size: Samples of a global batch.
        seed: Seed of the run.
        shuffle: Yield each bucket in index order if false.
        drop_last: Leave the incomplete last batch of each bucket out: other samples in each epoch.

    Raises:
        UsageError: No bucket fills a batch.
    """

    buckets: Sequence[Bucket]
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batches_per_epoch == 0:
            largest = max(map(len, self.buckets), default=0)
            raise UsageError(
                f"data.batch_size={self.batch_size} with data.drop_last=true: none of the {len(self.buckets)} "
                f"aspect-ratio buckets has that many images, the largest has {largest}; write data.drop_last=false, or "
                f"data.batch_size={largest}"
            )

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.buckets))

    @property
    def batches_per_bucket(self) -> list[int]:
        """Global batches of each bucket in an epoch."""
        return [num_batches(len(bucket), self.batch_size, drop_last=self.drop_last) for bucket in self.buckets]

    @property
    def batches_per_epoch(self) -> int:
        return sum(self.batches_per_bucket)

    @property
    def samples_per_epoch(self) -> int:
        return sum(min(len(b), num * self.batch_size) for b, num in zip(self.buckets, self.batches_per_bucket))

    def of_epoch(self, epoch: int, *, version: int = ORDER_VERSION) -> Callable[[int], np.ndarray]:
        """Return the function from the number of a global batch to its sample indices; see ``BatchOrder``.

        Args:
            epoch: Index of the pass over the data.
            version: Without effect: there is only one version.
        """
        interleaved = _Interleaved(self.batches_per_bucket, self._offsets(epoch))

        @cache
        def order(chosen: int) -> EpochOrder:
            bucket = self.buckets[chosen]
            return EpochOrder(len(bucket), seed=self.seed, epoch=epoch, locality=bucket.locality, stream=chosen)

        def batch(number: int) -> np.ndarray:
            chosen, place = interleaved.find(number)
            bucket, begin = self.buckets[chosen], place * self.batch_size
            places = np.arange(begin, min(begin + self.batch_size, len(bucket)))
            return bucket.at(order(chosen).at(places) if self.shuffle else places)

        return batch

    def _offsets(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.zeros(len(self.buckets), np.int64)
        bucket = torch.arange(len(self.buckets))
        return randomness.integers(self.seed, epoch, bucket, Purpose.BUCKETS, 2**_TICK_BITS).numpy()

    def described(self) -> list[str]:
        """Return a line for each bucket, and one for all of them, for people."""
        lines = []
        for bucket, num in zip(self.buckets, self.batches_per_bucket):
            rest = len(bucket) % self.batch_size
            last = f", {_counted(rest, 'image')} {'left out' if self.drop_last else 'in the last'}" if rest else ""
            counts = f"{_counted(len(bucket), 'image')}, {_counted(num, 'batch')}{last}"
            lines.append(f"bucket {bucket.shape[0]} x {bucket.shape[1]} (height x width): {counts}")
        lost = self.num_samples - self.samples_per_epoch
        lines.append(
            f"{len(self.buckets)} aspect-ratio buckets: {_counted(self.num_samples, 'image')}, "
            f"{_counted(self.batches_per_epoch, 'batch')} of {self.batch_size} in an epoch; incomplete batches lose "
            f"{_counted(lost, 'image')}"
        )
        return lines


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


class _Interleaved:
    """The batches of several buckets, ordered by time."""

    def __init__(self, num_batches: Sequence[int], offsets: np.ndarray) -> None:
        self._num_batches = np.asarray(num_batches, dtype=np.int64)
        self._offsets = offsets

    def _before(self, tick: int) -> np.ndarray:
        """Return for each bucket the number of its batches before a time: all j * 2**31 + offset < tick * n."""
        return -((self._offsets - tick * self._num_batches) >> _TICK_BITS)

    def find(self, number: int) -> tuple[int, int]:
        """Return the bucket of the batch of that number, and the batch's number in the bucket."""
        after = bisect_right(range(2**_TICK_BITS + 1), number, key=lambda tick: int(self._before(tick).sum()))
        before = self._before(after - 1)
        at_that_time = np.flatnonzero(self._before(after) - before)
        bucket = int(at_that_time[number - before.sum()])
        return bucket, int(before[bucket])


def bucket_validation_batches(
    buckets: Sequence[Bucket], batch_size: int, world_size: int = 1, rank: int = 0
) -> list[list[Key]]:
    """Return this rank's batches of validation keys (epoch 0), each of one bucket.

    Every sample is there once. Where a rank has no sample for a batch, it gets one of weight 0, so that all ranks have
    equally many batches.

    Args:
        buckets: The samples.
        batch_size: Most samples per rank and batch.
        world_size: Number of data-parallel ranks.
        rank: This rank.
    """
    batches: list[list[Key]] = []
    for bucket in buckets:
        for begin in range(0, len(bucket), batch_size * world_size):
            places = np.arange(begin, min(begin + batch_size * world_size, len(bucket)))
            indices, size = bucket.at(places).tolist(), len(places)
            mine = indices[rank * size // world_size : (rank + 1) * size // world_size]
            batches.append([(0, index, 1.0) for index in mine] or [(0, indices[0], 0.0)])
    return batches
