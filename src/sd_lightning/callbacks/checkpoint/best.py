"""The best checkpoint of a run by a metric of its validations, kept beside the newest ones."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl

from sd_lightning._errors import UsageError
from sd_lightning.storage import checkpoint

log = logging.getLogger(__name__)

_KEY = "callbacks.checkpoint.monitor"
_REMEDY = f"or leave {_KEY} out"


@dataclass
class Best:
    """The step whose checkpoint is the best so far."""

    monitor: str
    """The metric, such as "val/caption_gap"."""
    mode: Literal["min", "max"]
    step: int | None = None
    value: float | None = None

    def check(self, trainer: pl.Trainer, every_n_steps: int) -> None:
        """Check before the first step that every checkpoint is validated, and that the metric can be.

        Raises:
            UsageError: It is not.
        """
        passes, every_n_epoch = trainer.accumulate_grad_batches, trainer.check_val_every_n_epoch
        is_validated = trainer.enable_validation and any(trainer.num_val_batches or [])
        if every_n_epoch in (None, 1) and not is_validated:  # else it is not known yet
            raise UsageError(
                f"{self._who}, and nothing is validated; hold data out with data.val_data_dir=<folder> (or "
                f"data.num_val_samples) and trainer.limit_val_batches above 0, {_REMEDY}"
            )
        self.check_intervals(every_n_steps, passes, trainer.val_check_interval, every_n_epoch)
        self.check_gap(getattr(trainer.datamodule, "no_caption_gap", None))  # type: ignore[attr-defined]

    def check_intervals(
        self, every_n_steps: int, accumulate: int, interval: float | None, every_n_epoch: int | None
    ) -> None:
        """Check that every checkpoint is validated, as far as settings of the trainer tell.

        Raises:
            UsageError: It is not.
        """
        if every_n_epoch not in (None, 1):
            raise UsageError(
                f"{self._who} and trainer.check_val_every_n_epoch={every_n_epoch}, with which most checkpoints are not "
                f"validated; write trainer.check_val_every_n_epoch=null, {_REMEDY}"
            )
        passes = every_n_steps * accumulate
        if every_n_steps == 0 or (every_n_epoch is None and isinstance(interval, int) and passes % interval):
            also = "" if every_n_steps else "callbacks.checkpoint.every_n_steps=60 "
            raise UsageError(
                f"{self._who} with callbacks.checkpoint.every_n_steps={every_n_steps} and trainer.val_check_interval="
                f"{interval}: not every checkpoint is validated; expected one after a multiple of the forward passes "
                f"between validations; write {also}trainer.val_check_interval={passes or 60}, {_REMEDY}"
            )

    def check_gap(self, reason: str | None) -> None:
        """Check that the caption gap is measured if it is the metric, given why it is not.

        Raises:
            UsageError: It is not.
        """
        if self.monitor == "val/caption_gap" and reason is not None:
            raise UsageError(
                f"{self._who}, which is not measured: {reason}; give held-out data captions that differ, take "
                f"{_KEY}=val/loss, {_REMEDY}"
            )

    @property
    def _who(self) -> str:
        return f"got {_KEY}={self.monitor}"

    def look(self, trainer: pl.Trainer, step: int) -> None:
        """Compare the validation of a step that has a checkpoint with the best one so far.

        Raises:
            UsageError: The metric was not logged.
        """
        metrics = trainer.callback_metrics
        if self.monitor not in metrics:
            names = ", ".join(sorted(name for name in metrics if name.startswith("val/"))) or "none"
            raise UsageError(f"{self._who}, which no validation logs; expected one of {names}")
        value = trainer.strategy.broadcast(float(metrics[self.monitor]))
        sign = 1 if self.mode == "max" else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.step, self.value = step, value
            if trainer.is_global_zero:
                log.info("step %d is the best so far: %s %.5g", step, self.monitor, value)

    def path(self, run_dir: Path) -> Path | None:
        """Return the checkpoint of the best step, if it is there."""
        found = None if self.step is None else checkpoint.checkpoint_path(run_dir, self.step)
        return found if found is not None and found.is_dir() else None

    def load(self, state: dict[str, Any], run_dir: Path, step: int) -> None:
        """Go on from a saved state of the same metric whose checkpoint is still there."""
        if (state["monitor"], state["mode"]) == (self.monitor, self.mode):
            self.step, self.value = state["step"], state["value"]
            if self.step is not None and (self.step > step or self.path(run_dir) is None):
                log.warning(
                    "the best checkpoint, of step %d, is not in %s; the best of the next ones counts",
                    self.step,
                    run_dir,
                )
                self.step = self.value = None

    def summary(self) -> dict[str, Any]:
        """Return what ``summary.json`` tells."""
        return {"monitor": self.monitor, "best_step": self.step, "best_value": self.value}
