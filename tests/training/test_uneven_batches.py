"""A global batch that the processes or accumulated batches do not divide is trained as if it were in one piece."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import small_training
from ranks import run_jobs
from sd_lightning import SDLightningModule
from sd_lightning.data.batch import CaptionedImages
from sd_lightning.data.order import BatchOrder, Bucket
from sd_lightning.data.sampler import GlobalBatchSampler

BATCH_SIZE = 8


def gradient(module: SDLightningModule, samples: CaptionedImages, world: int, accumulate: int) -> tuple[Tensor, float]:
    """Return the mean gradient, and the mean loss, of a global batch over ranks and accumulated batches."""
    order = BatchOrder([Bucket((8, 8), range(len(samples)))], BATCH_SIZE, seed=1, drop_last=True)
    loss, parts = 0.0, world * accumulate
    module.zero_grad()
    for rank in range(world):
        sampler = GlobalBatchSampler(order, world_size=world, rank=rank, accumulate=accumulate)
        for keys, _ in zip(sampler, range(accumulate)):
            batch = module.encoder(samples.__getitems__(keys), seed=1)
            assert ("loss_weight" in batch) == (BATCH_SIZE % parts > 0)
            part = module.training_loss(batch) / parts
            part.backward()
            loss += part.item()
    grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(grads), loss


def test_parts_have_the_gradient_of_the_whole() -> None:
    module, data = small_training.module(), small_training.data(cache_latents=False)
    samples = CaptionedImages(data.source_train, module.latent_diffusion.tokenize, options=data.images, seed=1)
    module.encoder.to(torch.device("cpu"))
    whole, loss = gradient(module, samples, 1, 1)
    for world, accumulate in ((3, 1), (1, 3), (5, 1), (3, 2), (4, 2)):
        theirs, their_loss = gradient(module, samples, world, accumulate)
        assert (theirs - whole).abs().max() < 1e-6, (world, accumulate)
        assert their_loss == pytest.approx(loss, abs=1e-6)


class _Losses(Callback):
    """The loss of each optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.values.append(float(pl_module.last_loss))


def test_uneven_accumulation_trains_and_tells_the_losses_of_whole_batches() -> None:
    losses, weights = [], []
    for accumulate in (1, 3):
        told, module = _Losses(), small_training.module(optimizer=lambda groups: torch.optim.SGD(groups, lr=1e-2))
        small_training.fit(module, small_training.data(), 7, told, accumulate_grad_batches=accumulate)
        losses.append(told.values)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert len(losses[0]) == 7 and losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert (weights[0] - weights[1]).abs().max() < 1e-6


@pytest.mark.full("matrix")
def test_three_processes_train_a_batch_of_eight_as_one_does_under_each_engine(tmp_path: Path) -> None:
    def job(strategy: str, devices: int) -> dict[str, Any]:
        run_dir = str(tmp_path / f"{strategy}-{devices}")
        return {"do": "save", "strategy": strategy, "devices": devices, "steps": 6, "save_at": 6, "run_dir": run_dir}

    one = run_jobs("strategy_jobs", {"one": job("single", 1)}, tmp_path, world_size=1)["one"]
    expected = small_training.stored(Path(one["checkpoint"]))
    jobs = {name: job(name, 3) for name in ("ddp", "fsdp", "gemini", "zero2", "zero3")}
    for name, three in run_jobs("strategy_jobs", jobs, tmp_path, world_size=3).items():
        assert len(one["losses"]) == 6 and three["losses"] == pytest.approx(one["losses"], abs=2e-6), name
        ours = small_training.stored(Path(three["checkpoint"]))
        differences = torch.cat([(ours[k] - expected[k]).flatten() for k in expected if k.startswith("master/")])
        assert differences.square().mean().sqrt() <= 5e-7, name
