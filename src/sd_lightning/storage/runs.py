"""Find checkpoints and pipelines in a run's directory, and publish its results there.

``<run>/`` holds ``.sd_lightning`` (the mark of a run: see :mod:`sd_lightning.storage.run_folder`), ``config.yaml``,
``checkpoints/``, ``frozen/`` (parts of the pipeline that are not trained, linked by every checkpoint),
``frozen-weights/`` (weights within trained networks that are not trained, if there are any), ``pipeline/`` (the
result, linked from the last checkpoint), ``samples/``, ``logs/``, ``summary.json``, ``report.html`` and, if a step's
memory was traced, ``memory_timeline.json``, and with ``strategy=auto`` ``plan.json``.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic, checkpoint, run_folder
from sd_lightning.storage.new_folder import check_writable, unused
from sd_lightning.storage.untrusted import read_json

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)

LIGHTNING_SUFFIX = ".ckpt"
"""Suffix of plain Lightning checkpoints, from which only weights are loaded."""


def find_checkpoint(resume: str, run_dir: Path, *, who: str = "resume", thorough: bool = True) -> Path | None:
    """Return the checkpoint that ``resume=`` selects.

    Args:
        resume: "auto" (the newest valid one of this run, None if there is none), a checkpoint or a run directory.
        run_dir: The run's own directory.
        who: Name of the setting, for the message.
        thorough: Hash all files. One process of a run does, and broadcasts the result in ``PortableCheckpoint.setup``.
            Before that, the others check only names, sizes and small files; they also hash all files if the run is
            finished, since they may exit before ``setup``.

    Raises:
        UsageError: The path holds no valid checkpoint.
    """
    found = _find_checkpoint(resume, run_dir, who, None if thorough else checkpoint.SMALL_BYTES)
    if found is not None and not thorough and is_finished(run_dir, checkpoint.step_of(found)):
        return _find_checkpoint(resume, run_dir, who, None)
    return found


def _find_checkpoint(resume: str, run_dir: Path, who: str, hash_up_to: int | None) -> Path | None:
    if resume == "auto":
        return checkpoint.newest_valid(run_dir, hash_up_to=hash_up_to)
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
    if path.suffix == LIGHTNING_SUFFIX:
        raise UsageError(
            f"{who}={resume}: a Lightning checkpoint, from which only weights can be taken; write init_from={resume}"
        )
    found = checkpoint.newest_valid(path, hash_up_to=hash_up_to)
    if found is None:
        raise UsageError(f"{who}={resume}: no valid checkpoint in it; expected a run or one of its checkpoints")
    return found


def find_pipeline(path: str | os.PathLike[str], *, who: str) -> Path:
    """Return the pipeline folder of a run, a checkpoint or a pipeline folder.

    Args:
        path: Any of the three. The newest valid checkpoint is used if the run is unfinished or was continued.
        who: Name of the setting, for the message.

    Raises:
        UsageError: There is no pipeline.
    """
    root = Path(path)
    for candidate in (root, root / "pipeline"):
        if (candidate / "model_index.json").is_file():
            later = _newest_after(root, _finished_step(root)) if candidate != root else None
            return candidate if later is None else later / "pipeline"
    if not root.exists():
        raise UsageError(f"{who}={path}: no such folder; expected a run, a checkpoint or a pipeline folder")
    newest = checkpoint.newest_valid(root)
    if newest is None:
        raise UsageError(
            f"{who}={path}: neither a finished pipeline nor a valid checkpoint in it; expected a run, a checkpoint or "
            "a folder with model_index.json"
        )
    return newest / "pipeline"


def holds(run_dir: Path, path: Path) -> bool:
    """Return whether a path lies in a run's directory; links are followed, also those of the run's parts."""
    place = path.resolve()
    return any(place.is_relative_to(part.resolve()) for part in (run_dir, *(run_dir / n for n in run_folder.NAMES)))


def _newest_after(run_dir: Path, step: int) -> Path | None:
    """Return a run's newest valid checkpoint if its step is later; read none if no name has a later step."""
    if not any(checkpoint.step_of(path) > step for path in checkpoint.all_checkpoints(run_dir)):
        return None
    newest = checkpoint.newest_valid(run_dir)
    return newest if newest is not None and checkpoint.step_of(newest) > step else None


def check_lightning_checkpoint(path: str | os.PathLike[str]) -> None:
    """Check that ``init_from=`` is a file; it is read later.

    Raises:
        UsageError: It is not.
    """
    if not Path(path).is_file():
        given = "a folder" if Path(path).is_dir() else "no such file"
        raise UsageError(
            f"init_from={path}: {given}; expected the file that Lightning's trainer.save_checkpoint writes in one "
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
    differing = checkpoint.shape_differences(theirs, ours)
    if differing:
        raise UsageError(
            f"init_from={path}: the checkpoint is of another model; {len(differing)} of {len(ours)} tensors differ: "
            f"{'; '.join(differing[:3])}{'; …' if len(differing) > 3 else ''}. Give the model= and "
            "module.train_text_encoder of the run that saved it"
        )
    module.load_state_dict(weights)


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
        run_folder.check_ours(run_dir)
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
    return _finished_step(run_dir) == step


def _finished_step(run_dir: Path) -> int:
    """Return the step of a run's results, -1 if ``summary.json`` has none."""
    try:
        return int(read_json(run_dir / "summary.json")["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def go_back(run_dir: Path, step: int) -> None:
    """Set aside the checkpoints and results of later steps when a run resumes at an earlier one."""
    moved = checkpoint.set_aside(run_dir, step)
    if _finished_step(run_dir) > step or step == 0:  # results cannot belong to a run at step 0
        for name in ("pipeline", "report.html", "summary.json"):  # summary.json last: it has the step of the others
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
    final = run_dir / "pipeline"
    atomic.restore_replaced(run_dir, final.name)
    with atomic.new_folder(final) as tmp:
        atomic.hard_link_tree(newest / "pipeline", tmp)
        for path in run_folder.added_to(final) if final.is_dir() else ():
            if not (tmp / path.name).exists():
                link = atomic.hard_link_tree if path.is_dir() else atomic.hard_link
                link(path, tmp / path.name)
    return final
