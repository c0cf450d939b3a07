"""Files and folders that are complete or absent, and the places that results may go to.

They are written under a temporary name, synced to disk, and renamed. The user's folders are never replaced.
Leftovers of a killed process begin with a dot: ``.tmp-…`` (being written), ``.trash-…`` (being deleted) and ``.old-…``
(being replaced).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd_lightning._errors import UsageError

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-sd_lightning-"
"""Prefix of short-lived files and folders."""

_NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EFBIG: "the file is larger than the limit allows"}
if hasattr(errno, "EDQUOT"):  # Windows has none
    _NO_SPACE[errno.EDQUOT] = "the disk quota is used up"


def no_space(error: BaseException) -> str | None:
    """Return which space limit an error reports; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and not isinstance(error, UsageError):
        # safetensors' writer raises a class of its own with the number in the text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else None
    return _NO_SPACE.get(number) if number is not None else None


def check_free_space(
    folder: str | os.PathLike[str],
    need_bytes: int,
    who: str,
    *,
    purpose: str = "checkpoints",
    remedy: str = "free space, keep fewer checkpoints, or set output_dir to another disk",
) -> int:
    """Raise if a disk has too little free space.

    Args:
        folder: Where the files go; it need not exist yet.
        need_bytes: Bytes that must be free.
        who: Start of the message.
        purpose: Use of the space, for the message.
        remedy: What the user can do, for the message.

    Returns:
        The free bytes.

    Raises:
        UsageError: Fewer bytes are free.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < need_bytes:
        raise UsageError(
            f"{who} needs {need_bytes / 1e9:.2f} GB for {purpose}, but {folder} has {free / 1e9:.2f} GB free; {remedy}."
        )
    return free


def hidden(path: Path, kind: str = "tmp") -> Path:
    """Return an unused hidden name beside a path; it keeps the suffix, by which some libraries choose the format."""
    stem = path.stem.removeprefix(".")
    return path.with_name(f".{kind}-{stem}-{secrets.token_hex(4)}{path.suffix}")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces ``path`` at the end; an error leaves ``path`` unchanged."""
    tmp = hidden(path)
    try:
        yield tmp
        sync(tmp)
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as :func:`new_file` does; texts in UTF-8."""
    with new_file(path) as tmp:
        tmp.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder; it replaces ``path`` at the end; an error leaves ``path`` unchanged."""
    tmp = hidden(path)
    try:
        tmp.mkdir(parents=True)
        yield tmp
        _replace(path, tmp)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise


def _replace(path: Path, tmp: Path) -> None:
    """Sync a folder to disk and rename it to its final name.

    Replacing a folder takes two renames. If the process is killed between them, the old folder keeps its ``.old-``
    name until :func:`restore_replaced` renames it back.
    """
    for part in [*tmp.rglob("*"), tmp]:
        sync(part)
    old = hidden(path, "old") if path.exists() else None
    if old is not None:
        path.rename(old)
    try:
        tmp.rename(path)
    except BaseException:
        if old is not None:
            old.rename(path)
        raise
    sync(path.parent)
    if old is not None:
        delete_folder(old)


def restore_replaced(folder: Path, names: str) -> None:
    """Rename back folders whose replacement was interrupted between the two renames.

    Args:
        folder: Their parent.
        names: Regular expression of their final names.
    """
    for path in folder.glob(".old-*") if folder.is_dir() else ():
        match = re.fullmatch(rf"\.old-({names})(?:-\w+)?", path.name)
        if match and not (folder / match[1]).exists():
            path.rename(folder / match[1])


def clean(folder: Path, names: str) -> None:
    """Call :func:`restore_replaced`, then delete other leftovers of killed processes for these names."""
    restore_replaced(folder, names)
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch(rf"\.(tmp|old|trash)-(old-)?({names})(-\w+)*", path.name):
            log.info("Removing %s, left by a run that was killed.", path)
            shutil.rmtree(path, ignore_errors=True)


def delete_folder(path: Path) -> None:
    """Delete a folder; it is renamed first, so that an interruption leaves no partial folder at ``path``."""
    trash = hidden(path, "trash")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hard_link_tree(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Copy a directory tree by :func:`hard_link`, which shares the bytes on disk where possible.

    Symbolic links in ``src`` are followed, so that the copy survives when a model cache is cleaned.

    Raises:
        UsageError: ``src`` is not a directory.
    """
    src, dst = Path(src), Path(dst)
    if not src.is_dir():
        raise UsageError(f"hard_link_tree got {src}, which is not a folder; expected the folder to link from.")
    for folder, _, names in os.walk(src, followlinks=True):
        target = dst / Path(folder).relative_to(src)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            hard_link(Path(folder, name), target / name)


def hard_link(src: Path, dst: Path) -> None:
    """Hard-link a file, or copy it where links do not work (another disk, a file system without links)."""
    source = src.resolve()
    try:
        os.link(source, dst)
    except OSError as error:
        if error.errno in _NO_SPACE or isinstance(error, FileExistsError | FileNotFoundError):
            raise
        shutil.copy2(source, dst)


def check_place(name: str | os.PathLike[str], *, key: str) -> None:
    """Raise for a path unfit for results: empty, with ``~``, or the root, home or current folder by any name.

    Args:
        name: Path as the user gave it.
        key: Start of the message; its last word is the setting: "PortableCheckpoint got run_dir".

    Raises:
        UsageError: It is one of them.
    """
    text, setting, home = os.fspath(name), key.split()[-1], os.path.expanduser("~")
    if not text.strip():
        raise UsageError(f"{key}={text}: it is empty; expected a folder; write {setting}={unused('runs/new')}")
    expanded = os.path.expanduser(text)
    if expanded != text:
        own = unused(f"{home}/runs/new") if _is_same(Path(expanded), Path(home)) else expanded
        raise UsageError(
            f"{key}={text}: only a shell knows ~ as your home folder; expected a whole path; write {setting}={own}"
        )
    path = Path(text).resolve()
    places = {"the root folder": Path(path.anchor), "your home folder": Path(home)}
    with suppress(OSError):  # it was deleted
        places["the current folder"] = Path.cwd()
    for title, place in places.items():
        if _is_same(path, place):
            raise UsageError(
                f"{key}={text}: it is {title}; expected a folder of its own; write {setting}={unused('runs/new')}"
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
    probe = hidden(folder / TEMPORARY.removeprefix(".tmp-").removesuffix("-"))
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
def complete_or_absent(path: Path, *, setting: str) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``path`` at the end; after an error neither exists.

    Args:
        path: From :func:`check_new_folder`.
        setting: As the user wrote it, for messages: "output_dir=exported".

    Raises:
        UsageError: It cannot be written.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        with new_folder(path) as tmp:
            yield tmp
            if path.exists():
                path.rmdir()  # fails if it is no longer empty
    except BaseException as error:
        for parent in made:
            with suppress(OSError):  # it was not created, or is not empty
                parent.rmdir()
        if isinstance(error, OSError):
            raise UsageError(
                f"{setting} cannot be written ({error}); free space, or choose another "
                f"{setting.partition('=')[0]}=<folder>"
            ) from error
        raise
