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

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch.utils.data import Sampler

from sd_lightning._errors import UsageError
from sd_lightning.data.order import BatchOrder, Bucket, Key, Shape, listed
from sd_lightning.data.source import Bad, BadSample, Source
from sd_lightning.data.transform import (
    BUCKET_FIELDS,
    ImageOptions,
    any_error_is_a_bad_sample,
    check_size,
    nearest_shapes,
    resized,
)
from sd_lightning.state.ranks import gathered, rank_and_world_size

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Images whose sizes a thread reads before it takes the next ones."""
_NAMED = 20


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
    """

    def __init__(self, order: BatchOrder, *, world_size: int = 1, rank: int = 0, accumulate: int = 1) -> None:
        """Shard the samples over the ranks.

        Args:
            order: The samples of each global batch.
            world_size: Number of data-parallel ranks.
            rank: This process's data-parallel rank.
            accumulate: Micro-batches per optimizer step.

        Raises:
            UsageError: The global batch is smaller than the number of its parts, or larger than every bucket.
        """
        check_division(order.batch_size, world_size, accumulate)
        if not order.batches_per_epoch:
            largest, num = max(map(len, order.buckets), default=0), len(order.buckets)
            data = "the training set" if num == 1 else f"the largest of {num} aspect-ratio buckets"
            ways = [f"data.batch_size={largest}"] if largest >= world_size * accumulate else []
            ways += ["data.drop_last=false"] if order.drop_last and largest else []
            remedy = f"write {' or '.join(ways)}, or add images" if ways else "add images"
            raise UsageError(
                f"data.batch_size={order.batch_size} ({world_size} process(es) x {accumulate} accumulated batch(es)) "
                f"is larger than {data} of {largest} samples; {remedy}"
            )
        self.order = order
        self.world_size = world_size
        self.rank = rank
        self.accumulate = accumulate
        self.epoch = 0
        self.batches_done = 0
        self._resumed = False
        self._shift = 0

    @property
    def sampler(self) -> GlobalBatchSampler:
        """Return this object: Lightning calls ``set_epoch`` on ``loader.batch_sampler.sampler``."""
        return self

    def __len__(self) -> int:
        """Return the number of micro-batches of a *whole* epoch on one rank.

        ``resume`` does not reduce it: Lightning adds the batches done to its own counter, and would otherwise end
        the epoch early.
        """
        return self.order.batches_per_epoch * self.accumulate

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
        if not 0 <= batches_done <= self.order.batches_per_epoch:
            raise UsageError(
                f"resume: {batches_done} batches of epoch {epoch} are done, but an epoch has "
                f"{self.order.batches_per_epoch} ({self.order.num_samples} samples, data.batch_size="
                f"{self.order.batch_size}); resume with the data and the batch size of the saved run, "
                "or start a new one with init_from="
            )
        self.epoch = epoch
        self.batches_done = batches_done
        self._resumed = True

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield this rank's micro-batches of the rest of the epoch."""
        epoch, parts = self.epoch, self.world_size * self.accumulate
        samples_of = self.order.of_epoch(epoch)
        for number in range(self.batches_done, self.order.batches_per_epoch):
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


