"""Comparison of the training set with a checkpoint's, and restoring of its list of bad samples."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.position import RunPosition
from sd_lightning.callbacks.checkpoint.together import on_rank_zero
from sd_lightning.data.contract import ComparableData, CountedData, ResumableData
from sd_lightning.data.fingerprint import Change

log = logging.getLogger(__name__)


def check_datamodule(datamodule: object) -> ResumableData:
    """Return the trainer's datamodule, checked to be :class:`ResumableData`.

    Raises:
        UsageError: It is not.
    """
    if isinstance(datamodule, ResumableData):
        return datamodule
    given = "no datamodule" if datamodule is None else f"a {type(datamodule).__name__} as datamodule"
    raise UsageError(
        f"PortableCheckpoint got {given}; expected an SDDataModule, whose sampler says where a run stands and goes "
        "on from there; give one to trainer.fit, or save with Lightning's ModelCheckpoint"
    )


def compare_data(datamodule: object, saved: dict[str, Any], path: Path) -> Change | None:
    """Return how the training set has changed since a checkpoint; reads files.

    Args:
        datamodule: Datamodule of the run that resumes.
        saved: The checkpoint's ``trainer.json``.
        path: The checkpoint.

    Raises:
        UsageError: The checkpoint is in the middle of an epoch whose samples have changed.
    """
    if saved.get("data") is None or not isinstance(datamodule, ComparableData):
        return None
    change = datamodule.change_since(saved["data"])
    position = RunPosition(**saved["position"])
    if change is not None and change.moves and position.steps_in_epoch and datamodule.changed != "accept":
        then = f"a new epoch begins, without the rest of epoch {position.epoch}"
        raise UsageError(
            f"resume={path}: the training set has changed in the middle of epoch {position.epoch}, whose rest it is to "
            f"give: {change.told}; bring it back as it was, or write data.changed=accept: "
            f"{then if change.is_resized else 'the epoch goes on with the samples that are there'}"
        )
    return change


def go_on_with_data(trainer: pl.Trainer, saved: dict[str, Any], path: Path) -> RunPosition:
    """Log changes of the training set, restore its bad samples, and return the position at which the run resumes.

    A collective call; rank 0 reads the files.

    Raises:
        UsageError: The samples of the checkpoint's epoch have changed, or too many samples are bad.
    """
    datamodule: object = trainer.datamodule  # type: ignore[attr-defined]

    def look() -> tuple[Change | None, dict[str, str]]:
        change = compare_data(datamodule, saved, path)
        bad = saved.get("bad_samples", {})
        return change, datamodule.still_bad(bad) if isinstance(datamodule, CountedData) else {}

    change, bad = on_rank_zero(trainer, look)
    if saved.get("data") is None:
        log.warning("resume=%s: it does not say what data it was trained on; they are taken as they are", path)
    if change is not None:
        log.warning("resume=%s: the training set has changed since: %s", path, change.told)
    if bad and isinstance(datamodule, CountedData):
        datamodule.recall_bad(bad)
    position = RunPosition(**saved["position"])
    if change is not None and change.is_resized and position.steps_in_epoch:
        return replace(position, epoch=position.epoch + 1, steps_in_epoch=0)  # the order of every epoch has changed
    return position
