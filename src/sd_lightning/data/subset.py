"""Some samples of a source, and how samples are held out for validation, without lists of indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Protocol

import numpy as np
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.source import Source, as_source

_BY_CONTENT = 10_000
"""Largest number of samples whose images are looked at: three small pieces of each file, of no image without one."""
_BY_KEY = 1_000_000
"""Largest number of samples whose keys are hashed at every start: about three seconds."""


class Indices(Protocol):
    """Indices of some samples, such as a list or a range."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, place: int, /) -> int:
        """Return the index of one sample."""


class SourceSubset(Source):
    """Source of some samples of another source."""

    def __init__(self, source: Source, indices: Indices) -> None:
        """Choose the samples of ``source`` at ``indices``."""
        self.source = as_source(source)
        self.indices = indices
        self.dropped = self.source.dropped
        self.fingerprint = self.source.fingerprint

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        return self.source.image(self.indices[index])

    def captions(self, index: int) -> Sequence[str]:
        return self.source.captions(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def key(self, index: int) -> str:
        return self.source.key(self.indices[index])

    def content(self, index: int) -> bytes:
        return self.source.content(self.indices[index])

    def decode(self, content: bytes) -> Image.Image:
        return self.source.decode(content)

    def size(self, index: int) -> tuple[int, int]:
        return self.source.size(self.indices[index])

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        return self.source.evidence(self.indices[index], thorough=thorough)


@dataclass(frozen=True)
class AllBut:
    """The indices of ``range(total)`` that are not among some others."""

    total: int
    others: np.ndarray
    """(H,) int64, increasing."""

    def __len__(self) -> int:
        return self.total - len(self.others)

    def __getitem__(self, place: int) -> int:
        return place + int(np.searchsorted(self._left_before, place, side="right"))

    @cached_property
    def _left_before(self) -> np.ndarray:
        """(H,) int64: how many indices are left before each of the others."""
        return self.others - np.arange(len(self.others))


def hold_out(
    source: Source, num_val_samples: int | None, *, was_held: Callable[[str], bool] | None = None
) -> tuple[Source, Source | None]:
    """Split off samples for validation, chosen by a hash.

    Up to ``_BY_CONTENT`` samples it is that of the image's file, so that copies of an image are on the same side. Of
    more, and of images without a file of their own, which would be read whole, it is that of the key, and above
    ``_BY_KEY`` samples they are evenly spaced.

    Args:
        source: All samples.
        num_val_samples: How many to hold out; 0: none; ``None``: a twentieth, 64 at most. There may be a few less where
            images have copies.
        was_held: Tells of a sample's key whether it was held out before: such samples are chosen first.

    Returns:
        The samples to train on, and the held-out ones.

    Raises:
        UsageError: Nothing would be left to train on.
    """
    total = len(source)
    num = min(64, total // 20) if num_val_samples is None else num_val_samples
    if not 0 <= num < total:
        raise UsageError(
            f"data.num_val_samples={num}: expected 0 to {total - 1}, less than the {total} samples there are; "
            "write data.num_val_samples=null"
        )
    if num == 0:
        return source, None
    if total > _BY_KEY and was_held is None:
        held = np.arange(num) * total // num
    else:
        held = _chosen(as_source(source), num, was_held)
    return SourceSubset(source, AllBut(total, held)), SourceSubset(source, held.tolist())


def _chosen(source: Source, num: int, was_held: Callable[[str], bool] | None) -> np.ndarray:
    """Return the indices (H,) of the samples to hold out: those with the smallest hashes, whole groups of copies."""
    total = len(source)
    hash_of = _content_hash if total <= _BY_CONTENT else lambda source, index: _hash(source.key(index))
    hashes = np.array([hash_of(source, index) for index in range(total)], np.uint64)
    if total > 1 and (hashes == hashes[0]).all():  # where all images are the same, copies say nothing
        hashes = np.array([_hash(source.key(index)) for index in range(total)], np.uint64)
    values, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    first = np.zeros(len(values), bool)
    if was_held is not None:
        first[group[[was_held(source.key(index)) for index in range(total)]]] = True
    taken, left = np.zeros(len(values), bool), num
    for number in np.lexsort((values, ~first)).tolist():
        if counts[number] <= left:
            taken[number] = True
            left -= int(counts[number])
        if not left:
            break
    if left == num:  # every image has more copies than are to be held out
        taken[counts.argmin()] = True
    return np.flatnonzero(taken[group])


def _content_hash(source: Source, index: int) -> int:
    return _hash(source.evidence(index, thorough=True)[1] or source.key(index))


def _hash(text: str | bytes) -> int:
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
