"""A run's folder: its mark and lock, what it may hold, its checkpoints and pipelines, and its published results.

``<run>/`` holds ``.sd_lightning`` (the mark, written before anything else), ``config.yaml``, ``checkpoints/``,
``frozen/`` (parts of the pipeline that are not trained, linked by every checkpoint), ``frozen-weights/`` (weights in
trained networks that are not trained, if there are any), ``pipeline/`` (the result, linked from the last checkpoint),
``samples/``, ``logs/``, ``summary.json``, ``report.html`` and, if a step's memory was traced, ``memory_timeline.json``,
with ``strategy=auto`` ``plan.json``, and if it was evaluated ``evaluation.json`` and ``evaluation/``. A folder with
foreign files and no mark is refused. Files that operating systems create by themselves (``.DS_Store``, ``lost+found``,
…) are ignored.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import secrets
import shutil
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock, Timeout

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic, checkpoint, far_runs
from sd_lightning.storage.atomic import TEMPORARY, check_writable, unused
from sd_lightning.storage.untrusted import read_json

log = logging.getLogger(__name__)

MARK = ".sd_lightning"
"""A small JSON file in every run's folder."""
PLAN = "plan.json"
"""The plan of a run with ``strategy=auto``, and its rivals."""
EVALUATION = "evaluation.json"
"""What ``python -m sd_lightning.evaluate`` has measured; its pictures are in the folder ``evaluation``."""
LOCK = ".lock"
"""Lock file with the process and machine that work in a run's folder."""

_FORMAT = 1
_FROM_SYSTEMS = (".DS_Store", "._*", ".localized", "Thumbs.db", "desktop.ini", ".directory", "lost+found", ".nfs*")
_RECORDS = ("config.yaml", "logs", "samples", "summary.json", "report.html", "memory_timeline.json", PLAN, EVALUATION)
_NAMES = (*_RECORDS, "evaluation", "checkpoints", "frozen", "frozen-weights", "pipeline")
"""Names in a run's folder."""
_WRITTEN = (
    *("config.yaml", "frozen", "frozen-weights", "pipeline", "summary.json", "report.html"),
    *("checkpoints/step-[0-9]*", "checkpoints/set-aside-*", "checkpoints/.old-step-*", "checkpoints/.tmp-step-*"),
    *("checkpoints/.trash-*", "samples/step-*.png", "logs/**/metrics.csv", "logs/**/hparams.yaml"),
    *("logs/**/events.out.tfevents.*", "memory_timeline.json", ".tmp-frozen*", ".tmp-pipeline*", ".old-pipeline*"),
    *(PLAN, EVALUATION, "evaluation/[0-9]*.png", ".old-frozen*", ".trash-old-*", ".tmp-report-*"),
)
"""Patterns of what a run writes into its folder; ``overwrite=true`` deletes only these."""
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
            mark(self.path, anew=overwrite)
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
    """Return whether a folder is marked as a run's."""
    return _mark(folder) is not None


def mark(run_dir: Path, *, anew: bool = False) -> None:
    """Mark a folder as a run's; the mark is written atomically, with an id by which copies of the run are known.

    Args:
        run_dir: The folder.
        anew: Replace the mark of an earlier run.

    Raises:
        OSError: It cannot be written.
    """
    if anew or _mark(run_dir) is None:
        what = "a run of sd_lightning; overwrite=true deletes what it wrote"
        content = {"format": _FORMAT, "what": what, "id": secrets.token_hex(8)}
        atomic.write_whole(run_dir / MARK, json.dumps(content))


