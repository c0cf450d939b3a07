"""Read text embeddings of a store by sample and caption."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import ALTERED, CHECKS, Column, RowBuffer, StoreFile, row_sums
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.data.store.store import path_of
from sd_lightning.data.store.texts import EMPTY
from sd_lightning.models.families.base import Conditioning, nested_conditioning

_MOST_OPEN = 128
"""Text files that are open, unless one batch needs more."""


class StoredTexts:
    """Reads the text embeddings of one split; it may be pickled and forked.

    Attributes:
        num_missing: Text files that are not there; with any, embeddings cannot be read.
    """

    def __init__(self, reader: StoreReader, kind: str) -> None:
        """List the text files; they are opened when they are read.

        Args:
            reader: Of the split.
            kind: From ``text_kind``.
        """
        self._reader, self._kind = reader, kind
        present = reader.store.present(kind)
        self._sizes = {name: present.get(name, 0) for name in (EMPTY, *(each.captions for each in reader.entries))}
        self.num_missing = sum(not size for size in self._sizes.values())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_files", "_empty")}

    def batch(self, indices: np.ndarray, which: Sequence[int | None]) -> Conditioning:
        """Return the embeddings of caption number ``which[i]`` of each sample, of "" where it is None.

        Args:
            indices: (B,) int64.
            which: One per sample.

        Returns:
            What ``Family.embed`` returns for these captions, in the stored type.
        """
        kept = np.array([place for place, number in enumerate(which) if number is not None], np.int64)
        dropped = [place for place, number in enumerate(which) if number is None]
        captions = np.array([number for number in which if number is not None], np.int64)
        numbers, rows = self._reader.caption_places(indices[kept], captions)
        fds, begins = self._files.places(numbers)
        found: dict[str, Tensor] = {}
        for place, (name, column) in enumerate(self._files.columns.items()):
            out = RowBuffer(len(indices), column)
            if not out.read(kept, fds, begins[:, place] + rows * column.row_bytes):
                raise self._reader.cut_off(self._kind)
            if dropped:
                out.tensor[dropped] = self._empty[name]
            found[name] = out.tensor
        if len(kept):
            check, has_check = self._files.checks(numbers, rows)
            sums = torch.stack([row_sums(each[kept]) for each in found.values()]).sum(0)
            is_altered = has_check & (sums.numpy() != check)
            if is_altered.any():
                raise self._altered(int(numbers[is_altered.argmax()]))
        return nested_conditioning(found)

    def bytes_of_file(self, number: int) -> int:
        """Return the bytes of the text file of a sample file."""
        return self._sizes[self._reader.entries[number].captions]

    def fetch(self, number: int) -> None:
        """Copy the text file of a sample file into the cache, if the store is not local."""
        name = self._reader.entries[number].captions
        self._reader.cache.fetch(self._reader.store.folder, path_of(self._kind, name), self._sizes[name])

    @cached_property
    def _files(self) -> _OpenTexts:
        names = [entry.captions for entry in self._reader.entries]
        return _OpenTexts(lambda number: self._opened(names[number]), len(names))

    @cached_property
    def _empty(self) -> dict[str, Tensor]:
        file = self._opened(EMPTY)
        found = {name: file.read(name) for name in file.columns if name != CHECKS}
        sums = torch.stack([row_sums(each) for each in found.values()]).sum(0)
        if CHECKS in file.columns and not torch.equal(sums, file.read(CHECKS)):
            raise file.broken(ALTERED)
        file.close()
        return found

    def _altered(self, number: int) -> UsageError:
        store, name = self._reader.store, self._reader.entries[number].captions
        return UsageError(
            f"data.store={store.root.url}: text embeddings in {store.folder.url}/{path_of(self._kind, name)} are not "
            f"those that were written; delete it with python -m sd_lightning.precompute verify store={store.root.url} "
            "dry_run=false, and run precompute again with text=true"
        )

    def _opened(self, name: str) -> StoreFile:
        folder, path = self._reader.store.folder, path_of(self._kind, name)
        try:
            handle = self._reader.cache.open(folder, path, self._sizes[name])
        except FileNotFoundError as error:
            raise UsageError(
                f"data.store={self._reader.store.root.url}: {folder.url}/{path} is not there; text embeddings were "
                "deleted since this run began; start again with resume=auto, or run precompute with text=true"
            ) from error
        return StoreFile(handle, name=f"{folder.url}/{path}", size=self._sizes[name])


class _OpenTexts:
    """Text files that are open, by number.

    Attributes:
        columns: The columns by name; only their shape and bytes per row are those of every file.
    """

    def __init__(self, open_: Callable[[int], StoreFile], count: int) -> None:
        """Open the first file.

        Args:
            open_: Opens a file by its number.
            count: Number of files.
        """
        self._open_file = open_
        self._open: OrderedDict[int, StoreFile] = OrderedDict()
        first = open_(0)
        first.close()
        self.columns: dict[str, Column] = {name: each for name, each in first.columns.items() if name != CHECKS}
        self._checks: dict[int, np.ndarray] = {}
        self._fd = np.full(count, -1, np.int32)
        self._begin = np.zeros((count, len(self.columns)), np.int64)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the handles (B,) of some files, open, and where each of their columns begins (B, columns)."""
        if self._fd[numbers].min(initial=0) < 0:
            wanted = np.unique(numbers).tolist()
            new = [number for number in wanted if self._fd[number] < 0]
            for number in [each for each in self._open if each not in set(wanted)]:
                if len(self._open) + len(new) <= _MOST_OPEN:
                    break
                self._open.pop(number).close()
                self._checks.pop(number, None)
                self._fd[number] = -1
            for number in new:
                file = self._open[number] = self._open_file(number)
                self._fd[number] = file.fd
                self._begin[number] = [file.columns[name].begin for name in self.columns]
                if CHECKS in file.columns:
                    self._checks[number] = file.read(CHECKS).numpy()
        return self._fd[numbers], self._begin[numbers]

    def checks(self, numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the check sums (B,) of some rows of open files, and whether there are any (B,)."""
        found = [self._checks.get(number) for number in numbers.tolist()]
        sums = [0 if each is None else each[row] for each, row in zip(found, rows.tolist(), strict=True)]
        return np.array(sums, np.int64), np.array([each is not None for each in found], bool)
