"""Trainings whose images are encoded by actors of a Ray cluster or by the trainer; jobs of ranks, and of a test."""

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import ray
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import small_training as small
from lightning_jobs import Losses
from sd_lightning import SDDataModule
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.source import SourceSubset
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.transform import ImageOptions
from sd_lightning.remote.encoders import RayEncoders
from square_data import Squares, tokenize


def digits(loaders: RayEncoders | None = None) -> SDDataModule:
    """Five batches of digits and a remainder, cropped at random; 16 held out."""
    source = small._digits(Digits)
    return SDDataModule(
        SourceSubset(source, range(small.BATCH_SIZE * small.STEPS_PER_EPOCH + 3)),
        SourceSubset(source, range(100, 116)),
        batch_size=small.BATCH_SIZE,
        images=ImageOptions(24, False, True, 0.3),
        loader=LoaderOptions(loaders=loaders),
    )


class Call(Callback):
    """Calls functions after the given steps."""

    def __init__(self, functions: dict[int, Any]) -> None:
        self.functions = functions

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.functions.pop(trainer.global_step, lambda: None)()


def fit(
    loaders: RayEncoders | None = None,
    max_steps: int = 12,
    *callbacks: Callback,
    dtype: str = "bfloat16",
    texts: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train, with validation at the end of every epoch; return the losses and a sum of the weights."""
    losses, pl_module = Losses(), small.module(train_text_encoder=texts, encoder_dtype=dtype)
    every = {"limit_val_batches": 1.0, "check_val_every_n_epoch": 1, "val_check_interval": 1.0}
    trainer = small.fit(pl_module, digits(loaders), max_steps, losses, *callbacks, **every | options)
    held_out = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    sums = [float(weight.double().sum()) for weight in pl_module.parameters()]
    return {"losses": losses.values, "held out": held_out, "weights": sums}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train on every rank under DDP, with encoders if the job has the address of a cluster."""
    loaders = None
    if job["address"] is not None:
        os.environ["RAY_ADDRESS"] = job["address"]
        loaders = RayEncoders(2, run=job["run"])
    found = fit(loaders, strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    return {**found, "waits": loaders and loaders.waits()}


class Waiting:
    """Stands in for a LatentEncoder, and waits instead of computing; errors begin with the second epoch."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, seconds: float = 0.0, error: str | None = None) -> None:
        self.seconds, self.error = seconds, error

    def portable(self) -> "Waiting":
        return self

    def to(self, device: torch.device) -> "Waiting":
        return self

    def encode(self, batch: dict[str, Any], *, seed: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        if self.error is not None and batch["epoch"].any():
            if self.error == "die":
                os._exit(3)
            raise RuntimeError(self.error)
        images: Tensor = batch.pop("pixel_values")
        return {**batch, "latent_moments": images.mean(dim=(2, 3))}


def _tokenize(tokenizers: Any, captions: list[str]) -> dict[str, Tensor]:
    return tokenize(captions)


def waiting_loader(loaders: RayEncoders, encoder: Waiting, num_batches: int) -> Any:
    """Return the loader of squares that such an encoder encodes."""
    for name in (__name__, Squares.__module__):  # the cluster's processes cannot import them
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    model = SimpleNamespace(family=SimpleNamespace(tokenize=_tokenize), tokenizers={})
    module = SimpleNamespace(encoder=encoder, latent_diffusion=model)
    trainer: Any = SimpleNamespace(
        lightning_module=module, strategy=SimpleNamespace(root_device=torch.device("cpu")), num_devices=1
    )
    dataset = CaptionedImages(Squares(), tokenize, options=ImageOptions(16), seed=1)
    keys: list[Any] = [[(epoch, index) for index in range(4)] for epoch in range(num_batches)]
    return loaders.build(dataset, keys, trainer)
