"""Squares of color as data, and a module that records them: what each rank of a run has seen, bit for bit."""

import hashlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from PIL import Image
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.families.latents import LatentSpace

NUM, BATCH = 26, 8  # three global batches an epoch, two samples left out


class Squares(Source):
    """Images of different sizes and shapes with three captions each; some are broken."""

    def __init__(self, num: int = NUM, broken: tuple[int, ...] = ()) -> None:
        self.num, self.broken = num, broken

    def __len__(self) -> int:
        return self.num

    def image(self, index: int) -> Image.Image:
        if index in self.broken:
            raise BadSample("torn")
        pixels = torch.arange(20 * 30 * 3).mul(index + 3).remainder(251).to(torch.uint8)
        return Image.fromarray(pixels.view(20, 30, 3).numpy())

    def captions(self, index: int) -> list[str]:
        return [f"{kind} {index}" for kind in ("first", "second", "third")]

    def name(self, index: int) -> str:
        return f"square-{index}"


def tokenize(captions: list[str]) -> dict[str, Tensor]:
    """Two encoders, of three and five tokens: the first bytes of the caption's hash."""
    ids = [list(hashlib.sha256(caption.encode()).digest()[:8]) for caption in captions]
    first, second = torch.tensor(ids, dtype=torch.int64).split([3, 5], dim=1)
    return {"text_encoder": first, "text_encoder_2": second}


class Recorder(pl.LightningModule):
    """Stands in for SDLightningModule and records the bits of every training sample."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seed = seed
        self.latent_diffusion = SimpleNamespace(
            tokenize=tokenize,
            truncated=lambda captions: [False] * len(captions),
            latent_space=LatentSpace(channels=4, factor=8),
        )
        self.encoder = SimpleNamespace(encode_moments=self._encode, offload=False, keeps_captions=True)
        self.num_encoded = 0
        self.steps: list[list[tuple[int, int, str]]] = []
        self.val_batches: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}

    def _encode(self, pixel_values: Tensor) -> Tensor:
        self.num_encoded += len(pixel_values)
        return torch.nn.functional.avg_pool2d(pixel_values, 4)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.last = batch
        images = batch["pixel_values"] if "pixel_values" in batch else batch["latent_moments"]
        parts = [images, *batch["input_ids"].values(), batch["original_size"], batch["crop_top_left"]]
        self.steps.append(
            [
                (int(epoch), int(index), hashlib.sha256(b"".join(p[i].numpy().tobytes() for p in parts)).hexdigest())
                for i, (epoch, index) in enumerate(zip(batch["epoch"], batch["index"]))
            ]
        )
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.val_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class RankTrainer(pl.Trainer):
    """A Trainer that believes to be one of several ranks."""

    ranks = (1, 0)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.ranks[0], "rank": self.ranks[1]}


def trainer(max_steps: int, accumulate: int = 1, ranks: tuple[int, int] = (1, 0), **options: Any) -> RankTrainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    made = RankTrainer(
        accelerator="cpu", max_steps=max_steps, max_epochs=-1, accumulate_grad_batches=accumulate, **quiet | options
    )
    made.ranks = ranks
    return made


def datamodule(num_workers: int = 0, source: Any = None, val: Any = None, **options: Any) -> SDDataModule:
    images = ImageOptions(16, center_crop=False, random_flip=True, proportion_empty_prompts=0.3)
    defaults: dict[str, Any] = {"batch_size": BATCH, "images": images, "loader": LoaderOptions(num_workers)}
    return SDDataModule(source or Squares(), val, **defaults | options)


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train on a rank of two, a job of ``ranks``; then with more bad samples than are allowed."""
    images = ImageOptions(16, center_crop=True, proportion_empty_prompts=0.3)
    module = Recorder()
    data = datamodule(
        images=images, cache_latents=True, val=Squares(7), source=Squares(70, (4, 33)), max_bad_fraction=0.1
    )
    common: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    common |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_steps=9, **common).fit(module, data)
    bad = data.bad.gather()
    made, error = pl.Trainer(max_steps=20, **common), ""
    broken = tuple(range(0, 70, 5))  # a rank meets fewer than the limit of 10 in an epoch, both together 12
    try:
        made.fit(Recorder(), datamodule(images=images, source=Squares(70, broken), max_bad_fraction=0.15))
    except UsageError as refused:
        error = str(refused)
    shown = [batch["index"].tolist() for batch in module.val_batches]
    return {"seen": module.steps, "shown": shown, "bad": bad, "error": error, "steps": made.global_step}
