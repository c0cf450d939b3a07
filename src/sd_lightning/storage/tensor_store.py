"""Tensors in safetensors files, written and read in slices: memory stays flat whatever the size.

A *store* is a directory that several ranks write together. Every rank writes its flat ranges of
the named global tensors into one ordinary safetensors file of 1-D pieces, and rank 0 merges the
lists of pieces into ``index.json``. Any flat range can then be read at any other world size.

Files are read with plain reads, not by memory mapping: mapped pages count as resident memory,
so loading a file would seem (and under a memory limit would be) as large as the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.storage.safetensors_file import (
    DTYPE_OF_NAME,
    NAME_OF_DTYPE,
    SLICE_BYTES,
    HostBuffer,
    OpenFile,
    PieceSpec,
    PieceWriter,
    bytes_of,
    flat_blocks,
    open_safetensors,
    tensors_in,
)

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class Entry:
    """A flat range of a named global tensor that this rank owns and writes."""

    key: str
    shape: tuple[int, ...]
    """True shape of the whole global tensor."""
    begin: int
    end: int
    tensor: Tensor | Callable[[], Tensor]
    """``end - begin`` values in row-major order (any shape, strides and device), or a function
    that makes them when their turn comes (dequantised states: one at a time in memory)."""
    dtype: torch.dtype | None = None
    """Dtype in the file; needed with a function, otherwise the tensor's own."""

    @property
    def stored_dtype(self) -> torch.dtype:
        if self.dtype is not None:
            return self.dtype
        if not isinstance(self.tensor, Tensor):
            raise ValueError(f"Entry {self.key!r} makes its tensor when written; give its dtype.")
        return self.tensor.dtype


