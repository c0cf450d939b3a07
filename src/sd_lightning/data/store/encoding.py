"""Encode the images of one latent file: read, decode, encode, write. Who runs this, and where, is up to the caller."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.order import Shape
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.store.files import BLANK, CHECKS, HASH_BYTES, hashes_of, name_of, row_sums, sealed, serialized
from sd_lightning.data.store.layout import DTYPES, LATENTS, Recipe, path_of
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, Placed, any_error_is_a_bad_sample, place, to_model_range
from sd_lightning.diffusion import randomness
from sd_lightning.diffusion.randomness import Purpose
from sd_lightning.storage.location import Location

if TYPE_CHECKING:
    from sd_lightning.models.encoder import LatentEncoder

_GROUP = 64
_GROUP_PIXELS = 4 * 512 * 512
"""Pixels that are encoded at a time."""
STAGES = ("read", "decode", "encode", "write")
Loaded = tuple[list[Placed], str | None, dict[str, float]]
"""An image in every variant, or why it cannot be used; and the seconds of the stages so far."""


@dataclass(frozen=True)
class EncodeTask:
    """The images of one latent file."""

    split: str
    indices: np.ndarray
    """(N,) int64: for every image, a sample of the split's source that shows it."""
    images: np.ndarray
    """(N, 16) uint8: the hash of each."""
    shape: Shape
    """(height, width) in pixels to which they are brought."""

    def name(self, recipe: Recipe) -> str:
        """Return the file's name, a hash of the recipe and the ordered images."""
        return name_of(recipe.fingerprint.encode(), self.images.tobytes())


@dataclass(frozen=True)
class Encoded:
    """A latent file that is in the store."""

    name: str
    size: int
    """Bytes; 0 if none of its images can be read, and there is no file."""
    images: np.ndarray
    """(R, 16) uint8: the image of every row."""
    bad: Mapping[str, str]
    """Hash of each unusable image (hexadecimal) -> reason."""
    seconds: Mapping[str, float]
    """By stage."""


