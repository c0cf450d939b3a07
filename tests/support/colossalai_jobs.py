"""Trains with the real ColossalAI over a fake accelerator (:mod:`fake_colossalai`), or on CUDA.

A job that raises a ``UsageError`` gives ``{"error": message}``.
"""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

import fake_colossalai
from sd_lightning import UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint, SampleGrid
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.models.lora import Lora
from sd_lightning.state.shards import ParameterShard
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies import engine_of, training_state
from sd_lightning.strategies.colossalai import probe as colossalai_probe
from sd_lightning.strategies.colossalai import strategy as colossalai
from sd_lightning.strategies.colossalai.strategy import ColossalAIPrecision, ColossalAIStrategy
from sd_lightning.training.speed import HalfWeights
from small_training import apply_speed, data, module, trainer_of
from strategy_jobs import Losses

ACCELERATOR = "cpu"
LEARNING_RATE = 1e-3
SHARDED = {"min_chunk_size_m": 0.03125, "search_range_m": 0.015625, "hidden_dim": 64}
"""Chunks small enough for several of the tiny model's."""


class Look(Callback):
    """Notes what the engine has made of the settings, and compares its masters with checkpoints."""

    def __init__(self, checkpoint: PortableCheckpoint, job: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.job = job
        self.seen: dict[str, Any] = {"gathered_bytes": 0, "norms": []}
        self._before: list[torch.Tensor] = []

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.checkpoint.last_saved is None:  # later their parameters hold nothing
            self.exact = {n: p.detach().clone() for n, p in pl_module.named_parameters() if p.requires_grad}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        engine = self.engine(trainer)
        weights = engine.chunks.get_chunks(engine.parameters.values())
        self.seen |= {
            "lossless_start": all(
                torch.equal(shard.master.cpu(), self.exact[shard.name].reshape(-1)[shard.begin : shard.end])  # type: ignore[union-attr]
                for shard in self.shards(trainer)
            ),
            "chunk_sizes": [int(chunk.chunk_size) for chunk in weights],
            "replicated": [chunk.keep_gathered for chunk in weights],
            "weights_on": [chunk.device_type for chunk in weights],
            "masters_on": [chunk.paired_chunk.device_type for chunk in weights],
            "scale": engine.scaler_state(),
        }

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.job.get("resume") and "resumed_differing" not in self.seen:
            self.seen["resumed_differing"] = self.differing(trainer, Path(self.job["resume"]))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        self.seen["gathered_bytes"] = max(self.seen["gathered_bytes"], int(self.engine(trainer).chunks.accessed_mem))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.job.get("skip_at"):
            self._before = [shard.master.clone() for shard in self.shards(trainer)]  # type: ignore[union-attr]
            engine_of(trainer.strategy).skip_update(optimizer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.seen["norms"].append(self.engine(trainer).optimizer._current_grad_norm)
        if self._before:
            same = zip(self._before, self.shards(trainer), strict=True)
            self.seen["skipped"] = all(torch.equal(old, shard.master) for old, shard in same)  # type: ignore[arg-type]
            self._before = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        engine = self.engine(trainer)
        self.seen["scale_after"] = engine.scaler_state()
        self.seen["left_gathered"] = len(engine.chunks.accessed_chunks)
        assert self.checkpoint.last_saved is not None
        self.seen["saved_differing"] = self.differing(trainer, self.checkpoint.last_saved)
        masters: list[Any] = [shard.master for shard in self.shards(trainer)]
        self.seen["has_float32_masters"] = all(master.dtype == torch.float32 for master in masters) and any(
            not torch.equal(master, master.to(engine.dtype).float()) for master in masters
        )

    def differing(self, trainer: pl.Trainer, checkpoint: Path) -> list[str]:
        """Name what the ranks hold that is not bit for bit what a checkpoint says."""
        found = []
        with ShardedTensors(checkpoint / "state") as store:
            for shard in self.shards(trainer):
                assert set(shard.states) == {"exp_avg", "exp_avg_sq"}
                for kind, ours in {"master": shard.master, **shard.states}.items():
                    theirs = torch.empty(shard.end - shard.begin)
                    store.read_into(f"{kind}/{shard.name}", theirs, shard.begin, shard.end)
                    if not torch.equal(ours.cpu(), theirs):  # type: ignore[union-attr]
                        found.append(f"{kind}/{shard.name}")
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
        return sorted({name for each in of_ranks for name in each})

    @staticmethod
    def engine(trainer: pl.Trainer) -> Any:
        return trainer.strategy.engine  # type: ignore[attr-defined]

    @staticmethod
    def shards(trainer: pl.Trainer) -> list[ParameterShard]:
        return training_state(trainer).parameter_shards()


def strategy_of(job: dict[str, Any]) -> ColossalAIStrategy:
    return ColossalAIStrategy(**SHARDED | job.get("strategy", {}))


def adam(groups: Any, name: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(groups, **{"lr": LEARNING_RATE} | options)


def module_of(job: dict[str, Any]) -> Any:
    options = {"lora": Lora(**job["lora"]), "train_text_encoder": False} if "lora" in job else {}
    pl_module = module(optimizer=partial(adam, **job.get("optimizer", {})), **job.get("module", {}), **options)
    for network in pl_module.trained_networks().values():
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(job.get("train_only", "") in name)
    if job.get("unused"):  # a chunk of its own, of which nothing is ever gathered
        pl_module.unet.register_parameter("never_used", torch.nn.Parameter(torch.ones(*job["unused"])))
    apply_speed(job, pl_module)
    return pl_module


def run(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return reference(job) if job.get("reference") else train(job)
    except UsageError as error:
        return {"error": str(error)}


def train(job: dict[str, Any]) -> dict[str, Any]:
    checkpoint = PortableCheckpoint(job["run_dir"], every_n_steps=job.get("save_at", 0), resume=job.get("resume"))
    losses, look = Losses(), Look(checkpoint, job)
    callbacks: list[Callback] = [EMA(0.9), losses, checkpoint, look]
    if job.get("sample_every"):
        sampling = SamplingOptions(num_inference_steps=2, batch_size=2)
        prompts = ["a handwritten one", "a handwritten two", "a handwritten six"]
        grid = SampleGrid(job["run_dir"], prompts=prompts, every_n_steps=job["sample_every"], options=sampling)
        callbacks.append(grid)
    options: dict[str, Any] = {"strategy": strategy_of(job), "devices": job["devices"], "precision": "bf16-mixed"}
    options["accelerator"] = ACCELERATOR
    capacity, used = job.get("memory", [2**30, [0] * job["devices"]])
    fake_colossalai.FakeMonitor.capacity, fake_colossalai.FakeMonitor.used = capacity, used[int(os.environ["RANK"])]
    if job.get("precision") == "16-mixed":  # which Lightning would replace on a machine without a GPU
        options = options | {"plugins": [ColossalAIPrecision("16-mixed")], "precision": None}
    pl_module, datamodule = module_of(job), data()
    trainer = trainer_of(job["steps"], *callbacks, **options | job.get("trainer", {}))
    with mock.patch.object(colossalai, "check_run") if job.get("unchecked") else nullcontext():
        trainer.fit(pl_module, datamodule)
    results = {"losses": losses.values, "checkpoint": str(checkpoint.last_saved), "seen": look.seen}
    if job.get("evaluate"):
        for name in ("validate", "test"):
            found = getattr(trainer, name)(pl_module, datamodule, verbose=False)
            results[name] = {key: float(value) for key, value in found[0].items()}
    return results


class OnMasters(torch.optim.AdamW):
    """What the engine is to compute: AdamW on float32 copies of 16-bit weights, clipped by norm."""

    def __init__(self, groups: Any, exact: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        self.weights = [p for group in groups for p in group["params"]]
        self.masters = [torch.nn.Parameter(exact[p]) for p in self.weights]
        super().__init__(self.masters, lr=LEARNING_RATE)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        super().step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return loss


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Train on the CPU without ColossalAI."""
    exact: dict[torch.nn.Parameter, torch.Tensor] = {}
    pl_module, losses = module(optimizer=partial(OnMasters, exact=exact)), Losses()
    exact |= {p: p.detach().clone() for network in pl_module.trained_networks().values() for p in network.parameters()}
    options = {"plugins": [HalfWeights("bf16-true")], "gradient_clip_val": None}
    trainer_of(job["steps"], losses, **options).fit(pl_module, data())
    return {"losses": losses.values}


def prepare(accelerator: str) -> None:
    """Put the fake accelerator in place, on the CPU."""
    global ACCELERATOR
    ACCELERATOR = accelerator
    if accelerator == "cpu":
        fake_colossalai.install()
        colossalai_probe.require_engine = lambda **_: None  # what it looks for is what the fake stands in for
