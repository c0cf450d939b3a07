"""Small latent stores: pictures, an encoder without networks, and jobs over them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sd_lightning.data.batch import BadSamples
from sd_lightning.data.source import Source
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.data.sources.latents import StoredLatentsSource
from sd_lightning.data.store.encoding import Encoded, EncodeTask, ShardEncoder
from sd_lightning.data.store.job import Counts, StoreJob
from sd_lightning.data.store.layout import Generation, LatentStore, Recipe
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.data.store.texts import Tokenizing
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location

SIDE = 8


class MeanEncoder:
    """An encoder whose moments tell the picture: mean colours of its quarters, and a log-variance of -4."""

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        means = torch.nn.functional.avg_pool2d(pixel_values, SIDE // 2)
        return torch.cat([means, torch.full_like(means, -4.0)], dim=1)

    def latents(self, encoded: Tensor, *, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
        mean, _ = encoded.chunk(2, dim=1)
        return mean + index.view(-1, 1, 1, 1) % 7


def write_picture(folder: Path, name: str, *, colour: int, caption: str | None = None) -> Path:
    """Write a picture of one colour, and its caption beside it."""
    path = folder / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    rgb = (colour % 256, colour // 256 % 256, 100)
    Image.new("RGB", (SIDE, SIDE), rgb).save(path)
    path.with_suffix(".txt").write_text(caption or f"picture {name}")
    return path


def write_pictures(folder: Path, count: int) -> Path:
    """Write pictures 000, 001, … of different colours."""
    for i in range(count):
        write_picture(folder, f"{i:03}", colour=i)
    return folder


def write_photos(folder: Path, count: int = 20) -> Path:
    """Write pictures of noise, 40 x 32 pixels, with captions."""
    folder.mkdir()
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.txt").write_text(f"picture {i}")
    return folder


def tokenize(captions: list[str]) -> dict[str, Tensor]:
    """Return the first eight bytes of each caption."""
    rows = [[*caption.encode()[:8], *[0] * 8][:8] for caption in captions]
    return {"text_encoder": torch.tensor(rows, dtype=torch.int64).view(-1, 8)}


def recipe(**changes: object) -> Recipe:
    """Return a recipe for ``MeanEncoder``."""
    given = {"family": "Mean", "vae": "0" * 32, "resolution": SIDE, "dtype": "float32"}
    return Recipe(**{**given, **changes})  # type: ignore[arg-type]


@dataclass
class Ran:
    """What a job left."""

    generation: Generation
    counts: Counts
    bad: dict[str, str]
    tasks: list[EncodeTask] = field(default_factory=list)


def update(
    store: Path | Location,
    sources: Source | Mapping[str, Source],
    *,
    of: Recipe | None = None,
    tokenizing: Tokenizing | None = None,
    images_per_file: int = 4,
    samples_per_file: int = 2**13,
    portion: int = 10,
    max_bad_fraction: float = 0.5,
) -> Ran:
    """Bring a store up to date in this process."""
    root = store if isinstance(store, Location) else open_location(store, key="store")
    by_split = {"train": sources} if isinstance(sources, Source) else dict(sources)
    latents = LatentStore(root, of or recipe())
    encoder = ShardEncoder(by_split, MeanEncoder(), latents.recipe, latents.folder, torch.device("cpu"))
    bad = BadSamples(max_bad_fraction, sum(map(len, by_split.values())))
    tasks: list[EncodeTask] = []

    def run(given: object) -> list[Encoded]:
        tasks.extend(given)  # type: ignore[arg-type]
        return [encoder(task) for task in given]  # type: ignore[attr-defined]

    with latents.locked(), tempfile.TemporaryDirectory() as scratch:
        latents.create()
        job = StoreJob(
            latents,
            run,
            tokenizing or Tokenizing(tokenize, "bytes"),
            bad,
            Path(scratch),
            images_per_file=images_per_file,
            samples_per_file=samples_per_file,
            portion=portion,
        )
        generation = job.update(by_split)
    return Ran(generation, job.counts, bad.found, tasks)


def reader(
    store: Path | Location, split: str = "train", *, of: Recipe | None = None, cache: FileCache | None = None
) -> StoreReader:
    """Open a split of the newest generation."""
    root = store if isinstance(store, Location) else open_location(store, key="data.store")
    latents = LatentStore(root, of or recipe())
    cache = cache or FileCache(Path(tempfile.gettempdir()) / "unused-cache", 10**9)
    return StoreReader(latents, latents.generation(), split, cache)


def source_of(store: StoreReader) -> StoredLatentsSource:
    """Return what training reads of a split."""
    return StoredLatentsSource(store.store, store.generation, store.split, store.cache)


def expected(folder: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return what a store of a folder holds: name -> moments and captions, encoded here and now."""
    source = ImageFolder(folder)
    encoder = MeanEncoder()
    found = {}
    for i in range(len(source)):
        pixels = np.asarray(source.image(i).resize((SIDE, SIDE)), np.float32) / 127.5 - 1
        moments = encoder.encode_moments(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0].numpy()
        found[source.name(i)] = (moments, list(source.captions(i)))
    return found


def held(store: StoreReader) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Return what a store holds, in the form of :func:`expected`."""
    if not len(store):
        return {}
    found = {}
    for files in store.files_of_shape().values():
        index = np.arange(store.ends[files.start - 1] if files.start else 0, store.ends[files.stop - 1])
        latents = store.read_latents(index).latents
        found |= {store.name(i): (each.numpy(), store.captions(i)) for i, each in zip(index.tolist(), latents)}
    return found


def same(one: dict[str, tuple[np.ndarray, list[str]]], other: dict[str, tuple[np.ndarray, list[str]]]) -> bool:
    """Return whether two contents agree to rounding."""
    return one.keys() == other.keys() and all(
        np.allclose(one[name][0], other[name][0], atol=1e-5) and one[name][1] == other[name][1] for name in one
    )
