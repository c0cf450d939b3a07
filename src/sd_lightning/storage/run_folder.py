"""Whose a folder is: a run marks its own before it writes anything else there, and enters none that holds other files.

The mark is ``.sd_lightning``. Folders of earlier releases carry none; they are recognised by what lies in them. What
operating systems put into folders by themselves (``.DS_Store``, ``lost+found``, …) counts as nothing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage import checkpoint

MARK = ".sd_lightning"
"""A small JSON file in every run's folder."""
LOCK = ".lock"
"""Holds who is at work in a run's folder; see :mod:`sd_lightning.storage.runs`."""
TEMPORARY = ".tmp-sd_lightning-"
"""How names begin that exist for a moment only."""

_FORMAT = 1
_FROM_SYSTEMS = (".DS_Store", "._*", ".localized", "Thumbs.db", "desktop.ini", ".directory", "lost+found", ".nfs*")
NAMES = (
    *("config.yaml", "checkpoints", "frozen", "frozen-weights", "logs", "pipeline", "samples", "summary.json"),
    *("report.html", "report.html.tmp", "memory_timeline.json", ".tmp-frozen", ".tmp-pipeline", ".old-pipeline"),
)
"""What lies in a run's folder."""
_WRITTEN = (
    *("config.yaml", "frozen", "frozen-weights", "pipeline", "summary.json", "report.html", "report.html.tmp"),
    *("checkpoints/step-[0-9]*", "checkpoints/set-aside-*", "checkpoints/.old-step-*", "checkpoints/.tmp-step-*"),
    *("checkpoints/.trash-*", "samples/step-*.png", "logs/**/metrics.csv", "logs/**/hparams.yaml"),
    *("logs/**/events.out.tfevents.*", "memory_timeline.json", ".tmp-frozen", ".tmp-pipeline", ".old-pipeline"),
)
"""What a run leaves in its folder, as patterns; ``overwrite=true`` deletes this and nothing else there."""
_CONFIG_KEYS = {"output_dir", "resume", "model", "module", "objective", "trainer", "callbacks", "data"}
_SHOWN = 5


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: by its mark or, from a release that wrote none, by what lies in it."""
    return _mark(folder) is not None or _has_layout(folder)


def mark(run_dir: Path) -> None:
    """Mark a folder as a run's; the mark is there complete or not at all.

    Raises:
        OSError: It cannot be written.
    """
    if _mark(run_dir) is not None:
        return
    tmp = run_dir / f"{TEMPORARY}{secrets.token_hex(4)}"
    try:
        with open(tmp, "x", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "what": "a run of sd_lightning; overwrite=true deletes what it wrote"}, file)
            file.flush()
            os.fsync(file.fileno())
        tmp.replace(run_dir / MARK)
    finally:
        tmp.unlink(missing_ok=True)


def _mark(folder: Path) -> int | None:
    """Return the format that a folder's mark names; None if there is no mark."""
    try:
        return int(json.loads((folder / MARK).read_text(encoding="utf-8"))["format"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_layout(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of ours, or our ``config.yaml`` and nothing that no run writes."""
    config = folder / "config.yaml"
    is_ours = config.is_file() and _CONFIG_KEYS <= _keys(config)
    if any(checkpoint.has_manifest(path) for path in checkpoint.all_checkpoints(folder)):
        return is_ours or not config.exists()
    return is_ours and set(_entries(folder)) <= set(NAMES)


def _keys(config: Path) -> set[str]:
    try:
        return set(re.findall(r"^(\w+):", config.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return set()


def _entries(folder: Path) -> list[str]:
    """Names in a folder, without what systems put there and without what no run minds: a lock, half a mark."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [name for name in names if not (_matches(name, _FROM_SYSTEMS) or _is_passing(folder / name))]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_passing(path: Path) -> bool:
    if path.name != LOCK:
        return path.name.startswith(TEMPORARY)
    try:
        return path.stat().st_size < 1000 and bool(re.fullmatch(r"(\d+ \S+)?", path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return False


# ---------------------------------------------------------------------- what is refused


def check_place(name: str | os.PathLike[str], *, key: str) -> None:
    """Refuse what is no place for results: nothing, the root, the home and the current folder, by whatever name.

    Args:
        name: As the user gave it.
        key: What the user gave it as, for messages; its last word is the setting: "PortableCheckpoint got run_dir".

    Raises:
        UsageError: It is one of these.
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
    with suppress(OSError):  # one of them is not there, or cannot be
        return one == other.resolve() or one.samefile(other)
    return False


def check_ours(run_dir: Path, *, key: str = "output_dir", others: Collection[str] = ()) -> None:
    """Refuse a folder in which anything lies but a run of ours; nothing is written.

    Args:
        run_dir: The run's folder; it need not exist.
        key: As for :func:`check_place`.
        others: Names in it that others write beside the run: loggers begin before it.

    Raises:
        UsageError: It holds something else, is not a folder, or a newer release wrote it.
    """
    setting = key.split()[-1]
    if run_dir.is_symlink() and not run_dir.exists():
        target = run_dir.resolve()
        raise UsageError(f"{key}={run_dir}: a link to a folder that is not there; write {setting}={target}, or make it")
    if run_dir.exists() and not run_dir.is_dir():
        raise UsageError(f"{key}={run_dir}: a file is in the way; choose another {setting}=<folder>")
    if (_mark(run_dir) or 0) > _FORMAT:
        raise UsageError(
            f"{key}={run_dir} holds a run of a newer release; update sd-lightning, or write {setting}="
            f"{unused(f'{run_dir}-2')}"
        )
    names = [name for name in _entries(run_dir) if not _matches(name, others)]
    if not names or is_run(run_dir):
        return
    shown = [f"{name}/" if (run_dir / name).is_dir() else name for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise UsageError(
        f"{key}={run_dir} holds what no run of sd_lightning wrote and a run could replace: "
        f"{', '.join(shown[:_SHOWN])}{more} ({len(shown)} in all); expected a folder that is new, empty or a run's; "
        f"write {setting}={unused(run_dir / 'run')}"
    )


def unused(path: str | os.PathLike[str]) -> str:
    """Return a path, or with a number if something is there."""
    text, number = os.fspath(path), 1
    while os.path.lexists(text):
        number += 1
        text = f"{re.sub(r'-[0-9]+$', '', os.fspath(path))}-{number}"
    return text


# ---------------------------------------------------------------------- what overwrite=true deletes


def delete_written(run_dir: Path) -> None:
    """Delete what an earlier run wrote into its folder; its mark, and what others have put there, stay."""
    for path in [path for pattern in _WRITTEN for path in run_dir.glob(pattern)]:
        kept = added_to(path) if path.name == "pipeline" else []
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif not kept:
            shutil.rmtree(path)
        else:
            for part in set(path.iterdir()) - set(kept):
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
    for folder in sorted((run_dir / "logs").glob("**/"), reverse=True):  # loggers make theirs before they write
        _remove_empty(folder)
    for name in ("checkpoints", "samples", "pipeline"):
        _remove_empty(run_dir / name)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, not there, or a link
        folder.rmdir()


def added_to(pipeline: Path) -> list[Path]:
    """Return what others have put into a pipeline's folder, such as a model card."""
    try:
        index = json.loads((pipeline / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    ours = {"model_index.json", *index}
    return [path for path in pipeline.iterdir() if path.name not in ours and path.suffix != ".safetensors"]
