"""Captions in a store: their token ids, and if asked for what a model's text encoders make of each.

Embeddings are larger than pictures, so equal captions are encoded and stored once, whoever has them. A *text file* has
a row for each of some captions, known by a hash of its words. A *file of places* says for every caption of a sample
file in which text file and row its embeddings are. The folder of both is named for the text encoders, a text file for
its captions, so that neither is ever stale. A file of places is named for those of the sample file; it is written again
if they are found in other text files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.store.files import (
    BLANK,
    CHECKS,
    HASHES,
    Shard,
    about,
    captions_hash,
    hashes_of,
    is_ragged,
    name_of,
    sealed,
    serialized,
    write_groups,
)
from sd_lightning.data.store.index import RowIndex
from sd_lightning.data.store.layout import DTYPES, Generation, LatentStore, SampleEntry, network_hash, path_of
from sd_lightning.models.families.base import MASK
from sd_lightning.models.families.conditioning import flat_conditioning
from sd_lightning.storage.location import Location

if TYPE_CHECKING:
    from sd_lightning.models.encoder import LatentEncoder
    from sd_lightning.models.latent_diffusion import LatentDiffusion

TEXTS, PLACES = "texts", "places"
CODE_VERSION = 2
"""Version of the code between token ids and embeddings, and of their files; raised when that code changes them."""
EMPTY = captions_hash([[""]])
"""Name of the file with the place of the empty caption, for caption dropout."""
_MOST_CAPTIONS, _MOST_GROUPED = 2**13, 64
"""Captions of a text file, and those that are encoded at a time; fewer if their embeddings are large."""
_GROUP_BYTES = 2**28
_MOST_CHECKS = 128
"""Text files whose check sums are in memory while places are written."""


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
        for name, ids in sorted(model.tokenize([""]).items()):  # what a family does around them: lengths, masks
            digest.update(f"{name} {ids.tolist()}".encode())
        for name, tokenizer in sorted(model.tokenizers.items()):
            rules = json.loads(tokenizer.backend_tokenizer.to_str())
            for call in ("padding", "truncation"):  # what the last call asked for
                rules.pop(call)
            template = tokenizer.chat_template
            all_of_it = [name, model.family.max_length(tokenizer), rules, str(tokenizer.special_tokens_map), template]
            digest.update(json.dumps(all_of_it).encode())
        return cls(model.tokenize, digest.hexdigest())


def text_kind(model: LatentDiffusion) -> str:
    """Return the kind of a model's text files: a folder named for its text encoders and tokenizers.

    Args:
        model: Its text encoders have their weights as they were read.
    """
    family, tokens = model.family, Tokenizing.of(model).fingerprint
    rules = f"{family.pipeline_class} {family.masks_padding}{family.select_layers or ''}"
    digest = blake2b(f"{CODE_VERSION} {tokens} {rules}".encode(), digest_size=8)
    for name, network in sorted(model.text_encoders.items()):
        digest.update(f"{name} {network_hash(network.state_dict(), model.components[name].config)}".encode())
    return f"{TEXTS}/t{digest.hexdigest()}"


def text_kinds(store: LatentStore) -> list[str]:
    """Return the kinds of all text files of a store."""
    files = (file for folder in (TEXTS, PLACES) for file in store.folder.entries(f"{folder}/"))
    return sorted({f"{TEXTS}/{file.name.split('/')[1]}" for file in files})


def places_of(kind: str) -> str:
    """Return the folder of the places of a kind of text files."""
    return f"{PLACES}/{kind.removeprefix(f'{TEXTS}/')}"


def files_of(about: Mapping[str, Any]) -> list[Shard]:
    """Return the text files to which a file of places refers, by what its header says of it."""
    return [(str(name), int(size)) for name, size in about["files"]]


def real_tokens(input_ids: Mapping[str, Tensor]) -> dict[int, np.ndarray]:
    """Return, by padded length, how many tokens (B,) captions have up to the last one that their mask keeps.

    Args:
        input_ids: (B, L) by text encoder, with ``<text encoder>_mask``; one without a mask keeps all its tokens.
    """
    found: dict[int, Tensor] = {}
    for name, ids in input_ids.items():
        if not name.endswith(MASK):
            mask = input_ids.get(f"{name}{MASK}", torch.ones_like(ids))  # of all tokens, or of those that stay
            length = mask.shape[1]
            last = (mask != 0) * torch.arange(1, length + 1)
            found[length] = last.amax(1).maximum(found.get(length, torch.zeros_like(ids[:, 0])))
    return {length: each.numpy().astype(np.int64) for length, each in found.items()}


@dataclass(frozen=True)
class TextTask:
    """The captions of one text file."""

    hashes: np.ndarray
    """(R, 16) uint8."""
    input_ids: Mapping[str, Tensor]
    """(R, L) by text encoder."""

    def __len__(self) -> int:
        return len(self.hashes)

    def split(self, count: int) -> tuple[TextTask, TextTask]:
        """Return the first captions and the others."""
        first, rest = (
            {n: ids[part] for n, ids in self.input_ids.items()} for part in (slice(count), slice(count, None))
        )
        return TextTask(self.hashes[:count], first), TextTask(self.hashes[count:], rest)

    def joined(self, other: TextTask) -> TextTask:
        """Return the captions of both."""
        ids = {name: torch.cat([each, other.input_ids[name]]) for name, each in self.input_ids.items()}
        return TextTask(np.concatenate([self.hashes, other.hashes]), ids)


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
    masks_padding: bool = False
    """:attr:`Family.masks_padding`: then padded tokens are not stored."""
    group: int = _MOST_GROUPED
    """Captions that are encoded at a time: the same wherever they are encoded, so that their bits are the same."""

    def __call__(self, task: TextTask) -> EmbeddedTexts:
        """Encode the captions of a file and write it; memory holds a group of them at a time.

        Raises:
            UsageError: Embeddings are infinite in the stored type, or the file cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
            path = Path(scratch) / "texts.safetensors"
            try:
                lengths = self.lengths(task.input_ids)
                size = write_groups(path, self._groups(task), hashes=task.hashes, lengths=lengths)
            except OSError as error:
                raise UsageError(
                    f"precompute: cannot write {path} ({error}), from where text embeddings go to the store; expected "
                    "free space; set TMPDIR to a folder of a larger disk"
                ) from error
            self.folder.create(path_of(self.kind, name_of(task.hashes.tobytes())), path)
        return EmbeddedTexts(len(task), size)

    def lengths(self, input_ids: Mapping[str, Tensor]) -> dict[int, np.ndarray]:
        """Return, by padded length, the tokens (B,) that are stored; of other lengths all are."""
        return real_tokens(input_ids) if self.masks_padding else {}

    def embed(self, input_ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings (B, …) of some captions by flat name, in the type that is stored.

        Those of padded tokens that are not stored are zeros.
        """
        on_device = {name: ids.to(self.device) for name, ids in input_ids.items()}
        found = flat_conditioning(self.encoder.embed(on_device))
        stored = {name: each.to(DTYPES[self.dtype]).cpu().contiguous() for name, each in found.items()}
        lengths = self.lengths(input_ids)
        for each in stored.values():
            if is_ragged(each, lengths):
                each[torch.arange(each.shape[1]) >= torch.from_numpy(lengths[each.shape[1]])[:, None]] = 0
        if not all(each.isfinite().all() for each in stored.values()):
            raise UsageError(
                f"precompute: text embeddings are not finite in dtype={self.dtype}; write dtype=bfloat16 or "
                "dtype=float32, or compute_dtype=float32 if a text encoder overflows"
            )
        return stored

    def stored_bytes(self, input_ids: Mapping[str, Tensor]) -> float:
        """Return the mean bytes of a row for some captions; only one of them is encoded."""
        lengths = self.lengths(input_ids)
        return sum(
            each.nbytes * (float(lengths[each.shape[1]].mean()) / each.shape[1] if is_ragged(each, lengths) else 1)
            for each in self.embed({name: ids[:1] for name, ids in input_ids.items()}).values()
        )

    def _groups(self, task: TextTask) -> Iterator[dict[str, Tensor]]:
        """Yield the embeddings of a group after the other."""
        for begin in range(0, len(task), self.group):
            yield self.embed({name: ids[begin : begin + self.group] for name, ids in task.input_ids.items()})


def captions_per_file(bytes_per_caption: float, shard_mb: float) -> tuple[int, int]:
    """Return how many captions a text file gets, whole groups, and how many a group."""
    most = int(min(max(shard_mb * 1e6 / bytes_per_caption, 1), _MOST_CAPTIONS))
    group = int(min(max(_GROUP_BYTES / bytes_per_caption, 1), _MOST_GROUPED, most))
    return most // group * group, group


@dataclass
class TextJob:
    """Brings the text embeddings of one kind up to date with the samples of a store; each caption is encoded once."""

    store: LatentStore
    kind: str
    tokenizing: Tokenizing
    """What made the samples' token ids."""
    scratch: Path
    """Folder for temporary files."""
    per_file: int = _MOST_CAPTIONS
    """From :func:`captions_per_file`."""

    def new(self, entries: Sequence[SampleEntry | None]) -> Iterator[TextTask]:
        """Yield, of each of some sample files, the captions that no text file and no earlier one has.

        Args:
            entries: From :func:`missing_texts`.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            known = self._index(Path(folder))
            for _, hashes, input_ids in self._captions(entries):
                _, first = np.unique(hashes, axis=0, return_index=True)
                first.sort()
                new = first[known.find(hashes[first])[1][:, 0] < 0]
                if len(new):
                    known.add([("", 0, hashes[new])])
                    yield TextTask(hashes[new], {name: ids[new].long() for name, ids in input_ids().items()})

    def tasks(self, entries: Sequence[SampleEntry | None]) -> Iterator[TextTask]:
        """Yield these captions as text files, all full but the last."""
        waiting: TextTask | None = None
        for each in self.new(entries):
            waiting = each if waiting is None else waiting.joined(each)
            while len(waiting) >= self.per_file:
                task, waiting = waiting.split(self.per_file)
                yield task
        if waiting:
            yield waiting

    def place(self, entries: Sequence[SampleEntry | None]) -> None:
        """Write the files of places, when the text files are there."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            index, checks_of = self._index(Path(folder)), lru_cache(maxsize=_MOST_CHECKS)(self._checks)
            for name, hashes, _ in self._captions(entries):
                files, where = index.find(hashes)
                checks = np.empty(len(hashes), np.int64)
                for number, file in enumerate(files):
                    here = where[:, 0] == number
                    checks[here] = checks_of(file)[where[here, 1]]
                tensors = {"place": torch.from_numpy(where.astype(np.int32)), CHECKS: torch.from_numpy(checks)}
                data = sealed(serialized(tensors, {"rows": len(hashes), "files": files, "seal": BLANK}))
                self.store.folder.replace(path_of(places_of(self.kind), name), data)

    def _captions(
        self, entries: Sequence[SampleEntry | None]
    ) -> Iterator[tuple[str, np.ndarray, Callable[[], Mapping[str, Tensor]]]]:
        """Yield name, hashes (M, 16) and token ids (M, L) of the captions of each sample file, one after the other."""
        for entry in entries:
            if entry is None:
                yield EMPTY, hashes_of([b""]), partial(self.tokenizing.tokenize, [""])
                continue
            with self.store.opened(entry, self.scratch) as file:
                hashes = file.caption_hashes()
                yield entry.captions, hashes, file.input_ids

    def _index(self, folder: Path) -> RowIndex:
        present = self.store.present(self.kind)
        return RowIndex(self.store, present, folder, used=present, kind=self.kind, column=HASHES)

    def _checks(self, file: Shard) -> np.ndarray:
        header = self.store.header(self.kind, *file)
        return np.frombuffer(self.store.column(self.kind, file[0], header.columns[CHECKS]), np.int64)


def missing_texts(store: LatentStore, generation: Generation, kind: str) -> list[SampleEntry | None]:
    """Return sample files of a generation whose captions lack embeddings; None stands for the empty caption.

    Raises:
        UsageError: A file is truncated or altered.
    """
    places, present, present_places = places_of(kind), store.present(kind), store.present(places_of(kind))
    by_name: dict[str, SampleEntry | None] = {EMPTY: None}
    by_name |= {entry.captions: entry for entries in generation.splits.values() for entry in entries}
    missing = []
    for name, entry in by_name.items():
        files = files_of(about(store.header(places, name, present_places[name]))) if name in present_places else []
        for text, size in files:
            if present.get(text, size) != size:
                raise store.broken(path_of(kind, text), f"it has {present[text]} bytes instead of {size}")
        if not files or not all(text in present for text, _ in files):
            missing.append(entry)
    return missing