@dataclass(frozen=True)
class _Piece:
    file: str
    tensor: str
    begin: int
    end: int


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[_Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class ShardedTensors:
    """Read flat ranges of the named tensors of a store (not thread-safe).

    Args:
        directory: Holds ``index.json`` and the safetensors files it names.
        files: Ordinary safetensors files in it, such as a pipeline's, whose tensors to read in the place of a store's.

    Raises:
        UsageError: The index or one of the files is missing or cannot be read.
    """

    def __init__(self, directory: str | os.PathLike[str], *, files: Sequence[str] | None = None) -> None:
        self.directory = Path(directory)
        self._buffer = HostBuffer()
        self._files: dict[str, OpenFile] = {}
        self._stored = _read_index(self.directory / INDEX_NAME) if files is None else _read_headers(directory, files)

    def keys(self) -> list[str]:
        """Names of the stored tensors, in the order they were first written."""
        return list(self._stored)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def shape(self, key: str) -> tuple[int, ...]:
        """True global shape of a tensor."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Dtype in the files."""
        return self._entry(key).dtype

    def read_into(
        self, key: str, out: Tensor, begin: int = 0, end: int | None = None, *, shape: Sequence[int] | None = None
    ) -> None:
        """Fill a tensor with the flat row-major range ``[begin, end)`` of a stored tensor.

        Args:
            key: Name of the stored tensor.
            out: Filled in place; ``end - begin`` values, any shape, strides, device and dtype.
            begin: First flat index.
            end: One past the last flat index; the whole tensor if not given.
            shape: The global shape that the caller expects; compared if given.

        Raises:
            UsageError: The key is missing, the shape differs, a part of the range was never
                written, or a file is damaged; the message names the key.
        """
        stored = self._entry(key)
        end = stored.numel if end is None else end
        if shape is not None and tuple(shape) != stored.shape:
            raise UsageError(
                f"Tensor {key!r} has shape {stored.shape} in {self.directory}; expected {tuple(shape)}. "
                "Resume with the model that was trained."
            )
        if not 0 <= begin <= end <= stored.numel or out.numel() != end - begin:
            raise UsageError(
                f"Tensor {key!r} in {self.directory} has shape {stored.shape}; "
                f"cannot read [{begin}, {end}) into shape {tuple(out.shape)}."
            )
        target = out.detach()
        max_numel = SLICE_BYTES // stored.dtype.itemsize
        for file, offset, start, stop in self._spans(key, begin, end):
            for block in flat_blocks(target, start - begin, stop - begin, max_numel):
                direct = block.device.type == "cpu" and block.dtype == stored.dtype and block.is_contiguous()
                host = block if direct else self._buffer.take(block.shape, stored.dtype)
                offset += self._read(file, offset, bytes_of(host), key)
                if not direct:
                    block.copy_(host)

    def slices(self, key: str) -> Iterator[Tensor]:
        """The whole tensor as successive 1-D CPU slices; each is overwritten by the next one."""
        stored = self._entry(key)
        max_numel = SLICE_BYTES // stored.dtype.itemsize
        for file, offset, start, stop in self._spans(key, 0, stored.numel):
            for position in range(start, stop, max_numel):
                block = self._buffer.take([min(max_numel, stop - position)], stored.dtype)
                offset += self._read(file, offset, bytes_of(block), key)
                yield block

    def close(self) -> None:
        """Close the files."""
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

    def _spans(self, key: str, begin: int, end: int) -> Iterator[tuple[BinaryIO, int, int, int]]:
        """Where ``[begin, end)`` lies: (file, byte offset, first flat index, one past the last)."""
        stored = self._entry(key)
        position = begin
        for piece in stored.pieces:
            start, stop = max(piece.begin, position), min(piece.end, end)
            if start >= stop:
                continue
            if start > position:
                break
            handle, offset = self._locate(key, stored, piece)
            yield handle, offset + (start - piece.begin) * stored.dtype.itemsize, start, stop
            position = stop
        if position < end:
            raise UsageError(
                f"Tensor {key!r} has no values for [{position}, {end}) in {self.directory}; use another checkpoint."
            )

    def _locate(self, key: str, stored: _Stored, piece: _Piece) -> tuple[BinaryIO, int]:
        """File and byte offset of a piece, checked against the file's own header."""
        path = self.directory / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = open_safetensors(path)
            file = self._files[piece.file]
            begin, end = file.header[piece.tensor]["data_offsets"]
            if end - begin != (piece.end - piece.begin) * stored.dtype.itemsize:
                raise ValueError(f"{piece.tensor!r} has another size than in {INDEX_NAME}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"Tensor {key!r} cannot be read from {path} ({error}); use another checkpoint.") from error
        return file.handle, file.data_start + begin

    def _read(self, file: BinaryIO, offset: int, memory: memoryview, key: str) -> int:
        file.seek(offset)
        done = 0
        while done < len(memory):
            count = file.readinto(memory[done:])  # type: ignore[attr-defined]
            if not count:
                raise UsageError(f"Tensor {key!r}: {file.name} ends too early; use another checkpoint.")
            done += count
        return done


def _read_index(index: Path) -> dict[str, _Stored]:
    try:
        return {
            key: _Stored(
                DTYPE_OF_NAME[entry["dtype"]],
                tuple(entry["shape"]),
                tuple(sorted((_Piece(**piece) for piece in entry["pieces"]), key=lambda piece: piece.begin)),
            )
            for key, entry in json.loads(index.read_text(encoding="utf-8")).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"Tensor store {index} cannot be read ({error}); use another checkpoint.") from error


def _read_headers(directory: str | os.PathLike[str], files: Sequence[str]) -> dict[str, _Stored]:
    return {
        spec.key: _Stored(spec.dtype, spec.shape, (_Piece(file, spec.key, 0, math.prod(spec.shape)),))
        for file in files
        for spec in tensors_in(Path(directory, file))
    }


def write_shards(directory: str | os.PathLike[str], rank: int, world_size: int, entries: Iterable[Entry]) -> str:
    """Write the flat ranges that one rank owns; every rank calls it, in any order, with no communication.

    Writes ``shard-<rank>-of-<world_size>.safetensors`` and beside it the list of its pieces.
    Together the ranks must give every element of every tensor exactly once: what all ranks
    hold (DDP) is given by one of them, or each gives a part.

    Args:
        directory: Exists and is seen by all ranks.
        rank: This process, in ``[0, world_size)``.
        world_size: Number of processes that write.
        entries: What this rank owns; an empty range is allowed.

    Returns:
        The SHA-256 of the safetensors file.
    """
    stem = f"shard-{rank:05d}-of-{world_size:05d}"
    specs: list[PieceSpec] = []
    by_name: dict[str, Entry] = {}
    listing: dict[str, dict[str, Any]] = {}
    for entry in entries:
        numel = math.prod(entry.shape)
        if not 0 <= entry.begin <= entry.end <= numel:
            raise ValueError(f"{entry.key!r} got the range [{entry.begin}, {entry.end}) of shape {entry.shape}.")
        dtype = entry.stored_dtype
        pieces = listing.setdefault(
            entry.key, {"dtype": NAME_OF_DTYPE.get(dtype), "shape": list(entry.shape), "numel": numel, "pieces": []}
        )["pieces"]
        if entry.begin == entry.end:
            continue
        # A whole tensor keeps its plain name, so that other tools find it.
        name = entry.key if entry.end - entry.begin == numel else f"{entry.key}@{entry.begin}"
        specs.append(PieceSpec(name, dtype, (entry.end - entry.begin,)))
        by_name[name] = entry
        pieces.append({"file": f"{stem}.safetensors", "tensor": name, "begin": entry.begin, "end": entry.end})
    with PieceWriter(Path(directory, f"{stem}.safetensors"), specs) as writer:
        for piece in writer.pieces:
            source = by_name.pop(piece.key).tensor
            writer.write(piece.key, source if isinstance(source, Tensor) else source())
        digest = writer.close()
    text = json.dumps({"sha256": digest, "tensors": listing}, ensure_ascii=False)
    Path(directory, f"{stem}.json").write_text(text, encoding="utf-8")
    return digest


def merge_index(directory: str | os.PathLike[str], world_size: int) -> dict[str, str]:
    """Merge the ranks' lists of pieces into ``index.json``; rank 0 calls it when all have written.

    Args:
        directory: Where ``write_shards`` wrote.
        world_size: Number of processes that wrote.

    Returns:
        SHA-256 by file name of every rank's safetensors file, for the manifest.

    Raises:
        UsageError: A rank's list is not there (the ranks do not share the directory).
        ValueError: Ranks disagree on a tensor, or an element was given twice or not at all.
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
        entry["pieces"].sort(key=lambda piece: piece["begin"])
        position = 0
        for piece in [*entry["pieces"], {"begin": entry["numel"], "end": entry["numel"]}]:
            if piece["begin"] != position:
                fault = "not at all" if piece["begin"] > position else "twice"
                low, high = sorted((piece["begin"], position))
                raise ValueError(f"Elements [{low}, {high}) of {key!r} were written {fault}.")
            position = piece["end"]
    (directory / INDEX_NAME).write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    for path in lists:
        path.unlink()
    return digests


@dataclass(frozen=True)
class Computed:
    """A tensor that is made when it is written, and not kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def stream_network(
    reader: ShardedTensors,
    key_of: Mapping[str, str | Tensor | Computed],
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> str:
    """Write a network's weights as one ordinary safetensors file that any library loads.

    Args:
        reader: The store that holds the weights.
        key_of: For each name in the file, the key in the store, or the tensor itself (frozen
            weights and buffers, which are not in the store), or how it is computed.
        path: File to create.
        dtype: Convert floating-point weights to it; the stored dtypes if not given.

    Returns:
        The SHA-256 of the file.
    """
    specs = []
    for name, source in key_of.items():
        stored = reader.dtype(source) if isinstance(source, str) else source.dtype
        shape = reader.shape(source) if isinstance(source, str) else tuple(source.shape)
        specs.append(PieceSpec(name, dtype if dtype is not None and stored.is_floating_point else stored, shape))
    with PieceWriter(path, specs, metadata={"format": "pt"}) as writer:
        for piece in writer.pieces:
            source = key_of[piece.key]
            if isinstance(source, str):
                writer.write_slices(piece.key, reader.slices(source))
            else:
                writer.write(piece.key, source.make() if isinstance(source, Computed) else source)
        return writer.close()
