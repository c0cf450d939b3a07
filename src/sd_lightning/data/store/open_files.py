"""The files of a store that are open for reading, and the places of their rows."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sd_lightning.data.store.files import CHECKS, Column, SampleFile, StoreFile

_MOST_OPEN = 96
"""Sample files that are open: each takes about half a megabyte of memory."""
_MOST_HANDLES = 512
"""Files that are open; a process often may have 1024."""


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
            ids: The columns of token ids, by name; only their names are those of every file.
        """
        self._open_file, self._variants, self._slot_rows = open_, variants, max(num_rows)
        self._slot_of = np.full(len(num_rows), -1, np.int64)
        self._open: OrderedDict[int, OpenSamples] = OrderedDict()
        """Least recently used first."""
        self._num_handles = 0
        self._free: list[int] = []
        self._ids = list(ids)
        place: list[Any] = [("fd", "i4"), ("offset", "i8"), ("about", "i8", (variants, 6)), ("id_fd", "i4")]
        place += [("id_begin", "i8", (len(ids),)), ("first_caption", "i8"), ("num_captions", "i4")]
        self._places = np.zeros(0, place)

    def rows(self, numbers: np.ndarray, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the places of row ``rows[i]`` of file ``numbers[i]``, in parts of which all files can be open at once.

        A place has the file ``fd`` and ``offset`` of the latents, ``about`` each variant its four sizes, the sum of
        its latents and whether that is known, and for token ids the file ``id_fd``, ``id_begin`` of each column,
        ``first_caption`` and ``num_captions``. It holds until the next part.

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
            sizes, has_sum = each.read("sizes").long(), CHECKS in each.columns
            sums = each.read(CHECKS) - sizes.sum(1) if has_sum else torch.zeros(len(sizes), dtype=torch.int64)
            about = torch.cat([sizes, sums[:, None], torch.full((len(sizes), 1), int(has_sum))], dim=1)
            places["about"][here] = about.view(-1, self._variants, 6).numpy()[row[here]]
        places["id_fd"] = file.fd
        places["id_begin"] = [file.columns[name].begin for name in self._ids]
        places["first_caption"] = file.first_caption[:-1]
        places["num_captions"] = np.diff(file.first_caption)
