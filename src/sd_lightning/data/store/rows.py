"""Samples on their way into a store: what a sample file holds, as arrays that can be cut and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sd_lightning.data.store.files import SampleFile, hashes_of, name_of, serialized, text_columns

Shard = tuple[str, int]
"""Name and bytes of a latent file."""


def captions_hash(captions: Sequence[Sequence[str]]) -> str:
    """Return a hash of the captions of some samples, 32 hexadecimal digits; it also depends on which are whose."""
    counts = np.array([len(each) for each in captions], np.int64)
    return name_of(counts.tobytes(), *(text.encode(errors="surrogatepass") for each in captions for text in each))


@dataclass(frozen=True)
class SampleRows:
    """Some samples of a data set, whose images have one shape."""

    keys: np.ndarray
    """(N, 16) uint8: hash of each sample's identity."""
    stamps: np.ndarray
    """(N, 16) uint8: hash of its identity, image and captions in the data set; equal stamps mean nothing changed."""
    images: np.ndarray
    """(N, 16) uint8: hash of its image."""
    shape: int
    """Number of the images' shape among those of the recipe."""
    names: list[str]
    captions: list[list[str]]

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, found: Sequence[tuple[str, str, bytes, list[str]]], salt: str, *, shape: int) -> SampleRows:
        """Make rows of (identity, name, image hash, captions) per sample; ``salt`` is ``Generation.stamps``."""
        stamps = [
            b"\0".join([key.encode(errors="surrogatepass"), image, captions_hash([captions]).encode()]) + salt.encode()
            for key, _, image, captions in found
        ]
        return cls(
            keys=hashes_of([key.encode(errors="surrogatepass") for key, *_ in found]),
            stamps=hashes_of(stamps),
            images=np.frombuffer(b"".join(image for _, _, image, _ in found), np.uint8).reshape(-1, 16),
            shape=shape,
            names=[name for _, name, _, _ in found],
            captions=[captions for *_, captions in found],
        )

    @classmethod
    def read(cls, file: SampleFile) -> SampleRows:
        """Return the rows of a sample file.

        Raises:
            UsageError: The file is not what was written; what is made from it would look right.
        """
        file.check()
        keys, stamps, images = (file.read(name).numpy() for name in ("keys", "stamps", "images"))
        rows = range(len(file))
        shape = file.metadata["shape"]
        return cls(keys, stamps, images, shape, [file.sample_name(i) for i in rows], [file.captions(i) for i in rows])

    def take(self, chosen: np.ndarray) -> SampleRows:
        """Return the rows at some indices."""
        numbers = chosen.tolist()
        return SampleRows(
            self.keys[chosen],
            self.stamps[chosen],
            self.images[chosen],
            self.shape,
            [self.names[i] for i in numbers],
            [self.captions[i] for i in numbers],
        )

    def to_bytes(self, shards: Sequence[Shard], place: np.ndarray, input_ids: dict[str, Tensor]) -> bytes:
        """Return the sample file.

        Args:
            shards: Latent files.
            place: (N, 2): the number of each sample's file in ``shards``, and its row there.
            input_ids: (M, L) by text encoder, of all captions in order.
        """
        used, number = np.unique(place[:, 0], return_inverse=True)
        tensors = {
            "keys": torch.from_numpy(self.keys.copy()),
            "stamps": torch.from_numpy(self.stamps.copy()),
            "images": torch.from_numpy(self.images.copy()),
            "place": torch.from_numpy(np.stack([number.reshape(-1), place[:, 1]], axis=1).astype(np.int32)),
            "caption_count": torch.tensor([len(captions) for captions in self.captions], dtype=torch.int64),
            **text_columns("captions", [caption for captions in self.captions for caption in captions]),
            **text_columns("names", self.names),
            **{f"input_ids.{name}": ids.to(torch.int32) for name, ids in input_ids.items()},
        }
        about = {"rows": len(self), "shape": self.shape, "shards": [shards[i] for i in used.tolist()]}
        return serialized(tensors, about)
