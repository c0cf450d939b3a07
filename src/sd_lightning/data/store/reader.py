"""Read samples of a store by index: latents, sizes, token ids and captions."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.order import Shape
from sd_lightning.data.store.files import RowBuffer, StoreFile
from sd_lightning.data.store.layout import LATENTS, SAMPLES, Generation, LatentStore, path_of
from sd_lightning.data.store.sample_file import SampleFile
from sd_lightning.storage.file_cache import FileCache
from sd_lightning.storage.safetensors_file import Column

_SAMPLE_FILES = 64
"""Sample files that are open without their latents."""
_MOST_OPEN = 96
"""Sample files that are open: each takes about half a megabyte of memory."""
_MOST_HANDLES = 512
"""Files that are open; a process often may have 1024."""


@dataclass(frozen=True)
class StoredBatch:
    """What a store holds of B samples."""

    latents: Tensor
    """(B, C, h, w) in the stored type."""
    sizes: Tensor
    """(B, 4) int64: original height and width, top and left of the crop, in pixels."""


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
        self.ends = np.cumsum([entry.rows for entry in self.entries], dtype=np.int64)
        """(F,) int64: the index behind the last sample of each sample file."""
        self._shapes = np.array([entry.shape for entry in self.entries], np.int64)
        self._begins = self.ends - np.array([entry.rows for entry in self.entries], np.int64)
        self._fetched: deque[int] = deque(maxlen=_SAMPLE_FILES)
        self._checked: set[int] = set()
        """Sample files whose bytes this process, or the one that it was forked from, has compared with their names."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_files", "_sample_file")}

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def is_local(self) -> bool:
        """Whether files are read where they lie."""
        return self.store.folder.path("") is not None

    def read_latents(self, index: np.ndarray, variants: np.ndarray | int = 0) -> StoredBatch:
        """Return the latents of some samples, and their sizes.

        Args:
            index: (B,) int64, samples of one shape.
            variants: (B,) or one number: which encoding of each image.

        Raises:
            UsageError: A file is missing or not what was written.
        """
        numbers = self.ends.searchsorted(index, side="right")
        shapes = self._shapes[numbers]
        assert (shapes == shapes[0]).all(), "latents of several shapes in one batch"
        column = self._files.latents(int(numbers[0]))
        out, about = RowBuffer(len(index), column), np.empty((len(index), 5), np.int64)
        variants = np.broadcast_to(variants, len(index))
        for part, rows in self._rows(index):
            if not out.read(part, rows["fd"], rows["offset"] + variants[part] * column.row_bytes):
                raise self.cut_off(LATENTS)
            of_all = rows["about"]  # (N, variants, 5)
            about[part] = of_all[:, 0] if of_all.shape[1] == 1 else of_all[np.arange(len(rows)), variants[part]]
        differs = out.sums() != about[:, 4]
        if differs.any():
            raise self._altered(int(index[differs.argmax()]))
        return StoredBatch(out.tensor, torch.from_numpy(about[:, :4]))

    def num_captions(self, index: Sequence[int] | np.ndarray) -> list[int]:
        """Return the number of captions of each sample."""
        counts = np.empty(len(index), np.int64)
        for part, rows in self._rows(np.asarray(index, np.int64)):
            counts[part] = rows["num_captions"]
        return counts.tolist()

    def token_ids(
        self, index: Sequence[int] | np.ndarray, which: Sequence[int] | np.ndarray
    ) -> dict[str, Tensor] | None:
        """Return the token ids (B, L) int64, by text encoder, of caption number ``which[i]`` of each sample."""
        found = {name: RowBuffer(len(index), column) for name, column in self._ids.items()}
        numbers = np.asarray(which, np.int64)
        for part, rows in self._rows(np.asarray(index, np.int64)):
            captions = rows["first_caption"] + numbers[part]
            for number, out in enumerate(found.values()):
                if not out.read(part, rows["id_fd"], rows["id_begin"][:, number] + captions * out.row_bytes):
                    raise self.cut_off(SAMPLES)
        return {name: out.tensor.long() for name, out in found.items()}

    def caption_places(self, indices: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample file (B,) of each sample, and the row (B,) of its caption ``which[i]`` there."""
        numbers = self.ends.searchsorted(indices, side="right")
        places = np.empty(len(indices), np.int64)
        for part, rows in self._rows(indices):
            places[part] = rows["first_caption"] + which[part]
        return numbers, places

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

    def files_of_shape(self) -> dict[Shape, range]:
        """Return the sample files of every shape, which lie together, by their number."""
        shapes = self.store.recipe.all_shapes
        bounds = [(shapes[shape], np.flatnonzero(self._shapes == shape)) for shape in np.unique(self._shapes).tolist()]
        return {shape: range(int(files[0]), int(files[-1]) + 1) for shape, files in bounds}

    def bytes_of_file(self, number: int) -> int:
        """Return the bytes of a sample file and of the latent files that it refers to."""
        return self.entries[number].size + sum(size for _, size in self._sample_file(number).shards)

    def files(self, index: np.ndarray) -> list[int]:
        """Return the numbers of the sample files of some samples."""
        return np.unique(self.ends.searchsorted(index, side="right")).tolist()

    def fetch(self, file: int) -> None:
        """Copy a sample file, by its number, and its latent files into the cache, unless it was done just now."""
        if file not in self._fetched:
            for name, size in self._sample_file(file).shards:
                self.cache.fetch(self.store.folder, path_of(LATENTS, name), size)
            self._fetched.append(file)

    def _sample(self, index: int) -> tuple[SampleFile, int]:
        number = bisect_right(self.ends, index)
        return self._sample_file(number), index - int(self._begins[number])

    @cached_property
    def _sample_file(self) -> Callable[[int], SampleFile]:
        """Opens a sample file without its latents: what only needs captions brings no latents to this machine."""
        return lru_cache(maxsize=_SAMPLE_FILES)(self._open_samples)

    def _open_samples(self, number: int) -> SampleFile:
        entry = self.entries[number]
        handle = self.handle(SAMPLES, entry.name, entry.size)
        file = SampleFile(handle, name=f"{self.store.folder.url}/{path_of(SAMPLES, entry.name)}", size=entry.size)
        if number not in self._checked:
            file.check()
            self._checked.add(number)
        return file

    def _rows(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the places of some samples in parts, whose files are open then."""
        numbers = self.ends.searchsorted(indices, side="right")
        return self._files.rows(numbers, indices - self._begins[numbers])

    @cached_property
    def _files(self) -> OpenFiles:
        return OpenFiles(self._opened, [entry.rows for entry in self.entries], self.store.recipe.variants, self._ids)

    @cached_property
    def _ids(self) -> dict[str, Column]:
        """The columns of token ids, by text encoder; only their shape and bytes per row are those of every file."""
        return self._sample_file(0).id_columns

    def _opened(self, number: int) -> OpenSamples:
        file, folder = self._open_samples(number), self.store.folder.url
        shards = [
            StoreFile(self.handle(LATENTS, name, size), name=f"{folder}/{path_of(LATENTS, name)}", size=size)
            for name, size in file.shards
        ]
        return OpenSamples(file, shards)

    def handle(self, kind: str, name: str, size: int) -> BinaryIO:
        """Open a file of the store; of an object store, a copy in the cache.

        Raises:
            UsageError: It is not there.
        """
        path = path_of(kind, name)
        try:
            return self.cache.open(self.store.folder, path, size)
        except FileNotFoundError as error:
            raise UsageError(
                f"data.store={self.store.root.url}: {self.store.folder.url}/{path} is not there; the store was pruned "
                "or files were deleted since this run began; start again with resume=auto, or run precompute"
            ) from error

    def _altered(self, index: int) -> UsageError:
        """Return the error for a sample whose latents are not what was written."""
        file, row = self._sample(index)
        name, _ = file.shards[file.place[row, 0]]
        return UsageError(
            f"data.store={self.store.root.url}: the latents of {file.sample_name(row)} in {self.store.folder.url}/"
            f"{path_of(LATENTS, name)} are not those that were written; find all such files with python -m "
            f"sd_lightning.precompute verify store={self.store.root.url}, and delete the copies in data.cache_dir if "
            "it finds none"
        )

    def cut_off(self, kind: str) -> UsageError:
        """Return the error for a file of a kind that ends before a row that it had."""
        return UsageError(
            f"data.store={self.store.root.url}: a file of {self.store.folder.url}/{kind} was cut off while it was "
            "read; expected files that nobody changes; run precompute again, and resume this run"
        )


def default_cache(cache_dir: str | None, cache_gb: float) -> FileCache:
    """Return the cache for files of object stores."""
    folder = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "sd_lightning" / "latents"
    return FileCache(folder, int(cache_gb * 1e9))


@dataclass(frozen=True)
class OpenSamples:
    """A sample file and the latent files that it refers to, open."""

    file: SampleFile
    shards: list[StoreFile]

    @property
    def latents(self) -> Column:
        """The column of latents; only its shape and bytes per row are those of all latent files."""
        return self.shards[0].columns["latents"]

    @property
    def num_handles(self) -> int:
        """Number of open files."""
        return 1 + len(self.shards)

    @property
    def is_deleted(self) -> bool:
        """Whether one of the files was deleted: its space is free once nobody has it open."""
        return any(os.fstat(each.fd).st_nlink == 0 for each in (self.file, *self.shards))

    def close(self) -> None:
        """Close all of them."""
        for each in (self.file, *self.shards):
            each.close()


class OpenFiles:
    """Open sample files, with the places of all their rows in one array: a whole batch is looked up at once.

    Each open file has a slot in it, with as many entries as the largest file has rows.
    """

    def __init__(
        self, open_: Callable[[int], OpenSamples], num_rows: Sequence[int], variants: int, ids: Mapping[str, Column]
    ) -> None:
        """Open nothing yet.

        Args:
            open_: Opens a sample file by its number.
            num_rows: Rows of each sample file.
            variants: Encodings per image.
            ids: The columns of token ids, by text encoder; only these are those of every file.
        """
        self._open_file, self._variants, self._slot_rows = open_, variants, max(num_rows)
        self._slot_of = np.full(len(num_rows), -1, np.int64)
        self._open: OrderedDict[int, OpenSamples] = OrderedDict()
        """Least recently used first."""
        self._num_handles = 0
        self._free: list[int] = []
        self._ids = list(ids)
        place: list[Any] = [("fd", "i4"), ("offset", "i8"), ("about", "i8", (variants, 5)), ("id_fd", "i4")]
        place += [("id_begin", "i8", (len(ids),)), ("first_caption", "i8"), ("num_captions", "i4")]
        self._places = np.zeros(0, place)

    def rows(self, numbers: np.ndarray, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the places of row ``rows[i]`` of file ``numbers[i]``, in parts of which all files can be open at once.

        A place has the file ``fd`` and ``offset`` of the latents, ``about`` each variant its four sizes and the sum
        of its latents, and for token ids the file ``id_fd``, ``id_begin`` of each column, ``first_caption`` and
        ``num_captions``. It holds until the next part.

        Yields:
            Which ``i`` (N,) the part has, and their places (N,).
        """
        if self._slot_of[numbers].min(initial=0) >= 0:
            yield np.arange(len(numbers)), self._at(numbers, rows)
            return
        left = np.unique(numbers).tolist()
        while left:
            some = self._open_some(left)
            left = left[len(some) :]
            part = np.flatnonzero(np.isin(numbers, some))
            yield part, self._at(numbers[part], rows[part])

    def _at(self, numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self._places.take(self._slot_of[numbers] * self._slot_rows + rows)

    def latents(self, number: int) -> Column:
        """Return the column of latents of a file; shape and bytes per row are those of all its latent files."""
        self._open_some([number])
        return self._open[number].latents

    def _open_some(self, wanted: Sequence[int]) -> list[int]:
        """Open the first of some files, as many as can be open at once, at least one; close others."""
        some: list[int] = []
        for number in wanted:
            some.append(number)
            if number in self._open:
                self._open.move_to_end(number)
                continue
            self._open_one(number)
            for other in list(self._open)[: -len(some)]:
                if self._is_too_much or self._open[other].is_deleted:
                    self._close(other)
            if self._is_too_much:
                break
        return some

    @property
    def _is_too_much(self) -> bool:
        return len(self._open) > _MOST_OPEN or self._num_handles > _MOST_HANDLES

    def _open_one(self, number: int) -> None:
        samples = self._open_file(number)
        slot = self._free[-1] if self._free else len(self._open)
        self._fill(slot * self._slot_rows, samples)
        del self._free[-1:]
        self._open[number] = samples
        self._num_handles += samples.num_handles
        self._slot_of[number] = slot

    def _close(self, number: int) -> None:
        samples = self._open.pop(number)
        self._num_handles -= samples.num_handles
        self._free.append(int(self._slot_of[number]))
        self._slot_of[number] = -1
        samples.close()

    def _fill(self, begin: int, samples: OpenSamples) -> None:
        """Write the places of a file's rows."""
        if begin + self._slot_rows > len(self._places):
            more = np.zeros(begin + self._slot_rows - len(self._places), self._places.dtype)
            self._places = np.concatenate([self._places, more])
        file, shards = samples.file, samples.shards
        places = self._places[begin : begin + len(file)]
        shard, row = file.place.T
        begins = np.array([each.columns["latents"].begin for each in shards])[shard]
        places["fd"] = np.array([each.fd for each in shards])[shard]
        places["offset"] = begins + row * self._variants * samples.latents.row_bytes
        for number, each in enumerate(shards):
            here = shard == number
            sizes = each.read("sizes").long()
            sums = torch.from_numpy(each.checks) - sizes.sum(1)
            about = torch.cat([sizes, sums[:, None]], dim=1)
            places["about"][here] = about.view(-1, self._variants, 5).numpy()[row[here]]
        places["id_fd"] = file.fd
        places["id_begin"] = [file.id_columns[name].begin for name in self._ids]
        places["first_caption"] = file.first_caption[:-1]
        places["num_captions"] = np.diff(file.first_caption)
