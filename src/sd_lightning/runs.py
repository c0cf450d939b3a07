"""A run lives in one directory; this is its layout, and how other programs find things in it.

``<run>/`` holds ``config.yaml``, ``checkpoints/``, ``frozen/`` (parts of the pipeline that are not trained, linked by
every checkpoint), ``frozen-weights/`` (weights within trained networks that are not trained, if there are any),
``pipeline/`` (the result, linked from the last checkpoint), ``samples/``, ``logs/``, ``summary.json`` and
``report.html``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning import checkpoint
from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    from torch import nn

LIGHTNING_SUFFIX = ".ckpt"
"""Ending of plain Lightning checkpoints, from which only weights are taken."""


def find_checkpoint(resume: str, run_dir: Path, *, who: str = "resume") -> Path | None:
    """Return the checkpoint that ``resume=`` means.

    Args:
        resume: "auto" (the newest valid one of this run, None if there is none), a checkpoint or a run directory.
        run_dir: The run's own directory.
        who: The setting it was given by, for the message.

    Raises:
        UsageError: The path holds no valid checkpoint.
    """
    if resume == "auto":
        return checkpoint.newest_valid(run_dir)
    path = Path(resume)
    if not path.exists():
        raise UsageError(f"{who}={resume}: no such folder; expected auto, a run or one of its checkpoints")
    if (path / checkpoint.MANIFEST_NAME).exists():
        problems = checkpoint.verify(path)
        if problems:
            raise UsageError(
                f"{who}={resume}: the checkpoint is damaged: {problems[0]}; give an earlier one, or the run's folder"
            )
        return path
    if path.suffix == LIGHTNING_SUFFIX:
        raise UsageError(
            f"{who}={resume}: a Lightning checkpoint, from which only weights can be taken; write init_from={resume}"
        )
    found = checkpoint.newest_valid(path)
    if found is None:
        raise UsageError(f"{who}={resume}: no valid checkpoint in it; expected a run or one of its checkpoints")
    return found


def find_pipeline(path: str | os.PathLike[str], *, who: str) -> Path:
    """Return the pipeline folder of a run, a checkpoint or a pipeline folder.

    Args:
        path: Any of the three; of an unfinished run, the newest valid checkpoint's.
        who: The setting it was given by, for the message.

    Raises:
        UsageError: There is none.
    """
    root = Path(path)
    for candidate in (root, root / "pipeline"):
        if (candidate / "model_index.json").is_file():
            return candidate
    if not root.exists():
        raise UsageError(f"{who}={path}: no such folder; expected a run, a checkpoint or a pipeline folder")
    newest = checkpoint.newest_valid(root)
    if newest is None:
        raise UsageError(
            f"{who}={path}: neither a finished pipeline nor a valid checkpoint in it; expected a run, a checkpoint or "
            "a folder with model_index.json"
        )
    return newest / "pipeline"


def check_lightning_checkpoint(path: str | os.PathLike[str]) -> None:
    """Check that ``init_from=`` names a file, which is read later.

    Raises:
        UsageError: It does not.
    """
    if not Path(path).is_file():
        given = "a folder" if Path(path).is_dir() else "no such file"
        raise UsageError(
            f"init_from={path}: {given}; expected the file that Lightning's trainer.save_checkpoint writes in one "
            "process, or a run, checkpoint or pipeline folder of sd_lightning"
        )


def load_lightning_checkpoint(path: str | os.PathLike[str], module: nn.Module) -> None:
    """Fill a module with the weights of a plain Lightning checkpoint of the same module; the rest of it is not used.

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


WRITTEN = (
    *("config.yaml", "checkpoints", "frozen", "frozen-weights", "logs", "pipeline", "samples"),
    *("summary.json", "report.html", ".tmp-*", ".old-*"),
)
"""What a run leaves in its directory, as patterns; ``overwrite=true`` deletes this and nothing else there."""


def check_output_dir(run_dir: Path, *, resuming: bool, overwrite: bool, reads: Mapping[str, str]) -> None:
    """Refuse to mix two runs in one directory, and one that cannot be written; nothing is left or removed.

    Args:
        run_dir: The run's directory.
        resuming: Whether a run in it is continued.
        overwrite: Whether an earlier run in it is deleted.
        reads: What the run will read: setting -> path or anything else.

    Raises:
        UsageError: It holds another run, is not a directory, or cannot be written; or the run reads what it deletes.
    """
    for setting, path in reads.items() if overwrite else ():
        if any(Path(path).resolve().is_relative_to(written.resolve()) for written in _written(run_dir)):
            raise UsageError(
                f"{setting}={path} is part of the run in output_dir={run_dir}, which overwrite=true deletes before "
                "it is read; choose another output_dir=<folder>"
            )
    try:
        if run_dir.exists() and not run_dir.is_dir():
            raise UsageError(f"output_dir={run_dir}: a file is in the way; choose another output_dir=<folder>")
        if not resuming and not overwrite:
            check_unused(run_dir)
        check_writable(run_dir)
    except OSError as error:
        raise UsageError(
            f"output_dir={run_dir} cannot be written ({error.strerror}); choose another output_dir=<folder>"
        ) from error


def _written(run_dir: Path) -> list[Path]:
    return [path for pattern in WRITTEN for path in run_dir.glob(pattern)]


def check_unused(run_dir: Path) -> None:
    """Refuse to start a run where another has left checkpoints.

    Raises:
        UsageError: It has.
    """
    if checkpoint.all_checkpoints(run_dir):
        raise UsageError(
            f"output_dir={run_dir} already holds a run; continue it with resume=auto, choose another output_dir=, "
            "or delete it with overwrite=true"
        )


def check_writable(folder: Path) -> None:
    """Try whether a folder can be written, or made if it does not exist; nothing is left behind.

    Raises:
        OSError: It cannot.
    """
    while not folder.exists():
        folder = folder.parent
    # As root, os.access says yes to everything.
    probe = folder / f".tmp-{secrets.token_hex(4)}"
    probe.mkdir()
    probe.rmdir()


def prepare(run_dir: Path, *, overwrite: bool) -> None:
    """Make the run's directory; the last step before training, when everything else has been checked.

    Args:
        run_dir: What :func:`check_output_dir` accepted.
        overwrite: Delete what an earlier run left in it.
    """
    if overwrite and checkpoint.all_checkpoints(run_dir):
        for path in _written(run_dir):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    run_dir.mkdir(parents=True, exist_ok=True)


def is_finished(run_dir: Path, step: int) -> bool:
    """Return whether a run has ended at a step and written its results."""
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["steps"] == step)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def publish_pipeline(run_dir: Path, newest: Path) -> Path:
    """Make ``<run>/pipeline`` the pipeline of a checkpoint, by hard links; it is never half of one."""
    final, tmp, old = run_dir / "pipeline", run_dir / ".tmp-pipeline", run_dir / ".old-pipeline"
    for leftover in (tmp, old):
        shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.hard_link_tree(newest / "pipeline", tmp)
    if final.exists():
        final.rename(old)
    tmp.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final
