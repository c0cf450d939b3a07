"""Sharded tensor store: a directory of named tensors, written by several ranks and read at any world size.

Every rank writes its flat ranges of the global tensors into one ordinary safetensors file of 1-D pieces; rank 0 merges
the lists of pieces into ``index.json``. Then any flat range can be read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage import far_runs
from sd_lightning.storage.ranged_file import RangedFile, Span
from sd_lightning.storage.safetensors_file import (
    DTYPE_OF_NAME,
    NAME_OF_DTYPE,
    SLICE_BYTES,
    Column,
    HostBuffer,
    OpenFile,
    bytes_of,
    flat_blocks,
    open_safetensors,
    read_exactly,
    read_header,
)
from sd_lightning.storage.streamed_tensor import StreamedTensor, tensors_in, write_file
from sd_lightning.storage.untrusted import read_json

INDEX_NAME = "index.json"
_MOSTLY = 0.9
"""If so much of a file in a bucket is needed, all of it is fetched: it is hashed then, and all processes share it."""


@dataclass(frozen=True)
class _Piece:
    """Location in a file of a tensor's flat range (a ``TensorRange`` holds the values)."""

    file: str
    tensor: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Stored:
    """Index entry of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ShardedTensors:
    """Reader of flat ranges of a store's named tensors (not thread-safe).

    Args:
        directory: Holds ``index.json`` and the safetensors files it names. Of the copy of a checkpoint in a bucket
            (:mod:`sd_lightning.storage.far_runs`) these may be missing: ranges are fetched as they are read.
        files: Ordinary safetensors files in it, such as a pipeline's, to read instead of a store.

    Raises:
        UsageError: The index or one of the files is missing or cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], *, files: Sequence[str] | None = None) -> None:
        self.directory = Path(directory)
        self._buffer = HostBuffer()
        self._files: dict[str, OpenFile] = {}
        self._ranged: dict[str, RangedFile] = {}
        """Of the open files those that are in a bucket."""
        self._stored = _read_index(self.directory / INDEX_NAME) if files is None else _read_headers(directory, files)

    def keys(self) -> list[str]:
        """Return the names of the stored tensors, in the order they were first written."""
        return list(self._stored)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor in the files."""
        return self._entry(key).dtype

    def read_into(self, key: str, out: Tensor, begin: int = 0, end: int | None = None) -> None:
        """Fill a tensor with the flat row-major range ``[begin, end)`` of a stored tensor.

        Args:
            key: Name of the stored tensor.
            out: Filled in place; ``end - begin`` values, any shape, strides, device and dtype.
            begin: First flat index.
            end: One past the last flat index; the whole tensor if not given.

        Raises:
            UsageError: The key is missing, a part of the range was never written, or a file is damaged; the message
                names the key.
        """
        stored = self._entry(key)
        end = stored.numel if end is None else end
        if not 0 <= begin <= end <= stored.numel or out.numel() != end - begin:
            raise UsageError(
                f"Tensor {key!r} in {self.directory} has shape {stored.shape}; "
                f"cannot read [{begin}, {end}) into shape {tuple(out.shape)}."
            )
        self.fetch([(key, begin, end)])
        target = out.detach()
        max_numel = SLICE_BYTES // stored.dtype.itemsize
        for piece, start, stop in self._spans(key, begin, end):
            for block in flat_blocks(target, start - begin, stop - begin, max_numel):
                direct = block.device.type == "cpu" and block.dtype == stored.dtype and block.is_contiguous()
                host = block if direct else self._buffer.take(block.shape, stored.dtype)
                self._read(key, piece, start, host)
                start += block.numel()
                if not direct:
                    block.copy_(host)

    def fetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Fetch what will be read from a bucket, in few requests; nothing is done for files that are here.

        Args:
            ranges: Keys, with the flat range ``[begin, end)`` of each.

        Raises:
            UsageError: As for :meth:`read_into`, or the bucket cannot be read.
        """
        if not far_runs.is_copy(self.directory):
            return
        spans: dict[str, list[Span]] = {}
        for key, begin, end in ranges:
            itemsize = self.dtype(key).itemsize
            for piece, start, stop in self._spans(key, begin, end):
                at = self._column(key, piece).begin - piece.begin * itemsize
                spans.setdefault(piece.file, []).append((at + start * itemsize, at + stop * itemsize))
        for name in spans.keys() & self._ranged.keys():
            header = self._files[name].header
            if sum(end - begin for begin, end in set(spans[name])) < _MOSTLY * (header.end - header.begin):
                self._ranged[name].fetch(spans[name])
            else:
                far_runs.fetch_file(self.directory / name)
                del self._ranged[name], self._files[name]  # it is opened where it is now

    def streamed(self, key: str) -> StreamedTensor:
        """Return a tensor for a writer; the store must stay open until it is written."""
        stored = self._entry(key)
        return StreamedTensor(stored.dtype, stored.shape, lambda: self._slices(key))

    def _slices(self, key: str) -> Iterator[Tensor]:
        stored = self._entry(key)
        max_numel = SLICE_BYTES // stored.dtype.itemsize
        for begin in range(0, stored.numel, max_numel):
            block = self._buffer.take([min(max_numel, stored.numel - begin)], stored.dtype)
            self.read_into(key, block, begin, begin + block.numel())
            yield block

    def close(self) -> None:
        """Close the files."""
        self._ranged.clear()
        while self._files:
            self._files.popitem()[1].handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _entry(self, key: str) -> _Stored:
        if key not in self._stored:
            raise UsageError(
                f"Tensor {key!r} is not in {self.directory} ({len(self._stored)} others are); "
                "resume with the model that was trained."
            )
        return self._stored[key]

    def _spans(self, key: str, begin: int, end: int) -> Iterator[tuple[_Piece, int, int]]:
        """Yield the pieces that hold ``[begin, end)`` as (piece, first flat index, one past the last)."""
        position = begin
        for piece in self._entry(key).pieces:
            start, stop = max(piece.begin, position), min(piece.end, end)
            if start >= stop:
                continue
            if start > position:
                break
            yield piece, start, stop
            position = stop
        if position < end:
            raise UsageError(
                f"Tensor {key!r} has no values for [{position}, {end}) in {self.directory}; use another checkpoint."
            )

    def _read(self, key: str, piece: _Piece, start: int, out: Tensor) -> None:
        """Fill a contiguous host tensor from a piece."""
        memory = bytes_of(out)
        begin = self._column(key, piece).begin + (start - piece.begin) * out.dtype.itemsize
        if not read_exactly(self._files[piece.file].handle, memory, begin):
            raise UsageError(f"Tensor {key!r}: {self.directory / piece.file} ends too early; use another checkpoint.")

    def _column(self, key: str, piece: _Piece) -> Column:
        """Return where a piece lies in its file, which is opened, after checking its size in the file's header."""
        path, stored = self.directory / piece.file, self._entry(key)
        try:
            if piece.file not in self._files:
                self._files[piece.file] = self._open(path)
            column = self._files[piece.file].header.columns[piece.tensor]
            if column.end - column.begin != (piece.end - piece.begin) * stored.dtype.itemsize:
                raise ValueError(f"{piece.tensor!r} has another size than in {INDEX_NAME}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"Tensor {key!r} cannot be read from {path} ({error}); use another checkpoint.") from error
        return column

    def _open(self, path: Path) -> OpenFile:
        if path.exists() or not far_runs.is_copy(path):
            return open_safetensors(path)
        location = far_runs.location_of(self.directory.parent).child(self.directory.name)
        self._ranged[path.name] = file = RangedFile(location, path.name, self.directory)
        return OpenFile(file.handle, read_header(file.read))


def _read_index(index: Path) -> dict[str, _Stored]:
    try:
        stored = {
            key: _Stored(
                DTYPE_OF_NAME[entry["dtype"]],
                tuple(entry["shape"]),
                tuple(sorted((_Piece(**piece) for piece in entry["pieces"]), key=lambda piece: piece.begin)),
            )
            for key, entry in read_json(index).items()
        }
        wrong = [p.file for each in stored.values() for p in each.pieces if Path(p.file).name != p.file]
        if wrong:
            raise ValueError(f"it names {wrong[0]}, which is not beside it")
        return stored
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"Tensor store {index} cannot be read ({error}); use another checkpoint.") from error


