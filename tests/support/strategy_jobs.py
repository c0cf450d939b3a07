"""Jobs for :mod:`ranks`: training and loading under many strategies.

A job is ``{"do": "save" | "load" | a function of lightning_jobs.py, …}``; rank 0 tells what it found.
"""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import lightning_jobs
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.callbacks import EMA, NonFiniteLossGuard, PortableCheckpoint, SampleGrid, StopOnSignal
from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state
from sd_lightning.data.builders import dreambooth_data, image_folder_data
from sd_lightning.data.preservation import Preservation
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.lora import Lora
from sd_lightning.state.shards import LazyTensor, SavedParameter
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.strategies import training_state
from sd_lightning.training.lr_schedules import cosine
from sd_lightning.training.speed import precision_options
from small_models import for_ragged_captions
from small_training import RaggedDigits, apply_speed, data, fit, module, trainer_of
from strategy_table import strategy_of

# Adam divides by the root of small second moments, so rounding grows with the learning rate: at 2e-3 the losses of two
# summation orders differ by 2e-6 within five steps, for DDP as for any other engine.
LEARNING_RATE = 3e-4


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
    "adam": partial(torch.optim.Adam, lr=LEARNING_RATE, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


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
                if not torch.equal(ours.reshape(-1).cpu(), theirs):
                    differing.append(f"{kind}/{shard.name}")
        return differing


class StopAt(Callback):
    """One rank asks for the end of the run, as early stopping or a signal does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False)


class Signal(Callback):
    """The last rank gets a SIGTERM during a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class BadLoss(SDLightningModule):
    """Its loss is not a number on the last rank at one step."""

    bad_at = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == self.bad_at - 1 and self.global_rank == self.trainer.world_size - 1:
            loss = loss * float("nan")
            self.last_loss = loss.detach()
        return loss


def module_of(job: dict[str, Any]) -> Any:
    """Return the module of a job, with the parts that it freezes, adds or recomputes."""
    optimizer = OPTIMIZERS[job.get("optimizer", "adamw")]
    options = dict(job.get("module", {}))
    if job.get("lora"):
        options["lora"] = Lora(**job["lora"])
    if job.get("preservation"):
        options["preservation"] = Preservation(**job["preservation"])
    if job.get("token"):
        options |= {"learned_token": LearnedToken(job["token"]), "train_text_encoder": False}
    model = LatentDiffusion.build(job["architecture"], seed=1) if job.get("architecture") else None
    if job.get("family"):
        model, options["train_text_encoder"] = for_ragged_captions(job["family"], seed=1), False
    if job.get("pretrained"):  # read by the strategy, or quantised while it is read
        model = LatentDiffusion.from_pretrained(job["pretrained"], deferred=["denoiser"])
        options["train_text_encoder"] = False
    if job.get("lr_scheduler"):
        options["lr_scheduler"] = partial(cosine, total_steps=job["steps"], warmup_steps=2)
    pl_module = module(model, optimizer=optimizer, **options)
    if job.get("train_only"):  # a small trained set, such as LoRA's
        for network in pl_module.trained_networks().values():
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(job["train_only"] in name)
    if job.get("unused"):
        pl_module.unet.register_parameter("never_used", torch.nn.Parameter(torch.ones(3, 2)))
    apply_speed(job, pl_module)
    return pl_module


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job; validations run in inference mode, as with nccl: under gloo Lightning takes ``no_grad`` instead."""
    inference = mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False)
    with inference, mock.patch("sd_lightning.training.module.generate", _draw):
        return _run(job)


def _draw(*args: Any, **kwargs: Any) -> Any:
    """Draw, and fail if shards are moved: on CUDA, FSDP2 gives offloaded ones other memory, unknown to the average."""
    moved = AssertionError("drawing moved the shards of FSDP2")
    with mock.patch.object(FSDPModule, "_apply", side_effect=moved):
        return generate(*args, **kwargs)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    if job["do"] not in ("save", "load"):
        given = strategy_of if "strategies" in job else partial(strategy_of, job["strategy"])
        return lightning_jobs.run(given, job)
    losses = Losses()
    options = {"accelerator": job.get("accelerator", "cpu"), "devices": job["devices"]}
    options["strategy"] = strategy_of(job["strategy"])
    options |= precision_options(job.get("precision", "32-true"), options["strategy"])
    if job["do"] == "save":
        checkpoint = PortableCheckpoint(job["run_dir"], every_n_steps=job["save_at"], resume=job.get("resume"))
        callbacks: list[Callback] = [EMA(0.9, offload=job.get("ema_offload", False)), losses, checkpoint]
        if job.get("sample_every"):
            sampling = SamplingOptions(num_inference_steps=2, batch_size=2)
            prompts = ["a handwritten one", "a handwritten two", "a handwritten six"]
            callbacks.append(
                SampleGrid(job["run_dir"], prompts=prompts, every_n_steps=job["sample_every"], options=sampling)
            )
        if job.get("stop_at"):
            callbacks.append(StopAt(job["stop_at"]))
        if job.get("signal_at"):
            callbacks += [StopOnSignal(), Signal(job["signal_at"])]
        pl_module = module_of(job)
        if job.get("bad_at"):
            callbacks.append(NonFiniteLossGuard(2))
            pl_module.__class__ = type("BadLoss", (BadLoss,), {"bad_at": job["bad_at"]})
        datamodule = dreambooth_data(**job["dreambooth"]) if job.get("dreambooth") else _digits(job)
        if job.get("images"):
            datamodule = image_folder_data(**job["images"])
        trainer = trainer_of(job["steps"], *callbacks, **options, **job.get("trainer", {}))
        trainer.fit(pl_module, datamodule, ckpt_path=job.get("ckpt_path"))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results = {"losses": losses.values, "checkpoint": str(checkpoint.last_saved), "metrics": metrics}
        if job.get("evaluate"):
            for name in ("validate", "test"):
                found = getattr(trainer, name)(pl_module, datamodule, verbose=False)
                results[name] = {key: float(value) for key, value in found[0].items()}
        return results
    loads = LoadEach(job["checkpoints"])
    fit(module(), data_at(job["steps"]), 1, loads, **options)
    return {"found": loads.found}


def _digits(job: dict[str, Any]) -> Any:
    return data(source=RaggedDigits) if job.get("family") else data(cache_latents="architecture" not in job)


def data_at(batches: int) -> Any:
    """Return the data so that the first batch is the one after ``batches``."""
    datamodule = data()
    datamodule.resume(0, batches)
    return datamodule
