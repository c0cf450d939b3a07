"""Batch samplers: each rank's samples are a pure function of (seed, epoch, global batch).

The unit is the *global batch*: the samples of one optimizer step over all ranks, which a ``BatchOrder`` lists. Of its
``B`` samples, micro-batch ``m`` of rank ``r`` is part ``k = m * W + r`` of ``P = W * A`` parts, the positions
``[k * B // P, (k + 1) * B // P)``. A step therefore sees the same samples at every world size ``W`` and gradient
accumulation ``A``.

Where ``P`` does not divide ``B``, parts differ by one sample. The loss of each sample is weighted by ``n * P / B``,
``n`` being the size of its part, so that the mean over ranks and accumulated batches of their mean losses is the mean
over the global batch. A part without a sample, of an incomplete global batch, takes one of another part, of weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from sd_lightning._errors import UsageError
from sd_lightning.data.order import ORDER_VERSION, BatchOrder, check_version

Key = tuple[int, int] | tuple[int, int, float]
"""``(epoch, index)`` of a sample: all its randomness is derived from these two and the seed.

In global batches that are divided unevenly, the third is the weight of its loss.
"""


def split_keys(keys: Sequence[Key]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return epochs (B,) int64, indices (B,) int64, and loss weights (B,) float32 if the keys have any."""
    epochs, indices, *weights = zip(*keys, strict=True)
    return torch.tensor(epochs), torch.tensor(indices), torch.tensor(weights[0]) if weights else None


def check_division(batch_size: int, world_size: int = 1, accumulate: int = 1) -> None:
    """Check that every rank gets at least one sample of a global batch for every forward pass.

    Args:
        batch_size: Samples per optimizer step, over all ranks.
        world_size: Number of data-parallel ranks.
        accumulate: Forward passes per optimizer step (``trainer.accumulate_grad_batches``).

    Raises:
        UsageError: The global batch has fewer samples.
    """
    parts = world_size * accumulate
    if batch_size < parts:
        raise UsageError(
            f"data.batch_size={batch_size} is the global batch and cannot be split over {world_size} "
            f"process(es) x {accumulate} accumulated batch(es) = {parts} parts of at least one sample; "
            f"write data.batch_size={parts} or more"
        )


class GlobalBatchSampler(Sampler[list[Key]]):
    """Batch sampler over global indices that can resume within an epoch.

    Yields lists of keys, one list per micro-batch of this rank.

    Attributes:
        order: The samples of each global batch.
        epoch: The epoch that the next iteration yields.
        batches_done: Global batches of that epoch that the next iteration skips.
        order_version: Version of that epoch's order.
    """

    def __init__(self, order: BatchOrder, *, world_size: int = 1, rank: int = 0, accumulate: int = 1) -> None:
        """Shard the samples over the ranks.

        Args:
            order: The samples of each global batch.
            world_size: Number of data-parallel ranks.
            rank: This process's data-parallel rank.
            accumulate: Micro-batches per optimizer step.

        Raises:
            UsageError: The global batch is smaller than the number of its parts, or larger than the data set.
        """
        check_division(order.batch_size, world_size, accumulate)
        if not order.batches_per_epoch:
            parts = world_size * accumulate
            fits = order.num_samples >= parts
            remedy = f"write data.batch_size={order.num_samples}" if fits else "train on one process"
            raise UsageError(
                f"data.batch_size={order.batch_size} ({world_size} process(es) x {accumulate} accumulated batch(es)) "
                f"is larger than the training set of {order.num_samples} samples; {remedy}, or add images"
            )
        self.order = order
        self.world_size = world_size
        self.rank = rank
        self.accumulate = accumulate
        self.epoch = 0
        self.batches_done = 0
        self.order_version = ORDER_VERSION
        self._resumed = False
        self._shift = 0

    @property
    def sampler(self) -> GlobalBatchSampler:
        """Return this object: Lightning calls ``set_epoch`` on ``loader.batch_sampler.sampler``."""
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.order.batch_size

    @property
    def batches_per_epoch(self) -> int:
        """Global batches (optimizer steps) in an epoch."""
        return self.order.batches_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together see in an epoch."""
        return self.order.samples_per_epoch

    def __len__(self) -> int:
        """Return the number of micro-batches of a *whole* epoch on one rank.

        ``resume`` does not reduce it: Lightning adds the batches done to its own counter, and would otherwise end
        the epoch early.
        """
        return self.batches_per_epoch * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a new epoch starts at batch 0, in the newest order.

        After ``resume``, Lightning's epoch count may differ from ours: if Lightning ended a run at ``max_steps`` within
        an epoch, it counted that epoch as done. The first call after ``resume`` means the resumed epoch, and later
        calls count from it.
        """
        if self._resumed:
            self._resumed, self._shift = False, self.epoch - epoch
        if epoch + self._shift != self.epoch:
            self.epoch = epoch + self._shift
            self.batches_done = 0
            self.order_version = ORDER_VERSION

    def resume(self, epoch: int, batches_done: int, *, order_version: int = ORDER_VERSION) -> None:
        """Resume ``epoch`` after its first ``batches_done`` global batches.

        Args:
            epoch: Epoch to continue.
            batches_done: Optimizer steps already taken in it.
            order_version: Version of the order in which they were taken. The rest of the epoch follows it, too; an
                epoch that has not begun gets the newest.

        Raises:
            UsageError: The epoch does not have that many batches, or the version is unknown.
        """
        if not 0 <= batches_done <= self.batches_per_epoch:
            raise UsageError(
                f"resume: {batches_done} batches of epoch {epoch} are done, but an epoch has "
                f"{self.batches_per_epoch} ({self.order.num_samples} samples, data.batch_size="
                f"{self.global_batch_size}); resume with the data and the batch size of the saved run, "
                "or start a new one with init_from="
            )
        check_version(order_version)
        self.epoch = epoch
        self.batches_done = batches_done
        self.order_version = order_version if batches_done else ORDER_VERSION
        self._resumed = True

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield this rank's micro-batches of the rest of the epoch."""
        epoch, parts = self.epoch, self.world_size * self.accumulate
        samples_of = self.order.of_epoch(epoch, version=self.order_version)
        for number in range(self.batches_done, self.batches_per_epoch):
            indices = samples_of(number).tolist()
            size = len(indices)
            for part in range(self.rank, parts, self.world_size):
                mine = indices[part * size // parts : (part + 1) * size // parts]
                weight = () if size % parts == 0 else (len(mine) * parts / size,)
                # Every rank makes the same calls: where an incomplete batch leaves it no sample, with one of weight 0.
                yield [(epoch, index, *weight) for index in mine or indices[:1]]


def validation_batches(num_samples: int, batch_size: int, world_size: int = 1, rank: int = 0) -> list[list[Key]]:
    """Return this rank's batches of validation keys (epoch 0): a contiguous shard, equally large on all ranks."""
    share = max(1, num_samples // world_size)
    keys: list[Key] = [(0, (rank * share + i) % num_samples) for i in range(share)]
    return [keys[i : i + batch_size] for i in range(0, share, batch_size)]
