"""Encoded pictures, and the tars and Parquet files that hold them."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ORIENTATION = 0x0112


def picture(value: int, size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A picture, (width, height), that no other value has."""
    image = Image.new("RGB", size, (value, 255 - value, 7))
    image.putpixel((1, 2), (1, 2, value))
    return image


def encoded(
    value: int, kind: str = "PNG", *, size: tuple[int, int] = (12, 10), orientation: int | None = None
) -> bytes:
    """A picture as a file of some kind, perhaps lying on its side."""
    exif = Image.Exif()
    if orientation is not None:
        exif[ORIENTATION] = orientation
    file = io.BytesIO()
    picture(value, size).save(file, kind, **({"exif": exif} if orientation is not None else {}))
    return file.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes] | Sequence[tuple[str, bytes]], mode: str = "w") -> Path:
    """Write a tar of files, (name, bytes) each; a name may come twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def sample(key: str, value: int, **files: object) -> dict[str, bytes]:
    """The files of a sample: a picture, and a caption unless others are given, by suffix."""
    beside = files or {"txt": f"no {value}\n"}
    encode = {str: str.encode, bytes: bytes}
    texts = {suffix: encode.get(type(file), lambda f: json.dumps(f).encode())(file) for suffix, file in beside.items()}
    return {f"{key}.png": encoded(value)} | {f"{key}.{suffix}": data for suffix, data in texts.items()}


def write_parquet(path: Path, columns: Mapping[str, Sequence[Any]], *, rows_per_group: int = 3, **options: Any) -> Path:
    """Write columns into a Parquet file with small row groups."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(dict(columns)), path, row_group_size=rows_per_group, **options)
    return path


def image_rows(count: int, begin: int = 0) -> dict[str, list[Any]]:
    """Columns `image` and `text` of so many pictures."""
    values = range(begin, begin + count)
    return {"image": [encoded(value) for value in values], "text": [f"no {value}" for value in values]}
