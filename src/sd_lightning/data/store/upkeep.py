"""Free the space of what a store no longer refers to, and find files that are not what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.store.encoding import latent_file
from sd_lightning.data.store.files import ALTERED, SampleFile, StoreFile, name_of
from sd_lightning.data.store.image_tables import ImageTables, Moved
from sd_lightning.data.store.key_table import KeyTable
from sd_lightning.data.store.rows import SampleRows
from sd_lightning.data.store.store import (
    GENERATIONS,
    LATENTS,
    SAMPLES,
    TABLES,
    AlteredList,
    Generation,
    LatentStore,
    SampleEntry,
    path_of,
)
from sd_lightning.data.store.texts import EMPTY, TEXTS, text_kinds

_WORTHWHILE = 0.1
"""A latent file is written anew if a larger part of its rows is unused."""
NO_OTHER_LIST = (
    "it was altered, and no other list of samples can be read, so it stays: imported captions, and which images are "
    "held out, are told by it alone; put back a copy of it, or delete it by hand and run precompute again, which "
    "encodes nothing twice, but takes the captions of the data set and chooses the held-out images anew"
)
"""Reason with which an altered list is told that is not to be deleted."""


@dataclass
class Unused:
    """What the newest generation of a store does not refer to."""

    files: list[str] = field(default_factory=list)
    """Paths of files that nobody refers to."""
    freed: int = 0
    """Bytes of these files, and of the unused rows of the next ones."""
    partly: dict[str, np.ndarray] = field(default_factory=dict)
    """Latent file -> the rows (N,) that are used, for files that are worth writing anew."""


class Pruning:
    """Frees the space of a store that its newest generation does not refer to."""

    def __init__(self, store: LatentStore, scratch: Path, *, drop_texts: str | None = None) -> None:
        """Look at the store; nothing is changed.

        Args:
            store: The store.
            scratch: Folder for temporary files.
            drop_texts: Kind of text files that count as unused, from ``text_kinds``.
        """
        self.store, self._scratch, self._drop_texts = store, scratch, drop_texts
        self.generation = store.generation()
        self._latents = store.present(LATENTS)
        self._used = self._used_rows()
        self.unused = self._find()

    def _used_rows(self) -> dict[str, np.ndarray]:
        """Return which rows of every latent file samples refer to, a bit for each row."""
        used: dict[str, np.ndarray] = {}
        for file in self._sample_files():
            place = file.place
            for number, (name, _) in enumerate(file.metadata["shards"]):
                rows = place[place[:, 0] == number, 1]
                before = np.unpackbits(used.get(name, np.empty(0, np.uint8)))
                bits = np.zeros(max(len(before), int(rows.max()) + 1), np.uint8)
                bits[: len(before)] = before
                bits[rows] = 1
                used[name] = np.packbits(bits)
        return used

    def _sample_files(self) -> Iterator[SampleFile]:
        for entries in self.generation.splits.values():
            for entry in entries:
                yield self._sample_file(entry)

    def _sample_file(self, entry: SampleEntry) -> SampleFile:
        path = self.store.local(SAMPLES, entry.name, self._scratch)
        file = SampleFile(open(path, "rb", buffering=0), name=entry.name, size=entry.size)
        file.check()
        return file

    def _find(self) -> Unused:
        unused = Unused()
        if self.generation.number == 0:  # nothing is committed: a job has not ended yet
            return unused
        named = {entry.name for entries in self.generation.splits.values() for entry in entries}
        newest = f"{GENERATIONS}/{self.generation.number:08}.json"
        lists = set(self.store.lists()) - {newest}
        older = [entry for entry in self.store.folder.entries(f"{GENERATIONS}/") if entry.name in lists]
        unused.files += [entry.name for entry in older]
        unused.freed += sum(entry.size for entry in older)
        for kind, present, wanted in (
            (SAMPLES, self.store.present(SAMPLES), named),
            (LATENTS, self._latents, self._used.keys()),
        ):
            gone = sorted(present.keys() - wanted)
            unused.files += [path_of(kind, name) for name in gone]
            unused.freed += sum(present[name] for name in gone)
        captions = {EMPTY, *(entry.captions for entries in self.generation.splits.values() for entry in entries)}
        for entry in self.store.folder.entries(f"{TEXTS}/"):
            path = PurePosixPath(entry.name)
            if path.stem not in captions or str(path.parent) == self._drop_texts:
                unused.files.append(entry.name)
                unused.freed += entry.size
        for name, bits in self._used.items():
            if name not in self._latents:
                raise UsageError(
                    f"precompute prune: {self.store.folder.url}/{path_of(LATENTS, name)} is not there; run precompute "
                    "again, which encodes what is missing"
                )
            num_rows = self.store.column(LATENTS, name, "images")[1][0]
            rows = np.flatnonzero(np.unpackbits(bits))
            if len(rows) < num_rows * (1 - _WORTHWHILE):
                unused.partly[name] = rows
                unused.freed += self._latents[name] * (num_rows - len(rows)) // num_rows
        return unused

    def run(self) -> None:
        """Write partly used files anew, commit a generation that names the new ones, and delete the old ones."""
        if not self.unused.files and not self.unused.partly:
            return
        moved = self._compact()
        entries = {split: self._moved(old, moved) for split, old in self.generation.splits.items()}
        ImageTables(self.store, self._scratch).rewrite(self._used, moved)
        after = replace(self.generation, number=self.generation.number + 1, splits=entries, has_seal=True)
        if replace(after, number=self.generation.number) != self.generation:
            self.store.commit(after)
            self.unused.files.append(f"{GENERATIONS}/{self.generation.number:08}.json")
        kept = {entry.name for each in entries.values() for entry in each}
        replaced = [
            path_of(SAMPLES, entry.name)
            for old in self.generation.splits.values()
            for entry in old
            if entry.name not in kept
        ]
        # A pruning that was killed may have written some of them, which nobody referred to until now.
        used = {path_of(SAMPLES, name) for name in kept} | {path_of(LATENTS, each.name) for each in moved.values()}
        for path in (*self.unused.files, *replaced, *(path_of(LATENTS, name) for name in moved)):
            if path not in used:
                self.store.folder.delete(path)

    def _compact(self) -> dict[str, Moved]:
        """Write the used rows of every partly used file to a file of its own; return these by the old name."""
        moved = {}
        for name, rows in self.unused.partly.items():
            path = self.store.local(LATENTS, name, self._scratch)
            with open(path, "rb", buffering=0) as handle:
                file = StoreFile(handle, name=name, size=self._latents[name])
                if not file.is_whole(path):
                    raise file.broken(ALTERED)
                variants = self.store.recipe.variants
                encodings = (rows[:, None] * variants + np.arange(variants)).reshape(-1)
                images = file.read("images")[torch.from_numpy(rows)]
                tensors = {
                    "latents": file.read("latents")[torch.from_numpy(encodings)],
                    "sizes": file.read("sizes")[torch.from_numpy(encodings)],
                    "images": images,
                }
            data = latent_file(tensors, self.store.recipe, {})
            new = name_of(self.store.recipe.fingerprint.encode(), images.numpy().tobytes())
            self.store.put(LATENTS, new, data)
            moved[name] = Moved(new, len(data), rows)
        return moved

    def _moved(self, entries: Sequence[SampleEntry], moved: Mapping[str, Moved]) -> list[SampleEntry]:
        """Write the sample files that refer to moved files anew."""
        new = []
        for entry in entries:
            file = self._sample_file(entry)
            shards = file.metadata["shards"]
            if not any(name in moved for name, _ in shards):
                new.append(entry)
                continue
            place = file.place.copy()
            for number, (name, _) in enumerate(shards):
                if name in moved:
                    here = place[:, 0] == number
                    place[here, 1] = np.searchsorted(moved[name].rows, place[here, 1])
            names = [(moved[name].name, moved[name].size) if name in moved else (name, size) for name, size in shards]
            ids = {name.removeprefix("input_ids."): file.read(name) for name in file.id_columns}
            data = SampleRows.read(file).to_bytes(names, place, ids)
            self.store.put(SAMPLES, name_of(data), data)
            new.append(replace(entry, name=name_of(data), size=len(data)))
        return new


def broken_files(store: LatentStore, scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of the files of a store that are not what was written; all bytes are read.

    Files that a job deletes meanwhile, such as tables that it has merged, are skipped.

    Raises:
        UsageError: A file cannot be read just now, or a later version wrote a list.
    """
    altered, num_readable = [], 0
    for name in store.lists():
        try:
            Generation.from_json(store.folder.read(name), where=f"{store.folder.url}/{name}")
            num_readable += 1
        except FileNotFoundError:
            continue
        except AlteredList:
            altered.append(name)
    yield from ((name, ALTERED if num_readable else NO_OTHER_LIST) for name in altered)
    for kind in (LATENTS, SAMPLES, TABLES, *text_kinds(store)):
        for name, size in sorted(store.present(kind).items()):
            try:
                path = store.local(kind, name, scratch)
                reason = _problem(path, kind, name, size)
            except FileNotFoundError:
                continue
            if reason is not None:
                yield path_of(kind, name), reason
            if path.is_relative_to(scratch):
                path.unlink()


