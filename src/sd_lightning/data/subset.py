"""Some samples of a source, and how samples are held out for validation, without lists of indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.source import Source, as_source


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
class EvenlySpaced:
    """``num`` indices spread evenly over ``range(total)``."""

    total: int
    num: int

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, place: int) -> int:
        return place * self.total // self.num


@dataclass(frozen=True)
class AllBut:
    """The indices of ``range(total)`` that are not among ``num`` evenly spaced ones."""

    total: int
    num: int

    def __len__(self) -> int:
        return self.total - self.num

    def __getitem__(self, place: int) -> int:
        # place * (total - num) // num of these indices are below the evenly spaced one at that place.
        return place + 1 + ((place + 1) * self.num - 1) // len(self)


def hold_out(source: Source, num_val_samples: int | None) -> tuple[Source, Source | None]:
    """Split off evenly spaced samples for validation.

    Args:
        source: All samples.
        num_val_samples: How many to hold out; 0: none; ``None``: a twentieth, 64 at most.

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
    return SourceSubset(source, AllBut(total, num)), SourceSubset(source, EvenlySpaced(total, num))