def run_id(folder: Path) -> str | None:
    """Return the id in a run's mark, by which what was made of it is known elsewhere; None without one."""
    try:
        return str(read_json(folder / MARK)["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mark(folder: Path) -> int | None:
    """Return the format version in a folder's mark; None without a mark."""
    try:
        return int(read_json(folder / MARK)["format"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    for folder in [*emptied, *(run_dir / name for name in ("checkpoints", "samples", "pipeline", "evaluation"))]:
        with suppress(OSError):  # it is not empty, not there, or a link
            folder.rmdir()


def is_record(name: str) -> bool:
    """Return whether a file of this name, in a run's folder, is of its settings, curves, pictures or results."""
    return name.partition("/")[0] in _RECORDS


def added_to(pipeline: Path) -> list[Path]:
    """Return the foreign files in a pipeline's folder, such as a model card."""
    try:
        index = dict(read_json(pipeline / "model_index.json"))
    except (OSError, ValueError, TypeError):
        return []
    ours = {"model_index.json", *index}
    return [path for path in pipeline.iterdir() if path.name not in ours and path.suffix != ".safetensors"]


def find_checkpoint(resume: str, run_dir: Path, *, who: str = "resume", thorough: bool = True) -> Path | None:
    """Return the checkpoint that ``resume=`` selects.

    Args:
        resume: "auto" (the newest valid one of this run, None if there is none), a checkpoint or a run directory, or
            the URL of one. Of one in a bucket only small files are fetched; see
            :mod:`~sd_lightning.storage.far_runs`.
        run_dir: The run's own directory. If it stands for a URL, the bucket's newest checkpoint counts, too.
        who: Name of the setting, for the message.
        thorough: Hash all files. One process of a run does, and broadcasts the result in ``PortableCheckpoint.setup``.
            Before that, the others check only names, sizes and small files; they also hash all files if the run is
            finished, since they may exit before ``setup``.

    Raises:
        UsageError: The path holds no valid checkpoint.
    """
    path = _find_checkpoint(resume, run_dir, who, None if thorough else checkpoint.SMALL_BYTES)
    if path is not None and not thorough and is_finished(run_dir, checkpoint.step_of(path)):
        return _find_checkpoint(resume, run_dir, who, None)
    return path


def _find_checkpoint(resume: str, run_dir: Path, who: str, hash_up_to: int | None) -> Path | None:
    if resume == "auto":
        return far_runs.newer(run_dir, checkpoint.newest_valid(run_dir, hash_up_to=hash_up_to))
    if far_runs.is_url(resume):
        return far_runs.fetch(resume, who=who)
    path = Path(resume)
    if not path.exists():
        raise UsageError(f"{who}={resume}: no such folder; expected auto, a run or one of its checkpoints")
    if (path / checkpoint.MANIFEST_NAME).exists():
        problems = checkpoint.verify(path, hash_up_to=hash_up_to)
        if problems:
            raise UsageError(
                f"{who}={resume}: the checkpoint is damaged: {problems[0]}; give an earlier one, or the run's folder"
            )
        return path
    if path.suffix == checkpoint.LIGHTNING_SUFFIX:
        raise UsageError(
            f"{who}={resume}: a Lightning checkpoint, from which only weights can be taken; write init_from={resume}"
        )
    newest = checkpoint.newest_valid(path, hash_up_to=hash_up_to)
    if newest is None:
        raise UsageError(f"{who}={resume}: no valid checkpoint in it; expected a run or one of its checkpoints")
    return newest


def find_pipeline(path: str | os.PathLike[str], *, who: str) -> Path:
    """Return the pipeline folder of a run, a checkpoint or a pipeline folder.

    Args:
        path: Any of the three. The newest valid checkpoint is used if the run is unfinished or was continued. Or the
            URL of a run, a checkpoint or the pipeline in one: the newest whole checkpoint's pipeline is fetched.
        who: Name of the setting, for the message.

    Raises:
        UsageError: There is no pipeline.
    """
    root = far_runs.fetch(os.fspath(path), who=who, pipeline=True) if far_runs.is_url(path) else Path(path)
    for candidate in (root, root / "pipeline"):
        if (candidate / "model_index.json").is_file():
            later = _newest_after(root, finished_step(root)) if candidate != root else None
            return candidate if later is None else later / "pipeline"
    if not root.exists():
        raise UsageError(f"{who}={path}: no such folder; expected a run, a checkpoint or a pipeline folder")
    newest = checkpoint.newest_valid(root)
    if newest is None or not (newest / "pipeline").is_dir():  # a module of one's own may have no pipeline
        raise UsageError(
            f"{who}={path}: neither a finished pipeline nor a valid checkpoint with one in it; expected a run, a "
            "checkpoint or a folder with model_index.json"
        )
    return newest / "pipeline"


def run_of(path: Path) -> Path | None:
    """Return the run's folder, which has its settings, of a run, a checkpoint in it or a pipeline in either."""
    places = [path, path.parent] if path.name == "pipeline" else [path]
    places += [place.parents[1] for place in places if place.parent.name == "checkpoints"]
    return next((place for place in places if (place / "config.yaml").is_file()), None)


def holds(run_dir: Path, path: Path) -> bool:
    """Return whether a path lies in a run's directory; links are followed, also those of the run's parts.

    So does a copy of what the bucket holds of the run.
    """
    place, url = path.resolve(), far_runs.url_of(run_dir)
    copies = [] if url is None else [far_runs.working_folder(url, "fetched")]
    return any(place.is_relative_to(part.resolve()) for part in (run_dir, *copies, *(run_dir / n for n in _NAMES)))


def _newest_after(run_dir: Path, step: int) -> Path | None:
    """Return a run's newest valid checkpoint if its step is later; read none if no name has a later step."""
    if not any(checkpoint.step_of(path) > step for path in checkpoint.all_checkpoints(run_dir)):
        return None
    newest = checkpoint.newest_valid(run_dir)
    return newest if newest is not None and checkpoint.step_of(newest) > step else None


def check_output_dir(
    run_dir: Path, *, resuming: bool, overwrite: bool, reads: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Raise if a run cannot use its output directory; nothing is changed.

    Args:
        run_dir: The run's directory.
        resuming: Whether a run in it is continued.
        overwrite: Whether an earlier run in it is deleted.
        reads: Setting -> path that the run will read.

    Raises:
        UsageError: It holds another run, foreign files or what the run reads, is not a directory, or cannot be written.
    """
    try:
        _check_apart(run_dir, reads)
        check_ours(run_dir)
        if not resuming and not overwrite:
            check_unused(run_dir)
        check_writable(run_dir)
    except OSError as error:
        raise UsageError(
            f"output_dir={run_dir} cannot be written ({error.strerror}); choose another output_dir=<folder>"
        ) from error


def _check_apart(run_dir: Path, reads: Mapping[str, str | os.PathLike[str]]) -> None:
    for setting, path in reads.items():
        if holds(run_dir, Path(path)):
            same = Path(path).resolve() == run_dir.resolve()
            raise UsageError(
                f"{setting}={path} {'is' if same else 'lies in'} output_dir={run_dir}, where the run would write over "
                f"what it reads; expected two folders apart; write output_dir={unused(f'{run_dir}-2')}"
            )


def check_unused(run_dir: Path) -> None:
    """Raise if a directory holds the checkpoints or results of a run.

    Raises:
        UsageError: It does.
    """
    if checkpoint.all_checkpoints(run_dir):
        raise UsageError(
            f"output_dir={run_dir} already holds a run; continue it with resume=auto, choose another output_dir=, "
            "or delete it with overwrite=true"
        )
    if any((run_dir / name).exists() for name in ("pipeline/model_index.json", "summary.json")):
        raise UsageError(
            f"output_dir={run_dir} already holds the results of a run, whose checkpoints are gone; choose another "
            "output_dir=, or delete them with overwrite=true"
        )


def is_finished(run_dir: Path, step: int) -> bool:
    """Return whether a run has ended at a step and written its results."""
    return finished_step(run_dir) == step


def finished_step(run_dir: Path) -> int:
    """Return the step of a run's results, -1 if ``summary.json`` has none."""
    try:
        return int(read_json(run_dir / "summary.json")["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def result_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint of a run's result: the best one of a finished run that chose it, else the newest valid."""
    summary = run_dir / "summary.json"
    best = read_json(summary).get("best_step") if summary.is_file() else None
    found = checkpoint.checkpoint_path(run_dir, best) if type(best) is int else None
    if found is not None and found.is_dir() and _newest_after(run_dir, finished_step(run_dir)) is None:
        return found
    return checkpoint.newest_valid(run_dir)


def newest_step(run_dir: Path) -> int:
    """Return the step of a run's results or newest checkpoint, whichever is later; -1 without any."""
    return max([finished_step(run_dir), *map(checkpoint.step_of, checkpoint.all_checkpoints(run_dir))])


def go_back(run_dir: Path, step: int) -> None:
    """Set aside the checkpoints and results of later steps when a run resumes at an earlier one."""
    moved = checkpoint.set_aside(run_dir, step)
    if finished_step(run_dir) > step or step == 0:  # results cannot belong to a run at step 0
        for name in (EVALUATION, "pipeline", "report.html", "summary.json"):  # the last has the step of the others
            if (run_dir / name).is_file() or (run_dir / name / "model_index.json").is_file():
                new = run_dir / "checkpoints" / f"set-aside-{secrets.token_hex(4)}-{name}"
                new.parent.mkdir(exist_ok=True)
                moved.append((run_dir / name).rename(new))
    if not moved:
        return
    names = ", ".join(path.name for path in moved)
    log.warning("%s goes on from step %d; what is of later steps is set aside: %s", run_dir, step, names)


def publish_pipeline(run_dir: Path, newest: Path) -> Path:
    """Hard-link a checkpoint's pipeline to ``<run>/pipeline``, atomically.

    Foreign files in that folder, such as a model card, are kept.
    """
    if far_runs.is_copy(newest):  # the run was continued at its end, and has trained no step here
        far_runs.fetch(far_runs.name_of(newest), who="resume", pipeline=True)
    final = run_dir / "pipeline"
    atomic.restore_replaced(run_dir, final.name)
    with atomic.new_folder(final) as tmp:
        atomic.hard_link_tree(newest / "pipeline", tmp)
        for path in added_to(final) if final.is_dir() else ():
            if not (tmp / path.name).exists():
                link = atomic.hard_link_tree if path.is_dir() else atomic.hard_link
                link(path, tmp / path.name)
    return final
