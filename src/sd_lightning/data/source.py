"""Interface of a source of captioned images, independent of the storage format, and some samples of a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data.order import Bucket, Locality

if TYPE_CHECKING:
    from torch import Tensor

    from sd_lightning.models.latent_diffusion import LatentDiffusion

Bad = tuple[int, str]
"""Index of a sample that could not be read, and why."""
_BY_CONTENT = 10_000
"""Largest number of samples whose images are looked at: three small pieces of each file, of no image without one."""
_BY_KEY = 1_000_000
"""Largest number of samples whose keys are hashed at every start: about three seconds."""


class BadSample(Exception):
    """One sample is unusable (broken image, empty caption); the message is the reason."""


class ImageClassifier(Protocol):
    """Classifier of generated pictures, which measures the prompted accuracy."""

    def prompts(self, num_samples: int, /) -> tuple[list[str], list[int]]:
        """Return prompts and the label of each."""

    def accuracy(self, images: Sequence[Image.Image], labels: Sequence[int]) -> float:
        """Return the fraction of images that show their label."""


class StoredLatents(Protocol):
    """Encoded images, in memory or in a store."""

    def usable(self, index: Tensor) -> list[int]:
        """Return the sample to use for each of some samples; another one if its image is broken."""

    def batch(self, used: Sequence[int], *, epoch: Tensor) -> dict[str, Tensor]:
        """Return the batch entries that replace ``pixel_values``, for samples that :meth:`usable` returned.

        These are ``latent_moments`` (B, 2C, h, w) or ``latents`` (B, C, h, w), float32, ``original_size`` and
        ``crop_top_left`` (B, 2) int64.
        """


class Source(ABC):
    """Captioned images, addressed by index.

    To train on your own data, inherit from this class, implement ``__len__``, ``image`` and ``captions``, and pass
    an instance to ``SDDataModule``. Everything else has a default. Instances are pickled for worker processes;
    with ``cache_latents`` and in precompute, several threads read images at a time.
    """

    dropped: Mapping[str, str] = {}
    """Name -> reason of the entries found unusable when the source was opened; not counted in its length."""
    loss_weights: Tensor | None = None
    """(N,) float32, loss weight of each sample; None for equal weights."""
    group_size: int = 1
    """Consecutive samples kept together when shuffled; divides the number of samples."""
    locality: Locality | None = None
    """How far samples that lie together are spread in an epoch; None spreads them over all of it."""
    fingerprint: str | None = None
    """Fingerprint that comes with the data and replaces hashes of images, as in a Hugging Face dataset."""
    buckets: Sequence[Bucket] | None = None
    """Aspect-ratio buckets that come with the data, as in a latent store; None if images are cropped to any shape."""
    is_prior: Tensor | None = None
    """(N,) bool, the pictures of a class, whose captions stay as they are; None without any."""
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

    def name(self, index: int) -> str:
        """Return a name by which a person finds the sample, e.g. its path; by default its number."""
        return f"{type(self).__name__}/{index}"

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

    def mask(self, index: int) -> Image.Image | None:
        """Return the mask of an image's loss, mode L, of its size: 255 where the loss counts; None if all of it does.

        Raises:
            BadSample: The mask cannot be read, is of another shape, or has no part that counts.
        """
        return None

    def has_mask(self, index: int) -> bool:
        """Return whether :meth:`mask` looks for a mask; nothing is read for it."""
        return False

    latents: StoredLatents | None = None
    """Latents that are read instead of images; None for images."""
    digests: Mapping[str, str] | None = None
    """Hashes of all identities, images and captions, where reading every sample for them would take too long."""
    fetched_ahead: int = 0
    """Samples whose files are brought to this machine before they are read; 0 where there is nothing to bring."""

    def files(self, index: np.ndarray) -> Sequence[int]:
        """Return the numbers of the files of some samples, without repetition."""
        return ()

    def fetch(self, file: int) -> None:
        """Bring a file to this machine, if it is not there."""
        return

    def check_model(self, model: LatentDiffusion, *, train_text_encoder: bool) -> None:
        """Check that a model can be trained on these data; raise ``UsageError`` if it cannot.

        Args:
            model: Its frozen networks have their weights as they were read.
            train_text_encoder: Whether its text encoders are trained.
        """
        return

    def num_captions(self, index: Sequence[int]) -> list[int]:
        """Return the number of captions of each of some samples."""
        return [len(self.captions(i)) for i in index]

    def token_ids(self, index: Sequence[int], which: Sequence[int]) -> dict[str, Tensor] | None:
        """Return stored token ids (B, L) int64, by text encoder, of caption ``which[i]`` of sample ``index[i]``.

        None, the default, if none are stored: captions are then tokenized.
        """
        return None

    def text_embeddings(self, index: Sequence[int], which: Sequence[int | None]) -> dict[str, Any] | None:
        """Return stored embeddings of caption ``which[i]`` of sample ``index[i]``, of "" where it is None.

        They are what ``Family.embed`` returns. None, the default, if none are stored: captions are then encoded.
        """
        return None

    @property
    def needs_encoders(self) -> bool:
        """Whether images or captions are encoded in the run; known after :meth:`check_model`."""
        return True

    @property
    def distinct(self) -> Source:
        """The source that holds each image once; ``rows`` indexes it."""
        return self

    @property
    def classifier(self) -> ImageClassifier | None:
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


class SourceSubset(Source):
    """Source of some samples of another source."""

    def __init__(self, source: Source, indices: Sequence[int] | AllBut) -> None:
        """Choose the samples of ``source`` at ``indices``."""
        self.source = source
        self.indices = indices
        self.dropped = self.source.dropped
        self.fingerprint = self.source.fingerprint

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, index: int) -> Image.Image:
        return self.source.image(self.indices[index])

    def mask(self, index: int) -> Image.Image | None:
        return self.source.mask(self.indices[index])

    def has_mask(self, index: int) -> bool:
        return self.source.has_mask(self.indices[index])

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
        held = _chosen(source, num, was_held)
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
