"""The files of a store that are open for reading, and the places of their rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sd_lightning.data.store.files import Column, SampleFile, StoreFile

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

    def close(self) -> None:
        """Close all of them."""
        for each in (self.file, *self.shards):
            each.close()


class OpenFiles:
    """Open sample files, with the places of all their rows in one array: a whole batch is looked up at once.

    Each open file has a slot in it, with as many entries as the largest file has rows.

    Attributes:
        ids: The columns of token ids, by name; only their shape and bytes per row are those of every file.
    """

    def __init__(self, open_: Callable[[int], OpenSamples], num_rows: Sequence[int], variants: int) -> None:
        """Open the first file.

        Args:
            open_: Opens a sample file by its number.
            num_rows: Rows of each sample file.
            variants: Encodings per image.
        """
        self._open_file, self._variants, self._slot_rows = open_, variants, max(num_rows)
        self._slot_of = np.full(len(num_rows), -1, np.int64)
        self._open: OrderedDict[int, OpenSamples] = OrderedDict()
        self._free: list[int] = []
        first = open_(0)
        first.close()
        self.ids: dict[str, Column] = {name: first.file.columns[name] for name in first.file.id_columns}
        place: list[Any] = [("fd", "i4"), ("offset", "i8"), ("sizes", "i4", (variants, 4)), ("id_fd", "i4")]
        place += [("id_begin", "i8", (len(self.ids),)), ("first_caption", "i8"), ("num_captions", "i4")]
        self._places = np.zeros(0, place)

    def rows(self, numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the places (B,) of row ``rows[i]`` of file ``numbers[i]``; these files are open then.

        A place has the file ``fd`` and ``offset`` of the latents, their ``sizes``, and for token ids the file
        ``id_fd``, ``id_begin`` of each column, ``first_caption`` and ``num_captions``.
        """
        slots = self._slot_of[numbers]
        if slots.min(initial=0) < 0:
            wanted = np.unique(numbers).tolist()
            self._make_room(wanted)
            for number in wanted:
                self.open(number)
            slots = self._slot_of[numbers]
        return self._places.take(slots * self._slot_rows + rows)

    def open(self, number: int) -> OpenSamples:
        """Return a file, open."""
        samples = self._open.get(number)
        if samples is None:
            self._make_room([number])
            samples = self._open_file(number)
            slot = self._free.pop() if self._free else len(self._open)
            self._open[number] = samples
            self._slot_of[number] = slot
            self._fill(slot * self._slot_rows, samples)
        return samples

    def _make_room(self, wanted: Sequence[int]) -> None:
        """Close the files that were opened first, but none of those wanted, if too many would be open."""
        num_new = sum(number not in self._open for number in wanted)
        num_handles = sum(each.num_handles for each in self._open.values())
        for number in [each for each in self._open if each not in set(wanted)]:
            if len(self._open) + num_new <= _MOST_OPEN and num_handles <= _MOST_HANDLES:
                return
            samples = self._open.pop(number)
            num_handles -= samples.num_handles
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
            places["sizes"][here] = each.read("sizes").view(-1, self._variants, 4).numpy()[row[here]]
        places["id_fd"] = file.fd
        places["id_begin"] = [file.columns[name].begin for name in self.ids]
        places["first_caption"] = file.first_caption[:-1]
        places["num_captions"] = np.diff(file.first_caption)