def find_buckets(source: Source, options: ImageOptions) -> tuple[tuple[Bucket, ...], list[Bad]]:
    """Assign each image to the bucket of the nearest aspect ratio; a collective call with torch.distributed.

    The ranks share the images, and each reads its part with several threads. An image keeps one small integer in
    memory.

    Args:
        source: The images.
        options: Gives the buckets' shapes, and the limit on pixels.

    Returns:
        The buckets that have images, and the images that fit none: unreadable ones, and those with too many pixels
        before or after resizing. The same on every rank.

    Raises:
        UsageError: No image fits a bucket.
    """
    distinct, shapes = source.distinct, options.shapes
    total = len(distinct)
    rank, world = rank_and_world_size()
    own = range(rank * total // world, (rank + 1) * total // world)
    log.info("data: reading the sizes of %d images for aspect-ratio buckets", total)
    pieces = [own[i : i + _AT_ONCE] for i in range(0, len(own), _AT_ONCE)]
    # Headers are small: most of the time goes to waiting for the disk or the network.
    with ThreadPoolExecutor(min(32, 4 * (os.cpu_count() or 1))) as pool:
        found = list(pool.map(lambda piece: _assign(distinct, piece, shapes, options.max_image_pixels), pieces))
    parts = gathered(found)
    assigned = np.concatenate([numbers for part in parts for numbers, _ in part])
    bad = [each for part in parts for _, some in part for each in some]
    if len(bad) == total:
        shown = "; ".join(f"{distinct.name(i)}: {reason}" for i, reason in bad[:_NAMED])
        raise UsageError(
            f"data.enable_bucket=true: none of the {total} images fits a bucket ({shown}); mend or replace them, or "
            "raise data.max_image_pixels"
        )
    if source.rows is not None:
        rows = source.rows.numpy()
        assigned = assigned[rows]
        bad = [(int(np.flatnonzero(rows == row)[0]), reason) for row, reason in bad if row in rows]
    return listed(assigned, shapes), bad


def _assign(source: Source, indices: range, shapes: Sequence[Shape], max_pixels: int) -> tuple[np.ndarray, list[Bad]]:
    """Return the number of each image's shape (N,) int16, -1 for none, and why some have none."""
    assigned = np.full(len(indices), -1, dtype=np.int16)
    bad: list[Bad] = []
    for place, index in enumerate(indices):
        try:
            with any_error_is_a_bad_sample():
                height, width = source.size(index)
            check_size((width, height), max_pixels)
            number = int(nearest_shapes(np.array([[height, width]]), shapes)[0])
            resized((width, height), shapes[number], max_pixels)
            assigned[place] = number
        except BadSample as reason:
            bad.append((index, str(reason)))
    return assigned, bad


class Batching:
    """The batches of a run's sources.

    Sources with ``buckets``, such as a latent store, and all sources with ``data.enable_bucket=true`` have batches of
    one bucket each.
    """

    def __init__(
        self,
        batch_size: int,
        images: ImageOptions,
        *,
        drop_last: bool | None,
        count_bad: Callable[[Mapping[str, str]], None],
    ) -> None:
        """Keep the options.

        Args:
            batch_size: Samples per optimizer step, over all processes.
            images: Give the shapes of buckets.
            drop_last: Leave incomplete last batches out; None does so without buckets.
            count_bad: Called with name -> reason of images that fit no bucket.
        """
        self._batch_size = batch_size
        self._images = images
        self._drop_last = drop_last
        self._count_bad = count_bad
        self._found: dict[int, Sequence[Bucket]] = {}

    def buckets(self, source: Source) -> Sequence[Bucket]:
        """Return the aspect-ratio buckets of a source, none without; the first call is collective.

        Raises:
            UsageError: No image fits a bucket.
        """
        if source.buckets is not None:
            return source.buckets
        if not self._images.enable_bucket:
            return ()
        if id(source) not in self._found:
            self._found[id(source)], bad = find_buckets(source, self._images)
            self._count_bad({source.name(index): reason for index, reason in bad})
        return self._found[id(source)]

    def check(self, source: Source, world_size: int, accumulate: int) -> None:
        """Check before training that a source fills a global batch, and that the batch has a sample for every process.

        Sizes of images are not read: whether buckets fill a batch is checked by the sampler.

        Raises:
            UsageError: The batch is too large or too small.
        """
        if self._images.enable_bucket and source.buckets is None:
            check_division(self._batch_size, world_size, accumulate)
        else:
            GlobalBatchSampler(self.order(source, seed=0), world_size=world_size, accumulate=accumulate)

    def most_batches(self, source: Source) -> int:
        """Return the largest possible number of global batches in an epoch, the exact one without buckets."""
        if self._images.enable_bucket and source.buckets is None:
            return len(source) // self._batch_size + len(self._images.shapes)
        return self.order(source, seed=0).batches_per_epoch

    def order(self, source: Source, *, seed: int, shuffle: bool = True) -> BatchOrder:
        """Return the order of a source's samples; collective with buckets.

        Raises:
            UsageError: No image fits a bucket.
        """
        buckets, size = self.buckets(source), self._batch_size
        drop_last = not buckets if self._drop_last is None else self._drop_last
        side = self._images.resolution
        buckets = buckets or (Bucket((side, side), range(len(source)), source.locality),)
        return BatchOrder(buckets, size, seed, shuffle=shuffle, drop_last=drop_last, group_size=source.group_size)

    def validation(self, source: Source, batch_size: int, world_size: int, rank: int) -> list[list[Key]]:
        """Return a rank's batches of validation keys, equally many on all ranks; collective with buckets."""
        buckets = self.buckets(source)
        if buckets:
            return bucket_validation_batches(buckets, batch_size, world_size, rank)
        return validation_batches(len(source), batch_size, world_size, rank)

    def signature(self, source: Source) -> str:
        """Return the settings that the order of the epochs depends on, for a checkpoint; "" without buckets."""
        if source.buckets is None and not self._images.enable_bucket:
            return ""
        drop_last = f"data.drop_last={str(bool(self._drop_last)).lower()}"
        if source.buckets is not None:
            return f"aspect-ratio buckets of the data with {drop_last}"
        names = ("resolution", "max_image_pixels", *BUCKET_FIELDS[1:])
        settings = " ".join(f"data.{name}={getattr(self._images, name)}" for name in names)
        return f"aspect-ratio buckets with {settings} {drop_last}"
