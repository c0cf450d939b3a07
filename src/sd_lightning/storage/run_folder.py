"""Run folders: marked before anything else is written; folders with foreign files are refused.

The mark is the file ``.sd_lightning``. Folders of earlier releases have none and are recognised by their contents.
Files that operating systems create by themselves (``.DS_Store``, ``lost+found``, …) are ignored.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import socket
from collections.abc import Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock, Timeout

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic, checkpoint
from sd_lightning.storage.new_folder import TEMPORARY, unused
from sd_lightning.storage.untrusted import read_json

log = logging.getLogger(__name__)

MARK = ".sd_lightning"
"""A small JSON file in every run's folder."""
PLAN = "plan.json"
"""The plan of a run with ``strategy=auto``, and its rivals."""
LOCK = ".lock"
"""Lock file with the process and machine that work in a run's folder."""

_FORMAT = 1
_FROM_SYSTEMS = (".DS_Store", "._*", ".localized", "Thumbs.db", "desktop.ini", ".directory", "lost+found", ".nfs*")
NAMES = (
    *("config.yaml", "checkpoints", "frozen", "frozen-weights", "logs", "pipeline", "samples", "summary.json"),
    *("report.html", "report.html.tmp", "memory_timeline.json", PLAN, ".tmp-frozen", ".tmp-pipeline", ".old-pipeline"),
)
"""Names in a run's folder; the last ones only from earlier releases."""
_WRITTEN = (
    *("config.yaml", "frozen", "frozen-weights", "pipeline", "summary.json", "report.html", "report.html.tmp"),
    *("checkpoints/step-[0-9]*", "checkpoints/set-aside-*", "checkpoints/.old-step-*", "checkpoints/.tmp-step-*"),
    *("checkpoints/.trash-*", "samples/step-*.png", "logs/**/metrics.csv", "logs/**/hparams.yaml"),
    *("logs/**/events.out.tfevents.*", "memory_timeline.json", ".tmp-frozen*", ".tmp-pipeline*", ".old-pipeline*"),
    *(PLAN, ".old-frozen*", ".trash-old-*", ".tmp-report-*"),
)
"""Patterns of what a run writes into its folder; ``overwrite=true`` deletes only these."""
_CONFIG_KEYS = {"output_dir", "resume", "model", "module", "objective", "trainer", "callbacks", "data"}
_SHOWN = 5


