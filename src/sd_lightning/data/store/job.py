"""Bring a store up to date with a data set: encode what is new, keep what is the same, leave out what is gone.

The samples are looked at in portions, the next one while the images of this one are encoded. Of each portion, the
images that no latent file has are cut into new ones, in order. Then the sample files with captions and token ids are
written. The last act is one small file: the next generation, the list of all sample files. A job that is killed leaves
latent files that the next one finds, and the rest is cut as it would have been.
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
from sd_lightning.data.batch import BadSamples
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.store.encoding import Encoded, EncodeTask
from sd_lightning.data.store.files import HASH_BYTES, Shard, captions_hash, name_of
from sd_lightning.data.store.index import KnownSamples, RowIndex, same_key
from sd_lightning.data.store.layout import LATENTS, SAMPLES, Generation, LatentStore, SampleEntry
from sd_lightning.data.store.sample_file import Sample, SampleRows
from sd_lightning.data.store.texts import Tokenizing
from sd_lightning.data.transform import nearest_shapes

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
Portion = list[SampleRows]
"""The samples of every shape."""


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
    """Images that an earlier job had encoded, and to which no sample referred: it did not end, or they were removed."""
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
    """Folder for temporary files; with object stores, sample files are copied into it."""
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
        self._known = {
            split: KnownSamples(self.store, before.splits.get(split, []), self._latents, self.scratch / split)
            for split in {**before.splits, **sources}
        }
        used = set[str]().union(*(known.used for known in self._known.values()))
        self._images = RowIndex(self.store, self._latents, self.scratch, used=used)
        entries = {split: self._update_split(split, source, before) for split, source in sources.items()}
        if not entries["train"]:
            raise UsageError(
                f"precompute: none of the {self.counts.samples} images can be used, and {self.store.folder.url} stays "
                f"as it is ({self.bad.listed()}); mend them, or give another data set"
            )
        after = Generation(before.number + 1, entries, self.tokenizing.fingerprint)
        if replace(after, number=before.number) == before:
            return before
        self.store.commit(after)
        return after

    def _update_split(self, split: str, source: Source, before: Generation) -> list[SampleEntry]:
        known = self._known[split]
        added: list[SampleEntry] = []
        with closing(self._portions(source)) as portions:
            for rows in (part for portion in portions for part in portion):
                is_kept = known.keep(rows)
                self.counts.kept += int(is_kept.sum())
                if not is_kept.all():
                    added += self._add(split, source, rows.take(np.flatnonzero(~is_kept)))
        self.counts.removed += known.num_removed
        is_stale = before.tokenizers != self.tokenizing.fingerprint  # all token ids are made anew
        # Those of one shape lie together: they are a bucket.
        return sorted(known.entries(self._write, all_anew=is_stale) + added, key=lambda entry: entry.shape)

    def _count_moved(self, split: str, rows: SampleRows) -> None:
        """Count the samples to add to a split that were in another one."""
        is_moved = ~self._known[split].has(rows)
        for other, known in self._known.items():
            if other != split:
                self.counts.moved += int((is_moved & known.has(rows)).sum())

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

        def look(index: int) -> Sample | str:
            try:
                content = blake2b(source.content(index), digest_size=HASH_BYTES).digest()
                size = source.size(index) if shapes else (1, 1)
                captions = list(source.captions(index))
                return Sample(index, source.key(index), source.name(index), content, captions, size)
            except BadSample as reason:
                return str(reason)

        found: list[Sample] = []
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

    def _by_shape(self, found: Sequence[Sample]) -> Portion:
        if not found:
            return []
        shape_of = np.zeros(len(found), np.int64)
        if self.store.recipe.shapes:
            shape_of = nearest_shapes(np.array([each.size for each in found]), self.store.recipe.shapes)
        parts = []
        for shape in np.unique(shape_of).tolist():
            here = [found[i] for i in np.flatnonzero(shape_of == shape).tolist()]
            parts.append(SampleRows.of(here, shape=shape))
        return parts

    def _add(self, split: str, source: Source, rows: SampleRows) -> list[SampleEntry]:
        """Encode the images of new samples that no latent file has, and write the samples."""
        self._count_moved(split, rows)
        reasons = self._encode(split, rows)
        shards, where = self._images.find(rows.images)
        is_bad = where[:, 0] < 0
        for number in np.flatnonzero(is_bad).tolist():
            reason = reasons[rows.images[number].tobytes().hex()]
            self._count_bad({source.name(int(rows.indices[number])): reason})
        good = np.flatnonzero(~is_bad)
        self.counts.added += len(good)
        return self._write(rows.take(good), shards, where[good])

    def _encode(self, split: str, rows: SampleRows) -> dict[str, str]:
        """Encode the images of samples that no latent file has; return the reasons of those that cannot be used."""
        _, first = np.unique(rows.images, axis=0, return_index=True)
        rows = rows.take(np.sort(first))
        shards, where = self._images.find(rows.images)
        left_over = np.array([*map(self._images.is_left_over, shards), False], bool)
        self.counts.found += int(left_over[where[:, 0]].sum())
        hashes = [image.tobytes().hex() for image in rows.images]
        reasons = {image: self._images.bad[image] for image in hashes if image in self._images.bad}
        unknown = rows.take(np.flatnonzero((where[:, 0] < 0) & [image not in reasons for image in hashes]))
        step, pixels = self.images_per_file, self.store.recipe.all_shapes[rows.shape]
        parts = [unknown.take(np.arange(i, min(i + step, len(unknown)))) for i in range(0, len(unknown), step)]
        tasks = [EncodeTask(split, part.indices, part.images, pixels) for part in parts]
        results: dict[str, Encoded] = {}
        for each in self.run(tasks) if tasks else ():
            results[each.name] = each
            reasons |= each.bad
            self.counts.encoded += len(each.images)
            self.counts.bytes_written += each.size
        encoded = [results[task.name(self.store.recipe)] for task in tasks]
        encoded = [each for each in encoded if len(each.images)]
        if encoded:
            self._latents |= {each.name: each.size for each in encoded}
            self._images.add([(each.name, each.size, each.images) for each in encoded])
        return reasons

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


def _check_keys(found: Sequence[Sample]) -> None:
    """Raise if two samples have the same key."""
    name_of_key: dict[str, str] = {}
    for each in found:
        if each.key in name_of_key:
            raise same_key(name_of_key[each.key], each.name)
        name_of_key[each.key] = each.name


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
