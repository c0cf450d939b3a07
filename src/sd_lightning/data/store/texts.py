"""Captions in a store: their token ids, and if asked for what a model's text encoders make of each.

The embeddings of a sample file's captions are one file, a row per caption in the order of its token ids. Its folder is
named for the text encoders and its name for the captions: that is all they depend on, so they are never stale, and the
same whoever encodes them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import ALTERED, CHECKS, RowBuffer, StoreFile, captions_hash, row_sums, write_groups
from sd_lightning.data.store.layout import DTYPES, Generation, LatentStore, SampleEntry, network_hash, path_of
from sd_lightning.data.store.reader import StoreReader
from sd_lightning.models.families.base import Conditioning, flat_conditioning, nested_conditioning
from sd_lightning.storage.location import Location
from sd_lightning.storage.safetensors_file import Column

if TYPE_CHECKING:
    from sd_lightning.models.encoder import LatentEncoder
    from sd_lightning.models.latent_diffusion import LatentDiffusion

TEXTS = "texts"
CODE_VERSION = 1
"""Version of the code between token ids and embeddings; raised when that code changes their values."""
EMPTY = captions_hash([[""]])
"""Name of the file with the empty caption, for caption dropout."""
_GROUP = 64
"""Captions that are encoded at a time."""
_MOST_OPEN = 128
"""Text files that stay open, unless one batch needs more."""


@dataclass(frozen=True)
class Tokenizing:
    """Captions to token ids."""

    tokenize: Callable[[list[str]], Mapping[str, Tensor]]
    """Captions -> ids (B, L) by text encoder."""
    fingerprint: str
    """Hash of the tokenizers: stored token ids serve models with equal ones."""

    @classmethod
    def of(cls, model: LatentDiffusion) -> Tokenizing:
        """Return how a model's captions become token ids; all of a tokenizer counts, such as its merges."""
        digest = blake2b(digest_size=16)
        for name, tokenizer in sorted(model.tokenizers.items()):
            rules = json.loads(tokenizer.backend_tokenizer.to_str())
            for call in ("padding", "truncation"):  # what the last call asked for
                rules.pop(call)
            about = [name, model.family.max_length(tokenizer), rules, str(tokenizer.special_tokens_map)]
            if tokenizer.chat_template is not None:
                about += [tokenizer.chat_template, *model.family.prompts(tokenizer, [""])]
            digest.update(json.dumps(about).encode())
        return cls(model.tokenize, digest.hexdigest())


def text_kind(model: LatentDiffusion) -> str:
    """Return the kind of a model's text files: a folder named for its text encoders and tokenizers.

    Args:
        model: Its text encoders have their weights as they were read.
    """
    digest = blake2b(f"{CODE_VERSION} {Tokenizing.of(model).fingerprint}".encode(), digest_size=8)
    for name, network in sorted(model.text_encoders.items()):
        digest.update(f"{name} {network_hash(network.state_dict(), model.components[name].config)}".encode())
    return f"{TEXTS}/t{digest.hexdigest()}"


def text_kinds(store: LatentStore) -> list[str]:
    """Return the kinds of all text files of a store."""
    return sorted({entry.name.rpartition("/")[0] for entry in store.folder.entries(f"{TEXTS}/")})


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

    encoder: LatentEncoder
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
        store.header(kind, name, present[name])  # its header says how long it has to be
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
            ids = {name: each.long() for name, each in file.input_ids().items()}
        yield TextTask(entry.captions, ids)


class StoredTexts:
    """Reads the text embeddings of one split; it may be pickled and forked.

    Attributes:
        num_missing: Text files that are not there; with any, embeddings cannot be read.
    """

    def __init__(self, reader: StoreReader, kind: str) -> None:
        """List the text files; they are opened when they are read.

        Args:
            reader: Of the split.
            kind: From ``text_kind``.
        """
        self._reader, self._kind = reader, kind
        present = reader.store.present(kind)
        self._sizes = {name: present.get(name, 0) for name in (EMPTY, *(each.captions for each in reader.entries))}
        self.num_missing = sum(not size for size in self._sizes.values())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_file", "_empty")}

    def batch(self, indices: np.ndarray, which: Sequence[int | None]) -> Conditioning:
        """Return the embeddings of caption number ``which[i]`` of each sample, of "" where it is None.

        Args:
            indices: (B,) int64.
            which: One per sample.

        Returns:
            What ``Family.embed`` returns for these captions, in the stored type.
        """
        kept = np.array([place for place, number in enumerate(which) if number is not None], np.int64)
        dropped = [place for place, number in enumerate(which) if number is None]
        captions = np.array([number for number in which if number is not None], np.int64)
        numbers, rows = self._reader.caption_places(indices[kept], captions)
        opened = {number: self._file(self._reader.entries[number].captions) for number in np.unique(numbers).tolist()}
        files = [opened[number] for number in numbers.tolist()]
        found: dict[str, Tensor] = {}
        for name, empty in self._empty.items():
            row_bytes = empty.nbytes
            begins = np.array([file.columns[name].begin for file in files], np.int64)
            out = RowBuffer(len(indices), Column(empty.dtype, tuple(empty.shape), 0))
            if not out.read(kept, np.array([file.fd for file in files]), begins + rows * row_bytes):
                raise self._reader.cut_off(self._kind)
            out.tensor[dropped] = empty
            found[name] = out.tensor
        if files:
            sums = torch.stack([row_sums(each[kept]) for each in found.values()]).sum(0).tolist()
            for file, row, total in zip(files, rows.tolist(), sums, strict=True):
                if file.checks[row] != total:
                    raise file.broken(ALTERED)
        return nested_conditioning(found)

    def bytes_of_file(self, number: int) -> int:
        """Return the bytes of the text file of a sample file."""
        return self._sizes[self._reader.entries[number].captions]

    def fetch(self, number: int) -> None:
        """Copy the text file of a sample file into the cache, if the store is not local."""
        name = self._reader.entries[number].captions
        self._reader.cache.fetch(self._reader.store.folder, path_of(self._kind, name), self._sizes[name])

    @cached_property
    def _file(self) -> Callable[[str], StoreFile]:
        """Opens a text file by its name."""
        return lru_cache(maxsize=_MOST_OPEN)(self._opened)

    @cached_property
    def _empty(self) -> dict[str, Tensor]:
        """The embeddings of "", (1, …) each."""
        file = self._opened(EMPTY)
        found = {name: file.read(name) for name in file.columns if name != CHECKS}
        total = torch.stack([row_sums(each) for each in found.values()]).sum(0).item()
        if file.checks[0] != total:
            raise file.broken(ALTERED)
        file.close()
        return found

    def _opened(self, name: str) -> StoreFile:
        size, where = self._sizes[name], f"{self._reader.store.folder.url}/{path_of(self._kind, name)}"
        return StoreFile(self._reader.handle(self._kind, name, size), name=where, size=size)
