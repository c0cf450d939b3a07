"""Interface of a source of captioned images, independent of the storage format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from sd_lightning.data.buckets import Bucket
from sd_lightning.data.order import Locality

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sd_lightning.models.latent_diffusion import LatentDiffusion

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

    To train on your own data, inherit from this class, implement ``__len__``, ``image``, ``captions`` and ``name``, and
    pass an instance to ``SDDataModule``. Everything else has a default. Instances are pickled for worker processes;
    with ``cache_latents`` and in precompute, several threads read images at a time.
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
