"""Which samples and images a store holds, and where: sorted tables of hashes in temporary files.

The files of a store say themselves what they hold, so every job reads that anew, and no list of it can be out of date.
A table has 24 bytes per row on disk and is mapped into memory, of which a lookup needs a few pages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import HASH_BYTES, Shard, about
from sd_lightning.data.store.layout import LATENTS, SAMPLES, LatentStore, SampleEntry, path_of
from sd_lightning.data.store.sample_file import SampleFile, SampleRows
from sd_lightning.storage.atomic import no_space

ROW = np.dtype("V24")
"""A row of a table: a hash of 16 bytes, and two big-endian numbers of 4 bytes, the file where it is and the row there.

Rows are compared byte by byte, so that they are sorted by hash, and those of equal hashes by file and row.
"""
_FILES_AT_ONCE = 256
_READERS = 16
"""Threads that read the hashes of latent files: one alone waits for an object store most of the time."""
Write = Callable[[SampleRows, Sequence[Shard], np.ndarray], list[SampleEntry]]
"""Writes samples with the places of their latents, in one file or more."""


def rows_of(hashes: np.ndarray, file: np.ndarray | int, row: np.ndarray | int) -> np.ndarray:
    """Return table rows (N,) for hashes (N, 16) uint8."""
    words = np.empty((len(hashes), 6), ">u4")
    words[:, :4] = np.ascontiguousarray(hashes).view(">u4")
    words[:, 4], words[:, 5] = file, row
    return words.view(ROW).reshape(-1)


class HashTable:
    """A table of hashes, sorted in a file; of equal ones the first by file and row is found.

    The file is mapped into memory and sorted there, so that the system decides how much of it is in memory.
    """

    def __init__(self, path: Path, blocks: Iterable[np.ndarray]) -> None:
        """Write the table.

        Args:
            path: The file.
            blocks: Arrays of ``ROW``.

        Raises:
            UsageError: The disk is full.
        """
        self.path, num_rows = path, 0
        try:
            with open(path, "wb") as file:
                for block in blocks:
                    file.write(block.view(np.uint8).data)
                    num_rows += len(block)
        except OSError as error:
            if reason := no_space(error):
                raise UsageError(
                    f"precompute: cannot write {path}: {reason}; free space there, or set TMPDIR to a folder on "
                    "another disk, then run the same command again"
                ) from error
            raise
        self.rows = np.memmap(path, ROW, "r+", shape=(num_rows,)) if num_rows else np.empty(0, ROW)
        """(N,), sorted."""
        self.rows.sort()

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return file and row of each hash (N, 16) uint8, (N,) int64 each; -1 where it is not there."""
        places = np.full((2, len(hashes)), -1, np.int64)
        if len(self):
            first = rows_of(hashes, 0, 0)  # no row of the same hash comes before it
            order = first.argsort()  # neighbouring pages of the table
            at = self.rows.searchsorted(first[order])
            there = self.rows[at.clip(max=len(self) - 1)].view(">u4").reshape(-1, 6)
            is_there = (there[:, :4] == first[order].view(">u4").reshape(-1, 6)[:, :4]).all(axis=1)
            places[:, order[is_there]] = there[is_there, 4:].T
        return places[0], places[1]


class RowIndex:
    """In which row of which file each image, or caption, is. Of one that was encoded twice, the smaller name counts.

    Attributes:
        bad: Hash (hexadecimal) -> reason of the images that could not be used when a file was written to which no
            sample refers: a job has not ended.
    """

    def __init__(
        self,
        store: LatentStore,
        files: Mapping[str, int],
        scratch: Path,
        *,
        used: Collection[str],
        kind: str = LATENTS,
        column: str = "images",
    ) -> None:
        """Read the hashes of all files.

        Args:
            store: The store.
            files: Name -> bytes of its files of that kind.
            scratch: Folder for temporary files.
            used: Those to which samples refer.
            kind: Folder of the files.
            column: Their column of hashes (N, 16) uint8.

        Raises:
            UsageError: A file is truncated or altered.
        """
        self._store, self._scratch, self._num_tables = store, scratch, 0
        self._kind, self._column = kind, column
        self._files: list[Shard] = sorted(files.items())
        self._left_over = files.keys() - set(used)
        self.bad: dict[str, str] = {}
        self._tables: list[HashTable] = []
        self._append(self._read())

    def _read(self) -> Iterator[np.ndarray]:
        with ThreadPoolExecutor(_READERS, "hashes") as pool:
            for begin in range(0, len(self._files), _FILES_AT_ONCE):
                files = self._files[begin : begin + _FILES_AT_ONCE]
                for number, (images, bad) in enumerate(pool.map(self._read_file, files), begin):
                    self.bad |= bad if self._files[number][0] in self._left_over else {}
                    yield rows_of(images, number, np.arange(len(images)))

    def _read_file(self, file: Shard) -> tuple[np.ndarray, dict[str, str]]:
        name, size = file
        with self._store.readable(path_of(self._kind, name)):
            header = self._store.header(self._kind, name, size)
            hashes = self._store.column(self._kind, name, header.columns[self._column])
            return np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES), about(header).get("bad", {})

    def add(self, encoded: Sequence[tuple[str, int, np.ndarray]]) -> None:
        """Add new files: name, bytes and hashes (N, 16) uint8 of each."""
        begin = len(self._files)
        self._files += [(name, size) for name, size, _ in encoded]
        self._append(rows_of(images, i, np.arange(len(images))) for i, (*_, images) in enumerate(encoded, begin))

    def _append(self, blocks: Iterable[np.ndarray]) -> None:
        """Add a table; merge it with smaller and equal ones, so that there are few whatever the number of portions."""
        self._tables.append(self._table(blocks))
        while len(self._tables) > 1 and len(self._tables[-2]) <= len(self._tables[-1]):
            merged = self._tables[-2:]
            self._tables[-2:] = [self._table(table.rows for table in merged)]
            for table in merged:
                table.path.unlink()

    def _table(self, blocks: Iterable[np.ndarray]) -> HashTable:
        self._num_tables += 1
        return HashTable(self._scratch / f"{self._column}-{self._num_tables}", blocks)

    def find(self, images: np.ndarray) -> tuple[list[Shard], np.ndarray]:
        """Look up hashes (N, 16) uint8.

        Returns:
            Files in the order in which the hashes need them, and (N, 2) int64 with the file number there and the row
            of each, or (-1, -1).
        """
        where = np.full((len(images), 2), -1, np.int64)
        for table in self._tables:
            left = np.flatnonzero(where[:, 0] < 0)
            where[left] = np.stack(table.find(images[left]), axis=1)
        used, first, number = np.unique(where[:, 0], return_index=True, return_inverse=True)
        needed = [i for i in np.argsort(first).tolist() if used[i] >= 0]
        new_number = np.full(len(used), -1, np.int64)
        new_number[needed] = np.arange(len(needed))
        where[:, 0] = new_number[number.reshape(-1)]
        return [self._files[used[i]] for i in needed], where

    def is_left_over(self, shard: Shard) -> bool:
        """Return whether a latent file was there before this job, and no sample referred to it."""
        return shard[0] in self._left_over


