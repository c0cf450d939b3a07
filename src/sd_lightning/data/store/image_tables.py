"""The tables of a store: in which latent file, and in which row of it, the latents of each image are.

Every portion of a job adds a table. As soon as ``FAN_IN`` tables have about the same size, they are merged into one, so
a store of two billion images has a few dozen. Tables only say where latents are: one may repeat what another says, and
one that names a latent file that is gone says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sd_lightning.data.store.files import name_of
from sd_lightning.data.store.key_table import HASH_BYTES, KeyTable, rows_of, write_sorted, write_table
from sd_lightning.data.store.rows import Shard
from sd_lightning.data.store.store import LATENTS, TABLES, LatentStore, path_of

log = logging.getLogger(__name__)

FAN_IN = 16
"""Tables of a level that are merged into one."""
LEVEL_ROWS = 2**20
"""Rows of a table of level 0, at most; those of the next level have ``FAN_IN`` times as many."""
MOST_ROWS = 2**28
"""Tables of more rows (6.4 GB) are not merged."""


@dataclass(frozen=True)
class Moved:
    """The rows of a latent file that are now another file."""

    name: str
    """The new file."""
    size: int
    """Its bytes."""
    rows: np.ndarray
    """(N,) int64, increasing: the old row of each row."""


class ImageTables:
    """All tables of a store; only the job that holds its lock changes them."""

    def __init__(
        self,
        store: LatentStore,
        scratch: Path,
        *,
        fan_in: int = FAN_IN,
        level_rows: int = LEVEL_ROWS,
        most_rows: int = MOST_ROWS,
    ) -> None:
        """Open the tables.

        Args:
            store: The store.
            scratch: Folder for temporary files; tables of a store that is not local are copied into it.
            fan_in: See ``FAN_IN``.
            level_rows: See ``LEVEL_ROWS``.
            most_rows: See ``MOST_ROWS``.
        """
        self._store, self._scratch = store, scratch
        self._fan_in, self._level_rows, self._most_rows = fan_in, level_rows, most_rows
        self._images = lru_cache(maxsize=256)(self._read_images)
        self._tables = {name: KeyTable(store.local(TABLES, name, scratch)) for name in sorted(store.present(TABLES))}

    def __len__(self) -> int:
        return len(self._tables)

    def find(self, images: np.ndarray, latents: Mapping[str, int]) -> tuple[list[Shard], np.ndarray]:
        """Look up images.

        Args:
            images: (N, 16) uint8, their hashes.
            latents: Name -> bytes of the latent files that there are.

        Returns:
            Latent files in the order in which the images need them, and (N, 2) int64 with every image's file number
            there and row, or (-1, -1). Which tables say so makes no difference, and what one says counts only if
            that row of the latent file has the image's hash.
        """
        names: list[str] = []
        where = np.full((len(images), 2), -1, np.int64)
        order = np.lexsort(images.T[::-1])  # neighbouring pages of the tables
        for table in self._tables.values():
            is_there = np.array([name in latents for name in table.shards], bool)
            found = table.find(images[order])
            hit = np.flatnonzero(found >= 0)
            shard, row = table.at(found[hit])
            live = shard < len(is_there)
            live[live] = is_there[shard[live]]
            live[live] = self._agrees(table, shard[live], row[live], images[order[hit[live]]])
            here, shard, row = order[hit[live]], shard[live], row[live]
            # Of an image that was encoded twice, the file with the smaller name counts.
            before = where[here, 0]
            wins = before < 0
            for i in np.flatnonzero(~wins).tolist():
                wins[i] = table.shards[shard[i]] < names[before[i]]
            where[here[wins], 0], where[here[wins], 1] = len(names) + shard[wins].astype(np.int64), row[wins]
            names += table.shards
        used, first, number = np.unique(where[:, 0], return_index=True, return_inverse=True)
        needed = [i for i in np.argsort(first).tolist() if used[i] >= 0]
        new_number = np.full(len(used), -1, np.int64)
        new_number[needed] = np.arange(len(needed))
        where[:, 0] = new_number[number.reshape(-1)]
        return [(names[used[i]], latents[names[used[i]]]) for i in needed], where

    def _agrees(self, table: KeyTable, shard: np.ndarray, row: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Return whether row ``row[i]`` of latent file ``shard[i]`` has the hash ``images[i]``, (N,) bool."""
        agrees = np.zeros(len(images), bool)
        for number in np.unique(shard).tolist():
            stored = self._images(table.shards[number])
            here = np.flatnonzero((shard == number) & (row < len(stored)))
            agrees[here] = (stored[row[here]] == images[here]).all(axis=1)
        if not agrees.all():
            log.warning(
                "precompute: a table of %s says of %d images that they are where others are; they are encoded again; "
                "precompute verify finds the table",
                *(self._store.folder.url, int((~agrees).sum())),
            )
        return agrees

    def _read_images(self, name: str) -> np.ndarray:
        return np.frombuffer(self._store.column(LATENTS, name, "images")[0], np.uint8).reshape(-1, HASH_BYTES)

    def add(self, encoded: Sequence[tuple[str, np.ndarray]], latents: Mapping[str, int]) -> None:
        """Write a table of new latent files, and merge tables if there are enough.

        Args:
            encoded: Name and images (N, 16) uint8 of each new file.
            latents: Name -> bytes of the latent files that there are.
        """
        blocks = (rows_of(images, i, np.arange(len(images))) for i, (_, images) in enumerate(encoded))
        self._write(blocks, [name for name, _ in encoded])
        self.settle(latents)

    def settle(self, latents: Mapping[str, int]) -> None:
        """Merge tables of about the same size; also ends what a killed job had begun.

        Args:
            latents: Name -> bytes of the latent files that there are; what tables say of others is dropped.
        """
        self._delete_repeated()
        while (names := self._to_merge()) is not None:
            shards = [name for table in names for name in self._tables[table].shards if name in latents]
            shards = list(dict.fromkeys(shards))
            blocks = (rows for table in names for rows in _renumbered(self._tables[table], shards, {}))
            merged = self._write(blocks, shards) if shards else None
            self._delete([name for name in names if name != merged])

    def rewrite(self, used: Iterable[str], moved: Mapping[str, Moved]) -> None:
        """Drop what tables say of latent files that are gone, and say where those of moved files are now.

        One table after the other is written anew, and its old file deleted; the others stay as they are.

        Args:
            used: The latent files that stay as they are.
            moved: Old name -> what became of it.
        """
        wanted = {*used, *moved}
        for name, table in list(self._tables.items()):
            shards = [moved[each].name if each in moved else each for each in table.shards if each in wanted]
            if shards != table.shards:
                if shards:
                    self._write_rewritten(table, list(dict.fromkeys(shards)), moved)
                self._delete([name])

    def _write_rewritten(self, table: KeyTable, shards: list[str], moved: Mapping[str, Moved]) -> None:
        name = _name(shards)
        write_sorted(self._path(name), lambda: _renumbered(table, shards, moved), shards=shards)
        self._put(name)

    def _write(self, blocks: Iterable[np.ndarray], shards: Sequence[str]) -> str:
        name = _name(shards)
        write_table(self._path(name), blocks, shards=shards)
        self._put(name)
        return name

    def _path(self, name: str) -> Path:
        """Return where a table is written, and where the copy of one lies if the store is not local."""
        return self._scratch / f"{TABLES}-{name}.safetensors"

    def _put(self, name: str) -> None:
        path = self._path(name)
        if not self._store.put(TABLES, name, path):  # what is there may be altered: its name says what it names only
            self._store.folder.delete(path_of(TABLES, name))
            self._store.put(TABLES, name, path)
        if self._store.folder.path("") is not None:
            path.unlink()
        self._tables[name] = KeyTable(self._store.local(TABLES, name, self._scratch))

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.folder.delete(path_of(TABLES, name))
            self._path(name).unlink(missing_ok=True)
            del self._tables[name]

    def _delete_repeated(self) -> None:
        """Delete tables that another one repeats: a job was killed after it had written the merged one."""
        shards = {name: frozenset(table.shards) for name, table in self._tables.items()}
        for name in sorted(shards, key=lambda each: (len(shards[each]), each)):
            if any(other != name and shards[name] <= shards[other] for other in shards):
                del shards[name]
                self._delete([name])

    def _to_merge(self) -> list[str] | None:
        """Return the names of tables of one level, if they are enough."""
        levels: dict[int, list[str]] = {}
        for name in sorted(self._tables):
            levels.setdefault(self._level(len(self._tables[name])), []).append(name)
        for names in levels.values():
            rows = sum(len(self._tables[name]) for name in names)
            if len(names) >= self._fan_in and rows <= self._most_rows:
                return names
        return None

    def _level(self, rows: int) -> int:
        level = 0
        while rows > self._level_rows * self._fan_in**level:
            level += 1
        return level


