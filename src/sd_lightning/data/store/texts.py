"""Text embeddings in a store: what a model's text encoders make of each caption, if asked for.

The embeddings of a sample file's captions are one file, a row per caption in the order of its token ids. Its folder is
named for the text encoders and its name for the captions: that is all they depend on, so they are never stale, and the
same whoever encodes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import write_groups
from sd_lightning.data.store.recipe import DTYPES, network_hash
from sd_lightning.data.store.rows import captions_hash
from sd_lightning.data.store.store import Generation, LatentStore, SampleEntry, path_of
from sd_lightning.data.store.tokenizing import Tokenizing
from sd_lightning.models.families.base import flat_conditioning
from sd_lightning.storage.location import Location

if TYPE_CHECKING:
    from sd_lightning.models.latent_diffusion import LatentDiffusion

TEXTS = "texts"
CODE_VERSION = 1
"""Version of the code between token ids and embeddings; raised when that code changes their values."""
EMPTY = captions_hash([[""]])
"""Name of the file with the empty caption, for caption dropout."""
_GROUP = 64
"""Captions that are encoded at a time."""


def text_kind(model: LatentDiffusion) -> str:
    """Return the kind of a model's text files: a folder named for its text encoders and tokenizers.

    Args:
        model: Its text encoders have their weights as they were read.
    """
    found = blake2b(f"{CODE_VERSION} {Tokenizing.of(model).fingerprint}".encode(), digest_size=8)
    for name, network in sorted(model.text_encoders.items()):
        found.update(f"{name} {network_hash(network.state_dict(), model.components[name].config)}".encode())
    return f"{TEXTS}/t{found.hexdigest()}"


def text_kinds(store: LatentStore) -> list[str]:
    """Return the kinds of all text files of a store."""
    return sorted({entry.name.rpartition("/")[0] for entry in store.folder.entries(f"{TEXTS}/")})


class CaptionEncoder(Protocol):
    """What encodes captions: ``LatentEncoder``."""

    def embed(self, input_ids: Mapping[str, Tensor]) -> dict[str, Any]:
        """Encode captions, given as token ids (B, L) by text encoder."""


@dataclass(frozen=True)
class TextTask:
    """The captions of one text file."""

    name: str
    input_ids: Mapping[str, Tensor]
    """(M, L) by text encoder."""

    def __len__(self) -> int:
        return len(next(iter(self.input_ids.values())))


@dataclass(frozen=True)
class EmbeddedTexts:
    """A text file that has been written."""

    captions: int
    size: int
    """Bytes."""


@dataclass
class TextEncoder:
    """Encodes text files; it is pickled or forked into workers."""

    encoder: CaptionEncoder
    kind: str
    """From :func:`text_kind`."""
    folder: Location
    """The folder of the recipe."""
    dtype: str
    """Type of the stored numbers."""
    device: torch.device

    def __call__(self, task: TextTask) -> EmbeddedTexts:
        """Encode the captions of a file and write it; memory holds a group of them at a time.

        Raises:
            UsageError: Embeddings are infinite in the stored type, or the file cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
            path = Path(scratch) / "texts.safetensors"
            try:
                size = write_groups(path, self._groups(task), rows=len(task))
            except OSError as error:
                raise UsageError(
                    f"precompute: cannot write {path} ({error}), from where text embeddings go to the store; expected "
                    "free space; set TMPDIR to a folder of a larger disk"
                ) from error
            self.folder.create(path_of(self.kind, task.name), path)
        return EmbeddedTexts(len(task), size)

    def embed(self, input_ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings (B, …) of some captions by flat name, in the type that is stored."""
        on_device = {name: ids.to(self.device) for name, ids in input_ids.items()}
        found = flat_conditioning(self.encoder.embed(on_device))
        stored = {name: each.to(DTYPES[self.dtype]).cpu().contiguous() for name, each in found.items()}
        if not all(each.isfinite().all() for each in stored.values()):
            raise UsageError(
                f"precompute: text embeddings are not finite in dtype={self.dtype}; write dtype=bfloat16 or "
                "dtype=float32, or compute_dtype=float32 if a text encoder overflows"
            )
        return stored

    def _groups(self, task: TextTask) -> Iterator[dict[str, Tensor]]:
        """Yield the embeddings of a group after the other: the same groups wherever they are encoded."""
        for begin in range(0, len(task), _GROUP):
            yield self.embed({name: ids[begin : begin + _GROUP] for name, ids in task.input_ids.items()})


def missing_texts(store: LatentStore, generation: Generation, kind: str) -> list[SampleEntry | None]:
    """Return sample files of a generation whose captions have no text file; None stands for the empty caption.

    Raises:
        UsageError: A text file is truncated or altered.
    """
    present = store.present(kind)
    by_name: dict[str, SampleEntry | None] = {EMPTY: None}
    by_name |= {entry.captions: entry for entries in generation.splits.values() for entry in entries}
    for name in by_name.keys() & present.keys():
        store.metadata(kind, name, present[name])  # its header says how long it has to be
    return [entry for name, entry in by_name.items() if name not in present]


def text_tasks(
    store: LatentStore, entries: Sequence[SampleEntry | None], tokenizing: Tokenizing, scratch: Path
) -> Iterator[TextTask]:
    """Yield the captions of some sample files, whose token ids are read one file after the other.

    Args:
        store: The folder of the recipe.
        entries: From :func:`missing_texts`.
        tokenizing: What made their token ids.
        scratch: Folder for temporary files.
    """
    for entry in entries:
        if entry is None:
            yield TextTask(EMPTY, tokenizing.tokenize([""]))
            continue
        with store.opened(entry, scratch) as file:
            ids = {name.removeprefix("input_ids."): file.read(name).long() for name in file.id_columns}
        yield TextTask(entry.captions, ids)
