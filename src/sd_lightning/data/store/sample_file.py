"""The sample files of a store, and the rows of samples on their way there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor

from sd_lightning.data.store.files import (
    ALTERED,
    HASH_BYTES,
    Shard,
    StoreFile,
    captions_hash,
    hashes_of,
    name_of,
    serialized,
    utf8,
)
from sd_lightning.storage.safetensors_file import Column, read_exactly

_IDS = "input_ids."


def text_columns(name: str, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return strings as two tensors: their UTF-8 bytes one after the other, and the end of each (N,)."""
    encoded = [utf8(text) for text in texts]
    ends = torch.tensor([len(each) for each in encoded], dtype=torch.int64).cumsum(0)
    return {name: torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8), f"{name}_end": ends}


class SampleFile(StoreFile):
    """Captions, token ids and places of some samples; what is small is kept in memory once read."""

    def check(self) -> None:
        """Check that the file is what was written: its name is the hash of its bytes, which are all read.

        Raises:
            UsageError: It is not.
        """
        data = bytearray(os.fstat(self.fd).st_size)
        if (
            not read_exactly(self._handle, memoryview(data), 0)
            or name_of(data) != PurePath(self.name).name.partition(".")[0]
        ):
            raise self.broken(ALTERED)

    @cached_property
    def place(self) -> np.ndarray:
        """(N, 2) int64: the number of each sample's file in ``shards``, and its row there."""
        return self.read("place").numpy().astype(np.int64)

    @cached_property
    def first_caption(self) -> np.ndarray:
        """(N + 1,) int64: captions of sample i are number ``first_caption[i]`` to ``first_caption[i + 1] - 1``."""
        return np.concatenate([[0], self.read("caption_count").numpy().cumsum()])

    @property
    def shards(self) -> list[Shard]:
        """The latent files that it refers to."""
        return [(str(name), int(size)) for name, size in self.metadata["shards"]]

    @cached_property
    def id_columns(self) -> dict[str, Column]:
        """The columns of token ids, by text encoder, and of their masks (``<text encoder>_mask``)."""
        return {name.removeprefix(_IDS): each for name, each in self.columns.items() if name.startswith(_IDS)}

    def input_ids(self) -> dict[str, Tensor]:
        """Return the token ids and masks (M, L) int32 of all captions, by the names of ``id_columns``."""
        return {name: self.read(f"{_IDS}{name}") for name in self.id_columns}

    def caption_hashes(self) -> np.ndarray:
        """Return the hash (M, 16) uint8 of every caption."""
        data, ends = self.read("captions").numpy().tobytes(), self._ends["captions"].tolist()
        return hashes_of([data[begin:end] for begin, end in pairwise(ends)])

    @cached_property
    def _ends(self) -> dict[str, np.ndarray]:
        """Where each text of a column ends, behind a 0."""
        return {name: np.concatenate([[0], self.read(f"{name}_end").numpy()]) for name in ("captions", "names")}

    def captions(self, row: int) -> list[str]:
        """Return the captions of a sample."""
        return [self._text("captions", i) for i in range(self.first_caption[row], self.first_caption[row + 1])]

    def sample_name(self, row: int) -> str:
        """Return the name of a sample."""
        return self._text("names", row)

    def _text(self, column: str, number: int) -> str:
        begin, end = self._ends[column][number : number + 2].tolist()
        data = self.read(column, begin, end).numpy().tobytes()
        return data.decode(errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a data set that can be read."""

    index: int
    """Its index in the source."""
    key: str
    name: str
    image: bytes
    """Hash of its image."""
    captions: list[str]
    size: tuple[int, int]
    """(height, width) of the image in pixels, if its shape depends on it."""


@dataclass(frozen=True)
class SampleRows:
    """Samples of a data set as columns, whose images have one shape."""

    indices: np.ndarray
    """(N,) int64: the index of each in the source; of a file, its row."""
    keys: np.ndarray
    """(N, 16) uint8: hash of each sample's key."""
    stamps: np.ndarray
    """(N, 16) uint8: hash of its key, image and captions in the data set; equal stamps mean nothing changed."""
    images: np.ndarray
    """(N, 16) uint8: hash of its image."""
    shape: int
    """Number of the images' shape among those of the recipe."""
    names: list[str]
    captions: list[list[str]]

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def of(cls, samples: Sequence[Sample], *, shape: int) -> SampleRows:
        """Make rows of samples."""
        stamps = [b"\0".join([utf8(each.key), each.image, captions_hash([each.captions]).encode()]) for each in samples]
        return cls(
            indices=np.array([each.index for each in samples], np.int64),
            keys=hashes_of([utf8(each.key) for each in samples]),
            stamps=hashes_of(stamps),
            images=np.frombuffer(b"".join(each.image for each in samples), np.uint8).reshape(-1, HASH_BYTES),
            shape=shape,
            names=[each.name for each in samples],
            captions=[each.captions for each in samples],
        )

    @classmethod
    def read(cls, file: SampleFile) -> SampleRows:
        """Return the rows of a sample file.

        Raises:
            UsageError: The file is not what was written; what is made from it would look right.
        """
        file.check()
        keys, stamps, images = (file.read(name).numpy() for name in ("keys", "stamps", "images"))
        rows, shape = range(len(file)), file.metadata["shape"]
        names, captions = [file.sample_name(i) for i in rows], [file.captions(i) for i in rows]
        return cls(np.arange(len(file)), keys, stamps, images, shape, names, captions)

    def take(self, chosen: np.ndarray) -> SampleRows:
        """Return the rows at some places."""
        indices, keys, stamps, images = (each[chosen] for each in (self.indices, self.keys, self.stamps, self.images))
        names, captions = [self.names[i] for i in chosen], [self.captions[i] for i in chosen]
        return SampleRows(indices, keys, stamps, images, self.shape, names, captions)

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
            **{f"{_IDS}{name}": ids.to(torch.int32) for name, ids in input_ids.items()},
        }
        of_all = {"rows": len(self), "shape": self.shape, "shards": [shards[i] for i in used.tolist()]}
        return serialized(tensors, of_all)
