"""The order of the samples in an epoch: a pure function of (seed, epoch, position), in constant memory.

``GlobalBatchSampler`` asks a ``BatchOrder`` for the samples of a global batch, which have one image shape: a bucket. In
an epoch, batch ``j`` of the ``n`` batches of a bucket has the time ``(j + offset) / n`` with a random offset in [0, 1),
and batches are ordered by time. So the batches of every bucket are spread evenly over the epoch, and the batch of any
number is found by bisection, without a list of all batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import KeyedPermutation, Purpose

ORDER_VERSION = 2
"""Version of the orders of epochs, recorded in checkpoints: a position is that of one order only."""

Shape = tuple[int, int]
"""(height, width) in pixels."""
Batch = dict[str, Any]
"""Entries of a batch by name; see ``CaptionedImages``."""
Key = tuple[int, int] | tuple[int, int, float]
"""``(epoch, index)`` of a sample: all its randomness is derived from these two and the seed.

In global batches that are divided unevenly, the third is the weight of its loss.
"""
BatchKeys = Iterable[list[Key]]
"""The keys of each batch."""
Positions = Callable[[np.ndarray], np.ndarray]
"""(N,) int64 positions in an epoch -> (N,) int64 of what stands there."""
_FILES, _FIRST_WINDOW = 1, 2
"""Streams of the permutations of an order with a locality; stream 0 is that of all samples."""
_STREAMS = 8
"""Streams of each order of an epoch; windows are numbered above them."""
_TICK_BITS = 31
"""Bits of the resolution of the batches' times; batches of the same time follow in the order of their buckets."""


@dataclass(frozen=True)
class Locality:
    """Files in which samples lie, and how many of them are read at a time."""

    ends: np.ndarray
    """(F,) int64: the index behind the last sample of each file."""
    window: int
    """Files among which samples are shuffled."""


