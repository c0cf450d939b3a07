"""Interface of a source of captioned images, independent of the storage format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.buckets import Bucket
from sd_lightning.data.order import Locality

if TYPE_CHECKING:
    from torch import Tensor

Bad = tuple[int, str]
"""Index of a sample that could not be read, and why."""


class BadSample(Exception):
    """One sample is unusable (broken image, empty caption); the message is the reason."""


class Judge(Protocol):
    """Classifier of generated pictures, which measures the prompted accuracy."""

    def prompts(self, num_samples: int, /) -> tuple[list[str], list[int]]:
        """Return prompts and the label of each."""

    def accuracy(self, images: Sequence[Image.Image], labels: Sequence[int]) -> float:
        """Return the fraction of images that show their label."""


class Source(ABC):
    """Captioned images, addressed by index.

    To train on your own data, inherit from this class, implement ``__len__``, ``image``, ``captions`` and ``name``, and
    pass an instance to ``SDDataModule``. Everything else has a default. Instances are pickled for worker processes.
    """

    dropped: Mapping[str, str] = {}
    """Name -> reason of the entries found unusable when the source was opened; not counted in its length."""
    loss_weights: Tensor | None = None
    """(N,) float32, loss weight of each sample; None for equal weights."""
    together: int = 1
    """Consecutive samples kept together when shuffled; divides the number of samples."""
    locality: Locality | None = None
    """How far samples that lie together are spread in an epoch; None spreads them over all of it."""
    fingerprint: str | None = None
    """Fingerprint that comes with the data and replaces hashes of images, as in a Hugging Face dataset."""
    buckets: Sequence[Bucket] | None = None
    """Aspect-ratio buckets that come with the data, as in a latent store; None if images are cropped to any shape."""
    rows: Tensor | None = None
    """(N,) int64, index in ``distinct`` of each sample's image, where samples share images."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Decode an image as upright RGB; raise ``BadSample`` if it is broken."""

    @abstractmethod
    def captions(self, index: int) -> Sequence[str]:
        """Return the captions of an image without decoding it; raise ``BadSample`` if there are none."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a name by which a person finds the sample, e.g. its path."""

    def key(self, index: int) -> str:
        """Return the identity of a sample, which stays the same when others are added or removed.

        E.g. its path within the folder, with "/". No two samples of ``distinct`` have the same key.
        """
        return self.name(index)

    def content(self, index: int) -> bytes:
        """Return the bytes that decide what an image shows, to be hashed: the encoded file, or the raw pixels.

        Raises:
            BadSample: They cannot be read. Whether they can be decoded is not checked.
        """
        image = self.image(index)
        return f"{image.mode} {image.width} {image.height}\n".encode() + image.tobytes()

    def decode(self, content: bytes) -> Image.Image:
        """Decode what :meth:`content` returned; the result equals :meth:`image`.

        Raises:
            BadSample: The image is broken.
        """
        header, _, pixels = content.partition(b"\n")
        mode, width, height = header.decode().split()
        return Image.frombytes(mode, (int(width), int(height)), pixels)

    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of the upright image in pixels; encoded images are not decoded for it.

        Raises:
            BadSample: The image has no header that can be read, no pixels, or too many.
        """
        image = self.image(index)
        return image.height, image.width

    @property
    def distinct(self) -> Source:
        """The source that holds each image once; ``rows`` indexes it."""
        return self

    @property
    def judge(self) -> Judge | None:
        """Classifier of pictures generated from these captions; None if there is none."""
        return None

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Return the texts that a sample's fingerprint hashes (``data/fingerprint.py``).

        Args:
            index: Index of the sample.
            thorough: Whether contents may be read; False with many samples, where reading is too slow.

        Returns:
            Texts for its identity, image and captions; "" for a part that is not checked.
        """
        return self.key(index), "", self.caption_evidence(index) if thorough else ""

    def caption_evidence(self, index: int) -> str:
        """Return a sample's captions as one string, "" if they cannot be read."""
        try:
            return "\n".join(self.captions(index))
        except BadSample:
            return ""


_WITH_DEFAULT = frozenset(name for name in vars(Source) if name[0] != "_") - Source.__abstractmethods__


class _Undeclared(Source):
    """Adapter of an object with a source's four methods only; its own attributes override the defaults."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattribute__(self, name: str) -> Any:
        if name in _WITH_DEFAULT and hasattr(self._own, name):
            return getattr(self._own, name)
        return super().__getattribute__(name)

    def __len__(self) -> int:
        return len(self._own)

    def image(self, index: int) -> Image.Image:
        return self._own.image(index)

    def captions(self, index: int) -> Sequence[str]:
        return self._own.captions(index)

    def name(self, index: int) -> str:
        return self._own.name(index)


def as_source(source: Source) -> Source:
    """Return a source with every member of ``Source``; wrap an object that does not inherit from it."""
    return source if isinstance(source, Source) else _Undeclared(source)


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
        self.locality = self.source.locality

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
