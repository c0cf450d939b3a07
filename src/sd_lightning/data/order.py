"""The order of the samples in an epoch: a pure function of (seed, epoch, position), in constant memory.

``GlobalBatchSampler`` asks a ``BatchOrder`` for the samples of a global batch. ``EpochBatches`` cuts them from one
order of all samples. ``BucketOrder`` has batches of one image shape each: in an epoch, batch ``j`` of the ``n`` batches
of a bucket has the time ``(j + offset) / n`` with a random offset in [0, 1), and batches are ordered by time. So the
batches of every bucket are spread evenly over the epoch, and the batch of any number is found by bisection, without a
list of all batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Protocol

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import KeyedPermutation, Purpose

ORDER_VERSION = 2
"""Version of the orders of new epochs. Version 1, of checkpoints without a version, sorted as many keys as samples."""
UNVERSIONED = 1
"""Version of the order in checkpoints that record none."""

Shape = tuple[int, int]
"""(height, width) in pixels."""
Positions = Callable[[np.ndarray], np.ndarray]
"""(N,) int64 positions in an epoch -> (N,) int64 of what stands there."""
_FILES, _FIRST_WINDOW = 1, 2
"""Streams of the permutations of an order with a locality; stream 0 is that of all samples."""
_STREAMS = 8
"""Streams of each order of an epoch; windows are numbered above them."""
_TICK_BITS = 31
"""Bits of the resolution of the batches' times; batches of the same time follow in the order of their buckets."""


class BatchOrder(Protocol):
    """The samples of each global batch (optimizer step), equal on all ranks."""

    @property
    def num_samples(self) -> int:
        """Length of the data set."""

    @property
    def batch_size(self) -> int:
        """Samples of a global batch; the largest, if they differ."""

    @property
    def batches_per_epoch(self) -> int:
        """Global batches in every epoch; 0 if the samples do not fill one."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples in the global batches of an epoch."""

    def described(self) -> list[str]:
        """Return lines about the batches for people; none if they are what everyone expects."""

    def of_epoch(self, epoch: int, *, version: int = ORDER_VERSION) -> Callable[[int], np.ndarray]:
        """Return the function from the number of a global batch in ``epoch`` to its sample indices (B,) int64.

        Args:
            epoch: Index of the pass over the data.
            version: ``ORDER_VERSION``, or that of the checkpoint in the middle of whose epoch a run resumes.
        """


@dataclass(frozen=True)
class Locality:
    """Files in which samples lie, and how many of them are read at a time."""

    ends: np.ndarray
    """(F,) int64: the index behind the last sample of each file."""
    window: int
    """Files among which samples are shuffled."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"Locality got window={self.window}; expected at least one file; write window=32")


@dataclass(frozen=True)
class EpochBatches:
    """Global batch ``g`` is the positions ``[g * batch_size, (g + 1) * batch_size)`` of one order of all samples.

    By default an incomplete last batch is dropped: other samples in each epoch.
    """

    num_samples: int
    batch_size: int
    seed: int
    shuffle: bool = True
    """Yield in index order if false."""
    together: int = 1
    """Consecutive samples that stay together; divides ``num_samples``."""
    locality: Locality | None = None
    drop_last: bool = True

    @property
    def batches_per_epoch(self) -> int:
        return num_batches(self.num_samples, self.batch_size, drop_last=self.drop_last)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.num_samples, self.batches_per_epoch * self.batch_size)

    def described(self) -> list[str]:
        rest = self.num_samples % self.batch_size
        if self.drop_last or not rest:
            return []
        return [f"the last of {self.batches_per_epoch} batches of an epoch has {rest} of {self.batch_size} samples"]

    def of_epoch(self, epoch: int, *, version: int = ORDER_VERSION) -> Callable[[int], np.ndarray]:
        size, end, at = self.batch_size, self.num_samples, self._positions(epoch, version)
        return lambda number: at(np.arange(number * size, min((number + 1) * size, end)))

    def _positions(self, epoch: int, version: int) -> Positions:
        if not self.shuffle:
            return lambda positions: positions
        return EpochOrder(
            self.num_samples,
            seed=self.seed,
            epoch=epoch,
            together=self.together,
            locality=self.locality,
            version=version,
        ).at


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches of samples, with or without an incomplete last one."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


class EpochOrder:
    """The order of all samples in one epoch."""

    def __init__(
        self,
        num_samples: int,
        *,
        seed: int,
        epoch: int,
        together: int = 1,
        locality: Locality | None = None,
        stream: int = 0,
        version: int = ORDER_VERSION,
    ) -> None:
        """Choose the order.

        Args:
            num_samples: Length of the data set.
            seed: Seed of the run, in [0, 2**64).
            epoch: Index of the pass over the data.
            together: Consecutive samples that stay together; divides ``num_samples``.
            locality: How far samples are spread; over the whole epoch if None.
            stream: Number that tells apart the orders of one epoch, such as those of its buckets.
            version: Version of the order; the first knew no locality, and took memory for every sample.

        Raises:
            UsageError: The seed is out of range, or the version unknown.
        """
        check_version(version)
        num_groups, self._together = num_samples // together, together
        self._groups: Positions
        if version == 1:
            self._groups = randomness.permutation(seed, epoch, num_groups).numpy().__getitem__
        elif locality is None:
            self._groups = KeyedPermutation(num_groups, seed=seed, epoch=epoch, stream=stream * _STREAMS)
        else:
            assert together == 1, "stores hold no samples that stay together"
            self._groups = _Windows(locality, seed=seed, epoch=epoch, first_stream=stream * _STREAMS)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at ``positions`` of the epoch.

        Args:
            positions: (N,) int64.

        Returns:
            (N,) int64 sample indices.
        """
        if self._together == 1:
            return self._groups(positions)
        group, member = np.divmod(positions, self._together)
        return self._groups(group) * self._together + member


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
    """Raise if this release does not know a version of the order.

    Raises:
        UsageError: It does not.
    """
    if not 1 <= version <= ORDER_VERSION:
        raise UsageError(
            f"resume: the checkpoint is in the middle of an epoch in order version {version}; expected 1 to "
            f"{ORDER_VERSION}; update sd-lightning, or start a new run from its weights with init_from="
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
