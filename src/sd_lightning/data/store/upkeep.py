"""Free the space of what a store no longer refers to, and find files that are not what was written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.store.encoding import latent_file
from sd_lightning.data.store.files import ALTERED, Shard, StoreFile, about, name_of
from sd_lightning.data.store.layout import (
    GENERATIONS,
    LATENTS,
    SAMPLES,
    AlteredList,
    Generation,
    LatentStore,
    SampleEntry,
    path_of,
)
from sd_lightning.data.store.sample_file import SampleRows
from sd_lightning.data.store.texts import EMPTY, PLACES, TEXTS, files_of, places_of, text_kinds

_WORTHWHILE = 0.1
"""A latent file is written anew if a larger part of its rows is unused."""
NO_OTHER_LIST = (
    "it was altered, and no other list of samples can be read, so it stays: which images are held out is told by it "
    "alone; put back a copy of it, or delete it by hand and run precompute again, which encodes nothing twice, but "
    "chooses the held-out images anew"
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

    def _entries(self) -> Iterator[SampleEntry]:
        return chain.from_iterable(self.generation.splits.values())

    def _used_rows(self) -> dict[str, int]:
        """Return which rows of every latent file samples refer to, a bit for each row."""
        used: dict[str, int] = {}
        for entry in self._entries():
            with self.store.opened(entry, self._scratch) as file:
                for number, (name, _) in enumerate(file.shards):
                    rows = file.place[file.place[:, 0] == number, 1]
                    bits = np.packbits(np.bincount(rows) > 0, bitorder="little")
                    used[name] = used.get(name, 0) | int.from_bytes(bits.tobytes(), "little")
        return used

    def _find(self) -> Unused:
        unused = Unused()
        if self.generation.number == 0:  # nothing is committed: a job has not ended yet
            return unused
        entry_of = {entry.name: entry for entry in self._entries()}
        captions = {EMPTY, *(entry.captions for entry in entry_of.values())}
        kept = [kind for kind in text_kinds(self.store) if kind != self._drop_texts]
        texts = {path_of(kind, name) for kind in kept for name in texts_in_use(self.store, kind, captions)}
        places = set(map(places_of, kept))
        for entry in self.store.folder.entries():
            path, (folder, _, _) = PurePosixPath(entry.name), entry.name.partition("/")
            is_used = {
                GENERATIONS: path.suffix != ".json" or path.stem == f"{self.generation.number:08}",
                SAMPLES: path.stem in entry_of,
                LATENTS: path.stem in self._used,
                TEXTS: entry.name in texts,
                PLACES: path.stem in captions and str(path.parent) in places,
            }
            if not is_used.get(folder, True) and (folder == GENERATIONS or path.suffix == ".safetensors"):
                unused.files.append(entry.name)
                unused.freed += entry.size
        for name, bits in self._used.items():
            if name not in self._latents:
                raise UsageError(
                    f"precompute prune: {self.store.folder.url}/{path_of(LATENTS, name)} is not there; run precompute "
                    "again, which encodes what is missing"
                )
            with self.store.readable(path_of(LATENTS, name)):
                num_rows = self.store.header(LATENTS, name, self._latents[name]).columns["images"].shape[0]
            packed = np.frombuffer(bits.to_bytes(num_rows // 8 + 1, "little"), np.uint8)
            rows = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
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
        after = replace(self.generation, number=self.generation.number + 1, splits=entries)
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
        used = {path_of(SAMPLES, name) for name in kept} | {path_of(LATENTS, name) for name, _ in moved.values()}
        for path in (*self.unused.files, *replaced, *(path_of(LATENTS, name) for name in moved)):
            if path not in used:
                self.store.folder.delete(path)

    def _compact(self) -> dict[str, Shard]:
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
            moved[name] = new, len(data)
        return moved

    def _moved(self, entries: Sequence[SampleEntry], moved: Mapping[str, Shard]) -> list[SampleEntry]:
        """Write the sample files that refer to moved files anew."""
        new = []
        for entry in entries:
            with self.store.opened(entry, self._scratch) as file:
                if not any(name in moved for name, _ in file.shards):
                    new.append(entry)
                    continue
                place = file.place.copy()
                for number, (name, _) in enumerate(file.shards):
                    if name in moved:
                        here = place[:, 0] == number
                        place[here, 1] = np.searchsorted(self.unused.partly[name], place[here, 1])
                shards = [moved.get(name, (name, size)) for name, size in file.shards]
                data = SampleRows.read(file).to_bytes(shards, place, file.input_ids())
            self.store.put(SAMPLES, name_of(data), data)
            new.append(replace(entry, name=name_of(data), size=len(data)))
        return new


def broken_files(store: LatentStore, scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) of the files of a store that are not what was written; all bytes are read.

    Files that are deleted meanwhile are skipped.

    Raises:
        UsageError: A file cannot be read just now, or another version wrote a list.
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
    texts_of = {places_of(kind): kind for kind in text_kinds(store)}
    for kind in (LATENTS, SAMPLES, *texts_of.values(), *texts_of):
        of_places = store.present(texts_of[kind]) if kind in texts_of else None
        for name, size in sorted(store.present(kind).items()):
            try:
                path = store.local(kind, name, scratch)
                reason = _problem(path, kind, name, size)
                if reason is None and of_places is not None:
                    needed = files_of(about(store.header(kind, name, size)))
                    gone = [text for text, _ in needed if text not in of_places]
                    reason = f"its text file {gone[0]} is not there" if gone else None
            except FileNotFoundError:
                continue
            if reason is not None:
                yield path_of(kind, name), reason
            if path.is_relative_to(scratch):
                path.unlink()


def texts_in_use(store: LatentStore, kind: str, captions: Collection[str]) -> set[str]:
    """Return the names of the text files of a kind with the captions of some sample files, by their ``captions``."""
    places = {name: size for name, size in store.present(places_of(kind)).items() if name in captions}
    headers = (store.header(places_of(kind), name, size) for name, size in places.items())
    return {text for header in headers for text, _ in files_of(about(header))}


def missing_files(store: LatentStore, scratch: Path) -> Iterator[str]:
    """Yield the paths of files that are not there, although the newest generation of a store refers to them."""
    samples, latents = store.present(SAMPLES), store.present(LATENTS)
    missing = set()
    for entry in chain.from_iterable(store.generation().splits.values()):
        if entry.name not in samples:
            missing.add(path_of(SAMPLES, entry.name))
            continue
        with suppress(UsageError), store.opened(entry, scratch) as file:  # broken ones are told of anyway
            missing |= {path_of(LATENTS, name) for name, _ in file.shards if name not in latents}
    yield from sorted(missing)


def _problem(path: Path, kind: str, name: str, size: int) -> str | None:
    try:
        with open(path, "rb", buffering=0) as handle:
            if kind == SAMPLES:
                return None if name_of(handle.read()) == name else ALTERED
            return None if StoreFile(handle, name=name, size=size).is_whole(path) else ALTERED
    except UsageError as error:
        return str(error)
