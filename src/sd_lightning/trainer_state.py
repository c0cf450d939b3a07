"""What a checkpoint's ``trainer.json`` says, and whether it is of the model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_lightning import checkpoint, typed_json
from sd_lightning._errors import UsageError

FORMAT = 1


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``trainer.json``.

    Raises:
        UsageError: It is missing, unreadable or of a later format.
    """
    try:
        saved: dict[str, Any] = typed_json.loads((path / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a checkpoint that can be resumed ({error}); give runs/<name>") from error
    if saved.get("format") != FORMAT:
        raise UsageError(f"{path}: checkpoint format {saved.get('format')}; expected {FORMAT}; update sd-lightning")
    return saved


def check_same_model(saved: Mapping[str, Any], ours: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Compare the trained parameters of a checkpoint with the shapes of the model's by name.

    Raises:
        UsageError: They differ; the message names the first few.
    """
    theirs = {name: tuple(entry["shape"]) for name, entry in saved.items()}
    differing = checkpoint.shape_differences(theirs, ours)
    if differing:
        raise UsageError(
            f"resume={path}: the checkpoint is of another model; {len(differing)} trained tensors differ: "
            f"{'; '.join(differing[:3])}{'; …' if len(differing) > 3 else ''}. Resume with the model and "
            "train_text_encoder setting of that run"
        )