class EpochOrder:
    """The order of all samples in one epoch."""

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        epoch: int,
        group_size: int = 1,
        locality: Locality | None = None,
        stream: int = 0,
    ) -> None:
        """Choose the order.

        Args:
            num_samples: Length of the data set.
            seed: Seed of the run, in [0, 2**64).
            epoch: Index of the pass over the data.
            group_size: Consecutive samples that stay together; divides ``num_samples``.
            locality: How far samples are spread; over the whole epoch if None.
            stream: Number that tells apart the orders of one epoch, such as those of its buckets.

        Raises:
            UsageError: The seed is out of range.
        """
        self._group_size = group_size
        self._groups: Positions
        if locality is None:
            num_groups = num_samples // group_size
            self._groups = KeyedPermutation(num_groups, seed=seed, epoch=epoch, stream=stream * _STREAMS)
        else:
            assert group_size == 1, "stores hold no samples that stay together"
            self._groups = _Windows(locality, seed=seed, epoch=epoch, first_stream=stream * _STREAMS)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at ``positions`` of the epoch.

        Args:
            positions: (N,) int64.

        Returns:
            (N,) int64 sample indices.
        """
        if self._group_size == 1:
            return self._groups(positions)
        group, member = np.divmod(positions, self._group_size)
        return self._groups(group) * self._group_size + member


class _Windows:
    """Files in random order, and samples shuffled within windows of some of them.

    Memory is needed for every file, none for samples.
    """

    def __init__(self, locality: Locality, *, seed: int, epoch: int, first_stream: int) -> None:
        self._keys = {"seed": seed, "epoch": epoch}
        self._first_stream, num_files = first_stream, len(locality.ends)
        self._files = KeyedPermutation(num_files, **self._keys, stream=first_stream + _FILES)(np.arange(num_files))
        self._begins = np.concatenate([[0], locality.ends[:-1]])[self._files]
        sizes = np.diff(locality.ends, prepend=0)[self._files]
        self._starts = np.concatenate([[0], sizes.cumsum()])
        """(F + 1,): position of the first sample of each file, were they not shuffled."""
        self._windows = np.append(self._starts[:-1][:: locality.window], self._starts[-1])
        """Position of the first sample of each window."""
        self._within = lru_cache(maxsize=4)(self._permutation)

    def _permutation(self, window: int) -> KeyedPermutation:
        length = int(self._windows[window + 1] - self._windows[window])
        stream = self._first_stream + _FIRST_WINDOW + (window << 32)
        return KeyedPermutation(length, **self._keys, stream=stream)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        windows = self._windows.searchsorted(positions, side="right") - 1
        shuffled = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            here, start = windows == window, self._windows[window]
            shuffled[here] = start + self._within(window)(positions[here] - start)
        files = self._starts.searchsorted(shuffled, side="right") - 1
        return self._begins[files] + shuffled - self._starts[files]


def check_version(version: int) -> None:
    """Check that a checkpoint's position is one of this release's order.

    Raises:
        UsageError: It is one of another order.
    """
    if version != ORDER_VERSION:
        raise UsageError(
            f"resume: the checkpoint's epochs have order version {version}; expected {ORDER_VERSION}; install the "
            "release that saved it, or start a new run from its weights with init_from="
        )


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
class BatchOrder:
    """The samples of each global batch (optimizer step), equal on all ranks; each batch is of one bucket."""

    buckets: Sequence[Bucket]
    """The samples; one bucket of all of them where all images have the same shape."""
    batch_size: int
    """Samples of a global batch."""
    seed: int
    """Seed of the run."""
    shuffle: bool = True
    """Yield each bucket in index order if false."""
    drop_last: bool = False
    """Leave the incomplete last batch of each bucket out: other samples in each epoch."""
    group_size: int = 1
    """Consecutive samples that stay together; divides the size of every bucket."""

    @property
    def num_samples(self) -> int:
        """Samples of all buckets."""
        return sum(map(len, self.buckets))

    @property
    def batches_per_bucket(self) -> list[int]:
        """Global batches of each bucket in an epoch."""
        rest = 0 if self.drop_last else self.batch_size - 1
        return [(len(bucket) + rest) // self.batch_size for bucket in self.buckets]

    @property
    def batches_per_epoch(self) -> int:
        """Global batches in every epoch; 0 if no bucket fills one."""
        return sum(self.batches_per_bucket)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in the global batches of an epoch."""
        return sum(min(len(b), num * self.batch_size) for b, num in zip(self.buckets, self.batches_per_bucket))

    def of_epoch(self, epoch: int) -> Callable[[int], np.ndarray]:
        """Return the function from the number of a global batch in ``epoch`` to its sample indices (B,) int64."""
        num_batches, offsets = np.asarray(self.batches_per_bucket, np.int64), self._offsets(epoch)

        def before(tick: int) -> np.ndarray:
            """Return for each bucket the number of its batches before a time: all j * 2**31 + offset < tick * n."""
            return -((offsets - tick * num_batches) >> _TICK_BITS)

        @cache
        def order(chosen: int) -> EpochOrder:
            bucket, group_size = self.buckets[chosen], self.group_size
            keys = {"seed": self.seed, "epoch": epoch, "stream": chosen}
            return EpochOrder(len(bucket), **keys, group_size=group_size, locality=bucket.locality)

        def batch(number: int) -> np.ndarray:
            after = bisect_right(range(2**_TICK_BITS + 1), number, key=lambda tick: int(before(tick).sum()))
            done = before(after - 1)
            at_that_time = np.flatnonzero(before(after) - done)
            chosen = int(at_that_time[number - done.sum()])
            bucket, begin = self.buckets[chosen], int(done[chosen]) * self.batch_size
            places = np.arange(begin, min(begin + self.batch_size, len(bucket)))
            return bucket.at(order(chosen).at(places) if self.shuffle else places)

        return batch

    def _offsets(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.zeros(len(self.buckets), np.int64)
        bucket = torch.arange(len(self.buckets))
        return randomness.integers(self.seed, epoch, bucket, Purpose.BUCKETS, 2**_TICK_BITS).numpy()

    def described(self) -> list[str]:
        """Return for people a line for each of several buckets, and one of all; of one only what is unusual."""
        if len(self.buckets) == 1:
            rest = self.num_samples % self.batch_size
            if self.drop_last or not rest:
                return []
            return [f"the last of {self.batches_per_epoch} batches of an epoch has {rest} of {self.batch_size} samples"]
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
