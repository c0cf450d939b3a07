"""Batch samplers: each rank's samples are a pure function of (seed, epoch, global batch).

The unit is the *global batch*: the samples of one optimizer step over all ranks. Global
batch ``g`` of an epoch is positions ``[g*B, (g+1)*B)`` of the epoch's permutation; micro-batch
``m`` of rank ``r`` is its slice number ``m*W + r`` of length ``B/(W*A)``. A step therefore sees
the same samples at every world size ``W`` and gradient accumulation ``A``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, arange
from torch.utils.data import Sampler

from sd_lightning._errors import UsageError
from sd_lightning.diffusion import randomness

Key = tuple[int, int]
"""``(epoch, index)`` of a sample: all its randomness is derived from these two and the seed."""


def micro_batch_size(batch_size: int, world_size: int = 1, accumulate: int = 1) -> int:
    """Return the batch size of one rank and forward pass.

    Args:
        batch_size: Samples per optimizer step, over all ranks.
        world_size: Number of data-parallel ranks.
        accumulate: Forward passes per optimizer step (``trainer.accumulate_grad_batches``).

    Returns:
        ``batch_size / (world_size * accumulate)``.

    Raises:
        UsageError: The global batch cannot be divided evenly.
    """
    parts = world_size * accumulate
    if batch_size < 1 or batch_size % parts:
        below = max(batch_size, 0) // parts * parts
        nearest = " or ".join(str(n) for n in (below, below + parts) if n > 0)
        raise UsageError(
            f"data.batch_size={batch_size} is the global batch and cannot be split over {world_size} "
            f"process(es) x {accumulate} accumulated batch(es) = {parts} equal parts; "
            f"write data.batch_size={nearest}"
        )
    return batch_size // parts


class GlobalBatchSampler(Sampler[list[Key]]):
    """Batch sampler over global indices that can resume within an epoch.

    Yields lists of ``(epoch, index)``, one list per micro-batch of this rank. Every epoch uses a
    new permutation; an incomplete last global batch is dropped.

    Attributes:
        batch_size: Samples per yielded list (torch's meaning; the constructor takes the global one).
        global_batch_size: Samples per optimizer step, over all ranks.
        epoch: The epoch that the next iteration yields.
        batches_done: Global batches of that epoch that the next iteration skips.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch_size: int,
        world_size: int = 1,
        rank: int = 0,
        accumulate: int = 1,
        seed: int,
        shuffle: bool = True,
        together: int = 1,
    ) -> None:
        """Shard the samples over the ranks.

        Args:
            num_samples: Length of the dataset.
            batch_size: Global batch: samples per optimizer step, over all ranks.
            world_size: Number of data-parallel ranks.
            rank: This process's data-parallel rank.
            accumulate: Micro-batches per optimizer step.
            seed: Seed of the run; the permutation is ``randomness.permutation(seed, epoch, n)``.
            shuffle: Yield in index order if false.
            together: Consecutive samples kept together when shuffled; divides ``num_samples``.

        Raises:
            UsageError: The batch cannot be divided, or is larger than the dataset.
        """
        self.batch_size = micro_batch_size(batch_size, world_size, accumulate)
        if num_samples < batch_size:
            parts = world_size * accumulate
            remedy = (
                f"write data.batch_size={num_samples // parts * parts}"
                if num_samples >= parts
                else "train on one process"
            )
            raise UsageError(
                f"data.batch_size={batch_size} ({world_size} process(es) x {accumulate} accumulated batch(es)) is "
                f"larger than the training set of {num_samples} samples; {remedy}, or add images"
            )
        self.num_samples = num_samples
        self.global_batch_size = batch_size
        self.world_size = world_size
        self.rank = rank
        self.accumulate = accumulate
        self.seed = seed
        self.shuffle = shuffle
        self.together = together
        self.epoch = 0
        self.batches_done = 0
        self._resumed = False
        self._shift = 0

    @property
    def sampler(self) -> GlobalBatchSampler:
        """Return this object: Lightning calls ``set_epoch`` on ``loader.batch_sampler.sampler``."""
        return self

    @property
    def batches_per_epoch(self) -> int:
        """Global batches (optimizer steps) in an epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        """Samples that all ranks together see in an epoch."""
        return self.batches_per_epoch * self.global_batch_size

    def __len__(self) -> int:
        """Return the number of micro-batches of a *whole* epoch on one rank.

        ``resume`` does not reduce it: Lightning adds the batches done to its own counter, and would otherwise end
        the epoch early.
        """
        return self.batches_per_epoch * self.accumulate

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a new epoch starts at batch 0.

        After ``resume``, Lightning's epoch count may differ from ours: if Lightning ended a run at ``max_steps`` within
        an epoch, it counted that epoch as done. The first call after ``resume`` means the resumed epoch, and later
        calls count from it.
        """
        if self._resumed:
            self._resumed, self._shift = False, self.epoch - epoch
        if epoch + self._shift != self.epoch:
            self.epoch = epoch + self._shift
            self.batches_done = 0

    def resume(self, epoch: int, batches_done: int) -> None:
        """Resume ``epoch`` after its first ``batches_done`` global batches.

        Args:
            epoch: Epoch to continue.
            batches_done: Optimizer steps already taken in it.

        Raises:
            UsageError: The epoch does not have that many batches.
        """
        if not 0 <= batches_done <= self.batches_per_epoch:
            raise UsageError(
                f"resume: {batches_done} batches of epoch {epoch} are done, but an epoch has "
                f"{self.batches_per_epoch} ({self.num_samples} samples, data.batch_size="
                f"{self.global_batch_size}); resume with the data and the batch size of the saved run, "
                "or start a new one with init_from="
            )
        self.epoch = epoch
        self.batches_done = batches_done
        self._resumed = True

    def _order(self) -> Tensor:
        if self.shuffle:
            groups = randomness.permutation(self.seed, self.epoch, self.num_samples // self.together)
            return (groups[:, None] * self.together + arange(self.together)).flatten()
        return arange(self.num_samples)

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield this rank's micro-batches of the rest of the epoch."""
        epoch, order = self.epoch, self._order()
        for batch in range(self.batches_done, self.batches_per_epoch):
            for micro in range(self.accumulate):
                start = batch * self.global_batch_size + (micro * self.world_size + self.rank) * self.batch_size
                yield [(epoch, index) for index in order[start : start + self.batch_size].tolist()]


def validation_batches(num_samples: int, batch_size: int, world_size: int = 1, rank: int = 0) -> list[list[Key]]:
    """Return this rank's batches of validation keys (epoch 0): a contiguous shard, equally large on all ranks."""
    share = max(1, num_samples // world_size)
    keys = [(0, (rank * share + i) % num_samples) for i in range(share)]
    return [keys[i : i + batch_size] for i in range(0, share, batch_size)]
