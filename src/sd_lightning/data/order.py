"""The order of the samples in an epoch: a pure function of (seed, epoch, position), in constant memory.

``GlobalBatchSampler`` asks a ``BatchOrder`` for the samples of a global batch. ``EpochBatches`` cuts them from one
order of all samples; an order with other constraints, such as one image size per batch, takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.keyed_permutation import KeyedPermutation

ORDER_VERSION = 2
"""Version of the orders of new epochs. Version 1, of checkpoints without a version, sorted as many keys as samples."""
UNVERSIONED = 1
"""Version of the order in checkpoints that record none."""

Positions = Callable[[np.ndarray], np.ndarray]
"""(N,) int64 positions in an epoch -> (N,) int64 of what stands there."""
_FILES, _FIRST_WINDOW = 1, 2
"""Streams of the permutations of an order with a locality; stream 0 is that of all samples."""
_STREAMS = 8
"""Streams of each order of an epoch; windows are numbered above them."""


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