class KnownSamples:
    """The samples of a split before the job, and which of them are kept; out of core.

    Attributes:
        used: Names of the latent files to which they refer.
        num_removed: Samples that have not been kept, so far.
    """

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
        self.num_removed = int(self._ends[-1]) if self._entries else 0
        # What became of every sample: 0 not seen in the data set, 1 changed, 2 kept.
        self._state = np.memmap(scratch / "state", np.uint8, "w+", shape=(max(self.num_removed, 1),))
        self.used: set[str] = set()
        self._checked: set[int] = set()
        self._open = lru_cache(maxsize=32)(self._opened)
        blocks = (rows_of(self._open(i)[1], i, np.arange(entry.rows)) for i, entry in enumerate(self._entries))
        self._table = HashTable(scratch / "keys", blocks)

    def _opened(self, number: int) -> tuple[SampleFile, np.ndarray, np.ndarray]:
        """Return a sample file, its keys and its stamps."""
        entry = self._entries[number]
        path = self._store.local(SAMPLES, entry.name, self._scratch)
        name = f"{self._store.folder.url}/{path_of(SAMPLES, entry.name)}"
        file = SampleFile(open(path, "rb", buffering=0), name=name, size=entry.size)
        if number not in self._checked:
            file.check()
            self._checked.add(number)
        for shard, size in file.shards:
            self.used.add(shard)
            self._check_size(path_of(LATENTS, shard), self._latents.get(shard, size), size)
        return file, file.read("keys").numpy(), file.read("stamps").numpy()

    def _check_size(self, path: str, found: int, size: int) -> None:
        """Raise for a file that would count as written although it is not whole."""
        if found != size:
            raise self._store.broken(path, f"it has {found} bytes instead of {size}")

    def keep(self, rows: SampleRows) -> np.ndarray:
        """Return which samples are in the store as they are, (N,) bool, and note that these are still wanted.

        Raises:
            UsageError: Another sample with the key of one of them was given before.
        """
        is_kept = np.zeros(len(rows), bool)
        for number, hit, row, is_same in self._same(rows):
            file, _, _ = self._open(number)
            is_there = np.array([name in self._latents for name, _ in file.shards], bool)
            is_same &= is_there[file.place[row, 0]]
            is_kept[hit] = is_same
            at = self._ends[number] - self._entries[number].rows + row
            if (again := self._state[at] > 0).any():
                first = np.flatnonzero(again)[0]
                raise same_key(file.sample_name(row[first]), rows.names[hit[first]])
            self._state[at] = np.where(is_same, 2, 1)
            self.num_removed -= int(is_same.sum())
        return is_kept

    def has(self, rows: SampleRows) -> np.ndarray:
        """Return which samples are here with the same image and captions, (N,) bool, whether or not encoded."""
        found = np.zeros(len(rows), bool)
        for _, hit, _, is_same in self._same(rows):
            found[hit] = is_same
        return found

    def _same(self, rows: SampleRows) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield for each file with some of the samples: its number, which they are, their rows, and which are equal."""
        file, row = self._table.find(rows.keys)
        for number in np.unique(file[file >= 0]).tolist():
            hit = np.flatnonzero(file == number)
            _, _, stamps = self._open(number)
            yield number, hit, row[hit], (stamps[row[hit]] == rows.stamps[hit]).all(axis=1)

    def entries(self, write: Write, *, all_anew: bool = False) -> list[SampleEntry]:
        """Return the files that hold the kept samples; a file that loses some of its samples is written anew."""
        kept: list[SampleEntry] = []
        for number, entry in enumerate(self._entries):
            rows = np.flatnonzero(self._state[self._ends[number] - entry.rows : self._ends[number]] == 2)
            if len(rows) == entry.rows and not all_anew:
                kept.append(entry)
            elif len(rows):
                file, _, _ = self._open(number)
                kept += write(SampleRows.read(file).take(rows), file.shards, file.place[rows])
        return kept


def same_key(one: str, other: str) -> UsageError:
    """Return the error for two samples, given by name, that have the same key."""
    who = f"the samples {one} and {other} have" if one != other else f"two samples {one} have"
    return UsageError(
        f"precompute: {who} the same key, and every job would write them anew; expected one for each sample; list "
        "each file once, or make the source's key() tell them apart"
    )
