"""How the sources of a run are cut into batches: the order of an epoch, validation, and aspect-ratio buckets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sd_lightning._errors import UsageError
from sd_lightning.data.bad_samples import BadSamples
from sd_lightning.data.buckets import Bucket, BucketOrder, bucket_validation_batches
from sd_lightning.data.image_options import BUCKET_FIELDS, ImageOptions
from sd_lightning.data.image_sizes import find_buckets
from sd_lightning.data.order import BatchOrder, EpochBatches
from sd_lightning.data.sampler import GlobalBatchSampler, Key, check_division, validation_batches
from sd_lightning.data.source import Source

log = logging.getLogger(__name__)


class Batching:
    """The batches of a run's sources.

    Sources with ``buckets``, such as a latent store, and all sources with ``data.enable_bucket=true`` have batches of
    one bucket each.
    """

    def __init__(self, batch_size: int, images: ImageOptions, *, drop_last: bool | None, bad: BadSamples) -> None:
        """Keep the options.

        Args:
            batch_size: Samples per optimizer step, over all processes.
            images: Give the shapes of buckets.
            drop_last: Leave incomplete last batches out; None does so without buckets.
            bad: Where images that fit no bucket are counted.
        """
        self._batch_size = batch_size
        self._images = images
        self._drop_last = drop_last
        self._bad = bad
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
            self._bad.count({source.name(index): reason for index, reason in bad})
        return self._found[id(source)]

    def check(self, source: Source, world_size: int, accumulate: int) -> None:
        """Check before training that a source fills a global batch, and that the batch has a sample for every process.

        Sizes of images are not read: whether buckets fill a batch is checked by :meth:`order`.

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
            UsageError: No bucket fills a batch, or no image fits a bucket.
        """
        buckets, size = self.buckets(source), self._batch_size
        drop_last = not buckets if self._drop_last is None else self._drop_last
        if buckets:
            return BucketOrder(buckets, size, seed, shuffle=shuffle, drop_last=drop_last)
        return EpochBatches(
            len(source),
            size,
            seed,
            shuffle=shuffle,
            together=source.together,
            locality=source.locality,
            drop_last=drop_last,
        )

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


def check_buckets(images: ImageOptions, source: Source) -> None:
    """Check that the samples of a source may be in batches of different shapes.

    Raises:
        UsageError: They stay together in groups.
    """
    if images.enable_bucket and source.together > 1:
        raise UsageError(
            f"data.enable_bucket=true: samples stay together in groups of {source.together}, such as a photo and a "
            "picture of its class, but a batch has one shape; write data.enable_bucket=false, or train without "
            "pictures of the class"
        )
