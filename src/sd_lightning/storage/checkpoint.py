"""Checkpoint directories: written atomically and checksummed.

Layout: ``<run>/checkpoints/step-00000240/{pipeline/,state/,trainer.json,manifest.json}``. ``manifest.json`` holds the
size and SHA-256 of every file. Rank 0 creates, completes and removes a checkpoint; all ranks write into it. For the
atomic rename and the leftovers of killed processes, see :mod:`sd_lightning.storage.atomic`. When a run goes back to an
earlier step, the checkpoints of later steps are renamed ``set-aside-…``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic
from sd_lightning.storage.untrusted import read_json

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
LIGHTNING_SUFFIX = ".ckpt"
"""Suffix of plain Lightning checkpoints, from which only weights are loaded."""
SMALL_BYTES = 2**20
"""Files up to this size hold metadata that processes make decisions by; larger ones hold tensors."""

_STEP_NAME = r"step-\d{8,}"
_Inode = tuple[int, int]


def checkpoint_path(run_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the final path of an optimizer step's checkpoint."""
    return Path(run_dir, "checkpoints", f"step-{step:08d}")


def step_of(checkpoint: str | os.PathLike[str]) -> int:
    """Return the optimizer step in a checkpoint's name.

    Raises:
        UsageError: The folder is not named like a checkpoint.
    """
    name = Path(checkpoint).name
    if not is_step(name):
        raise UsageError(f"{checkpoint} is not a checkpoint; expected a folder named like step-00000240.")
    return int(name.removeprefix("step-"))


def is_step(name: str) -> bool:
    """Return whether a folder is named like a checkpoint."""
    return re.fullmatch(_STEP_NAME, name) is not None


