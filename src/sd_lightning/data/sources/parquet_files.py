"""Reading of Parquet files: footers, first rows, and any value at random from a cache of decoded row groups."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.source import BadSample

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType
    from pyarrow.parquet import FileMetaData

CACHE_BYTES = 2**29
"""Decoded row groups that a process keeps; the one read last is kept even if it is larger."""
_PIECE = 64
_UNREADABLE = (OSError, ValueError, LookupError, NotImplementedError)
"""What pyarrow raises for damaged or changed files."""


class RowGroups:
    """Cache of decoded columns of row groups; it is empty again in a process that it is pickled to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, str], ChunkedArray] = OrderedDict()

    def __reduce__(self) -> tuple[type[RowGroups], tuple[()]]:
        return RowGroups, ()

    def value(self, path: str, group: int, column: str, row: int) -> Any:
        """Return the value of a column in a row of a row group.

        Raises:
            BadSample: It cannot be read.
        """
        try:
            with self._lock:
                values = self._column(path, group, column)
            return values[row].as_py()
        except _UNREADABLE as error:
            raise BadSample(f"cannot read row group {group} of {path} ({error})") from error

    def _column(self, path: str, group: int, column: str) -> ChunkedArray:
        key = (path, group, column)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        # Neither open files nor threads are left behind: worker processes are forked.
        with pyarrow_parquet().ParquetFile(path, pre_buffer=False) as file:
            values = file.read_row_group(group, columns=[column], use_threads=False).column(column)
        self._kept[key] = values
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > CACHE_BYTES:
            self._kept.popitem(last=False)
        return values


def read_footer(path: str) -> tuple[FileMetaData, bytes]:
    """Return a file's metadata, parsed and as bytes.

    Raises:
        UsageError: ``pyarrow`` is not installed, or the file cannot be read.
    """
    parquet = pyarrow_parquet()
    try:
        metadata = parquet.read_metadata(path)
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)  # the footer's length, and a magic number
            length = int.from_bytes(file.read(4), "little")
            file.seek(-8 - length, os.SEEK_END)
            return metadata, file.read(length)
    except _UNREADABLE as error:
        raise UsageError(f"ParquetImages cannot read {path} ({error}); mend or remove it") from error


def image_chunks(metadata: FileMetaData, column: str) -> list[tuple[int, int]]:
    """Return where a column lies in a file: first byte and bytes, compressed, of each part."""
    found = []
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if f"{chunk.path_in_schema}.".startswith(f"{column}."):
                begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                found.append((begin, chunk.total_compressed_size))
    return found


def sampled_hash(chunks: Sequence[tuple[str, int, int]], num_pieces: int) -> str:
    """Return a hash of small pieces of files, at even distances.

    Args:
        chunks: Path, first byte and bytes of each part of a file.
        num_pieces: How many pieces to read in all; their cost does not grow with the files.

    Raises:
        UsageError: A file cannot be read.
    """
    step = max(sum(size for *_, size in chunks) // max(num_pieces, 1), 1)
    found, at = blake2b(digest_size=16), 0  # `at`: distance of the next piece from the begin of a part
    for path, parts in groupby(chunks, key=itemgetter(0)):
        try:
            with open(path, "rb", buffering=0) as file:
                for _, begin, size in parts:
                    for offset in range(at, size, step):
                        found.update(os.pread(file.fileno(), min(_PIECE, size - offset), begin + offset))
                    at = (at - size) % step if at < size else at - size
        except OSError as error:
            raise UsageError(f"ParquetImages cannot read {path} ({error}); mend or remove it") from error
    return found.hexdigest()


def first_rows(path: str, columns: list[str], count: int) -> list[list[Any]]:
    """Return the values of some columns in the first rows of a file, without decoding a whole row group.

    Raises:
        UsageError: They cannot be read.
    """
    try:
        with pyarrow_parquet().ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=count, columns=columns, use_threads=False))
            return [[row[column] for column in columns] for row in batch.to_pylist()]
    except _UNREADABLE as error:
        raise UsageError(f"ParquetImages cannot read {path} ({error}); mend or remove it") from error


def num_bytes(metadata: FileMetaData, group: int, column: str) -> int:
    """Return the bytes of a column in a row group, decompressed."""
    chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
    # The fields of a structure are columns of their own: image.bytes, image.path.
    return sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}."))


def holds_images(kind: DataType) -> bool:
    """Return whether a column of this type may hold encoded images or paths."""
    if _types().is_struct(kind):
        return any(field.name == "bytes" and _is_binary(field.type) for field in kind)
    return _is_binary(kind) or holds_strings(kind)


def holds_texts(kind: DataType) -> bool:
    """Return whether a column of this type holds strings, or lists of strings."""
    types = _types()
    return holds_strings(kind.value_type if types.is_list(kind) or types.is_large_list(kind) else kind)


def holds_integers(kind: DataType) -> bool:
    """Return whether a column of this type holds whole numbers."""
    return _types().is_integer(kind)


def holds_strings(kind: DataType) -> bool:
    """Return whether a column of this type holds strings."""
    types = _types()
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_binary(kind: DataType) -> bool:
    types = _types()
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def pyarrow_parquet() -> Any:
    """Return the module ``pyarrow.parquet``; raise ``UsageError`` if it is not installed."""
    return require("pyarrow.parquet", extra="parquet", who="data=parquet")


def _types() -> Any:
    return require("pyarrow.types", extra="parquet", who="data=parquet")
