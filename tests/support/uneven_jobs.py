"""Evaluations in which one rank has other numbers of batches than the other; jobs for :mod:`ranks`.

A job is ``{"do": "fit" | "validate" | "predict", "strategy": …, "batches": [of rank 0, of rank 1]}``, and
``"ema": True`` for one with averages.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sd_lightning import UsageError
from sd_lightning.callbacks import EMA
from strategy_table import strategy_of


class Normalises(pl.LightningModule):
    """BatchNorm between two layers; every rank trains on data of its own."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.found: list[float] = []
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self._batches = batches

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found.append(float(self.body(batch[0]).mean()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        torch.manual_seed(1 + int(os.environ["RANK"]))
        return DataLoader(TensorDataset(3 * torch.randn(4, 4)), batch_size=2)

    def val_dataloader(self) -> Any:
        torch.manual_seed(7)
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=1, sampler=range(self._batches))

    predict_dataloader = val_dataloader


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job; return what validation found and what the module ended with, or the message of a refusal."""
    warnings.filterwarnings("ignore")
    module = Normalises(job["batches"][int(os.environ["RANK"])])
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    strategy = strategy_of(job["strategy"], timeout_seconds=20.0)
    strategy.swaps_averages = True  # what an earlier fit with averages has left
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        callbacks=[EMA(0.5)] if job.get("ema") else [],
        **options | job.get("trainer", {}),
    )
    try:
        getattr(trainer, job["do"])(module)
    except UsageError as error:
        return {"refused": str(error), "steps": trainer.global_step}
    weights = {name: value.double().flatten().tolist() for name, value in module.named_parameters()}
    is_left = "setup_data" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    return {"found": module.found, "weights": weights, "is_left": is_left}
