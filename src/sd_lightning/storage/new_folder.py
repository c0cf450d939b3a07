"""Folders that are there complete or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage import run_folder, runs


def check_new_folder(name: str, *, key: str) -> Path:
    """Check that a new folder can be made there, without making it yet.

    Args:
        name: Its path, as the user gave it.
        key: What the user gave it as, for messages: "output_dir".

    Raises:
        UsageError: Something is there already, nothing can be written there, or it is the root, the home or the
            current folder.
    """
    run_folder.check_place(name, key=key)
    path = Path(name).resolve()
    try:
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{key}={name} is not empty; choose another {key}=<folder>, or delete it")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{key}={name}: a file is in the way; choose another {key}=<folder>")
        runs.check_writable(path.parent)
    except OSError as error:
        raise UsageError(f"{key}={name} cannot be written ({error.strerror}); choose another {key}=<folder>") from error
    return path


@contextmanager
def complete_or_absent(path: Path, *, given: str) -> Iterator[Path]:
    """Yield a temporary folder beside a new folder; rename it at the end, remove it on any error.

    Args:
        path: From :func:`check_new_folder`.
        given: What the user wrote, for messages: "output_dir=exported".

    Raises:
        UsageError: It cannot be written.
    """
    tmp = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    made = [parent for parent in tmp.parents if not parent.exists()]
    try:
        tmp.mkdir(parents=True)
        yield tmp
        if path.exists():
            path.rmdir()
        tmp.rename(path)
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # it was not made, or something else is in it by now
                parent.rmdir()
        if isinstance(error, OSError):
            raise UsageError(
                f"{given} cannot be written ({error}); free space, or choose another {given.partition('=')[0]}=<folder>"
            ) from error
        raise
