"""The best checkpoint by a metric of the validations stays, whatever else is deleted, and goes on when a run does."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import small_training as small
from sd_lightning import UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.storage import checkpoint, runs


class Scores(pl.Callback):
    """Logs a metric by a table of its values by step."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("val/score", torch.tensor(self.values[trainer.global_step]))


def train(run_dir: Path, steps: int, values: dict[int, float], *, resume: Path | None = None, **options: Any) -> Any:
    saving = PortableCheckpoint(
        run_dir, **{"every_n_steps": 1, "keep": 1, "monitor": "val/score", "resume": resume} | options
    )
    small.fit(
        small.module(),
        small.data(),
        steps,
        EMA(0.9),
        Scores(values),
        saving,
        val_check_interval=1,
        limit_val_batches=1,
    )
    return saving


def steps_in(run_dir: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(run_dir)]


@pytest.mark.parametrize(("mode", "best"), [(None, 2), ("min", 3)])
def test_the_best_checkpoint_stays_beside_the_newest(mode: Any, best: int, tmp_path: Path) -> None:
    saving = train(tmp_path, 5, {1: 0.1, 2: 0.9, 3: -0.5, 4: float("nan"), 5: 0.9}, mode=mode)
    assert steps_in(tmp_path) == [best, 5]
    assert saving.result == checkpoint.checkpoint_path(tmp_path, best) != saving.last_saved
    assert saving.best.summary() == {
        "monitor": "val/score",
        "best_step": best,
        "best_value": pytest.approx({2: 0.9, 3: -0.5}[best]),
    }


def test_a_resumed_run_knows_its_best_and_is_exact(tmp_path: Path) -> None:
    values = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.1}
    straight = train(tmp_path / "straight", 5, values)
    train(tmp_path / "run", 3, values)
    resumed = train(tmp_path / "run", 5, values, resume=checkpoint.checkpoint_path(tmp_path / "run", 3))
    assert steps_in(tmp_path / "run") == steps_in(tmp_path / "straight") == [2, 5]
    small.assert_bitwise_equal(resumed.last_saved, straight.last_saved)
    small.assert_bitwise_equal(resumed.result, straight.result)
    assert checkpoint.step_of(resumed.result) == 2 == resumed.best.step


def test_a_best_checkpoint_that_is_gone_or_of_another_metric_does_not_count(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, {1: 0.9, 2: 0.1})
    last = checkpoint.checkpoint_path(tmp_path / "run", 2)
    elsewhere = train(tmp_path / "other", 3, {3: 0.2}, resume=last)
    assert (elsewhere.best.step, elsewhere.result) == (3, elsewhere.last_saved)
    other = train(tmp_path / "run", 3, {3: 0.2}, resume=last, monitor="val/loss")
    assert other.best.step == 3 and other.best.mode == "min"


def test_a_finished_runs_result_is_the_best_checkpoint_unless_it_went_on(tmp_path: Path) -> None:
    train(tmp_path, 3, {1: 0.1, 2: 0.9, 3: 0.2})
    assert runs.result_checkpoint(tmp_path) == checkpoint.checkpoint_path(tmp_path, 3), "not finished"
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "best_step": 2}))
    assert runs.result_checkpoint(tmp_path) == checkpoint.checkpoint_path(tmp_path, 2)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 1, "best_step": 2}))
    assert runs.result_checkpoint(tmp_path) == checkpoint.checkpoint_path(tmp_path, 3), "it went on"


def test_what_cannot_be_monitored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="monitor=val/other, which no validation logs; expected one of .*val/score"):
        train(tmp_path / "a", 2, {1: 0.1}, monitor="val/other")
    with pytest.raises(UsageError, match="not every checkpoint is validated; .*every_n_steps=60 trainer.val_check_int"):
        train(tmp_path / "b", 2, {1: 0.1}, every_n_steps=0)
    with pytest.raises(UsageError, match="mode=max and monitor=None; expected min or max, beside a monitor"):
        PortableCheckpoint(tmp_path, mode="max")
    saving = PortableCheckpoint(tmp_path / "c", every_n_steps=1, monitor="val/loss")
    with pytest.raises(UsageError, match="monitor=val/loss, and nothing is validated; hold data out with"):
        small.fit(small.module(), small.data(), 1, saving, limit_val_batches=0)
