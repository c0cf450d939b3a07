"""Seals: the hash of a whole file, written into its header. A flipped bit anywhere in the file breaks it.

The hash is taken with ``BLANK`` where the seal stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

_HASH_BYTES = 16
BLANK = "-" * 2 * _HASH_BYTES
"""What stands in place of a seal before there is one."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What is raised when the header of an altered file is parsed."""
_BLOCK = 2**22


def sealed(data: bytes) -> bytes:
    """Return data in which ``BLANK`` stands once, with their seal instead."""
    return data.replace(BLANK.encode(), _hash(data, BLANK, iter(())).encode(), 1)


def is_sealed(data: bytes, seal: object) -> bool:
    """Return whether data are what was sealed; ``seal`` is the one that was read from them."""
    return seal == _hash(data, seal, iter(()))


def seal_file(path: Path) -> None:
    """Put a safetensors file's seal in place of the ``BLANK`` in its header; memory holds a few megabytes of it."""
    with open(path, "r+b") as file:
        head = _head(file)
        seal = _hash(head, BLANK, _blocks(file))
        file.seek(0)
        file.write(head.replace(BLANK.encode(), seal.encode(), 1))


def is_sealed_file(path: Path, seal: object) -> bool:
    """Return whether a safetensors file is what was sealed; ``seal`` is the one that was read from its header."""
    with open(path, "rb") as file:
        return seal == _hash(_head(file), seal, _blocks(file))


def _head(file: BinaryIO) -> bytes:
    length = file.read(8)
    return length + file.read(int.from_bytes(length, "little"))


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _hash(head: bytes, seal: object, rest: Iterator[bytes]) -> str:
    found = blake2b(head.replace(str(seal).encode(), BLANK.encode(), 1), digest_size=_HASH_BYTES)
    for block in rest:
        found.update(block)
    return found.hexdigest()
