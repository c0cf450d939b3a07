"""Read the text embeddings of a store by sample and caption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning.data.store.files import ALTERED, CHECKS, HASHES, RowBuffer, Shard, StoreFile, row_sums
from sd_lightning.data.store.layout import path_of
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.data.store.texts import EMPTY, files_of, places_of
from sd_lightning.models.families.conditioning import Conditioning, nested_conditioning
from sd_lightning.storage.safetensors_file import Column

_MOST_OPEN = 128
"""Text files that stay open, unless one batch needs more."""


class StoredTexts:
    """Reads the text embeddings of one split; it may be pickled and forked.

    Attributes:
        num_missing: Sample files whose captions lack embeddings; with any, embeddings cannot be read.
    """

    def __init__(self, reader: StoreReader, kind: str) -> None:
        """List the files of places; they, and text files, are opened when they are read.

        Args:
            reader: Of the split.
            kind: From ``text_kind``.
        """
        self._reader, self._kind = reader, kind
        present = reader.store.present(places_of(kind))
        self._sizes = {name: present.get(name, 0) for name in (EMPTY, *(each.captions for each in reader.entries))}
        self.num_missing = sum(not size for size in self._sizes.values())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_file", "_places")}

    def batch(self, indices: np.ndarray, which: Sequence[int | None]) -> Conditioning:
        """Return the embeddings of caption number ``which[i]`` of each sample, of "" where it is None.

        Args:
            indices: (B,) int64.
            which: One per sample.

        Returns:
            What ``Family.embed`` returns for these captions, in the stored type; zeros for tokens that were not stored.
        """
        places = [self._place(EMPTY, 0) if number is None else None for number in which]
        kept = [i for i, number in enumerate(which) if number is not None]
        numbers = np.array([number for number in which if number is not None], np.int64)
        for i, number, row in zip(kept, *map(np.ndarray.tolist, self._reader.caption_places(indices[kept], numbers))):
            places[i] = self._place(self._reader.entries[number].captions, row)
        files, rows, checks = zip(*filter(None, places), strict=True)
        found: dict[str, Tensor] = {}
        for name, column in files[0].row_columns.items():
            out = RowBuffer(len(indices), column)
            begins, sizes = np.array([file.span(name, row) for file, row in zip(files, rows)], np.int64).T
            if not out.read(np.arange(len(indices)), np.array([file.fd for file in files]), begins, sizes):
                raise self._reader.cut_off(self._kind)
            found[name] = out.tensor
        sums = torch.stack([row_sums(each) for each in found.values()]).sum(0).tolist()
        for file, total, check in zip(files, sums, checks, strict=True):
            if total != check:
                raise file.broken(ALTERED)
        return nested_conditioning(found)

    def bytes_of_file(self, number: int) -> int:
        """Return the bytes of the text files with the captions of a sample file."""
        return sum(size for _, size in self._places(self._reader.entries[number].captions)[0])

    def fetch(self, number: int) -> None:
        """Copy the text files with the captions of a sample file into the cache, if the store is not local."""
        for name, size in self._places(self._reader.entries[number].captions)[0]:
            self._reader.cache.fetch(self._reader.store.folder, path_of(self._kind, name), size)

    def _place(self, name: str, row: int) -> tuple[TextFile, int, int]:
        """Return text file, row there and check sum of a caption, by its file of places and row there."""
        files, place, checks = self._places(name)
        return self._file(files[place[row, 0]]), int(place[row, 1]), int(checks[row])

    @cached_property
    def _places(self) -> Callable[[str], tuple[list[Shard], np.ndarray, np.ndarray]]:
        """Reads a file of places by its name: text files, file number and row (M, 2), and check sum (M,)."""
        return lru_cache(maxsize=_MOST_OPEN)(self._read_places)

    def _read_places(self, name: str) -> tuple[list[Shard], np.ndarray, np.ndarray]:
        kind = places_of(self._kind)
        where = f"{self._reader.store.folder.url}/{path_of(kind, name)}"
        file = StoreFile(self._reader.handle(kind, name, self._sizes[name]), name=where, size=self._sizes[name])
        files = files_of(file.metadata)
        found = files, file.read("place").numpy().astype(np.int64), file.checks
        file.close()
        return found

    @cached_property
    def _file(self) -> Callable[[Shard], TextFile]:
        """Opens a text file by its name and size."""
        return lru_cache(maxsize=_MOST_OPEN)(self._opened)

    def _opened(self, file: Shard) -> TextFile:
        (name, size), where = file, f"{self._reader.store.folder.url}/{path_of(self._kind, file[0])}"
        return TextFile(self._reader.handle(self._kind, name, size), name=where, size=size)


class TextFile(StoreFile):
    """Embeddings of some captions, a row each."""

    @cached_property
    def row_columns(self) -> dict[str, Column]:
        """The columns of embeddings, with their padded shape."""
        padded: dict[str, int] = self.metadata["padded"]
        names = self.columns.keys() - {CHECKS, HASHES, *(f"{name}_end" for name in padded)}
        columns = {name: self.columns[name] for name in sorted(names)}
        return {
            name: Column(
                each.dtype, (len(self), *((padded[name],) if name in padded else ()), *each.shape[1:]), each.begin
            )
            for name, each in columns.items()
        }

    def span(self, name: str, row: int) -> tuple[int, int]:
        """Return where a row of a column begins in the file, and its bytes."""
        column, first, count = self.columns[name], row, 1
        if name in self.metadata["padded"]:
            first, end = self._ends[name][row : row + 2].tolist()
            count = end - first
        return column.begin + first * column.row_bytes, count * column.row_bytes

    @cached_property
    def _ends(self) -> dict[str, np.ndarray]:
        """Where the tokens of each row of a ragged column end, behind a 0."""
        return {name: np.concatenate([[0], self.read(f"{name}_end").numpy()]) for name in self.metadata["padded"]}