@dataclass
class ShardEncoder:
    """Encodes latent files; it is pickled or forked into workers."""

    sources: Mapping[str, Source]
    """By split."""
    encoder: LatentEncoder
    recipe: Recipe
    folder: Location
    """The folder of the recipe."""
    device: torch.device
    max_pixels: int = MAX_IMAGE_PIXELS
    num_threads: int = 2
    """Threads that read and decode, each a group of images."""
    load_elsewhere: Callable[[EncodeTask, range], Future[list[Loaded]]] | None = None
    """Has :meth:`load` called by other processes, with up to ``num_threads`` groups at a time."""
    remedy: str = "write dtype=bfloat16 or dtype=float32, or compute_dtype=float32 if the VAE overflows"
    """What helps if latents are infinite."""

    @property
    def group(self) -> int:
        """Images that are encoded at a time: the same wherever they are encoded, so that their bits are the same."""
        return max(1, min(_GROUP, _GROUP_PIXELS // (self.recipe.resolution**2 * self.recipe.variants)))

    def __call__(self, task: EncodeTask) -> Encoded:
        """Encode the images of a file and write it.

        Raises:
            UsageError: An image has changed since it was hashed, its latents are infinite in the stored type, or the
                file cannot be written.
        """
        seconds = dict.fromkeys(STAGES, 0.0)
        images, bad, latents, sizes = [], {}, [], []
        for numbers, group in self._groups(task):
            good = []
            for number, (placed, reason, times) in zip(numbers, group, strict=True):
                for stage, value in times.items():
                    seconds[stage] += value
                if reason is None:
                    good.append((number, placed))
                else:
                    bad[task.images[number].tobytes().hex()] = reason
            if good:
                start = time.perf_counter()
                hashes = task.images[[number for number, _ in good]]
                latents.append(self._encode(hashes, [placed for _, each in good for placed in each]))
                seconds["encode"] += time.perf_counter() - start
                sizes += [[*p.original_size, *p.crop_top_left] for _, each in good for p in each]
                images.append(hashes)
        if not images:
            return Encoded(task.name(self.recipe), 0, np.empty((0, HASH_BYTES), np.uint8), bad, seconds)
        start = time.perf_counter()
        rows = np.concatenate(images)
        tensors = {
            "latents": torch.cat(latents),
            "sizes": torch.tensor(sizes, dtype=torch.int32),
            "images": torch.from_numpy(rows.copy()),
        }
        data = latent_file(tensors, self.recipe, bad)
        name = task.name(self.recipe)
        self.folder.create(path_of(LATENTS, name), data)
        seconds["write"] += time.perf_counter() - start
        return Encoded(name, len(data), rows, bad, seconds)

    def _groups(self, task: EncodeTask) -> Iterator[tuple[range, list[Loaded]]]:
        """Yield the image numbers of each group with what was loaded; the next groups are loaded meanwhile."""
        groups = [range(i, min(i + self.group, len(task.images))) for i in range(0, len(task.images), self.group)]
        with ThreadPoolExecutor(self.num_threads, "decode") as pool:
            load = self.load_elsewhere or (lambda task, group: pool.submit(self.load, task, group))
            loading = (load(task, group) for group in groups)
            ahead = deque(islice(loading, self.num_threads))
            for group in groups:
                loaded = ahead.popleft().result()
                ahead.extend(islice(loading, 1))
                yield group, loaded

    def load(self, task: EncodeTask, group: range) -> list[Loaded]:
        """Read and decode the images of a group; no network is needed.

        Raises:
            UsageError: An image has changed since it was hashed, or this machine cannot read it.
        """
        return [self._load(task, number) for number in group]

    def _load(self, task: EncodeTask, number: int) -> Loaded:
        source, index, image = self.sources[task.split], int(task.indices[number]), task.images[number]
        begin = read = time.perf_counter()
        try:
            try:
                with any_error_is_a_bad_sample():
                    content = source.content(index)
            except BadSample as error:  # the image is not to blame: it was read when it was hashed
                raise UsageError(
                    f"precompute: {source.name(index)} was read before, and cannot be read on {socket.gethostname()} "
                    f"({error}); expected data that stay as they are, and that every machine which encodes can read; "
                    "nothing is lost: mend that, and run precompute again"
                ) from error
            read = time.perf_counter()
            if not np.array_equal(hashes_of([content])[0], image):
                raise UsageError(
                    f"precompute: {source.name(index)} has changed while it was encoded; nothing is lost: run "
                    "precompute again when nobody writes to the data"
                )
            with any_error_is_a_bad_sample():
                picture = source.decode(content)
                placed = [self._placed(picture, image, variant, task.shape) for variant in range(self.recipe.variants)]
            return placed, None, {"read": read - begin, "decode": time.perf_counter() - read}
        except BadSample as reason:
            return [], str(reason), {"read": read - begin}

    def _placed(self, picture: Any, image: np.ndarray, variant: int, shape: Shape) -> Placed:
        """Resize, crop and flip; random numbers belong to the image and the variant."""
        number = torch.tensor([number_of(image)])
        crop = None
        if self.recipe.crop == "random":
            top, left = randomness.uniform(0, variant, number, Purpose.CROP, (2,))[0].tolist()
            crop = (top, left)
        # Variants take turns, so that of two one is mirrored.
        flip = self.recipe.flip and (variant + int(image[-1])) % 2 == 1
        return place(picture, shape, max_pixels=self.max_pixels, crop=crop, flip=flip)

    def _encode(self, images: np.ndarray, placed: list[Placed]) -> Tensor:
        """Return the latents (N * variants, C, h, w) of some images, in the type that is stored."""
        pixels = torch.from_numpy(np.stack([p.pixels for p in placed]))
        encoded = self.encoder.encode_moments(to_model_range(pixels).to(self.device))
        variants = self.recipe.variants
        if self.recipe.latents == "draw":
            index = torch.tensor([number_of(image) for image in images for _ in range(variants)])
            epoch = torch.arange(variants).repeat(len(images))
            encoded = self.encoder.latents(encoded, seed=0, epoch=epoch.to(self.device), index=index.to(self.device))
        stored = encoded.to(DTYPES[self.recipe.dtype]).cpu().contiguous()
        if not stored.isfinite().all():
            raise UsageError(f"the VAE's latents are not finite in dtype={self.recipe.dtype}; {self.remedy}")
        return stored


def latent_file(tensors: Mapping[str, Tensor], recipe: Recipe, bad: Mapping[str, str]) -> bytes:
    """Return a latent file: ``latents``, ``sizes`` and ``images``, with a check sum of each row, and sealed."""
    about = {
        "rows": len(tensors["images"]),
        "variants": recipe.variants,
        "recipe": recipe.fingerprint,
        "bad": bad,
        "seal": BLANK,
    }
    checks = row_sums(tensors["latents"]) + tensors["sizes"].sum(1)
    return sealed(serialized({**tensors, CHECKS: checks}, about))


def number_of(image: np.ndarray) -> int:
    """Return the number of an image, in [0, 2**56), that its random numbers depend on."""
    return int.from_bytes(image[:7].tobytes(), "big")
