"""Checkpoint directories: complete or absent, checksummed, never half of one.

Layout: ``<run>/checkpoints/step-00000240/{pipeline/,state/,trainer.json,manifest.json}``. A
checkpoint is written under a temporary name and renamed when all of it is on disk, so a process
killed at any moment leaves the last good one as it was. ``manifest.json`` holds the size and
SHA-256 of every file. One process (rank 0) makes, commits and removes; all ranks write into it.

What a run leaves when it is killed begins with a dot: ``.tmp-…`` (being written), ``.trash-…``
(being deleted) and ``.old-…`` (being replaced by a checkpoint of the same step). What a run left behind when it
went back to an earlier step is called ``set-aside-…``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

_STEP_NAME = re.compile(r"step-(\d{8,})")
_OLD_NAME = re.compile(r"\.old-(step-\d{8,})-\w+")

_NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EFBIG: "the file is larger than the limit allows"}
if hasattr(errno, "EDQUOT"):
    _NO_SPACE[errno.EDQUOT] = "the disk quota is used up"


def checkpoint_path(run_dir: str | os.PathLike[str], step: int) -> Path:
    """Where the checkpoint of an optimizer step lies once it is complete."""
    return Path(run_dir, "checkpoints", f"step-{step:08d}")


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """The optimizer step in a checkpoint's name.

    Raises:
        UsageError: The folder is not named like a checkpoint.
    """
    match = _STEP_NAME.fullmatch(Path(checkpoint).name)
    if match is None:
        raise UsageError(f"{checkpoint} is not a checkpoint; expected a folder named like step-00000240.")
    return int(match[1])


def is_portable(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of our checkpoints, or a run that holds some: other folders may be an engine's own."""
    root = Path(path)
    return (root / MANIFEST_NAME).is_file() or bool(all_checkpoints(root))


def has_manifest(path: Path) -> bool:
    """Whether a folder holds a manifest as ``commit`` writes it; not whether the files are as it says."""
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.keys() >= {"sha256", "files"}


def begin(run_dir: str | os.PathLike[str], step: int) -> Path:
    """Make the temporary directory in which the checkpoint of a step is built."""
    path = checkpoint_path(run_dir, step)
    tmp = _hidden(path, "tmp")
    tmp.mkdir(parents=True)
    return tmp


def commit(tmp: Path, *, known: Mapping[str, str] | None = None) -> Path:
    """Make a finished temporary directory a checkpoint, durably and in one step.

    Args:
        tmp: What ``begin`` gave, with all files in it.
        known: SHA-256 by path relative to ``tmp`` (with ``/``) of files that were hashed while
            they were written. The others are read and hashed, each inode once; files hard-linked
            from the previous checkpoint are taken over from its manifest.

    Returns:
        The final path. A checkpoint of the same step that was there before is replaced.
    """
    final = tmp.parent / tmp.name.removeprefix(".tmp-").rsplit("-", 1)[0]
    step_of(final)
    _write_manifest(tmp, known or {})
    _sync_tree(tmp)
    old = None
    if final.exists():
        # A directory cannot be replaced in one step. Killed between the two renames, the old one
        # is found under its .old- name and put back.
        old = _hidden(final, "old")
        final.rename(old)
    try:
        tmp.rename(final)
    except BaseException:
        _restore_replaced(tmp.parent.parent)
        raise
    _sync(tmp.parent)
    if old is not None:
        _delete(old)
    return final