def _name(shards: Sequence[str]) -> str:
    return name_of(*(each.encode() for each in shards))


def _renumbered(table: KeyTable, shards: Sequence[str], moved: Mapping[str, Moved]) -> Iterator[np.ndarray]:
    """Yield a table's rows in order, with the numbers of other files, and the new rows of moved ones.

    Rows that are in none of them are left out.
    """
    number = {name: i for i, name in enumerate(shards)}
    is_moved = np.array([name in moved for name in table.shards], bool)
    new_names = [moved[name].name if name in moved else name for name in table.shards]
    new_numbers = np.array([number.get(name, -1) for name in new_names], np.int64)
    # One sorted list of all rows that moved: a key is the file's number and the old row.
    old_rows = [moved[name].rows if name in moved else np.empty(0, np.int64) for name in table.shards]
    begins = np.cumsum([0, *map(len, old_rows)])
    keys = np.concatenate([(i << 32) + rows for i, rows in enumerate(old_rows)])
    for rows in table.blocks():
        rows = rows[rows["shard"] < len(table.shards)]  # an altered row says nothing
        shard = rows["shard"].astype(np.int64)
        new = new_numbers[shard]
        here = np.flatnonzero(is_moved[shard])
        if len(here):
            wanted = (shard[here] << 32) + rows["row"][here]
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            new[here[keys[at] != wanted]] = -1
            rows["row"][here] = at - begins[shard[here]]
        rows["shard"] = np.maximum(new, 0)
        yield rows[new >= 0]
