"""Bring a store up to date with a data set: encode what is new, keep what is the same, leave out what is gone.

The samples are looked at in portions, the next one while the images of this one are encoded. Of each portion, the
images that no table knows are cut into latent files, in order; a file that exists already is not encoded again. Then
the portion's table of images is written, and the sample files with captions and token ids. The last act is one small
file: the next generation, the list of all sample files. A job that is killed leaves files that the next one finds.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.data.bad_samples import BadSamples
from sd_lightning.data.shapes import nearest_shapes
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.store.encoding import Encoded, EncodeTask, already_encoded
from sd_lightning.data.store.files import name_of
from sd_lightning.data.store.image_tables import ImageTables
from sd_lightning.data.store.key_table import HASH_BYTES
from sd_lightning.data.store.known_samples import KnownSamples, same_key
from sd_lightning.data.store.rows import SampleRows, Shard, captions_hash
from sd_lightning.data.store.store import LATENTS, SAMPLES, Generation, LatentStore, SampleEntry
from sd_lightning.data.store.tokenizing import Tokenizing

log = logging.getLogger(__name__)

PORTION = 2**20
"""Samples that are looked at before any of them is encoded; two portions are held at a time."""
SAMPLES_PER_FILE = 2**13
"""Samples in a sample file, about: it ends where a latent file ends."""
_LATENT_FILES = 4
"""Latent files of a sample file, if they are as large as asked for: with large latents it has fewer samples."""
_TASKS = 64
"""Latent files into which a small data set is divided, so that every worker has some."""
_LEAST_IMAGES = 64
_READ_AT_ONCE = 256
Run = Callable[[Sequence[EncodeTask]], Iterable[Encoded]]
"""Encodes latent files, in any order."""
Portion = list[tuple[np.ndarray, SampleRows]]
"""Of every shape: the indices of the samples, and their rows."""


@dataclass(frozen=True)
class _Looked:
    """A sample that can be read."""

    index: int
    size: tuple[int, int]
    """(height, width) of the image in pixels, if its shape depends on it."""
    row: tuple[str, str, bytes, list[str]]
    """Identity, name, hash of the image, captions."""


@dataclass
class Counts:
    """What a job has done."""

    samples: int = 0
    """Samples of the data set, usable or not."""
    kept: int = 0
    """Samples that were in the store and are the same."""
    added: int = 0
    """Samples that are new or changed."""
    removed: int = 0
    """Samples that are no longer in the data set, or in another split."""
    moved: int = 0
    """Samples among the added ones that were in another split."""
    encoded: int = 0
    """Images encoded by this job."""
    found: int = 0
    """Images that an earlier job, which did not end, had encoded."""
    bytes_written: int = 0


@dataclass
class StoreJob:
    """A job that brings a store up to date.

    Attributes:
        counts: What has been done so far.
    """

    store: LatentStore
    run: Run
    tokenizing: Tokenizing
    bad: BadSamples
    scratch: Path
    """Folder for temporary files; with object stores, the tables are copied into it."""
    images_per_file: int
    samples_per_file: int = SAMPLES_PER_FILE
    portion: int = PORTION
    num_threads: int = 4
    """Threads that read and hash."""
    looked_at: Callable[[int], None] = lambda count: None
    """Called with the number of samples that have been read and hashed."""
    counts: Counts = field(default_factory=Counts)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def update(self, sources: Mapping[str, Source]) -> Generation:
        """Make the store hold the samples of some sources, by split, and return its generation."""
        before = self.store.generation()
        self._latents = self.store.present(LATENTS)
        self._tables = ImageTables(self.store, self.scratch)
        self._tables.settle(self._latents)
        self._stamps = before.stamps
        self._known = {
            split: KnownSamples(self.store, before.splits.get(split, []), self._latents, self.scratch / split)
            for split in {**before.splits, **sources}
        }
        entries = {split: self._update_split(split, source, before) for split, source in sources.items()}
        if not entries["train"]:
            raise UsageError(
                f"precompute: none of the {self.counts.samples} images can be used, and {self.store.folder.url} stays "
                f"as it is ({self.bad.listed()}); mend them, or give another data set"
            )
        after = Generation(before.number + 1, entries, self.tokenizing.fingerprint, before.stamps)
        if replace(after, number=before.number) == before:
            return before
        self.store.commit(after)
        return after

    def _update_split(self, split: str, source: Source, before: Generation) -> list[SampleEntry]:
        known = self._known[split]
        # With other tokenizers all token ids are made anew, of the captions in the store: they may be imported ones.
        is_stale = before.tokenizers != self.tokenizing.fingerprint
        added: list[SampleEntry] = []
        with closing(self._portions(source)) as portions:
            for indices, rows in (part for portion in portions for part in portion):
                is_kept = known.keep(rows)
                self.counts.kept += int(is_kept.sum())
                new = np.flatnonzero(~is_kept)
                if len(new):
                    added += self._add(split, source, indices[new], self._with_captions(rows.take(new), split))
        self.counts.removed += known.num_removed
        # Those of one shape lie together: they are a bucket.
        return sorted(known.entries(self._write, all_anew=is_stale) + added, key=lambda entry: entry.shape)

    def _with_captions(self, rows: SampleRows, split: str) -> SampleRows:
        """Return rows to add to a split, with the captions that the store has of the same samples.

        The split itself has some whose latents are gone, and its captions count; others move here from another split.
        """
        own = self._known[split].captions(rows)
        captions = list(rows.captions)
        for other, known in self._known.items():
            for place, found in known.captions(rows).items() if other != split else ():
                captions[place] = found
                self.counts.moved += place not in own
        for place, found in own.items():
            captions[place] = found
        return replace(rows, captions=captions)

    def _portions(self, source: Source) -> Generator[Portion, None, None]:
        """Yield the readable samples, a portion at a time; the next one is looked at meanwhile."""
        is_closed = threading.Event()
        with ThreadPoolExecutor(self.num_threads, "look") as threads, ThreadPoolExecutor(1, "portion") as ahead:
            waiting: deque[Future[Portion]] = deque()
            try:
                for begin in range(0, len(source), self.portion):
                    waiting.append(ahead.submit(self._look_at, source, begin, threads, is_closed))
                    if len(waiting) == 2:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                is_closed.set()

    def _look_at(self, source: Source, begin: int, threads: ThreadPoolExecutor, is_closed: threading.Event) -> Portion:
        """Read and hash the samples of a portion, until nobody wants them any more."""
        shapes = self.store.recipe.shapes

        def look(index: int) -> _Looked | str:
            try:
                content = blake2b(source.content(index), digest_size=HASH_BYTES).digest()
                size = source.size(index) if shapes else (1, 1)
                row = source.key(index), source.name(index), content, list(source.captions(index))
                return _Looked(index, size, row)
            except BadSample as reason:
                return str(reason)

        found: list[_Looked] = []
        end = min(begin + self.portion, len(source))
        for at in range(begin, end, _READ_AT_ONCE):
            if is_closed.is_set():
                return []
            some = range(at, min(at + _READ_AT_ONCE, end))
            for index, sample in zip(some, threads.map(look, some)):
                if isinstance(sample, str):
                    self._count_bad({source.name(index): sample})
                else:
                    found.append(sample)
            self.counts.samples += len(some)
            self.looked_at(self.counts.samples)
        _check_keys(found)
        return self._by_shape(found)

    def _count_bad(self, bad: Mapping[str, str]) -> None:
        with self._counting:
            self.bad.count(bad)

    def _by_shape(self, found: Sequence[_Looked]) -> Portion:
        if not found:
            return []
        shape_of = np.zeros(len(found), np.int64)
        if self.store.recipe.shapes:
            shape_of = nearest_shapes(np.array([each.size for each in found]), self.store.recipe.shapes)
        parts = []
        for shape in np.unique(shape_of).tolist():
            here = [found[i] for i in np.flatnonzero(shape_of == shape).tolist()]
            rows = SampleRows.of([each.row for each in here], self._stamps, shape=shape)
            parts.append((np.array([each.index for each in here], np.int64), rows))
        return parts

    def _add(self, split: str, source: Source, indices: np.ndarray, rows: SampleRows) -> list[SampleEntry]:
        """Encode the images of new samples where no table knows them, and write the samples."""
        _, where = self._tables.find(rows.images, self._latents)
        reasons: dict[str, str] = {}
        unknown = np.flatnonzero(where[:, 0] < 0)
        if len(unknown):
            _, first = np.unique(rows.images[unknown], axis=0, return_index=True)
            first = unknown[np.sort(first)]
            reasons = self._encode(split, indices[first], rows.images[first], rows.shape)
        shards, where = self._tables.find(rows.images, self._latents)
        is_bad = where[:, 0] < 0
        for number in np.flatnonzero(is_bad).tolist():
            reason = reasons[rows.images[number].tobytes().hex()]
            self._count_bad({source.name(int(indices[number])): reason})
        good = np.flatnonzero(~is_bad)
        self.counts.added += len(good)
        return self._write(rows.take(good), shards, where[good])

    def _encode(self, split: str, indices: np.ndarray, images: np.ndarray, shape: int) -> dict[str, str]:
        """Encode images and write their table; return the reasons of those that cannot be used."""
        step, pixels = self.images_per_file, self.store.recipe.all_shapes[shape]
        cuts = range(0, len(images), step)
        tasks = [EncodeTask(split, indices[i : i + step], images[i : i + step], pixels) for i in cuts]
        names = [task.name(self.store.recipe) for task in tasks]
        is_there = [name in self._latents for name in names]
        results = {
            name: already_encoded(self.store, task, self._latents[name])
            for name, task, there in zip(names, tasks, is_there)
            if there
        }
        self.counts.found += sum(len(each.images) for each in results.values())
        for each in self.run([task for task, there in zip(tasks, is_there) if not there]):
            results[each.name] = each
            self.counts.encoded += len(each.images)
            self.counts.bytes_written += each.size
        encoded = [results[name] for name in names if len(results[name].images)]
        self._latents |= {each.name: each.size for each in encoded}
        if encoded:
            self._tables.add([(each.name, each.images) for each in encoded], self._latents)
        return {image: reason for each in results.values() for image, reason in each.bad.items()}

    def _write(self, rows: SampleRows, shards: Sequence[Shard], where: np.ndarray) -> list[SampleEntry]:
        """Write samples to one or more files."""
        entries = []
        cuts = [0, *self._cuts(where[:, 0]), len(rows)] if len(rows) else []
        for begin, end in pairwise(cuts):
            some = np.arange(begin, end)
            part = rows.take(some)
            captions = [caption for each in part.captions for caption in each]
            ids = dict(self.tokenizing.tokenize(captions))
            data = part.to_bytes(shards, where[some], ids)
            name = name_of(data)
            self.store.put(SAMPLES, name, data)
            self.counts.bytes_written += len(data)
            digests = name_of(part.keys.tobytes()), name_of(part.images.tobytes()), captions_hash(part.captions)
            entries.append(SampleEntry(name, len(part), len(data), part.shape, *digests))
        return entries

    def _cuts(self, files: np.ndarray) -> list[int]:
        """Return where to cut samples into files, given the number of each one's latent file.

        Cuts are where a latent file begins, so that sample files do not share any: a reader that takes a sample file
        after the other then reads each latent file once.
        """
        begins = np.flatnonzero(np.diff(np.maximum.accumulate(files)) > 0) + 1
        cuts = [0]
        for begin in begins.tolist():
            if begin - cuts[-1] >= self.samples_per_file:
                cuts.append(begin)
        return cuts[1:]


def _check_keys(found: Sequence[_Looked]) -> None:
    """Raise if two samples have the same key."""
    if len({each.row[0] for each in found}) < len(found):
        name_of_key: dict[str, str] = {}
        for key, name, *_ in (each.row for each in found):
            if key in name_of_key:
                raise same_key(name_of_key[key], name)
            name_of_key[key] = name


def rows_per_file(num_samples: int, bytes_per_image: int, shard_mb: float) -> tuple[int, int]:
    """Return how many images a latent file gets, and how many samples a sample file.

    Neither depends on the number of workers, so that any number of them writes the same files.

    Args:
        num_samples: Length of the data set.
        bytes_per_image: Bytes of an image's latents, all variants.
        shard_mb: Largest size of a latent file, in megabytes.
    """
    largest = max(1, math.floor(shard_mb * 1e6 / bytes_per_image))
    # Whole groups of images, which are encoded together.
    share = -(-num_samples // (_TASKS * _LEAST_IMAGES)) * _LEAST_IMAGES
    return min(largest, max(share, _LEAST_IMAGES)), min(SAMPLES_PER_FILE, _LATENT_FILES * largest)