@contextmanager
def saving(run_dir: str | os.PathLike[str], step: int, *, known: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Build a checkpoint in the yielded directory; commit it at the end, remove it on any error.

    Args:
        run_dir: The run's directory.
        step: Optimizer step.
        known: As for ``commit``; read at the end, so it may be filled meanwhile.

    Raises:
        UsageError: The disk is full; the message names the last good checkpoint.
    """
    tmp: Path | None = None
    try:
        tmp = begin(run_dir, step)
        yield tmp
        commit(tmp, known=known)
    except BaseException as error:
        if tmp is not None:
            shutil.rmtree(tmp, ignore_errors=True)
        full = disk_full(error, run_dir, step)
        if full is not None:
            raise full from error
        raise


def disk_full(error: BaseException, run_dir: str | os.PathLike[str], step: int) -> UsageError | None:
    """The message for an error of saving that means "no space"; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        # safetensors' own writer raises its own class with the number in the text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        number = int(match[1]) if match else None
    if number not in _NO_SPACE:
        return None
    good = next((path for path in reversed(all_checkpoints(run_dir)) if not verify(path, contents=False)), None)
    return UsageError(
        f"Saving the checkpoint of step {step} in {run_dir} failed: {_NO_SPACE[number]} ({error}). "
        f"{f'The last good checkpoint is {good}' if good else 'There is no earlier checkpoint'}; "
        "free space or keep fewer checkpoints, then start again with resume=auto."
    )


def verify(checkpoint: str | os.PathLike[str], *, contents: bool = True) -> list[str]:
    """Compare a checkpoint with its manifest.

    Args:
        checkpoint: The checkpoint's directory.
        contents: Read and hash every file; otherwise only look at names and sizes.

    Returns:
        One line per problem, beginning with the file's name; empty if it is intact.
    """
    root = Path(checkpoint)
    try:
        manifest = json.loads((root / MANIFEST_NAME).read_text(encoding="utf-8"))
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        if manifest["sha256"] != _manifest_digest(manifest["files"]):
            raise ValueError("its own checksum differs")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        return [f"{MANIFEST_NAME} {reason}"]
    problems = []
    digests: dict[tuple[int, int], str] = {}
    for name, (size, digest) in files.items():
        try:
            found = (root / name).stat()
            if found.st_size != size:
                problems.append(f"{name} has {found.st_size} bytes instead of {size}")
            elif contents and _digest(root / name, digests) != digest:
                problems.append(f"{name} was altered (its SHA-256 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


def all_checkpoints(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints of a run by name (not verified), oldest first."""
    folder = Path(run_dir, "checkpoints")
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def newest_valid(run_dir: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint whose every file matches its checksum; warns about each it passes over.

    Reads whole checkpoints: call it on one rank and send the others the answer.
    """
    _restore_replaced(run_dir)
    for path in reversed(all_checkpoints(run_dir)):
        problems = verify(path)
        if not problems:
            return path
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        log.warning("Checkpoint %s is not used: %s%s; trying the one before it.", path, problems[0], more)
    return None


def prune(
    run_dir: str | os.PathLike[str], keep: int, *, trusted: Path | None = None, also: Path | None = None
) -> list[Path]:
    """Delete all but the newest checkpoints of a run; the newest valid one and the trusted one always stay.

    Args:
        run_dir: The run's directory.
        keep: How many to keep, at least 1.
        trusted: A checkpoint known to be valid (just committed); spares reading it again.
        also: A further one that stays.

    Returns:
        What was deleted.
    """
    if keep < 1:
        raise UsageError(f"prune got keep={keep}; expected at least 1 checkpoint to keep.")
    paths = all_checkpoints(run_dir)
    removed = paths[:-keep]
    if not removed:
        return []
    needed = {trusted} if trusted in paths[-keep:] else {trusted, newest_valid(run_dir)}
    removed = [path for path in removed if path not in {*needed, also}]
    for path in removed:
        _delete(path)
    return removed


def set_aside(run_dir: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the checkpoints of later steps than the one that a run goes on from: they belong to a future it has left.

    Nothing looks for checkpoints under the new names, and nothing deletes them.

    Args:
        run_dir: The run's directory.
        step: Where the run stands.

    Returns:
        The new paths.
    """
    moved = []
    for path in all_checkpoints(run_dir):
        if step_of(path) > step:
            moved.append(path.rename(path.with_name(f"set-aside-{path.name}-{secrets.token_hex(4)}")))
    return moved


def clean(run_dir: str | os.PathLike[str]) -> None:
    """Remove what killed runs left; call it once at the start of a run, on one rank, before any save."""
    _restore_replaced(run_dir)
    folder = Path(run_dir, "checkpoints")
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((".tmp-step-", ".trash-", ".old-step-")):
                log.info("Removing %s, left by a run that was killed.", path)
                shutil.rmtree(path, ignore_errors=True)


def hard_link_tree(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> None:
    """Make a directory tree with the files of another, sharing the bytes on disk where possible.

    Files are copied where links are not (another disk, or a file system without links).
    Symbolic links in ``src`` are followed: the copy stands when a model cache is cleaned.

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
    """Give a file a second name, or copy it where links are not supported."""
    source = src.resolve()
    try:
        os.link(source, dst)
    except OSError as error:
        if error.errno in _NO_SPACE or isinstance(error, FileExistsError | FileNotFoundError):
            raise
        shutil.copy2(source, dst)


def check_free_space(
    run_dir: str | os.PathLike[str], need_bytes: int, who: str, *, purpose: str = "checkpoints"
) -> None:
    """Refuse a run that could not save.

    Args:
        run_dir: Where checkpoints go; it need not exist yet.
        need_bytes: Bytes that must be free.
        who: Begins the message.
        purpose: What needs them.

    Raises:
        UsageError: Less is free.
    """
    folder = Path(run_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise UsageError(
            f"{who} needs {need_bytes / 1e9:.2f} GB for {purpose}, but {run_dir} has {free / 1e9:.2f} GB free; "
            "free space, keep fewer checkpoints, or set output_dir to another disk."
        )


def shape_differences(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Say of each tensor that a checkpoint and a model do not share what shape it has in either."""
    return [
        f"{name}: {theirs.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} in the model"
        for name in dict.fromkeys([*ours, *theirs])
        if theirs.get(name) != ours.get(name)
    ]


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{kind}-{path.name}-{secrets.token_hex(4)}")


def _delete(path: Path) -> None:
    """Delete a checkpoint; interrupted, it leaves no half of one under a name that is ever used."""
    trash = path.with_name(f".trash-{path.name.removeprefix('.')}-{secrets.token_hex(4)}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _restore_replaced(run_dir: str | os.PathLike[str]) -> None:
    """Put back a checkpoint whose replacement was interrupted between the two renames."""
    folder = Path(run_dir, "checkpoints")
    for path in folder.glob(".old-step-*") if folder.is_dir() else ():
        match = _OLD_NAME.fullmatch(path.name)
        if match and not (folder / match[1]).exists():
            path.rename(folder / match[1])


def _files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def _digest(path: Path, digests: dict[tuple[int, int], str]) -> str:
    """SHA-256 of a file, remembered by inode."""
    found = path.stat()
    inode = (found.st_dev, found.st_ino)
    if inode not in digests:
        with open(path, "rb", buffering=0) as file:
            digests[inode] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests[inode]


def _manifest_digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write_manifest(tmp: Path, known: Mapping[str, str]) -> None:
    names = [name for name in _files(tmp) if name != MANIFEST_NAME]
    unknown = sorted(known.keys() - set(names))
    if unknown:
        raise ValueError(f"{tmp} has no file {unknown[0]!r}, for which a checksum was given.")
    digests = _linked_digests(tmp.parent)
    files = {}
    for name in names:
        digest = known.get(name) or _digest(tmp / name, digests)
        files[name] = {"size": (tmp / name).stat().st_size, "sha256": digest}
    manifest = {"sha256": _manifest_digest(files), "files": files}
    (tmp / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _linked_digests(folder: Path) -> dict[tuple[int, int], str]:
    """Checksums by inode of the newest checkpoint's files that other names share.

    A frozen encoder that every checkpoint links is hashed once in a run. Were such a file altered
    in place, its old checksum stays, and every checkpoint that links it is rightly found damaged.
    """
    paths = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    if not paths:
        return {}
    newest = max(paths, key=step_of)
    if verify(newest, contents=False):
        return {}
    entries = json.loads((newest / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
    stats = {name: (newest / name).stat() for name in entries}
    return {(s.st_dev, s.st_ino): entries[name]["sha256"] for name, s in stats.items() if s.st_nlink > 1}


def _sync(path: Path) -> None:
    """Force a file or directory to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync(path)
