"""Trains and loads under many strategies in one set of processes; started by torchrun from tests.

``torchrun --nproc-per-node N strategy_driver.py JOBS.json RESULTS.json``: JOBS is a list of ``{"do": "save" | "load", …}``,
RESULTS gets one entry per job from rank 0.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from small_training import data, fit, module
from torch import Tensor

from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.callbacks.checkpoint import read_trainer_state
from sd_lightning.state import LazyTensor, SavedParameter
from sd_lightning.strategies import ddp, training_state
from sd_lightning.strategies.deepspeed import Buckets, DeepSpeedStrategy
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.tensor_store import ShardedTensors


def strategy_of(name: str) -> Any:
    """Return a fresh strategy; ZeRO-3 shards even the smallest parameter."""
    if name == "single":
        return "auto"
    if name == "ddp":
        return ddp()
    if name == "fsdp":
        return FSDPStrategy()
    return DeepSpeedStrategy(stage=int(name[-1]), buckets=Buckets(stage3_param_persistence_threshold=0))  # type: ignore[arg-type]


class Losses(Callback):
    """The mean loss of every step over all ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.values.append(mean_over_ranks(pl_module.last_loss))


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().double().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


class LoadEach(Callback):
    """Loads checkpoints one after another into a running strategy and compares everything with the files."""

    def __init__(self, checkpoints: dict[str, str]) -> None:
        self.checkpoints = checkpoints
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.found:
            return
        state = training_state(trainer)
        for name, path in self.checkpoints.items():
            saved = read_trainer_state(Path(path))
            with ShardedTensors(Path(path) / "state") as store:

                def read(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
                    store.read_into(f"{kind}/{name}", out, begin, end)

                parameters = {name: SavedParameter(**entry) for name, entry in saved["parameters"].items()}
                state.load(parameters, saved["optimizer_groups"], read)
                differing = self._differing(store, saved)
                differing += self._differing_shards(state.parameter_shards(), store)
            with torch.no_grad():
                loss = mean_over_ranks(pl_module.training_loss(batch))
            self.found[name] = {"differing": differing, "loss": loss}

    @staticmethod
    def _differing(store: ShardedTensors, saved: dict[str, Any]) -> list[str]:
        return [] if len(store.keys()) >= 3 * len(saved["parameters"]) else ["moments are missing from the store"]

    @staticmethod
    def _differing_shards(shards: list[Any], store: ShardedTensors) -> list[str]:
        differing = []
        for shard in shards:
            tensors: dict[str, LazyTensor] = {"master": shard.master, **shard.states}
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                ours = tensors[kind]
                assert isinstance(ours, Tensor)
                theirs = torch.empty(shard.end - shard.begin)
                store.read_into(f"{kind}/{shard.name}", theirs, shard.begin, shard.end)
                if not torch.equal(ours.reshape(-1), theirs):
                    differing.append(f"{kind}/{shard.name}")
        return differing


def run(job: dict[str, Any]) -> dict[str, Any]:
    losses = Losses()
    options = {"strategy": strategy_of(job["strategy"]), "devices": job["devices"]}
    if job["do"] == "save":
        checkpoint = PortableCheckpoint(job["run_dir"], every_n_steps=job["save_at"], resume=job.get("resume"))
        fit(module(), data(), job["steps"], EMA(0.9), losses, checkpoint, **options)
        return {"losses": losses.values}
    loads = LoadEach(job["checkpoints"])
    fit(module(), data_at(job["steps"]), 1, loads, **options)
    return {"found": loads.found}


def data_at(batches: int) -> Any:
    """Return the data so that the first batch is the one after ``batches``."""
    datamodule = data()
    datamodule.resume(0, batches)
    return datamodule


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for each in jobs:
        try:
            results.append(run(each))
        except Exception:
            print(f"JOB FAILED: {each}\n{traceback.format_exc()}", flush=True)
            sys.exit(1)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
