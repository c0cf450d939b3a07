"""A training small enough for a unit test: the tiny model on a few digits; and how tests compare two of them."""

import itertools
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor

from sd_lightning import LatentDiffusion, SDDataModule, SDLightningModule
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.source import SourceSubset
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.models.families.blocks import recomputable
from sd_lightning.storage import typed_json
from sd_lightning.storage.tensor_store import ShardedTensors
from sd_lightning.training.speed import Speed
from small_models import few_blocks

BATCH_SIZE = 8
STEPS_PER_EPOCH = 5


class RaggedDigits(Digits):
    """Digits with captions of one to seven sentences: those of a batch, and of its ranks, have several lengths."""

    def captions(self, index: int) -> list[str]:
        sentences = [f"{each}, " * (1 + index % 7) for each in super().captions(index)]
        return [each.removesuffix(", ") for each in sentences]


@cache
def _digits(cls: type[Digits]) -> Digits:
    return cls("train")


def data(
    *, batch_size: int = BATCH_SIZE, num_workers: int = 0, cache_latents: bool = True, source: type[Digits] = Digits
) -> SDDataModule:
    """Return 43 digits to train on (five batches and a remainder) and 16 held out."""
    digits = _digits(source)
    return SDDataModule(
        SourceSubset(digits, range(BATCH_SIZE * STEPS_PER_EPOCH + 3)),
        SourceSubset(digits, range(100, 116)),
        batch_size=batch_size,
        images=ImageOptions(32, True, False, 0.1),
        loader=LoaderOptions(num_workers),
        cache_latents=cache_latents,
    )


def apply_speed(job: Mapping[str, Any], module: SDLightningModule) -> None:
    """Apply the ``speed`` of a job; its blocks keep what ``kept`` has in turn, under a limit."""
    networks = module.trained_networks()
    levels = itertools.cycle([SavedActivations(each) for each in job.get("kept", ("all",))])
    Speed(**job.get("speed", {})).apply_(networks, dict(zip(recomputable(networks), levels)))


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=2e-3, fused=True)


def module(model: LatentDiffusion | None = None, **options: Any) -> SDLightningModule:
    """Return a module of few blocks, or of ``model``; its text encoder is trained, as by default."""
    options = {"train_text_encoder": True, "optimizer": adamw, "seed": 3} | options
    return SDLightningModule(model or few_blocks(seed=1), **options)


def fit(
    pl_module: pl.LightningModule, datamodule: SDDataModule, max_steps: int, *callbacks: Callback, **options: Any
) -> pl.Trainer:
    """Train without logs, validation and progress bar."""
    trainer = trainer_of(max_steps, *callbacks, **options)
    trainer.fit(pl_module, datamodule)
    return trainer


def trainer_of(max_steps: int, *callbacks: Callback, **options: Any) -> pl.Trainer:
    warnings.filterwarnings("ignore", module="lightning")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "check_val_every_n_epoch": None,
        "val_check_interval": 10**6,
        "gradient_clip_val": 1.0,
    }
    return pl.Trainer(max_steps=max_steps, callbacks=list(callbacks), **defaults | options)


class Saving(PortableCheckpoint):
    """Saves after the given steps and at the end."""

    def __init__(self, run_dir: Path, at: tuple[int, ...] = (), *, resume: Path | None = None, keep: int = 20) -> None:
        super().__init__(run_dir, every_n_steps=0, keep=keep, resume=resume)
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.every_n_steps = 1 if trainer.global_step in self.at else 0
        super().on_train_batch_end(trainer, pl_module, *args)


def train(
    run_dir: Path, max_steps: int, *, save: tuple[int, ...] = (), resume: Path | None = None, **options: Any
) -> Path:
    """Train with EMA and checkpoints from fresh objects; return the last checkpoint.

    Options of ``module`` and ``data`` go by their names, others to the trainer.
    """
    given = {k: options.pop(k) for k in ("batch_size", "num_workers", "cache_latents") if k in options}
    ours = {k: options.pop(k) for k in ("optimizer", "lr_scheduler", "seed", "train_text_encoder") if k in options}
    saving = Saving(run_dir, save, resume=resume)
    fit(module(**ours), data(**given), max_steps, EMA(0.9), saving, **options)
    assert saving.last_saved is not None
    return saving.last_saved


def weights(pl_module: pl.LightningModule) -> dict[str, Tensor]:
    """Return a copy of the trained weights."""
    return {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are bit-equal."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint's state: master/…, exp_avg/…, ema/…"""
    with ShardedTensors(checkpoint / "state") as store:
        tensors = {key: torch.empty(store.shape(key), dtype=store.dtype(key)) for key in store.keys()}
        for key, tensor in tensors.items():
            store.read_into(key, tensor)
    return tensors


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    """Read ``trainer.json`` without the clock."""
    state = typed_json.loads((checkpoint / "trainer.json").read_text())
    del state["train_seconds"]
    return state


def assert_bitwise_equal(ours: Path, theirs: Path) -> None:
    """Compare two checkpoints: weights, optimizer states, average, schedulers, position and exported weights."""
    left, right = stored(ours), stored(theirs)
    assert left.keys() == right.keys()
    differing = [key for key in left if not torch.equal(left[key], right[key])]
    assert not differing, f"{len(differing)} of {len(left)} tensors differ, e.g. {differing[:3]}"
    assert typed_json.dumps(trainer_state(ours)) == typed_json.dumps(trainer_state(theirs))
    digests = [
        {
            k: v["sha256"]
            for k, v in json.loads((c / "manifest.json").read_text())["files"].items()
            if k.endswith(".safetensors")
        }
        for c in (ours, theirs)
    ]
    assert digests[0] == digests[1]
