"""The samples that a store has before a job, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import SampleFile
from sd_lightning.data.store.key_table import KeyTable, rows_of, write_table
from sd_lightning.data.store.rows import SampleRows, Shard
from sd_lightning.data.store.store import LATENTS, SAMPLES, LatentStore, SampleEntry, path_of

Write = Callable[[SampleRows, Sequence[Shard], np.ndarray], list[SampleEntry]]
"""Writes samples with the places of their latents, in one file or more."""


class KnownSamples:
    """The samples of a split before the job, and which of them are kept; out of core."""

    def __init__(
        self, store: LatentStore, entries: Sequence[SampleEntry], latents: Mapping[str, int], scratch: Path
    ) -> None:
        scratch.mkdir()
        present = store.present(SAMPLES)
        # Deleted files, such as altered ones that ``verify`` found: their samples count as new.
        self._entries = [entry for entry in entries if entry.name in present]
        self._store, self._latents, self._scratch = store, latents, scratch
        for entry in self._entries:
            self._check_size(path_of(SAMPLES, entry.name), present[entry.name], entry.size)
        self._ends = np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)
        total = int(self._ends[-1]) if self._entries else 0
        # What became of every sample: 0 not seen in the data set, 1 changed, 2 kept.
        self._state = np.memmap(scratch / "state", np.uint8, "w+", shape=(max(total, 1),))
        self.num_removed = total
        """Samples that have not been kept, so far."""
        self._checked: set[int] = set()
        self.open = lru_cache(maxsize=32)(self._open)
        blocks = (rows_of(self.open(i)[1], i, np.arange(entry.rows)) for i, entry in enumerate(self._entries))
        path = scratch / "known"
        write_table(path, blocks)
        self._table = KeyTable(path)

    def _open(self, number: int) -> tuple[SampleFile, np.ndarray, np.ndarray]:
        """Return a sample file, its keys and its stamps."""
        entry = self._entries[number]
        path = self._store.local(SAMPLES, entry.name, self._scratch)
        name = f"{self._store.folder.url}/{path_of(SAMPLES, entry.name)}"
        file = SampleFile(open(path, "rb", buffering=0), name=name, size=entry.size)
        if number not in self._checked:
            file.check()
            self._checked.add(number)
        for shard, size in file.metadata["shards"]:
            self._check_size(path_of(LATENTS, shard), self._latents.get(shard, size), size)
        return file, file.read("keys").numpy(), file.read("stamps").numpy()

    def _check_size(self, path: str, found: int, size: int) -> None:
        """Raise for a file that would count as written although it is not whole."""
        if found != size:
            raise UsageError(
                f"{self._store.folder.url}/{path} has {found} bytes instead of {size}: it is truncated or altered; "
                f"delete it with python -m sd_lightning.precompute verify store={self._store.root.url} dry_run=false, "
                "and run precompute again"
            )

    def keep(self, rows: SampleRows) -> np.ndarray:
        """Return which samples are in the store as they are, (N,) bool, and note that these are still wanted.

        Raises:
            UsageError: Another sample with the key of one of them was given before.
        """
        found = self._table.find(rows.keys)
        is_kept = np.zeros(len(rows), bool)
        hit = np.flatnonzero(found >= 0)
        file, row = self._table.at(found[hit])
        for number in np.unique(file).tolist():
            of_file = file == number
            sample_file, _, stamps = self.open(number)
            shards = sample_file.metadata["shards"]
            is_there = np.array([name in self._latents for name, _ in shards], bool)
            is_same = (stamps[row[of_file]] == rows.stamps[hit[of_file]]).all(axis=1)
            is_same &= is_there[sample_file.place[row[of_file], 0]]
            is_kept[hit[of_file]] = is_same
            at = self._ends[number] - self._entries[number].rows + row[of_file]
            if (again := self._state[at] > 0).any():
                first = np.flatnonzero(again)[0]
                raise same_key(sample_file.sample_name(row[of_file][first]), rows.names[hit[of_file][first]])
            self._state[at] = np.where(is_same, 2, 1)
            self.num_removed -= int(is_same.sum())
        return is_kept

    def captions(self, rows: SampleRows) -> dict[int, list[str]]:
        """Return the captions here of samples that are the same here, by their place in ``rows``.

        They are those of the data set, or have been imported since.
        """
        at = self._table.find(rows.keys)
        found: dict[int, list[str]] = {}
        file, row = self._table.at(at[at >= 0])
        for place, number, line in zip(np.flatnonzero(at >= 0).tolist(), file.tolist(), row.tolist(), strict=True):
            sample_file, _, stamps = self.open(number)
            if (stamps[line] == rows.stamps[place]).all():
                found[place] = sample_file.captions(line)
        return found

    def entries(self, write: Write, *, all_anew: bool = False) -> list[SampleEntry]:
        """Return the files that hold the kept samples; a file that loses some of its samples is written anew."""
        kept: list[SampleEntry] = []
        for number, entry in enumerate(self._entries):
            rows = np.flatnonzero(self._state[self._ends[number] - entry.rows : self._ends[number]] == 2)
            if len(rows) == entry.rows and not all_anew:
                kept.append(entry)
            elif len(rows):
                file = self.open(number)[0]
                shards = [(str(name), int(size)) for name, size in file.metadata["shards"]]
                kept += write(SampleRows.read(file).take(rows), shards, file.place[rows])
        return kept


def same_key(one: str, other: str) -> UsageError:
    """Return the error for two samples, given by name, that have the same key."""
    what = f"the samples {one} and {other} have" if one != other else f"two samples {one} have"
    return UsageError(
        f"precompute: {what} the same key, and every job would write them anew; expected one for each sample; list "
        "each file once, or make the source's key() tell them apart"
    )
