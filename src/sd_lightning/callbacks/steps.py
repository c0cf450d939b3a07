"""Callbacks that act once per optimizer step, however many batches it accumulates."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class StepCallback(Callback):
    """Callback with one more hook, :meth:`on_step`."""

    _last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step  # by now a checkpoint has been restored

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last_step:  # else gradients are still being accumulated
            self._last_step = trainer.global_step
            self.on_step(trainer, pl_module, batch)

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        """Handle the end of an optimizer step, whose last batch is given."""
