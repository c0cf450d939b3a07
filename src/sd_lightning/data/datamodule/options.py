"""Groups of options of the builders in ``builders.py``."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sd_lightning._errors import UsageError
from sd_lightning.data.sources.dreambooth import Picture, find_class_pictures
from sd_lightning.data.sources.latents import check_law, choose_recipe
from sd_lightning.data.store.recipe import Recipe
from sd_lightning.storage.location import Location


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
class StoredBatches:
    """``SDDataModule``'s own options for a latent store, whose latents need no cache."""

    batch_size: int = 16
    """Samples per optimizer step, over all processes."""
    max_bad_fraction: float = 0.01
    """Stop the run when more than this fraction of the samples is bad."""
    changed: Literal["refuse", "accept"] = "refuse"
    """Whether a run may resume within an epoch whose samples have changed."""


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

    def choose(self, root: Location) -> Recipe:
        """Return the recipe of a store that fits.

        Raises:
            UsageError: None fits, or several do.
        """
        recipe = choose_recipe(root, recipe=self.recipe, resolution=self.resolution)
        asked = {name: getattr(self, name) for name in ("center_crop", "random_flip", "enable_bucket")}
        check_law(recipe, asked)
        return recipe
