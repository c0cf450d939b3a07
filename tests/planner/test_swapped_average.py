"""While images are drawn, the EMA takes the trained weights' place: predicted against what a swap allocates."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

import lightning_jobs as jobs
import small_training as small
from sd_lightning.planner.footprint import When
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import engine_of, training_state
from sd_lightning.strategies.processes.group import leave_process_group
from strategy_table import strategy_of

KINDS = {"beside": (torch.float32, (When.SWAPPED,)), "apart": (torch.float64, (When.SWAPPED, When.SWAPPED_APART))}
"""Where the EMA is. Another dtype stands for another device, which a machine without a GPU lacks."""


def storages() -> dict[int, int]:
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and not issubclass(type(each), DTensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


class Swaps(Callback):
    """Swaps an average in after the first step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.allocated = dtype, -1

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        state = training_state(trainer)
        shards = state.parameter_shards()
        average = {(s.name, s.begin): s.master.detach().clone().to(self.dtype) for s in shards}  # type: ignore[union-attr]
        before = storages()
        state.swap_in(average)
        self.allocated = sum(size for place, size in storages().items() if place not in before)
        state.swap_out()


@pytest.fixture(autouse=True, scope="module")  # DeepSpeed keeps the first group of the process
def alone() -> Iterator[None]:
    yield
    leave_process_group()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *(("ddp", where) for where in KINDS),
        *((name, "beside") for name in ("fsdp", "fsdp_offload", "zero2", "zero3", "gemini_default", "gemini_offload")),
    ],
)
def test_a_swap_takes_what_is_predicted(name: str, precision: str, where: str, tmp_path: Path) -> None:
    dtype, when = KINDS[where]
    callback = Swaps(dtype)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = jobs.trainer(strategy_of(name), tmp_path, jobs.Losses(), max_steps=1, precision=precision, **options)
    trainer.callbacks.append(callback)
    trainer.fit(small.module(), small.data())
    forecaster = Forecaster(small.module().latent_diffusion, TrainingRun(1, 32, precision, train_text_encoder=True))
    footprint = engine_of(strategy_of(name)).footprint(forecaster.workload)
    assert footprint is not None
    predicted = sum(each.nbytes for each in (*footprint.device, *footprint.host) if each.when in when)
    assert callback.allocated == pytest.approx(predicted, rel=0.02)
