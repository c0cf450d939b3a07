"""The order of the samples in an epoch: a pure function of (seed, epoch, position), in constant memory.

``GlobalBatchSampler`` asks a ``BatchOrder`` for the samples of a global batch. ``EpochBatches`` cuts them from one
order of all samples; an order with other constraints, such as one image size per batch, takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
_BLOCKS, _WINDOWS, _LAST_WINDOW, _ROTATION = range(1, 5)
"""Streams of the permutations of an order with a locality; stream 0 is that of all samples."""
_STREAMS = 8
"""Streams of each order of an epoch."""


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
    """How far samples that lie together are spread in an epoch, so that whole shards can be read ahead."""

    block: int
    """Consecutive samples that are read together."""
    window: int
    """Blocks among which samples are shuffled."""

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1:
            raise UsageError(
                f"Locality got block={self.block} window={self.window}; expected at least one sample and one block; "
                "write block=1024 window=64"
            )


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
            block = -(-locality.block // together)
            self._groups = _Windows(
                num_groups, block, locality.window, seed=seed, epoch=epoch, first_stream=stream * _STREAMS
            )

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
    """Groups of samples in shuffled blocks, and shuffled again within windows of consecutive blocks.

    The groups are a ring, cut into blocks from a random place on. The incomplete last block, which is another piece of
    the data in each epoch, joins the last window.
    """

    def __init__(self, length: int, block: int, window: int, *, seed: int, epoch: int, first_stream: int) -> None:
        def permutation(of: int, stream: int) -> KeyedPermutation:
            return KeyedPermutation(of, seed=seed, epoch=epoch, stream=first_stream + stream)

        self._length = length
        self._block = block
        self._window = block * window
        self._num_blocks = length // block
        self._num_before_last = max(0, -(-self._num_blocks // window) - 1) * self._window
        self._rotation = permutation(length, _ROTATION)(np.zeros(1, np.int64))
        self._blocks = permutation(self._num_blocks, _BLOCKS)
        self._within = permutation(self._window, _WINDOWS)
        self._within_last = permutation(length - self._num_before_last, _LAST_WINDOW)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        early = positions < self._num_before_last
        window, place = np.divmod(positions[early], self._window)
        shuffled = np.empty_like(positions)
        shuffled[early] = window * self._window + self._within(place, window)
        shuffled[~early] = self._num_before_last + self._within_last(positions[~early] - self._num_before_last)
        block, place = np.divmod(shuffled, self._block)
        whole = block < self._num_blocks
        block[whole] = self._blocks(block[whole])
        return (block * self._block + place + self._rotation) % self._length


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
