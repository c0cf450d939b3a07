"""Jobs for :mod:`ranks`: training under many settings of DeepSpeed."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import fake_aio
import small_training as small
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.callbacks import EMA, NonFiniteLossGuard, PortableCheckpoint
from sd_lightning.callbacks.ema import inference_weights
from sd_lightning.strategies import training_state
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.training.speed import Speed


@dataclass
class Job:
    """One training."""

    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``deepspeed``; empty for Lightning's own choice."""
    trainer: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    sample_after: int = 0
    """Draw pictures after this step, with the averaged weights."""
    bad_batch: int = 0
    """The batch, counted from 1, whose loss is not a number."""
    checkpointing: bool = False
    trains: str = ""
    """Freeze all parameters whose names do not contain this."""
    run_dir: str | None = None
    """Write checkpoints here."""
    save_every: int = 0
    resume: str | None = None
    breaks_layout: bool = False
    """Pretend that DeepSpeed arranges parameters in another order."""
    whole: bool = False
    """Train the whole `tiny` model: DeepSpeed swaps nothing smaller than 1 MiB."""
    fake_aio: bool = False
    """Swap without DeepSpeed's compiled extension."""


class Record(Callback):
    """What a training did, step by step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.losses: list[float] = []
        self.weights: list[str] = []
        self.average = ""
        self.dtypes: set[str] = set()
        self.hooks = 0
        self.engine: dict[str, Any] = {}
        self.initial_difference = -1.0
        self.swap_files: list[str] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.engine = engine_facts(trainer)
        self.initial_difference = distance_from_fresh_weights(trainer, self.job)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.dtypes.add(str(batch["latents"].dtype))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.hooks += 1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        loss = pl_module.last_loss.detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.losses.append(float(loss))
        self.weights.append(digest([read(shard.master) for shard in training_state(trainer).parameter_shards()]))
        if trainer.global_step == self.job.sample_after:
            with inference_weights(trainer):
                pl_module.sample(["a digit 3", "zero"], num_inference_steps=2)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        ema = next(c for c in trainer.callbacks if isinstance(c, EMA))  # type: ignore[attr-defined]
        self.average = digest(list(ema.shadow.values()))
        folder = getattr(trainer.strategy, "_swap_folder", None)
        if folder is not None:
            self.swap_files = sorted(path.name for path in folder.path.rglob("*.swp"))


class BadBatch(Callback):
    """Makes one batch's loss not a number, as the module sees it and as gradients do."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.batch and trainer.global_rank == 0:  # one rank is enough
            batch["latents"] = batch["latents"] * float("nan")


def read(tensor: Any) -> Tensor:
    return tensor if isinstance(tensor, Tensor) else tensor()


def digest(tensors: list[Tensor]) -> str:
    """Return a fingerprint of the tensors of all ranks, bit for bit."""
    own = hashlib.sha256()
    for tensor in tensors:
        own.update(tensor.detach().float().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    parts: list[Any] = [own.hexdigest()]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own.hexdigest())
    return "-".join(part[:16] for part in parts)


def engine_facts(trainer: pl.Trainer) -> dict[str, Any]:
    engine: Any = getattr(trainer.strategy, "deepspeed_engine", None)
    if not hasattr(engine, "zero_optimization_stage"):
        return {}
    zero = engine.optimizer
    return {
        "stage": int(engine.zero_optimization_stage()),
        "accumulate": engine.gradient_accumulation_steps(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "clip": engine.gradient_clipping(),
        "optimizer": type(zero.optimizer).__module__ + "." + type(zero.optimizer).__name__,
        "lr": zero.optimizer.param_groups[0]["lr"],
        "bucket": int(zero.reduce_bucket_size),
        "compute": str(next(trainer.lightning_module.parameters()).dtype),
        "checkpoint_functions": sorted(
            {
                f"{function.__module__}.{function.__qualname__}"
                for module in trainer.lightning_module.modules()
                if getattr(module, "gradient_checkpointing", False)
                and (function := getattr(module, "_gradient_checkpointing_func", None)) is not None
                and hasattr(function, "__qualname__")
            }
        ),
    }


def fresh_module(job: Job) -> SDLightningModule:
    return small.module(LatentDiffusion.build("tiny", seed=1) if job.whole else None)


def distance_from_fresh_weights(trainer: pl.Trainer, job: Job) -> float:
    """Return the largest difference of the float32 weights from those of a module just built."""
    fresh = dict(fresh_module(job).named_parameters())
    distances = [0.0]
    for shard in training_state(trainer).parameter_shards():
        if shard.begin < shard.end:
            expected = fresh[shard.name].detach().reshape(-1)[shard.begin : shard.end]
            distances.append(float((read(shard.master).reshape(-1).float() - expected).abs().max()))
    return max(distances)


def run(fields: dict[str, Any]) -> dict[str, Any]:
    """Do the job of these fields; one that ``breaks_layout`` gives ``{"error": …}``."""
    job = Job(**fields)
    try:
        return train(job)
    except Exception as error:
        if not job.breaks_layout:
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def train(job: Job) -> dict[str, Any]:
    record = Record(job)
    callbacks: list[Callback] = [EMA(0.9), NonFiniteLossGuard(3), record]
    if job.bad_batch:
        callbacks.append(BadBatch(job.bad_batch))
    if job.run_dir is not None:
        callbacks.append(PortableCheckpoint(job.run_dir, every_n_steps=job.save_every, resume=job.resume, keep=9))
    module = fresh_module(job)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(job.trains in name)
    if job.checkpointing:
        Speed(gradient_checkpointing=True).apply_(module.trained_networks())
    if job.fake_aio:
        fake_aio.install()
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    strategy = deepspeed(**job.strategy) if job.strategy else "auto"
    options = {"strategy": strategy, "devices": world_size, **job.trainer}
    moved = AssertionError("on CUDA, parameters would no longer be views of the engine's weights")
    stays = mock.patch.object(type(module), "cpu", side_effect=moved) if job.strategy else contextlib.nullcontext()
    with broken_layout() if job.breaks_layout else contextlib.nullcontext(), stays:
        small.fit(module, small.data(), job.steps, *callbacks, **options)
    assert torch.nn.functional.linear is torch._C._nn.linear, "what DeepSpeed replaces is put back"
    from deepspeed.ops.op_builder.builder import OpBuilder

    recorded = ("losses", "weights", "average", "hooks", "engine", "initial_difference", "swap_files")
    loaded = {"dtypes": sorted(record.dtypes), "extensions": sorted(OpBuilder._loaded_ops)}
    return {key: getattr(record, key) for key in recorded} | loaded


@contextlib.contextmanager
def broken_layout() -> Iterator[None]:
    """Let the engine's lists name two parameters of the same size in the wrong order."""
    from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy

    original = DeepSpeedStrategy._state_of

    def broken(self: Any, zero: Any) -> Any:
        group = zero.fp16_groups[0] if self.zero_stage_3 else zero.round_robin_bit16_groups[0]
        shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in group]
        first, second = next(
            (i, j) for i in range(len(shapes)) for j in range(i) if shapes[i] == shapes[j] and len(shapes[i]) > 1
        )
        group[first], group[second] = group[second], group[first]
        return original(self, zero)

    DeepSpeedStrategy._state_of = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeepSpeedStrategy._state_of = original  # type: ignore[method-assign]