class RunFolder:
    """A run's folder, locked by one process at a time.

    Args:
        path: The folder; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_lock": None}  # a child process holds no lock itself

    def open(self, *, overwrite: bool = False, key: str = "output_dir", others: Collection[str] = ()) -> None:
        """Create the folder, lock it and mark it as a run's; the last step before training.

        Args:
            overwrite: Delete the files of an earlier run in it.
            key: Start of the message, as in :func:`check_ours`.
            others: Name patterns of foreign files that are allowed in it.

        Raises:
            UsageError: Another process runs there, or it holds foreign files; both stay untouched.
        """
        check_ours(self.path, key=key, others=others)  # before the lock file is created
        held = self._is_held()
        self.lock()
        try:
            check_ours(self.path, key=key, others=others)  # again, now that no other run can begin
            mark(self.path)
            if overwrite:
                delete_written(self.path)
        except BaseException:
            if not held:
                self.unlock()
            raise

    def lock(self) -> None:
        """Create the folder and lock it against other processes; the system unlocks it when this process dies.

        Only rank 0 locks; a child process of the holder counts as the holder.

        Raises:
            UsageError: Another process runs there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._is_held():
            return
        file = self.path.resolve() / LOCK
        lock = FileLock(file, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            self._refuse_locked(file)
        except OSError as error:
            log.warning("%s cannot be locked (%s); start no second run in it", self.path, error.strerror)
        else:
            self._lock = lock
            file.write_text(f"{os.getpid()} {socket.gethostname()}", encoding="utf-8")

    def unlock(self) -> None:
        """Unlock the folder if this object has locked it."""
        if self._lock is not None and self._is_held():
            with suppress(OSError):  # Windows cannot delete an open file
                Path(self._lock.lock_file).unlink()
            self._lock.release()
        self._lock = None

    def _is_held(self) -> bool:
        return self._lock is not None and self._lock.is_locked  # is_locked is False after a fork

    def _refuse_locked(self, file: Path) -> None:
        """Raise an error that names the lock's holder, unless that is this process or its parent."""
        try:
            holder = file.read_text(encoding="utf-8", errors="replace").split()
        except OSError:  # on Windows, only the holder can read it
            holder = []
        parent = multiprocessing.parent_process()
        own = {str(process) for process in (os.getpid(), parent and parent.pid)}
        if len(holder) == 2 and holder[0] in own and holder[1] == socket.gethostname():
            return
        who = f"process {holder[0]} on {holder[1]}" if len(holder) == 2 else "another process"
        raise UsageError(
            f"output_dir={self.path}: a run is at work in it ({who}); wait for its end, or choose another "
            "output_dir=<folder>"
        ) from None


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: by its mark or, from earlier releases, by its contents."""
    return _mark(folder) is not None or _has_layout(folder)


def mark(run_dir: Path) -> None:
    """Mark a folder as a run's; the mark is written atomically.

    Raises:
        OSError: It cannot be written.
    """
    if _mark(run_dir) is None:
        told = {"format": _FORMAT, "what": "a run of sd_lightning; overwrite=true deletes what it wrote"}
        with atomic.new_file(run_dir / MARK) as tmp:
            tmp.write_text(json.dumps(told), encoding="utf-8")


def _mark(folder: Path) -> int | None:
    """Return the format version in a folder's mark; None without a mark."""
    try:
        return int(read_json(folder / MARK)["format"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_layout(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint of ours, or our ``config.yaml`` and no foreign files."""
    config = folder / "config.yaml"
    is_ours = config.is_file() and _CONFIG_KEYS <= _keys(config)
    if any(checkpoint.manifest_digest(path) is not None for path in checkpoint.all_checkpoints(folder)):
        return is_ours or not config.exists()
    return is_ours and set(_entries(folder)) <= set(NAMES)


def _keys(config: Path) -> set[str]:
    try:
        return set(re.findall(r"^(\w+):", config.read_text(encoding="utf-8"), re.MULTILINE))
    except (OSError, UnicodeDecodeError):
        return set()


def _entries(folder: Path) -> list[str]:
    """List a folder, without files of the operating system, locks and unfinished marks."""
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


def check_ours(run_dir: Path, *, key: str = "output_dir", others: Collection[str] = ()) -> None:
    """Raise if a folder holds anything but a run of ours; nothing is written.

    Args:
        run_dir: The run's folder; it need not exist.
        key: Start of the message; its last word is the setting.
        others: Name patterns of foreign files that are allowed in it: loggers begin before the run.

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


def delete_written(run_dir: Path) -> None:
    """Delete the files of an earlier run in its folder; its mark and foreign files stay."""
    for path in [path for pattern in _WRITTEN for path in run_dir.glob(pattern)]:
        kept = added_to(path) if path.name == "pipeline" else []
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif not kept:
            shutil.rmtree(path)
        else:
            for part in set(path.iterdir()) - set(kept):
                shutil.rmtree(part) if part.is_dir() and not part.is_symlink() else part.unlink()
    emptied = sorted((run_dir / "logs").glob("**/"), reverse=True)  # loggers create their folders before they write
    for folder in [*emptied, *(run_dir / name for name in ("checkpoints", "samples", "pipeline"))]:
        with suppress(OSError):  # it is not empty, not there, or a link
            folder.rmdir()


def added_to(pipeline: Path) -> list[Path]:
    """Return the foreign files in a pipeline's folder, such as a model card."""
    try:
        index = dict(read_json(pipeline / "model_index.json"))
    except (OSError, ValueError, TypeError):
        return []
    ours = {"model_index.json", *index}
    return [path for path in pipeline.iterdir() if path.name not in ours and path.suffix != ".safetensors"]
