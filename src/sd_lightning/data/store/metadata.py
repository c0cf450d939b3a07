"""The metadata of a store as a Parquet table, a row per sample, to look at, to join, and to bring new captions back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.store.files import SampleFile, name_of
from sd_lightning.data.store.key_table import HASH_BYTES, KeyTable, rows_of, write_table
from sd_lightning.data.store.rows import SampleRows, captions_hash
from sd_lightning.data.store.store import LATENTS, SAMPLES, Generation, LatentStore, SampleEntry
from sd_lightning.data.store.tokenizing import Tokenizing
from sd_lightning.storage.atomic import new_file

SIZES = ("original_height", "original_width", "crop_top", "crop_left")
"""Columns with the size of the original image and the corner of its crop, in pixels; of the first variant."""

_EXPORT, _IMPORT = "precompute export", "precompute import"


def committed(store: LatentStore, *, who: str) -> Generation:
    """Return the newest generation.

    Raises:
        UsageError: There is none.
    """
    generation = store.generation()
    if not generation.number:
        raise UsageError(f"{who}: {store.folder.url} has no samples yet; run precompute with your data= first")
    return generation


def export_table(store: LatentStore, path: Path, scratch: Path) -> int:
    """Write a row per sample of the newest generation; memory holds one sample file at a time.

    Text that is no UTF-8 is written with backslash escapes.

    Args:
        store: The folder of a recipe.
        path: The Parquet file to write; its row groups are the sample files.
        scratch: Folder for temporary files.

    Returns:
        The number of rows.

    Raises:
        UsageError: pyarrow is not installed, or the store has no samples.
    """
    arrow, parquet = (
        require("pyarrow", extra="parquet", who=_EXPORT),
        require("pyarrow.parquet", extra="parquet", who=_EXPORT),
    )
    generation = committed(store, who=_EXPORT)
    strings = ("split", "key", "name", "image", "latent_file")
    kinds = {name: arrow.string() for name in strings} | {name: arrow.int32() for name in (*SIZES, "row")}
    columns = ["split", "key", "name", "image", "captions", *SIZES, "latent_file", "row"]
    schema = arrow.schema([(name, kinds.get(name, arrow.list_(arrow.string()))) for name in columns])
    count = 0
    with new_file(path) as tmp, parquet.ParquetWriter(tmp, schema) as writer:
        for split, entries in generation.splits.items():
            for entry in entries:
                with store.opened(entry, scratch) as file:
                    rows = {"split": [split] * len(file), **_columns(store, file)}
                writer.write_table(arrow.table(rows, schema=schema))
                count += entry.rows
    return count


def _columns(store: LatentStore, file: SampleFile) -> dict[str, list[Any]]:
    """Return the columns of a sample file."""
    rows, (shard, row) = SampleRows.read(file), file.place.T
    names = [str(name) for name, _ in file.metadata["shards"]]
    sizes = np.zeros((len(rows), len(SIZES)), np.int32)
    for number, name in enumerate(names):
        here = shard == number
        sizes[here] = _sizes(store, name)[row[here] * store.recipe.variants]
    return {
        "key": [key.tobytes().hex() for key in rows.keys],
        "name": [_utf8(name) for name in rows.names],
        "image": [image.tobytes().hex() for image in rows.images],
        "captions": [[_utf8(caption) for caption in captions] for captions in rows.captions],
        **{name: column.tolist() for name, column in zip(SIZES, sizes.T, strict=True)},
        "latent_file": [names[number] for number in shard],
        "row": row.tolist(),
    }


def _sizes(store: LatentStore, name: str) -> np.ndarray:
    """Return the sizes (rows * variants, 4) of a latent file; nothing else of it is read."""
    return np.frombuffer(store.column(LATENTS, name, "sizes")[0], "<i4").reshape(-1, len(SIZES))


@dataclass
class Imported:
    """What an import has done, in samples."""

    changed: int = 0
    """With other captions now."""
    same: int = 0
    """Whose captions were those of the table."""
    absent: int = 0
    """Without a row in the table: they keep their captions."""


@dataclass
class CaptionImport:
    """Replaces captions of a store by those of a table; latents and all other samples stay as they are.

    Stamps stay too: as long as a sample's image and captions in its data set are the same, precompute keeps what was
    imported.

    Attributes:
        counts: What has been done so far.
    """

    store: LatentStore
    path: Path
    """A Parquet file with the columns split, key or image, and captions: strings, or lists of strings."""
    tokenizing: Tokenizing
    scratch: Path
    """Folder for temporary files."""
    counts: Imported = field(default_factory=Imported)

    def run(self) -> Generation:
        """Commit and return the generation with the new captions; the old one if none differs.

        Raises:
            UsageError: The table does not fit the store, or the tokenizers are others than those of the store.
        """
        before = committed(self.store, who=_IMPORT)
        if before.tokenizers != self.tokenizing.fingerprint:
            raise UsageError(
                f"{_IMPORT}: model= has other tokenizers than those that made the token ids of "
                f"{self.store.folder.url}; write the model= and model.pretrained= that the store was made with; if "
                "an older version of sd_lightning made it, run precompute again first"
            )
        table = _CaptionTable(self.path, before.splits, self.scratch)
        self._check_rows(table, before)
        splits = {
            split: [self._with_captions(table, split, entry) for entry in entries]
            for split, entries in before.splits.items()
        }
        if splits == before.splits:
            return before
        after = replace(before, number=before.number + 1, splits=splits, has_seal=True)
        self.store.commit(after)
        return after

    def _check_rows(self, table: _CaptionTable, before: Generation) -> None:
        """Check that the store has a sample for each row."""
        for split, entries in before.splits.items():
            seen = np.memmap(self.scratch / f"seen-{split}", np.uint8, "w+", shape=(table.num_rows(split) + 1,))
            for entry in entries:
                with self.store.opened(entry, self.scratch) as file:
                    seen[table.find(split, file)] = 1  # -1, a sample without a row, is the last place
            unknown = len(seen) - 1 - int(np.count_nonzero(seen[:-1]))
            if unknown:
                raise UsageError(
                    f"{_IMPORT}: {unknown} of {len(seen) - 1} rows of {self.path} for split={split} are of no "
                    f"sample in {self.store.folder.url}; expected rows of its own export; leave them out, or run "
                    "precompute with the data that has these samples first"
                )

    def _with_captions(self, table: _CaptionTable, split: str, entry: SampleEntry) -> SampleEntry:
        """Return a sample file with the captions of the table; it is written anew if any differ."""
        with self.store.opened(entry, self.scratch) as file:
            found = table.find(split, file)
            self.counts.absent += int((found < 0).sum())
            if (found < 0).all():
                return entry
            rows = SampleRows.read(file)
            captions = table.captions(split, found, rows.captions)
            num_changed = sum(new != old for new, old in zip(captions, rows.captions, strict=True))
            self.counts.changed += num_changed
            self.counts.same += int((found >= 0).sum()) - num_changed
            if not num_changed:
                return entry
            ids = dict(self.tokenizing.tokenize([caption for each in captions for caption in each]))
            shards = [(str(name), int(size)) for name, size in file.metadata["shards"]]
            data = replace(rows, captions=captions).to_bytes(shards, file.place, ids)
        self.store.put(SAMPLES, name_of(data), data)
        return replace(entry, name=name_of(data), size=len(data), captions=captions_hash(captions))


class _CaptionTable:
    """A table to import: its rows by hash, out of core, and its captions by row."""

    def __init__(self, path: Path, splits: Mapping[str, Sequence[SampleEntry]], scratch: Path) -> None:
        self._path = path
        self._file = self._open()
        names = set(self._file.schema_arrow.names)
        self._by = "key" if "key" in names else "image"
        for name in ("split", self._by, "captions"):
            if name not in names:
                raise self._refused(
                    f"has no column {'key or image' if name == 'image' else name}", "with split, key and captions"
                )
        self._read = lru_cache(maxsize=4)(self._read_captions)
        self._check()
        self._tables = {split: self._index(split, scratch / f"rows-{split}") for split in splits}
        if sum(map(len, self._tables.values())) != self._file.metadata.num_rows:
            raise self._refused("has rows of other splits", f"with split {' or '.join(splits)}")

    def num_rows(self, split: str) -> int:
        return len(self._tables[split])

    def find(self, split: str, file: SampleFile) -> np.ndarray:
        """Return where the rows of the samples of a file lie in the table of a split, -1 without a row."""
        return self._tables[split].find(file.read("keys" if self._by == "key" else "images").numpy())

    def captions(self, split: str, found: np.ndarray, otherwise: Sequence[list[str]]) -> list[list[str]]:
        """Return the captions at places that :meth:`find` returned."""
        captions, hit = list(otherwise), np.flatnonzero(found >= 0)
        groups, rows = self._tables[split].at(found[hit])
        order = np.argsort(groups, kind="stable")  # each row group is read once
        for place, group, row in zip(hit[order].tolist(), groups[order].tolist(), rows[order].tolist(), strict=True):
            captions[place] = self._read(group)[row]
        return captions

    def _open(self) -> Any:
        parquet = require("pyarrow.parquet", extra="parquet", who=_IMPORT)
        try:
            return parquet.ParquetFile(self._path)
        except (OSError, ValueError) as error:
            raise self._refused(f"cannot be read ({error})", "that precompute export wrote") from error

    def _refused(self, problem: str, expected: str) -> UsageError:
        return UsageError(
            f"{_IMPORT}: table={self._path} {problem}; expected a Parquet file with a row per sample, {expected}; "
            "write one with python -m sd_lightning.precompute export, and change its captions"
        )

    def _groups(self, *columns: str) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        for group in range(self._file.num_row_groups):
            yield group, self._file.read_row_group(group, columns=list(columns)).to_pydict()

    def _read_captions(self, group: int) -> list[list[str]]:
        return [
            _captions(each) for each in self._file.read_row_group(group, columns=["captions"])["captions"].to_pylist()
        ]

    def _check(self) -> None:
        """Check every row."""
        for _, columns in self._groups("split", self._by, "captions"):
            for key, value in zip(columns[self._by], columns["captions"], strict=True):
                if not _captions(value):
                    raise self._refused(
                        f"has no caption for {self._by} {key}",
                        "each with a caption (samples without a row keep theirs)",
                    )
                if not _is_hash(key):
                    raise self._refused(f"has {self._by}={key!r}", f"each with a {self._by} of 32 hexadecimal digits")

    def _index(self, split: str, path: Path) -> KeyTable:
        """Return a table of the rows of a split; each column ``shard`` there is a row group."""

        def blocks() -> Iterator[np.ndarray]:
            for group, columns in self._groups("split", self._by):
                rows = [row for row, each in enumerate(columns["split"]) if each == split]
                joined = bytes.fromhex("".join(columns[self._by][row] for row in rows))
                yield rows_of(np.frombuffer(joined, np.uint8).reshape(-1, 16), group, np.array(rows, np.int64))

        write_table(path, blocks())
        table, last = KeyTable(path), None
        for block in table.blocks():
            keys = block[["high", "low"]]
            if (keys[1:] == keys[:-1]).any() or (len(keys) and last == keys[0]):
                raise self._refused(f"has two rows of one {self._by} in split={split}", "one for each")
            last = keys[-1] if len(keys) else last
        return table


def _captions(value: object) -> list[str]:
    """Return the captions in a string or a list of strings, stripped; none if one is no text."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        return []
    return [each.strip() for each in values if each.strip()]


def _is_hash(value: object) -> bool:
    try:
        return isinstance(value, str) and len(bytes.fromhex(value)) == HASH_BYTES
    except ValueError:
        return False


def _utf8(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
