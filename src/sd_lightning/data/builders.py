"""Functions that build an ``SDDataModule`` from plain values: the ``_target_`` of ``conf/data/*.yaml``.

Callers pass flat keyword arguments (``data.batch_size=64``); ``flat`` groups them into the dataclasses that the
functions take (``ImageOptions``, ``LoaderOptions``, ...).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_type_hints

from sd_lightning._errors import UsageError
from sd_lightning.data.captions import CaptionOptions
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import ENCODER_FIELDS, LoaderOptions
from sd_lightning.data.source import Source, SourceSubset, hold_out
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.sources.dreambooth import (
    Picture,
    SubjectAndClass,
    balanced,
    find_class_pictures,
    find_subjects,
    held_out,
    photos_of,
)
from sd_lightning.data.sources.huggingface import HuggingFaceImages
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.latents import StoredLatentsSource, check_law, choose_recipe
from sd_lightning.data.sources.parquet import ParquetImages
from sd_lightning.data.sources.webdataset import WebDatasetTars
from sd_lightning.data.store.layout import LatentStore
from sd_lightning.data.store.reader import default_cache
from sd_lightning.data.transform import BUCKET_FIELDS, MASK_FIELDS, ImageOptions
from sd_lightning.storage.object_store import open_location

_Builder = Callable[..., SDDataModule]


def flat(*, without: Sequence[str] = (), **groups: Any) -> Callable[[_Builder], _Builder]:
    """Replace a builder's dataclass parameters by the fields of these dataclasses.

    The signature and the annotations of the result are flat, too: the configuration is checked against them.

    Args:
        without: Fields without meaning for this builder; they keep their defaults.
        **groups: Parameter -> instance of its dataclass, with the defaults of this builder.
    """

    def decorate(build: _Builder) -> _Builder:
        own = inspect.signature(build, eval_str=True).parameters.values()
        flat = [each for each in own if each.name not in groups]
        for group in groups.values():
            hints = get_type_hints(type(group))
            flat += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
                for name, default in vars(group).items()
                if name not in without
            ]
        signature = inspect.Signature(flat, return_annotation=SDDataModule)

        @functools.wraps(build)
        def built(*args: Any, **kwargs: Any) -> SDDataModule:
            arguments = signature.bind(*args, **kwargs).arguments
            for name, group in groups.items():
                fields = {field: arguments.pop(field) for field in vars(group) if field in arguments}
                arguments[name] = dataclasses.replace(group, **fields)
            return build(**arguments)

        del built.__wrapped__  # or inspect would use its signature and annotations
        built.__annotations__ = {each.name: each.annotation for each in flat}
        built.__signature__ = signature  # type: ignore[attr-defined]
        return built

    return decorate


@dataclasses.dataclass(frozen=True)
class Batches:
    """``SDDataModule``'s own options."""

    batch_size: int = 16
    """Samples per optimizer step, over all processes."""
    cache_latents: bool = False
    """Encode all images once, before the first step."""
    max_bad_fraction: float = 0.01
    """Stop the run when more than this fraction of the samples is bad."""
    changed: Literal["refuse", "accept"] = "refuse"
    """Whether a run may resume within an epoch whose samples have changed."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of a table of images."""

    image_column: str = "image"
    """Images, or paths of images."""
    caption_column: str = "text"
    """Captions, each a string or a list of strings."""


