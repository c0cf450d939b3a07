"""Jobs for :mod:`ranks`: what a strategy allocates while the EMA is in the trained weights' place, and the forecast.

A job is ``{"strategy": …, "precision": …, "apart": whether the EMA is of another dtype, "folder": …}``.
"""

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

import lightning_jobs
import small_training as small
from sd_lightning.planner.footprint import When
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import engine_of, training_state
from strategy_table import strategy_of


class Swaps(Callback):
    """Swaps an average in after the first step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.allocated = dtype, -1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        state = training_state(trainer)
        shards = state.parameter_shards()
        average = {(s.name, s.begin): s.master.detach().clone().to(self.dtype) for s in shards}  # type: ignore[union-attr]
        before = _storages()
        state.swap_in(average)
        self.allocated = sum(size for place, size in _storages().items() if place not in before)
        state.swap_out()


def _storages() -> dict[int, int]:
    """Return the bytes of every storage by its address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    local = [t for t in tensors if not isinstance(t, DTensor) and t.device.type == "cpu" and t.layout == torch.strided]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}


def run(job: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a swap allocates on this rank, and those that are predicted."""
    # Another dtype stands for another device, which a machine without a GPU lacks.
    callback = Swaps(torch.float64 if job["apart"] else torch.float32)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    options |= {"devices": job["devices"], "precision": job["precision"], "max_steps": 1}
    strategy = strategy_of(job["strategy"])
    trainer = lightning_jobs.trainer(strategy, Path(job["folder"]), lightning_jobs.Losses(), callback, **options)
    trainer.fit(small.module(), small.data())
    training = TrainingRun(1, 32, job["precision"], world_size=job["devices"], train_text_encoder=True)
    forecaster = Forecaster(small.module().latent_diffusion, training)
    footprint = engine_of(strategy_of(job["strategy"])).footprint(forecaster.workload)
    assert footprint is not None
    when = (When.SWAPPED, When.SWAPPED_APART) if job["apart"] else (When.SWAPPED,)
    held = (*footprint.device, *footprint.host)
    return {"allocated": callback.allocated, "predicted": sum(each.nbytes for each in held if each.when in when)}
