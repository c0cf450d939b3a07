"""Folders for results: the user's folders are never replaced, and new ones are complete or absent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic

TEMPORARY = ".tmp-sd_lightning-"
"""Prefix of short-lived files and folders."""


def check_place(name: str | os.PathLike[str], *, key: str) -> None:
    """Raise for a path unfit for results: empty, with ``~``, or the root, home or current folder by any name.

    Args:
        name: Path as the user gave it.
        key: Start of the message; its last word is the setting: "PortableCheckpoint got run_dir".

    Raises:
        UsageError: It is one of them.
    """
    given, setting, home = os.fspath(name), key.split()[-1], os.path.expanduser("~")
    if not given.strip():
        raise UsageError(f"{key}={given}: it is empty; expected a folder; write {setting}={unused('runs/new')}")
    expanded = os.path.expanduser(given)
    if expanded != given:
        own = unused(f"{home}/runs/new") if _is_same(Path(expanded), Path(home)) else expanded
        raise UsageError(
            f"{key}={given}: only a shell knows ~ as your home folder; expected a whole path; write {setting}={own}"
        )
    path = Path(given).resolve()
    places = {"the root folder": Path(path.anchor), "your home folder": Path(home)}
    with suppress(OSError):  # it was deleted
        places["the current folder"] = Path.cwd()
    for what, place in places.items():
        if _is_same(path, place):
            raise UsageError(
                f"{key}={given}: it is {what}; expected a folder of its own; write {setting}={unused('runs/new')}"
            )


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):  # one of them does not exist, or is no valid path
        return one == other.resolve() or one.samefile(other)
    return False


def unused(path: str | os.PathLike[str]) -> str:
    """Return a path, with a number appended if something exists there."""
    text, number = os.fspath(path), 1
    while os.path.lexists(text):
        number += 1
        text = f"{re.sub(r'-[0-9]+$', '', os.fspath(path))}-{number}"
    return text


def check_writable(folder: Path) -> None:
    """Check that a folder can be written, or created if it does not exist; nothing is left behind.

    Raises:
        OSError: It cannot.
    """
    while not folder.exists():
        folder = folder.parent
    probe = atomic.hidden(folder / TEMPORARY.removeprefix(".tmp-").removesuffix("-"))
    probe.mkdir()  # as root, os.access says yes to everything
    probe.rmdir()


def check_new_folder(name: str, *, key: str, may_exist: bool = False) -> Path:
    """Check that a new folder can be created, without creating it.

    Args:
        name: Its path, as the user gave it.
        key: Name of the setting, for messages: "output_dir".
        may_exist: Whether it may be an existing folder with files.

    Raises:
        UsageError: It is not empty, is a file, cannot be written, or :func:`check_place` refuses it.
    """
    check_place(name, key=key)
    path = Path(name).resolve()
    try:
        if not may_exist and path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{key}={name} is not empty; choose another {key}=<folder>, or delete it")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{key}={name}: a file is in the way; choose another {key}=<folder>")
        check_writable(path if may_exist else path.parent)
    except OSError as error:
        raise UsageError(f"{key}={name} cannot be written ({error.strerror}); choose another {key}=<folder>") from error
    return path


@contextmanager
def complete_or_absent(path: Path, *, given: str) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` at the end; after an error neither exists.

    Args:
        path: From :func:`check_new_folder`.
        given: What the user wrote, for messages: "output_dir=exported".

    Raises:
        UsageError: It cannot be written.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        with atomic.new_folder(path) as tmp:
            yield tmp
            if path.exists():
                path.rmdir()  # fails if it is no longer empty
    except BaseException as error:
        for parent in made:
            with suppress(OSError):  # it was not created, or is not empty
                parent.rmdir()
        if isinstance(error, OSError):
            raise UsageError(
                f"{given} cannot be written ({error}); free space, or choose another {given.partition('=')[0]}=<folder>"
            ) from error
        raise