def is_portable(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is one of our checkpoints or a run with some; others may be an engine's own."""
    root = Path(path)
    return (root / MANIFEST_NAME).is_file() or bool(all_checkpoints(root))


def manifest_digest(path: Path) -> str | None:
    """Return a checkpoint's identity: the checksum of its files' names, sizes and checksums.

    Return None without a manifest of ours. The files are not read; :func:`verify` checks them.
    """
    try:
        manifest = read_json(path / MANIFEST_NAME)
    except (OSError, ValueError):
        return None
    is_ours = isinstance(manifest, dict) and manifest.keys() >= {"sha256", "files"}
    return str(manifest["sha256"]) if is_ours else None


@contextmanager
def saving(run_dir: str | os.PathLike[str], step: int, *, known: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield a directory for a checkpoint's files; the checkpoint is complete at the end, absent after any error.

    An existing checkpoint of the same step is replaced.

    Args:
        run_dir: The run's directory.
        step: Optimizer step.
        known: SHA-256 of files that were hashed while they were written, by path relative to the directory (with
            ``/``); it is read at the end, so it may be filled meanwhile. Other files are read and hashed, each inode
            once; the checksums of files hard-linked from the previous checkpoint come from its manifest.

    Raises:
        UsageError: The disk is full; the message names the last good checkpoint.
    """
    with naming_full_disk(run_dir, step), atomic.new_folder(checkpoint_path(run_dir, step)) as tmp:
        yield tmp
        _write_manifest(tmp, known or {})


@contextmanager
def naming_full_disk(run_dir: str | os.PathLike[str], step: int) -> Iterator[None]:
    """Name the last good checkpoint of a run if the block, a part of saving, fails for lack of space.

    Raises:
        UsageError: It does. Other errors are raised as they are.
    """
    try:
        yield
    except Exception as error:
        reason = atomic.no_space(error)
        if reason is None:
            raise
        good = next((path for path in reversed(all_checkpoints(run_dir)) if not verify(path, hash_up_to=0)), None)
        raise UsageError(
            f"Saving the checkpoint of step {step} in {run_dir} failed: {reason} ({error}). "
            f"{f'The last good checkpoint is {good}' if good else 'There is no earlier checkpoint'}; "
            "free space or keep fewer checkpoints, then start again with resume=auto."
        ) from error


def verify(checkpoint: str | os.PathLike[str], *, hash_up_to: int | None = None) -> list[str]:
    """Compare a checkpoint with its manifest.

    Args:
        checkpoint: The checkpoint's directory.
        hash_up_to: Check only names and sizes of files with more bytes; None reads and hashes every file.

    Returns:
        One line per problem, beginning with the file's name; empty if it is intact.
    """
    root = Path(checkpoint)
    try:
        files = files_of(read_json(root / MANIFEST_NAME))
    except FileNotFoundError:
        return [f"{MANIFEST_NAME} is missing"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST_NAME} cannot be read ({error})"]
    problems = []
    digests: dict[_Inode, str] = {}
    for name, (size, digest) in files.items():
        try:
            if not is_inside(name) or not stat.S_ISREG((status := (root / name).stat()).st_mode):
                problems.append(f"{name} is no file of the checkpoint")
            elif status.st_size != size:
                problems.append(f"{name} has {status.st_size} bytes instead of {size}")
            elif (hash_up_to is None or size <= hash_up_to) and _digest(root / name, digests) != digest:
                problems.append(f"{name} was altered (its SHA-256 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except (OSError, ValueError) as error:  # a name with a zero byte
            problems.append(f"{name!r} cannot be read ({error})")
    return problems


def files_of(manifest: Any) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 by name of the files that a manifest, as JSON, lists; the names are not checked.

    Raises:
        ValueError: It is no manifest of ours.
    """
    try:
        files = {name: (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        digest = manifest["sha256"]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(repr(error)) from error
    if digest != _manifest_digest(manifest["files"]):
        raise ValueError("its own checksum differs")
    return files


def is_inside(name: str) -> bool:
    """Return whether a relative path stays in its folder, links aside."""
    return not PurePath(name).is_absolute() and ".." not in PurePath(name).parts


def all_checkpoints(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints of a run by name (not verified), oldest first."""
    folder = Path(run_dir, "checkpoints")
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if is_step(path.name)), key=step_of)


def newest_valid(run_dir: str | os.PathLike[str], *, hash_up_to: int | None = None) -> Path | None:
    """Return the newest checkpoint whose files match their checksums; warn about each one skipped.

    This reads whole checkpoints, unless ``hash_up_to`` is given as in :func:`verify`: call it on one rank and
    broadcast the result.
    """
    atomic.restore_replaced(Path(run_dir, "checkpoints"), _STEP_NAME)
    for path in reversed(all_checkpoints(run_dir)):
        problems = verify(path, hash_up_to=hash_up_to)
        if not problems:
            return path
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        log.warning("Checkpoint %s is not used: %s%s; trying the one before it.", path, problems[0], more)
    return None


def prune(
    run_dir: str | os.PathLike[str], keep: int, *, trusted: Path | None = None, also: Collection[Path | None] = ()
) -> list[Path]:
    """Delete all but the newest checkpoints of a run; the newest valid one and the trusted one always stay.

    Args:
        run_dir: The run's directory.
        keep: How many to keep, at least 1.
        trusted: A checkpoint known to be valid (just committed); it is not read again.
        also: Other checkpoints to keep.

    Returns:
        The deleted checkpoints.
    """
    assert keep >= 1
    paths = all_checkpoints(run_dir)
    removed = paths[:-keep]
    if not removed:
        return []
    needed = {trusted} if trusted in paths[-keep:] else {trusted, newest_valid(run_dir)}
    removed = [path for path in removed if path not in {*needed, *also}]
    for path in removed:
        atomic.delete_folder(path)
    return removed


def set_aside(run_dir: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the checkpoints of later steps than the one that a run resumes from.

    They belong to a history that the run has left. Under the new names they are neither found nor deleted.

    Args:
        run_dir: The run's directory.
        step: Step that the run resumes from.

    Returns:
        The new paths.
    """
    return [
        path.rename(path.with_name(f"set-aside-{path.name}-{secrets.token_hex(4)}"))
        for path in all_checkpoints(run_dir)
        if step_of(path) > step
    ]


def clean(run_dir: str | os.PathLike[str]) -> None:
    """Remove the leftovers of killed runs; call it once at the start of a run, on one rank, before any save."""
    atomic.clean(Path(run_dir, "checkpoints"), _STEP_NAME)


def shape_differences(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each tensor whose shape differs or that is absent in the checkpoint or the model."""
    return [
        f"{name}: {theirs.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} in the model"
        for name in dict.fromkeys([*ours, *theirs])
        if theirs.get(name) != ours.get(name)
    ]


def check_lightning_checkpoint(path: str | os.PathLike[str]) -> None:
    """Check that ``init_from=`` is a file; it is read later.

    Raises:
        UsageError: It is not.
    """
    if not Path(path).is_file():
        kind = "a folder" if Path(path).is_dir() else "no such file"
        raise UsageError(
            f"init_from={path}: {kind}; expected the file that Lightning's trainer.save_checkpoint writes in one "
            "process, or a run, checkpoint or pipeline folder of sd_lightning"
        )


def load_lightning_checkpoint(path: str | os.PathLike[str], module: nn.Module) -> None:
    """Load the weights, and nothing else, of a plain Lightning checkpoint into the same module.

    Raises:
        UsageError: The file cannot be read without running code from it, or is of another model.
    """
    import torch

    remedy = "expected a checkpoint that Lightning saved of SDLightningModule; save it again, or give a pipeline folder"
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
        theirs = {str(name): tuple(value.shape) for name, value in weights.items()}
    except Exception as error:  # damaged files and refused pickles raise many types
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(f"init_from={path}: cannot be read ({type(error).__name__}: {reason}); {remedy}") from error
    ours = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    differing = shape_differences(theirs, ours)
    if differing:
        raise UsageError(
            f"init_from={path}: the checkpoint is of another model; {len(differing)} of {len(ours)} tensors differ: "
            f"{'; '.join(differing[:3])}{'; …' if len(differing) > 3 else ''}. Give the model=, trainable=, "
            "base= and module.train_text_encoder of the run that saved it"
        )
    module.load_state_dict(weights)


def _digest(path: Path, digests: dict[_Inode, str]) -> str:
    """Return the SHA-256 of a file, remembered by inode."""
    status = path.stat()
    inode = (status.st_dev, status.st_ino)
    if inode not in digests:
        with open(path, "rb", buffering=0) as file:
            digests[inode] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests[inode]


def _manifest_digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _write_manifest(tmp: Path, known: Mapping[str, str]) -> None:
    names = sorted(path.relative_to(tmp).as_posix() for path in tmp.rglob("*") if not path.is_dir())
    unknown = sorted(known.keys() - set(names))
    if unknown:
        raise ValueError(f"{tmp} has no file {unknown[0]!r}, for which a checksum was given.")
    digests = linked_digests(tmp.parent.parent)
    files = {
        name: {"size": (tmp / name).stat().st_size, "sha256": known.get(name) or _digest(tmp / name, digests)}
        for name in names
    }
    manifest = {"sha256": _manifest_digest(files), "files": files}
    (tmp / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def linked_digests(run_dir: Path) -> dict[_Inode, str]:
    """Return the checksums, by inode, of the newest checkpoint's files with several hard links.

    A frozen encoder that every checkpoint links is hashed once in a run. If such a file is altered in place, its old
    checksum stays, and every checkpoint that links it is correctly reported as damaged.
    """
    paths = all_checkpoints(run_dir)
    if not paths or verify(paths[-1], hash_up_to=0):
        return {}
    entries = read_json(paths[-1] / MANIFEST_NAME)["files"]
    stats = {name: (paths[-1] / name).stat() for name in entries}
    return {(s.st_dev, s.st_ino): entries[name]["sha256"] for name, s in stats.items() if s.st_nlink > 1}
