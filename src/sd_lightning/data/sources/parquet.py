"""Captioned images from Parquet files, which hold the encoded images or their paths."""

from __future__ import annotations

import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning._imports import require
from sd_lightning.data.fingerprint import THOROUGH, file_evidence
from sd_lightning.data.source import BadSample
from sd_lightning.data.sources.image_files import (
    EncodedImages,
    captions_in,
    check_column,
    choose,
    files_below,
    is_outside,
    open_file,
    read_size,
)
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, check_size

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType
    from pyarrow.parquet import ColumnChunkMetaData, FileMetaData

CACHE_BYTES = 2**29
"""Decoded row groups that a process keeps; the one read last is kept even if it is larger."""
_PIECE = 64
_UNREADABLE = (OSError, ValueError, LookupError, NotImplementedError)
"""What pyarrow raises for damaged or changed files."""
MAX_GROUP_GIB = 1.0
"""Largest row group of images: reading one of them decodes all."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PIECES = 4
_LOOKED_AT = 20
"""Number of rows checked to decide whether a column holds images."""


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


def column_chunks(metadata: FileMetaData, group: int, column: str) -> list[ColumnChunkMetaData]:
    """Return the parts of a column in a row group: the fields of a structure are parts (image.bytes, image.path)."""
    chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(f"{column}.")]


def sampled_hash(chunks: Sequence[tuple[str, int, int]], num_pieces: int) -> str:
    """Return a hash of small pieces of files, at even distances.

    Args:
        chunks: Path, first byte and bytes of each part of a file.
        num_pieces: How many pieces to read in all; their cost does not grow with the files.

    Raises:
        UsageError: A file cannot be read.
    """
    step = max(sum(size for *_, size in chunks) // max(num_pieces, 1), 1)
    digest, at = blake2b(digest_size=16), 0  # `at`: distance of the next piece from the begin of a part
    for path, parts in groupby(chunks, key=itemgetter(0)):
        try:
            with open(path, "rb", buffering=0) as file:
                for _, begin, size in parts:
                    for offset in range(at, size, step):
                        digest.update(os.pread(file.fileno(), min(_PIECE, size - offset), begin + offset))
                    at = (at - size) % step if at < size else at - size
        except OSError as error:
            raise UsageError(f"ParquetImages cannot read {path} ({error}); mend or remove it") from error
    return digest.hexdigest()


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


class ParquetImages(EncodedImages):
    """Images and captions in the rows of ``.parquet`` files.

    Reading an image decodes its row group, and a few of them are kept (``RowGroups``): row groups of some hundred
    images suit best. Rows without a caption are bad samples, found when they are read.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        image_column: str = "image",
        caption_column: str = "text",
        width_column: str | None = None,
        height_column: str | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        allow_outside: bool = False,
    ) -> None:
        """Read the footers of all files, and check the columns.

        Args:
            root: A folder of files, or one file.
            image_column: Column of encoded images (binary, or ``{bytes, path}`` as Hugging Face writes them), or of
                paths, absolute or relative to the folder.
            caption_column: Column of captions, each a string or a list of strings.
            width_column: Column of the widths of the upright images in pixels; None to read the images' headers.
            height_column: Column of their heights.
            max_image_pixels: Limit on an image's pixels.
            allow_outside: Whether paths may name images outside of the folder.

        Raises:
            UsageError: ``pyarrow`` is not installed; there are no such files or columns, or a column holds something
                else; a row group is too large.
        """
        pyarrow_parquet()  # before anything else is complained about
        if (width_column is None) != (height_column is None):
            raise UsageError(
                f"ParquetImages got data.width_column={width_column} and data.height_column={height_column}; expected "
                "both or none; write both"
            )
        self.max_image_pixels, self._allow_outside = max_image_pixels, allow_outside
        self._image, self._caption = image_column, caption_column
        self._width, self._height = width_column, height_column
        self._groups = RowGroups()
        self._paths = _find_files(Path(root))
        self._folder = str(root) if os.path.isdir(root) else os.path.dirname(root)
        self._keys = [os.path.relpath(path, self._folder or ".").replace(os.sep, "/") for path in self._paths]
        self._names_files = False
        self._table, self.fingerprint = self._read_footers()  # by row group: file, number in it, first row, rows
        self._ends = self._table[:, 3].cumsum()
        if not len(self):
            raise UsageError(
                f"ParquetImages: {str(root)!r} has no rows; expected captioned images; write "
                "data.train_data_dir=<folder> with another one"
            )
        self._check_first_rows()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def open(self, index: int) -> BinaryIO:
        return self._open(self._value(index, self._image))

    def size(self, index: int) -> tuple[int, int]:
        if self._width is None or self._height is None:
            return super().size(index)
        width, height = self._value(index, self._width), self._value(index, self._height)
        if width is None or height is None:
            return super().size(index)
        check_size((width, height), self.max_image_pixels)
        return height, width

    def captions(self, index: int) -> list[str]:
        return captions_in(self._value(index, self._caption))

    def name(self, index: int) -> str:
        file, _, begin, row = self._place(index)
        return f"{self._paths[file]}/{begin + row}"

    def key(self, index: int) -> str:
        """Return the file's path within the folder, and the number of the row in it."""
        file, _, begin, row = self._place(index)
        return f"{self._keys[file]}/{begin + row}"

    def evidence(self, index: int, *, thorough: bool) -> tuple[str, str, str]:
        """Leave out images in the Parquet files: footers and pieces (``fingerprint``) stand for them."""
        image = ""
        if self._names_files:
            path = self._value(index, self._image)
            image = file_evidence(os.path.join(self._folder, path or ""), thorough=thorough)
        return self.key(index), image, self.caption_evidence(index) if thorough else ""

    def _read_footers(self) -> tuple[np.ndarray, str]:
        """Check all files; return the table of row groups, and a hash of the footers and of pieces of the images.

        Another image of the same size leaves the footer as it is. It is noticed where a piece is in it: there are
        ``_PIECES`` for each image, up to ``THOROUGH`` images.
        """
        chunks: list[tuple[str, int, int]] = []
        table: list[tuple[int, int, int, int]] = []
        digest = blake2b(digest_size=16)
        for file, path in enumerate(self._paths):
            metadata, footer = read_footer(path)
            if metadata.num_rows:  # the columns of an empty file may have no type
                self._check_file(path, metadata)
            digest.update(blake2b(self._keys[file].encode(errors="surrogatepass")).digest() + blake2b(footer).digest())
            row = 0
            for group in range(metadata.num_row_groups):
                count = metadata.row_group(group).num_rows
                table.append((file, group, row, count))
                row += count
                for chunk in column_chunks(metadata, group, self._image):
                    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                    chunks.append((path, begin, chunk.total_compressed_size))
        if not self._names_files:  # files are looked at one by one
            digest.update(sampled_hash(chunks, _PIECES * min(sum(count for *_, count in table), THOROUGH)).encode())
        return np.array(table, dtype=np.int64).reshape(-1, 4), digest.hexdigest()

    def _place(self, index: int) -> tuple[int, int, int, int]:
        """Return file, row group in it, its first row, and the sample's row in the row group."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        file, group, begin, count = self._table[at].tolist()
        return file, group, begin, index - int(self._ends[at]) + count

    def _value(self, index: int, column: str) -> Any:
        file, group, _, row = self._place(index)
        return self._groups.value(self._paths[file], group, column, row)

    def _open(self, value: Any) -> BinaryIO:
        """Open the image that a value of the image column holds or names."""
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, value)
        if isinstance(content, bytes) and content:
            return io.BytesIO(content)
        if not isinstance(path, str) or not path:
            raise BadSample("it has no image")
        if _URL.match(path):
            raise BadSample(f"its image is at {path}; download the images, and write their paths into the column")
        if not self._allow_outside and is_outside(path, self._folder or "."):
            raise BadSample(
                f"its image {path} is outside of {self._folder or '.'}; move it there, or write "
                "data.allow_outside=true if you trust who wrote the file"
            )
        return open_file(os.path.join(self._folder, path))

    def _check_file(self, path: str, metadata: FileMetaData) -> None:
        """Raise if a file lacks a column, a column is of the wrong type, or a row group is too large."""
        schema = metadata.schema.to_arrow_schema()
        checks = [
            ("image_column", self._image, holds_images, "encoded images, or paths"),
            ("caption_column", self._caption, holds_texts, "strings, or lists of strings"),
            ("width_column", self._width, holds_integers, "whole numbers"),
            ("height_column", self._height, holds_integers, "whole numbers"),
        ]
        for option, column, fits, expected in checks:
            if column is None:
                continue
            check_column(option, column, schema.names, path)
            if not fits(schema.field(column).type):
                raise UsageError(
                    f"data.{option}={column}: the column of {path} is {schema.field(column).type}; expected "
                    f"{expected}; {choose(option, [field.name for field in schema if fits(field.type)])}"
                )
        self._names_files = holds_strings(schema.field(self._image).type)
        for group in range(metadata.num_row_groups):
            chunks = column_chunks(metadata, group, self._image)
            gib = sum(chunk.total_uncompressed_size for chunk in chunks) / 2**30
            if gib > MAX_GROUP_GIB:
                raise UsageError(
                    f"ParquetImages got {path}, whose row group {group} has {metadata.row_group(group).num_rows} "
                    f"images of {gib:.1f} GiB; expected at most {MAX_GROUP_GIB} GiB, as reading an image decodes its "
                    "row group; write the file again with row_group_size=100"
                )

    def _check_first_rows(self) -> None:
        """Raise if none of the first rows has an image, or its size is not that in the columns of sizes."""
        path = self._paths[self._place(0)[0]]
        columns = [self._image, *([self._width, self._height] if self._width and self._height else [])]
        reason = ""
        for row, (value, *stated) in enumerate(first_rows(path, columns, _LOOKED_AT)):
            try:
                with self._open(value) as file:
                    height, width = read_size(file, max_pixels=self.max_image_pixels)
            except BadSample as error:
                reason = reason or str(error)
                continue
            if stated and None not in stated and stated != [width, height]:
                raise UsageError(
                    f"data.width_column={self._width} data.height_column={self._height}: row {row} of {path} says "
                    f"{stated[0]} x {stated[1]}, but its upright image has {width} x {height} pixels; leave both out, "
                    "and the sizes are read from the images"
                )
            return
        raise UsageError(
            f"data.image_column={self._image}: none of the first rows of {path} has an image that can be read (the "
            f"first: {reason}); expected encoded images, or paths from {self._folder or '.'}; mend them, or write "
            "data.image_column=<another>"
        )


def _find_files(root: Path) -> list[str]:
    """Return the Parquet files of a folder in order, or the one file."""
    if root.is_file():
        return [str(root)]
    found = files_below(root, (".parquet",))
    if not found:
        problem = "holds no .parquet file" if root.is_dir() else "does not exist"
        raise UsageError(
            f"ParquetImages: {str(root)!r} {problem}; expected a folder of .parquet files, or one file; write "
            "data.train_data_dir=<folder>"
        )
    return found