def _read_headers(directory: str | os.PathLike[str], files: Sequence[str]) -> dict[str, _Stored]:
    return {
        name: _Stored(tensor.dtype, tensor.shape, (_Piece(file, name, 0, tensor.numel),))
        for file in files
        for name, tensor in tensors_in(Path(directory, file)).items()
    }


def write_shards(directory: str | os.PathLike[str], rank: int, world_size: int, ranges: Iterable[TensorRange]) -> str:
    """Write the flat ranges that one rank owns; every rank calls it, in any order, with no communication.

    Writes ``shard-<rank>-of-<world_size>.safetensors`` and beside it the list of its pieces.
    Together the ranks must write every element exactly once: one rank writes a tensor that all
    hold (DDP), or each rank writes a part.

    Args:
        directory: Existing directory that all ranks share.
        rank: This process, in ``[0, world_size)``.
        world_size: Number of processes that write.
        ranges: Ranges that this rank owns; empty ones are allowed.

    Returns:
        The SHA-256 of the safetensors file.
    """
    stem = f"shard-{rank:05d}-of-{world_size:05d}"
    tensors: dict[str, StreamedTensor] = {}
    listing: dict[str, dict[str, Any]] = {}
    for each in ranges:
        total, numel, dtype = math.prod(each.shape), each.end - each.begin, each.stored_dtype
        if not 0 <= each.begin <= each.end <= total:
            raise ValueError(f"{each.name!r} got the range [{each.begin}, {each.end}) of shape {each.shape}.")
        entry = {"dtype": NAME_OF_DTYPE.get(dtype), "shape": list(each.shape), "numel": total, "pieces": []}
        pieces = listing.setdefault(each.name, entry)["pieces"]
        if not numel:
            continue
        # A whole tensor keeps its plain name, so that other tools find it.
        name = each.name if numel == total else f"{each.name}@{each.begin}"
        if name in tensors:
            raise ValueError(f"A safetensors file cannot hold two tensors named {name!r}.")
        tensors[name] = StreamedTensor.of(each.values, dtype, (numel,))
        pieces.append({"file": f"{stem}.safetensors", "tensor": name, "begin": each.begin, "end": each.end})
    digest = write_file(Path(directory, f"{stem}.safetensors"), tensors)
    text = json.dumps({"sha256": digest, "tensors": listing}, ensure_ascii=False)
    Path(directory, f"{stem}.json").write_text(text, encoding="utf-8")
    return digest


