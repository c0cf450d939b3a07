"""Samples of a latent store: stored latents instead of images."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.data.order import Bucket, Locality, Shape
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.store.files import name_of
from sd_lightning.data.store.layout import LATENTS, Generation, LatentStore, Recipe, network_hash, path_of, recipes
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.data.store.stored_texts import StoredTexts
from sd_lightning.data.store.texts import Tokenizing, text_kind
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.location import Location

if TYPE_CHECKING:
    from PIL import Image

    from sd_lightning.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)

_WINDOW = 32
"""Sample files, with their latent files, among which samples are shuffled: about 260,000 samples."""
_AHEAD = 0.75
"""Windows for which files are fetched ahead: less than 1, so that files read now were used later than those before."""


class StoredLatentsSource(StoreReader, Source):
    """One split of a latent store."""

    def __init__(self, store: LatentStore, generation: Generation, split: str, cache: FileCache) -> None:
        """Open a split; see :class:`StoreReader`.

        Raises:
            UsageError: It has no samples, or the cache cannot hold its files.
        """
        super().__init__(store, generation, split, cache)
        self.recipe = store.recipe
        if not len(self):
            raise UsageError(
                f"data.store={store.root.url} has no samples to {'train on' if split == 'train' else 'validate'} "
                f"({self.recipe.description()}): precompute has not ended, or none of its images could be used; run it "
                "again"
            )
        self.latents = self
        self.fingerprint = self.recipe.fingerprint
        self._has_token_ids = False
        self._texts: StoredTexts | None = None
        buckets = [self._bucket(shape, files) for shape, files in self.files_of_shape().items()]
        if self.recipe.shapes:
            self.buckets = buckets
        else:
            self.locality = buckets[0].locality
        if not self.is_local:
            for name, size in self._sample_file(0).shards:  # all files are of about one size
                self.cache.check_fits(f"{store.folder.url}/{path_of(LATENTS, name)}", size)
        self.digests = {
            name: name_of(*(getattr(entry, name).encode() for entry in self.entries))
            for name in ("identities", "images", "captions")
        }

    def _bucket(self, shape: Shape, files: range) -> Bucket:
        """Return the samples of some sample files as a bucket."""
        begin = int(self.ends[files.start - 1]) if files.start else 0
        ends = self.ends[files.start : files.stop] - begin
        # Buckets take turns, so that the files of all their windows are read at the same time.
        window = max(2, round(_WINDOW * len(files) / len(self.entries)))
        locality = Locality(ends, window) if len(files) > window else None
        return Bucket(shape, range(begin, begin + int(ends[-1])), locality)

    @cached_property
    def fetched_ahead(self) -> int:  # type: ignore[override]
        """How many samples ahead files are fetched, such that those that are read now stay in the cache."""
        if self.is_local:
            return 0
        num_files, cache = min(_WINDOW, len(self.entries)), self.cache
        # The first sample file with all that it refers to: others are like it.
        first_bytes = self.bytes_of_file(0) + (0 if self._texts is None else self._texts.bytes_of_file(0))
        window_bytes = num_files * first_bytes * len(self) / len(self.entries) / self.entries[0].rows
        if cache.max_bytes < min(2 * window_bytes, window_bytes * len(self.entries) / num_files):
            log.warning(
                "%s=%.3g holds %.1f times the %d files (%.3g GB) among which samples are shuffled; files are fetched "
                "again and again if it holds less than once, and late if less than twice; expected %.3g or more",
                *(cache.key, cache.max_bytes / 1e9, cache.max_bytes / window_bytes, num_files, window_bytes / 1e9),
                2 * window_bytes / 1e9,
            )
        ahead = min(_AHEAD, max(cache.max_bytes / window_bytes - 1, 0))
        return int(ahead * num_files * len(self) / len(self.entries))

    def fetch(self, file: int) -> None:
        super().fetch(file)
        if self._texts is not None:
            self._texts.fetch(file)

    def image(self, index: int) -> Image.Image:
        raise BadSample("a latent store holds no images")

    def usable(self, index: Tensor) -> list[int]:
        """Return the samples themselves: a store holds none that is broken."""
        return index.tolist()

    def batch(self, used: Sequence[int], *, epoch: Tensor) -> dict[str, Tensor]:
        """Return stored latents and sizes; epochs take turns among the encodings of an image."""
        index = np.asarray(used, np.int64)
        stored = self.read_latents(index, (index + epoch.numpy()) % self.recipe.variants)
        name = "latent_moments" if self.recipe.latents == "moments" else "latents"
        sizes = stored.sizes
        return {name: stored.latents.float(), "original_size": sizes[:, :2], "crop_top_left": sizes[:, 2:]}

    def token_ids(
        self, index: Sequence[int] | np.ndarray, which: Sequence[int] | np.ndarray
    ) -> dict[str, Tensor] | None:
        return super().token_ids(index, which) if self._has_token_ids else None

    def text_embeddings(self, index: Sequence[int], which: Sequence[int | None]) -> dict[str, Any] | None:
        return None if self._texts is None else self._texts.batch(np.asarray(index, np.int64), which)

    @property
    def needs_encoders(self) -> bool:
        return self._texts is None

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        return self.name(index), self.image_hash(index), "\n".join(self.captions(index))

    def check_model(self, model: LatentDiffusion, *, train_text_encoder: bool) -> None:
        """Check that a model has the VAE of the store; use what is stored of captions if it fits the model.

        Token ids fit a model with the same tokenizers, text embeddings one with the same, frozen text encoders.

        Raises:
            UsageError: It has another VAE, or is of another family.
        """
        where = f"data.store={self.store.root.url}"
        again = "write the model= and model.pretrained= that the store was made with, or run precompute for this one"
        if model.pipeline_class != self.recipe.family:
            raise UsageError(
                f"{where} was made for a {self.recipe.family}, but model= is a {model.pipeline_class}; {again}"
            )
        ours = network_hash(model.vae.state_dict(), model.components["vae"].config)
        if ours != self.recipe.vae:
            raise UsageError(
                f"{where} was made with another VAE (hash {self.recipe.vae[:8]}…) than model= has ({ours[:8]}…), and "
                f"its latents mean other pictures; {again}"
            )
        self._has_token_ids = Tokenizing.of(model).fingerprint == self.generation.tokenizers
        self._texts, note = None, "the text encoders are trained: captions are encoded in every step"
        if not train_text_encoder:
            texts = StoredTexts(self, text_kind(model))
            self._texts = None if texts.num_missing else texts
            note = (
                f"captions are encoded in every step: those of {texts.num_missing} sample files have no embeddings of "
                "these text encoders (precompute text=true writes them)"
                if texts.num_missing
                else "stored text embeddings are used, and no caption is encoded"
            )
        if self.split == "train" and is_first_process():
            log.info("data: %s", note)


def choose_recipe(root: Location, *, recipe: str | None, resolution: int | None) -> Recipe:
    """Return the one recipe of a store that fits some settings.

    Args:
        root: The store.
        recipe: Beginning of its fingerprint; None for any.
        resolution: Side of the images, in pixels; None for any.

    Raises:
        UsageError: There is none, or several.
    """
    found = recipes(root)
    if not found:
        raise UsageError(
            f"data.store={root.url}: there is no latent store; expected what sd_lightning.precompute wrote; run python "
            f"-m sd_lightning.precompute store={root.url} with your data= and model="
        )
    fits = [
        each for each in found if each.fingerprint.startswith(recipe or "") and resolution in (None, each.resolution)
    ]
    if len(fits) == 1:
        return fits[0]
    choices = "; ".join(f"{each.fingerprint[:8]}: {each.description()} vae {each.vae[:8]}" for each in fits or found)
    wanted = " ".join(
        f"data.{name}={value}" for name, value in (("recipe", recipe), ("resolution", resolution)) if value is not None
    )
    raise UsageError(
        f"data.store={root.url} has {len(fits) or 'no'} recipe{'s' if len(fits) != 1 else ''} for "
        f"{wanted or 'data=latents'}; expected one of ({choices}); write "
        f"data.recipe={(fits or found)[0].fingerprint[:8]}"
    )


def check_law(recipe: Recipe, asked: Mapping[str, bool | None]) -> None:
    """Check that a store has the crop, flip and buckets that settings ask for.

    Args:
        recipe: That of the store.
        asked: ``center_crop``, ``random_flip`` and ``enable_bucket``; None asks for nothing.

    Raises:
        UsageError: It has others.
    """
    law = {"center_crop": recipe.crop == "center", "random_flip": recipe.flip, "enable_bucket": bool(recipe.shapes)}
    varied = {"center_crop": False, "random_flip": True}
    for name, wanted in asked.items():
        if wanted in (None, law[name]):
            continue
        setting = f"data.{name}={str(wanted).lower()}"
        more = " variants=4" if varied.get(name) == wanted else ""
        raise UsageError(
            f"{setting}: the images of this store were encoded with data.{name}={str(law[name]).lower()}, which "
            f"training cannot change; leave it out, or run precompute with {setting}{more}"
        )
