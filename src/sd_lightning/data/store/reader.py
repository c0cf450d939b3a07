"""Read samples of a store by index: latents, sizes, token ids and captions."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import SampleFile, StoreFile
from sd_lightning.data.store.store import LATENTS, SAMPLES, Generation, LatentStore, path_of
from sd_lightning.storage.file_cache import FileCache

_OPEN_SHARDS = 256
"""Latent files kept open: 20 bytes per row are in memory for each."""
_OPEN_SAMPLE_FILES = 32
"""Sample files kept open: about 1 MB is in memory for each."""
File = TypeVar("File", bound=StoreFile)


class StoreReader:
    """Reads one split of a generation; it may be pickled and forked."""

    def __init__(self, store: LatentStore, generation: Generation, split: str, cache: FileCache) -> None:
        """Open a split; files are opened when they are read.

        Args:
            store: The folder of a recipe.
            generation: One of its generations.
            split: "train" or "val".
            cache: Where files of an object store are copied to; local ones are read where they lie.
        """
        self.store, self.generation, self.split, self.cache = store, generation, split, cache
        self.entries = generation.splits.get(split, [])
        self._ends = np.cumsum([entry.rows for entry in self.entries], dtype=np.int64)
        self._forget()

    def _forget(self) -> None:
        self._samples: OrderedDict[str, SampleFile] = OrderedDict()
        self._shards: OrderedDict[str, _LatentFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_samples", "_shards")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def latents(self, indices: np.ndarray, variants: np.ndarray | int = 0) -> tuple[Tensor, Tensor]:
        """Return the latents of some samples, and their sizes.

        Args:
            indices: (B,) int64.
            variants: (B,) or one number: which encoding of each image.

        Returns:
            (B, C, h, w) in the stored type, and (B, 4) int64: original height and width, top and left of the crop.

        Raises:
            UsageError: A file is missing or not what was written.
        """
        variants = np.broadcast_to(variants, indices.shape)
        out: Tensor | None = None
        sizes = torch.empty(len(indices), 4, dtype=torch.int64)
        memory = np.empty((0, 0), np.uint8)
        for shard, rows, at in self._by_shard(indices):
            rows = rows * self.store.recipe.variants + variants[at]
            if out is None:
                shape, dtype = shard.shape("latents"), shard.columns["latents"].dtype
                out = torch.empty(len(indices), *shape, dtype=dtype)
                memory = out.view(len(indices), -1).view(torch.uint8).numpy()
            for number, row in zip(at.tolist(), rows.tolist()):
                shard.fill(memory[number].data, "latents", row)
            sizes[torch.from_numpy(at)] = shard.sizes[torch.from_numpy(rows)]
        assert out is not None
        return out, sizes

    def token_ids(self, indices: np.ndarray, which: Sequence[int]) -> dict[str, Tensor]:
        """Return the token ids (B, L) int64, by text encoder, of caption number ``which[i]`` of each sample."""
        out: dict[str, Tensor] = {}
        memory: dict[str, np.ndarray] = {}
        chosen = np.asarray(which)
        for file, rows, at in self._by_file(indices):
            if not out:
                for name in file.id_columns:
                    ids = torch.empty(len(indices), *file.shape(name), dtype=torch.int32)
                    out[name], memory[name] = ids, ids.view(torch.uint8).numpy()
            captions = file.first_caption[rows] + chosen[at]
            for name, each in memory.items():
                for number, caption in zip(at.tolist(), captions.tolist()):
                    file.fill(each[number].data, name, caption)
        return {name.removeprefix("input_ids."): ids.long() for name, ids in out.items()}

    def captions(self, index: int) -> list[str]:
        """Return the captions of a sample."""
        file, row = self._sample(index)
        return file.captions(row)

    def name(self, index: int) -> str:
        """Return the name of a sample."""
        file, row = self._sample(index)
        return file.sample_name(row)

    def image_hash(self, index: int) -> str:
        """Return the hash of a sample's image."""
        file, row = self._sample(index)
        return file.read("images", row, row + 1).numpy().tobytes().hex()

    @property
    def file_ends(self) -> np.ndarray:
        """(F,) int64: the index behind the last sample of each sample file."""
        return self._ends

    def bytes_of_file(self, number: int) -> int:
        """Return the bytes of a sample file and the latent files that it refers to."""
        shards = self._file(number).metadata["shards"]
        return self.entries[number].size + sum(size for _, size in shards)

    def fetch(self, indices: np.ndarray) -> None:
        """Copy the files of some samples into the cache, if the store is not local."""
        for number in np.unique(np.searchsorted(self._ends, indices, side="right")).tolist():
            for name, size in self._file(number).metadata["shards"]:
                self.cache.fetch(self.store.folder, path_of(LATENTS, name), size)

    def _sample(self, index: int) -> tuple[SampleFile, int]:
        number = bisect_right(self._ends, index)
        return self._file(number), index - int(self._ends[number]) + self.entries[number].rows

    def _by_file(self, indices: np.ndarray) -> Iterator[tuple[SampleFile, np.ndarray, np.ndarray]]:
        """Yield (file, rows in it, their positions in ``indices``) for the sample files of some samples."""
        files = np.searchsorted(self._ends, indices, side="right")
        for number in np.unique(files).tolist():
            at = np.flatnonzero(files == number)
            yield self._file(number), indices[at] - (self._ends[number] - self.entries[number].rows), at

    def _by_shard(self, indices: np.ndarray) -> Iterator[tuple[_LatentFile, np.ndarray, np.ndarray]]:
        """Yield (file, rows in it, their positions in ``indices``) for the latent files of some samples."""
        for file, rows, at in self._by_file(indices):
            place = file.place[rows]
            for number in np.unique(place[:, 0]).tolist():
                here = np.flatnonzero(place[:, 0] == number)
                name, size = file.metadata["shards"][number]
                yield self._shard(name, size), place[here, 1], at[here]

    def _file(self, number: int) -> SampleFile:
        entry = self.entries[number]
        return self._kept_open(self._samples, _OPEN_SAMPLE_FILES, SampleFile, (SAMPLES, entry.name, entry.size))

    def _shard(self, name: str, size: int) -> _LatentFile:
        return self._kept_open(self._shards, _OPEN_SHARDS, _LatentFile, (LATENTS, name, size))

    def _kept_open(
        self, files: OrderedDict[str, File], most: int, kind: Callable[..., File], which: tuple[str, str, int]
    ) -> File:
        """Return an open file; the least recently used one is closed if too many are open."""
        folder, name, size = which
        file = files.get(name)
        if file is None:
            path = path_of(folder, name)
            try:
                handle = self.cache.open(self.store.folder, path, size)
            except FileNotFoundError as error:
                raise UsageError(
                    f"data.store={self.store.root.url}: {self.store.folder.url}/{path} is not there; the store was "
                    "pruned or files were deleted since this run began; start again with resume=auto, or run precompute"
                ) from error
            files[name] = file = kind(handle, name=f"{self.store.folder.url}/{path}", size=size)
            if len(files) > most:
                files.popitem(last=False)[1].close()
        files.move_to_end(name)
        return file


class _LatentFile(StoreFile):
    """A latent file whose sizes are kept in memory."""

    def __init__(self, handle: Any, *, name: str, size: int | None = None) -> None:
        super().__init__(handle, name=name, size=size)
        self.sizes = self.read("sizes").long()


def default_cache(cache_dir: str | None, cache_gb: float) -> FileCache:
    """Return the cache for files of object stores."""
    folder = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "sd_lightning" / "latents"
    return FileCache(folder, int(cache_gb * 1e9))