def merge_index(directory: str | os.PathLike[str], world_size: int) -> dict[str, str]:
    """Merge the ranks' lists of pieces into ``index.json``; rank 0 calls it when all ranks have written.

    Args:
        directory: Where ``write_shards`` wrote.
        world_size: Number of processes that wrote.

    Returns:
        SHA-256 by file name of every rank's safetensors file, for the manifest.

    Raises:
        UsageError: A rank's list is missing (the ranks do not share the directory).
        ValueError: Ranks disagree on a tensor, or an element was written twice or not at all.
    """
    directory = Path(directory)
    index: dict[str, dict[str, Any]] = {}
    digests: dict[str, str] = {}
    lists = [directory / f"shard-{rank:05d}-of-{world_size:05d}.json" for rank in range(world_size)]
    for path in lists:
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(
                f"Rank 0 does not find {path}; expected the shards of {world_size} ranks. "
                "Set output_dir to a folder that all machines share."
            ) from error
        digests[f"{path.stem}.safetensors"] = written["sha256"]
        for key, entry in written["tensors"].items():
            known = index.setdefault(key, entry)
            if any(known[name] != entry[name] for name in ("dtype", "shape")):
                raise ValueError(f"Ranks disagree on the dtype or shape of {key!r}: {known} and {entry}.")
            if known is not entry:
                known["pieces"] += entry["pieces"]
    for key, entry in index.items():
        _check_complete(key, entry)
    (directory / INDEX_NAME).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    for path in lists:
        path.unlink()
    return digests


def _check_complete(key: str, entry: dict[str, Any]) -> None:
    """Sort a tensor's pieces; raise unless every element was written exactly once."""
    entry["pieces"].sort(key=lambda piece: piece["begin"])
    position = 0
    for piece in [*entry["pieces"], {"begin": entry["numel"], "end": entry["numel"]}]:
        if piece["begin"] != position:
            fault = "not at all" if piece["begin"] > position else "twice"
            low, high = sorted((piece["begin"], position))
            raise ValueError(f"Elements [{low}, {high}) of {key!r} were written {fault}.")
        position = piece["end"]