def unsealed_files(store: LatentStore, scratch: Path) -> list[str]:
    """Return the paths of lists and tables that older versions wrote, without a seal; broken ones are left out."""
    found = []
    for path in (*store.lists(), *(path_of(TABLES, name) for name in sorted(store.present(TABLES)))):
        with suppress(UsageError, FileNotFoundError):
            if path.startswith(TABLES):
                is_old = KeyTable(store.local(TABLES, PurePosixPath(path).stem, scratch)).seal is None
            else:
                is_old = not Generation.from_json(store.folder.read(path), where=path).has_seal
            found += [path] if is_old else []
    return found


def missing_files(store: LatentStore, scratch: Path) -> Iterator[str]:
    """Yield the paths of files that are not there, although the newest generation of a store refers to them."""
    samples, latents = store.present(SAMPLES), store.present(LATENTS)
    missing = set()
    for entry in chain.from_iterable(store.generation().splits.values()):
        if entry.name not in samples:
            missing.add(path_of(SAMPLES, entry.name))
            continue
        with suppress(UsageError), store.opened(entry, scratch) as file:  # broken ones are told of anyway
            missing |= {path_of(LATENTS, name) for name, _ in file.metadata["shards"] if name not in latents}
    yield from sorted(missing)


def _problem(path: Path, kind: str, name: str, size: int) -> str | None:
    try:
        if kind == TABLES:
            return None if KeyTable(path).is_sound() else ALTERED
        with open(path, "rb", buffering=0) as handle:
            if kind == SAMPLES:
                return None if name_of(handle.read()) == name else ALTERED
            return None if StoreFile(handle, name=name, size=size).is_whole(path) else ALTERED
    except UsageError as error:
        return str(error)
