"""What a collection of captioned images offers, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from PIL import Image

from sd_lightning._errors import UsageError

Bad = tuple[int, str]
"""Index of a sample that could not be read, and why."""


class BadSample(Exception):
    """One sample is unusable (broken image, empty caption); the message is the reason."""


class Source(Protocol):
    """A collection of captioned images, addressed by index; picklable for worker processes."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Names and reasons of entries found unusable when the source was opened; not in its length."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def image(self, index: int) -> Image.Image:
        """Decode an image as RGB; raise ``BadSample`` if it is broken."""

    def captions(self, index: int) -> Sequence[str]:
        """Return the captions of an image without decoding it; raise ``BadSample`` if there are none."""

    def name(self, index: int) -> str:
        """Return what a person finds the sample by, e.g. its path."""

    # What ``data/fingerprint.py`` asks for where a source has it: ``evidence(index, thorough=)`` and ``fingerprint``.


def evidence_of(source: Source, index: int, *, thorough: bool) -> tuple[str, str, str]:
    """Return what a sample's identity, image and captions are hashed from; "" stands for what is not looked at."""
    if hasattr(source, "evidence"):
        identity, image, captions = source.evidence(index, thorough=thorough)
        return identity, image, captions
    return source.name(index), "", caption_evidence(source, index) if thorough else ""


def caption_evidence(source: Source, index: int) -> str:
    """Return a sample's captions as one string, "" if they cannot be read."""
    try:
        return "\n".join(source.captions(index))
    except BadSample:
        return ""


class SourceSubset:
    """Some of a source's samples, as a source of its own."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        """Choose the samples of ``source`` at ``indices``."""
        self.source = source
        self.indices = indices
        self.dropped = source.dropped
        self.fingerprint: str | None = getattr(source, "fingerprint", None)

    def __len__(self) -> int:
        """Return the number of chosen samples."""
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        """See ``Source.image``."""
        return self.source.image(self.indices[index])

    def captions(self, index: int) -> Sequence[str]:
        """See ``Source.captions``."""
        return self.source.captions(self.indices[index])

    def name(self, index: int) -> str:
        """See ``Source.name``."""
        return self.source.name(self.indices[index])

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """See :func:`evidence_of`."""
        return evidence_of(self.source, self.indices[index], thorough=thorough)


def hold_out(source: Source, num_val_samples: int | None) -> tuple[Source, Source | None]:
    """Split evenly spaced samples off for validation.

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
    held_out = [i * total // num for i in range(num)]
    rest = sorted(set(range(total)) - set(held_out))
    return SourceSubset(source, rest), SourceSubset(source, held_out)
