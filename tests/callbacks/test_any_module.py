"""Portable checkpoints of a LightningModule of one's own: no pipeline, everything else as for our own module."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

import small_training as small
from sd_lightning import UsageError
from sd_lightning.callbacks import EMA
from sd_lightning.callbacks.checkpoint.pipeline import PipelineModule
from sd_lightning.callbacks.checkpoint.restore import load_weights
from sd_lightning.data.contract import ResumableData
from sd_lightning.data.order import BatchOrder, Bucket
from sd_lightning.data.sampler import GlobalBatchSampler
from sd_lightning.storage import runs
from sd_lightning.storage.checkpoint import checkpoint_path, verify
from strategy_table import strategy_of

STEPS, LEFT_AT = 8, 3
"""An epoch has five steps: the run is left in the first, and ends in the second."""


class Regression(pl.LightningModule):
    """A perceptron with running means, which no optimizer steps, and a learning rate that changes at every step."""

    def __init__(self, plateau: bool = False, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()
        self.plateau = plateau
        self.automatic_optimization = not manual

    def build(self) -> None:
        self.body = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh())
        self.head = nn.Linear(12, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return (self.head(self.body(inputs)) - targets).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.plateau:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _plateau(optimizer), "monitor": "loss"}}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class BuiltLate(Regression):
    """The same; its networks are built when the trainer asks for them."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(1)
            super().build()


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(key[1]))
        return inputs, inputs.sum(0, keepdim=True).sin()


class Data(pl.LightningDataModule):
    """The least that can be resumed: a sampler with a position."""

    batch_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.train_sampler: GlobalBatchSampler | None = None
        self.position: dict[str, int] = {}

    def resume(self, epoch: int, batches_done: int) -> None:
        self.position = {"epoch": epoch, "batches_done": batches_done}
        if self.train_sampler is not None:
            self.train_sampler.resume(**self.position)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        order = BatchOrder([Bucket((1, 1), range(43))], self.batch_size, seed=5)
        self.train_sampler = GlobalBatchSampler(order, accumulate=self.trainer.accumulate_grad_batches)
        if self.position:
            self.train_sampler.resume(**self.position)
        return DataLoader(Samples(), batch_sampler=self.train_sampler)


class Losses(Callback):
    def __init__(self) -> None:
        self.of_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.of_step[trainer.global_step] = float(outputs["loss"])


def train(
    run_dir: Path,
    strategy: str,
    steps: int,
    *callbacks: Callback,
    resume: Path | None = None,
    kind: type[Regression] = Regression,
) -> tuple[dict[int, float], Regression]:
    module, losses, saving = kind(), Losses(), small.Saving(run_dir, (LEFT_AT,), resume=resume)
    small.fit(module, Data(), steps, EMA(0.9), losses, saving, *callbacks, strategy=strategy_of(strategy))  # type: ignore[arg-type]
    return losses.of_step, module


class Killed(Callback):
    """Stands for a kill in the step after the checkpoint."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == LEFT_AT + 1:
            raise KeyError("killed")


@pytest.mark.parametrize(
    ("first", "second"),
    [("ddp", "fsdp"), ("fsdp", "gemini_small_chunks"), ("gemini_small_chunks", "zero2"), ("zero3", "ddp")],
)
def test_a_killed_run_goes_on_under_another_strategy_with_the_same_losses(
    first: str, second: str, tmp_path: Path
) -> None:
    straight, whole = train(tmp_path / "straight", "single", STEPS)
    run = tmp_path / "run"
    with pytest.raises(KeyError, match="killed"):
        train(run, first, STEPS, Killed())
    resume = runs.find_checkpoint("auto", run)
    assert resume == checkpoint_path(run, LEFT_AT)
    assert sorted(os.listdir(resume)) == ["manifest.json", "state", "trainer.json"] and not verify(resume)
    assert sorted(os.listdir(run)) == [".sd_lightning", "checkpoints"]
    with pytest.raises(UsageError, match="neither a finished pipeline nor a valid checkpoint with one in it"):
        runs.find_pipeline(run, who="run")
    losses, module = train(run, second, STEPS, resume=resume)
    assert losses.keys() == set(range(LEFT_AT + 1, STEPS + 1))
    assert all(math.isclose(loss, straight[step], rel_tol=1e-6) for step, loss in losses.items())
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    ours, theirs = (small.stored(checkpoint_path(path, STEPS)) for path in (run, tmp_path / "straight"))
    assert ours.keys() == theirs.keys() and {"buffer/body.1.running_mean", "ema/head.bias"} < ours.keys()
    for key, values in theirs.items():
        torch.testing.assert_close(ours[key], values, rtol=1e-4, atol=1e-6)
    states = [small.trainer_state(checkpoint_path(path, STEPS)) for path in (run, tmp_path / "straight")]
    assert states[0]["position"] == states[1]["position"] and states[0]["schedulers"] == states[1]["schedulers"]
    assert (states[0]["trained_parts"], states[0]["frozen"], states[0]["position"]["seed"]) == ({}, {}, None)


@pytest.mark.parametrize("kind", [Regression, BuiltLate])
def test_a_run_goes_on_bit_for_bit(kind: type[Regression], tmp_path: Path) -> None:
    straight, _ = train(tmp_path / "straight", "ddp", STEPS)
    train(tmp_path / "run", "ddp", LEFT_AT, kind=kind)
    losses, _ = train(tmp_path / "run", "ddp", STEPS, resume=checkpoint_path(tmp_path / "run", LEFT_AT), kind=kind)
    assert losses == {step: straight[step] for step in losses}
    small.assert_bitwise_equal(checkpoint_path(tmp_path / "run", STEPS), checkpoint_path(tmp_path / "straight", STEPS))


def test_evaluation_takes_the_average_and_the_buffers(tmp_path: Path) -> None:
    train(tmp_path, "single", LEFT_AT)
    path, module = checkpoint_path(tmp_path, LEFT_AT), Regression()
    load_weights(path, module)
    stored = small.stored(path)
    assert all(torch.equal(value, stored[f"ema/{name}"]) for name, value in module.named_parameters())
    assert all(torch.equal(value, stored[f"buffer/{name}"]) for name, value in module.named_buffers())


def test_a_module_says_by_its_members_whether_it_has_a_pipeline() -> None:
    assert isinstance(small.module(), PipelineModule) and not isinstance(Regression(), PipelineModule)
    assert isinstance(Data(), ResumableData)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Regression(manual=True), "got Regression with automatic_optimization=False"),
        (lambda: Regression(plateau=True), "got ReduceLROnPlateau, which Lightning steps after checkpoints are saved"),
    ],
)
def test_what_could_not_be_resumed_exactly_is_refused_before_the_first_step(
    module: Callable[[], Regression], message: str, tmp_path: Path
) -> None:
    losses, data = Losses(), Data()
    with pytest.raises(UsageError, match=message):
        small.fit(module(), data, 1, losses, small.Saving(tmp_path), gradient_clip_val=None)  # type: ignore[arg-type]
    assert not losses.of_step
