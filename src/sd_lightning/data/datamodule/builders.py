"""Functions that build an ``SDDataModule`` from plain values: the ``_target_`` of ``conf/data/*.yaml``.

Callers pass flat keyword arguments (``data.batch_size=64``); ``flat`` groups them into the dataclasses that the
functions take (``ImageOptions``, ``LoaderOptions``, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.data.datamodule.flat import flat
from sd_lightning.data.datamodule.module import SDDataModule
from sd_lightning.data.datamodule.options import Batches, Columns, ColumnsAndSizes, Prior, Recorded, StoredBatches
from sd_lightning.data.image_options import BUCKET_FIELDS, ImageOptions
from sd_lightning.data.loader import LoaderOptions
from sd_lightning.data.source import Source
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.sources.dreambooth import SubjectAndClass, find_photos
from sd_lightning.data.sources.huggingface import HuggingFaceImages
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.latents import stored_images
from sd_lightning.data.sources.parquet import ParquetImages
from sd_lightning.data.sources.webdataset import WebDatasetTars
from sd_lightning.data.store.reader import StoreReader, default_cache
from sd_lightning.data.store.store import LatentStore
from sd_lightning.data.subset import SourceSubset, hold_out
from sd_lightning.storage.locations import open_location

_OF_MANY_IMAGES: dict[str, Any] = {
    "batches": Batches(),
    "images": ImageOptions(proportion_empty_prompts=0.1),
    "loader": LoaderOptions(),
}


@flat(
    batches=Batches(64, cache_latents=True),
    images=ImageOptions(32, center_crop=True, proportion_empty_prompts=0.1),
    loader=LoaderOptions(),
    without=("max_image_pixels", *BUCKET_FIELDS),
)
def digits_data(
    *, num_val_samples: int = 128, batches: Batches, images: ImageOptions, loader: LoaderOptions
) -> SDDataModule:
    """Build the datamodule of ``Digits``, validated on the first ``num_val_samples`` of the 360 held out."""
    held_out = Digits("val")
    if not 1 <= num_val_samples <= len(held_out):
        raise UsageError(
            f"data.num_val_samples={num_val_samples}: expected 1 to {len(held_out)}; write data.num_val_samples=128"
        )
    val = SourceSubset(held_out, range(num_val_samples))
    return SDDataModule(Digits("train"), val, images=images, loader=loader.in_memory(), **vars(batches))


@flat(**_OF_MANY_IMAGES)
def image_folder_data(
    train_data_dir: str,
    val_data_dir: str | None = None,
    *,
    num_val_samples: int | None = None,
    caption_column: str = "text",
    caption_extension: str = ".txt",
    folder_repeats: bool = False,
    allow_outside: bool = False,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build an ``ImageFolder`` datamodule; without ``val_data_dir``, ``hold_out`` splits off ``num_val_samples``."""

    def read(folder: str) -> Source:
        return ImageFolder(
            folder,
            caption_column=caption_column,
            max_image_pixels=images.max_image_pixels,
            allow_outside=allow_outside,
            caption_extension=caption_extension,
            folder_repeats=folder_repeats,
        )

    train, val = _train_and_val(read, train_data_dir, val_data_dir, num_val_samples)
    return SDDataModule(train, val, images=images, loader=loader, **vars(batches))


@flat(columns=Columns(), **_OF_MANY_IMAGES)
def huggingface_data(
    dataset_name: str,
    *,
    split: str = "train",
    val_split: str | None = None,
    num_val_samples: int | None = None,
    columns: Columns,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of a Hugging Face dataset; ``num_val_samples`` as in :func:`image_folder_data`."""

    def read(part: str) -> Source:
        pixels = images.max_image_pixels
        return HuggingFaceImages(dataset_name, split=part, max_image_pixels=pixels, **vars(columns))

    train, val = _train_and_val(read, split, val_split, num_val_samples)
    return SDDataModule(train, val, images=images, loader=loader, **vars(batches))


@flat(**_OF_MANY_IMAGES)
def webdataset_data(
    train_data_dir: str,
    val_data_dir: str | None = None,
    *,
    num_val_samples: int | None = None,
    caption_key: str | None = None,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of ``WebDatasetTars``; ``num_val_samples`` as in :func:`image_folder_data`."""

    def read(tars: str) -> Source:
        return WebDatasetTars(tars, caption_key=caption_key, max_image_pixels=images.max_image_pixels)

    train, val = _train_and_val(read, train_data_dir, val_data_dir, num_val_samples)
    return SDDataModule(train, val, images=images, loader=loader, **vars(batches))


@flat(columns=ColumnsAndSizes(), **_OF_MANY_IMAGES)
def parquet_data(
    train_data_dir: str,
    val_data_dir: str | None = None,
    *,
    num_val_samples: int | None = None,
    allow_outside: bool = False,
    columns: ColumnsAndSizes,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of ``ParquetImages``; ``num_val_samples`` as in :func:`image_folder_data`."""

    def read(folder: str) -> Source:
        pixels = images.max_image_pixels
        return ParquetImages(folder, max_image_pixels=pixels, allow_outside=allow_outside, **vars(columns))

    train, val = _train_and_val(read, train_data_dir, val_data_dir, num_val_samples)
    return SDDataModule(train, val, images=images, loader=loader, **vars(batches))


@flat(
    prior=Prior(),
    batches=Batches(2, cache_latents=True),
    images=ImageOptions(center_crop=True),
    loader=LoaderOptions(),
    without=("val_batch_size",),
)
def dreambooth_data(
    instance_data_dir: str,
    instance_prompt: str | None = None,
    *,
    prior: Prior,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of a subject's photos and, with class prompts, class pictures (``SubjectAndClass``)."""
    source = SubjectAndClass(
        find_photos(instance_data_dir, instance_prompt),
        prior.find(),
        prior_loss_weight=prior.prior_loss_weight,
        min_samples=16 * batches.batch_size,
        max_image_pixels=images.max_image_pixels,
    )
    return SDDataModule(source, images=images, loader=loader, **vars(batches))


@flat(recorded=Recorded(), batches=StoredBatches(), loader=LoaderOptions())
def latents_data(
    store: str,
    *,
    recorded: Recorded,
    cache_dir: str | None = None,
    cache_gb: float = 100.0,
    proportion_empty_prompts: float = 0.1,
    batches: StoredBatches,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of a latent store."""
    root = open_location(store, key="data.store")
    recipe = recorded.choose(root)
    folder = LatentStore(root, recipe)
    generation = folder.generation()
    cache = default_cache(cache_dir, cache_gb)
    train, val = (StoreReader(folder, generation, split, cache) for split in ("train", "val"))
    images = ImageOptions(
        recipe.resolution,
        center_crop=recipe.crop == "center",
        random_flip=recipe.flip,
        proportion_empty_prompts=proportion_empty_prompts,
    )
    source_val = stored_images(folder, val) if len(val) else None
    return SDDataModule(stored_images(folder, train), source_val, images=images, loader=loader, **vars(batches))


def _train_and_val(
    read: Callable[[str], Source], train: str, val: str | None, num_val_samples: int | None
) -> tuple[Source, Source | None]:
    """Read what to train on, and what to validate on; without the latter, hold out a part of the former."""
    if val is None:
        return hold_out(read(train), num_val_samples)
    return read(train), read(val)