@dataclasses.dataclass(frozen=True)
class ColumnsAndSizes(Columns):
    """Columns of Parquet files."""

    width_column: str | None = None
    """Widths of the upright images; None to read them from the images."""
    height_column: str | None = None
    """Heights of the upright images."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """Prior preservation: pictures of the subject's class beside the photos."""

    class_data_dir: str | None = None
    """Folder of the class pictures."""
    class_prompts: list[str] | None = None
    """Captions of the class pictures; without any, prior preservation is off."""
    num_class_images: int = 100
    """Pictures to use, divided among the prompts."""
    prior_loss_weight: float = 1.0
    """Loss weight of the class pictures."""

    def find(self) -> list[Picture]:
        """Return the class pictures.

        Raises:
            UsageError: There are prompts but no pictures.
        """
        if not self.class_prompts:
            return []
        if self.class_data_dir is None:
            raise UsageError(
                "data.class_prompts without data.class_data_dir; write data.class_data_dir=<folder>, where the "
                "pictures of the class lie"
            )
        pictures = find_class_pictures(self.class_data_dir, self.class_prompts, self.num_class_images)
        if not pictures:
            raise UsageError(
                f"data.class_data_dir={self.class_data_dir} has no pictures of {self.class_prompts[0]!r}; draw them "
                "with python -m sd_lightning.dreambooth, or leave data.class_prompts out"
            )
        return pictures


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Which encodings of a latent store to train on."""

    recipe: str | None = None
    """Beginning of the fingerprint of the recipe."""
    resolution: int | None = None
    """Side of the images, in pixels."""
    center_crop: bool | None = None
    """The crop that the store has to have."""
    random_flip: bool | None = None
    """The flip that the store has to have."""
    enable_bucket: bool | None = None
    """Whether the store has to have buckets."""


_OF_MANY_IMAGES: dict[str, Any] = {
    "batches": Batches(),
    "images": ImageOptions(proportion_empty_prompts=0.1),
    "loader": LoaderOptions(),
}


@flat(
    batches=Batches(64, cache_latents=True),
    images=ImageOptions(32, center_crop=True, proportion_empty_prompts=0.1),
    loader=LoaderOptions(),
    without=("max_image_pixels", *BUCKET_FIELDS, *MASK_FIELDS),
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

    read = functools.partial(
        ImageFolder,
        caption_column=caption_column,
        max_image_pixels=images.max_image_pixels,
        allow_outside=allow_outside,
        caption_extension=caption_extension,
        folder_repeats=folder_repeats,
        masked_loss=images.masked_loss,
    )
    return _of_many(read, train_data_dir, val_data_dir, num_val_samples, images=images, loader=loader, **vars(batches))


@flat(columns=Columns(), **_OF_MANY_IMAGES, without=MASK_FIELDS)
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
        return HuggingFaceImages(dataset_name, split=part, max_image_pixels=images.max_image_pixels, **vars(columns))

    return _of_many(read, split, val_split, num_val_samples, images=images, loader=loader, **vars(batches))


@flat(**_OF_MANY_IMAGES, without=MASK_FIELDS)
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
    read = functools.partial(WebDatasetTars, caption_key=caption_key, max_image_pixels=images.max_image_pixels)
    return _of_many(read, train_data_dir, val_data_dir, num_val_samples, images=images, loader=loader, **vars(batches))


@flat(columns=ColumnsAndSizes(), **_OF_MANY_IMAGES, without=MASK_FIELDS)
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
    options = {"max_image_pixels": images.max_image_pixels, "allow_outside": allow_outside, **vars(columns)}
    read = functools.partial(ParquetImages, **options)
    return _of_many(read, train_data_dir, val_data_dir, num_val_samples, images=images, loader=loader, **vars(batches))


@flat(
    prior=Prior(),
    batches=Batches(2, cache_latents=True),
    images=ImageOptions(center_crop=True),
    loader=LoaderOptions(),
    without=("val_batch_size", *ENCODER_FIELDS),
)
def dreambooth_data(
    instance_data_dir: str | None = None,
    instance_prompt: str | None = None,
    *,
    subjects: list[dict[str, Any]] | None = None,
    caption_extension: str = ".txt",
    val_data_dir: str | None = None,
    prior: Prior,
    batches: Batches,
    images: ImageOptions,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of photos of one or more subjects and, with class prompts, class pictures."""
    chosen = find_subjects(subjects, instance_data_dir, instance_prompt)
    photos = photos_of(chosen, caption_extension=caption_extension, masked_loss=images.masked_loss)
    source = SubjectAndClass(
        balanced(photos),
        prior.find(),
        prior_loss_weight=prior.prior_loss_weight,
        min_samples=16 * batches.batch_size,
        max_image_pixels=images.max_image_pixels,
    )
    val = None
    if val_data_dir is not None:
        val = held_out(
            val_data_dir,
            photos,
            caption_extension=caption_extension,
            masked_loss=images.masked_loss,
            max_image_pixels=images.max_image_pixels,
        )
    return SDDataModule(source, val, images=images, loader=loader, **vars(batches))


@flat(
    recorded=Recorded(),
    captions=CaptionOptions(),
    batches=Batches(),
    loader=LoaderOptions(),
    without=("cache_latents", *ENCODER_FIELDS),
)
def latents_data(
    store: str,
    *,
    recorded: Recorded,
    cache_dir: str | None = None,
    cache_gb: float = 100.0,
    proportion_empty_prompts: float = 0.1,
    captions: CaptionOptions,
    batches: Batches,
    loader: LoaderOptions,
) -> SDDataModule:
    """Build the datamodule of a latent store."""
    root = open_location(store, key="data.store")
    recipe = choose_recipe(root, recipe=recorded.recipe, resolution=recorded.resolution)
    check_law(recipe, {name: getattr(recorded, name) for name in ("center_crop", "random_flip", "enable_bucket")})
    folder = LatentStore(root, recipe)
    generation = folder.generation()
    cache = default_cache(cache_dir, cache_gb)
    train = StoredLatentsSource(folder, generation, "train", cache)
    val = StoredLatentsSource(folder, generation, "val", cache) if generation.num_samples("val") else None
    images = ImageOptions(
        recipe.resolution,
        center_crop=recipe.crop == "center",
        random_flip=recipe.flip,
        proportion_empty_prompts=proportion_empty_prompts,
        **vars(captions),
    )
    return SDDataModule(train, val, images=images, loader=loader, **vars(batches))


def paths_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return those of a builder's arguments that name files or folders, by name.

    Texts that name nothing on this disk are no paths, such as columns and names on a hub, except folders of class
    pictures to be drawn.
    """
    texts = {name: value for name, value in settings.items() if isinstance(value, str) and value}
    texts |= {f"subjects.{number}.dir": each["dir"] for number, each in enumerate(settings.get("subjects") or ())}
    return {name: value for name, value in texts.items() if name.endswith("_dir") or os.path.exists(value)}


def _of_many(
    read: Callable[[str], Source], train: str, val: str | None, num_val_samples: int | None, **options: Any
) -> SDDataModule:
    """Read what to train on, and what to validate on; without the latter, hold out a part of the former."""
    source = read(train)
    source_train, source_val = hold_out(source, num_val_samples) if val is None else (source, read(val))
    return SDDataModule(source_train, source_val, **options)
