"""``AutoStrategy`` chooses for any module with example inputs, and trains as the chosen strategy does."""

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_jobs as jobs
import small_training as small
from ranks import run_jobs
from sd_lightning import AutoStrategy, UsageError
from sd_lightning.planner.devices import DTYPES, GIB, Device
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import presets
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.predicted import _batch_size, _traced
from sd_lightning.strategies.processes.group import leave_process_group

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "max_steps": 4}


class Bert(jobs.Language):
    """With the example that its users would write."""

    def __init__(self) -> None:
        super().__init__("bert")
        self.example_input_array = torch.zeros(2, 6, dtype=torch.int64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class Vit(jobs.Boring):
    """A vision transformer from its configuration."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.model: Any = transformers.ViTForImageClassification(
            transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=4, hidden_dropout_prob=0.0)
        )
        self.example_input_array = {"pixel_values": torch.zeros(2, 3, 16, 16)}

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).logits

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        samples = [(torch.randn(3, 16, 16, generator=generator), torch.tensor(index % 4)) for index in range(24)]
        return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


MODULES = {"bert": Bert, "vit": Vit}
DIRECTLY: dict[str, Any] = {
    "SingleDeviceStrategy": lambda: "auto",
    "GeminiStrategy": GeminiStrategy,
    "DeepSpeedStrategy": lambda: deepspeed(stage=1, offload_optimizer="cpu"),
}
"""Class of what is chosen below -> the same, as one would pass it."""


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    leave_process_group()


def gpu(gigabytes: float) -> Device:
    return Device("a small GPU", gigabytes * GB / GIB, 8, dict.fromkeys(DTYPES, 10.0), 300, 10)


def fit(strategy: Any, module: Any, folder: Path, **options: Any) -> tuple[pl.Trainer, list[float]]:
    losses = jobs.Losses()
    trainer = jobs.trainer(strategy, folder, losses, **QUIET | options)
    trainer.fit(module)
    return trainer, losses.values


@pytest.mark.parametrize(("kind", "precision"), [("bert", "32-true"), ("vit", "32-true"), ("vit", "bf16-mixed")])
def test_any_module_trains_as_under_the_strategy_that_is_chosen(
    kind: str, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        trainer, losses = fit(AutoStrategy(gpu(24)), MODULES[kind](), tmp_path, precision=precision)
    chosen = type(trainer.strategy)
    assert chosen is not AutoStrategy and len(losses) == 4
    lines = [record.message for record in caplog.records if "GB of host memory, " in record.message]
    assert len(lines) == 4 and [line.startswith("  rival: ") for line in lines] == [False, True, True, True]
    told = {"bert": "traced training_step", "vit": "traced forward"}[kind]
    assert lines[0].startswith(f"AutoStrategy ({told}) on 1 x a small GPU, seconds assumed, from the data sheet: ")
    leave_process_group()
    again, same = fit(DIRECTLY[chosen.__name__](), MODULES[kind](), tmp_path, precision=precision)
    assert type(again.strategy) is chosen and losses == same, "bit for bit"


def test_an_sd_module_is_planned_by_its_model_and_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(strategy: Any) -> tuple[pl.Trainer, list[float]]:
        losses = jobs.Losses()
        trainer = jobs.trainer(strategy, tmp_path, losses, **QUIET)
        trainer.fit(small.module(), small.data())
        return trainer, losses.values

    with caplog.at_level(logging.INFO):
        trainer, losses = run(AutoStrategy(gpu(24)))
    (line,) = (record.message for record in caplog.records if record.message.startswith("AutoStrategy on 1 x"))
    assert "traced" not in line and type(trainer.strategy) is not AutoStrategy
    leave_process_group()
    assert losses == run(DIRECTLY[type(trainer.strategy).__name__]())[1]


def test_less_memory_makes_another_choice(tmp_path: Path) -> None:
    """Of a model whose weights and optimizer are nearly all of its memory."""

    class Wide(Bert):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(2000, 2000)

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + self.wide.weight.square().mean()

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.wide(torch.zeros(2000, device=tokens.device)).mean()

    ample = fit(AutoStrategy(gpu(24)), Wide(), tmp_path, max_steps=1)[0].strategy
    leave_process_group()
    tight = fit(AutoStrategy(gpu(0.67)), Wide(), tmp_path, max_steps=1)[0].strategy
    assert isinstance(tight, GeminiStrategy) or "DeepSpeed" in type(tight).__name__ or "FSDP" in type(tight).__name__
    assert type(ample) is not type(tight)


def test_if_nothing_fits_the_devices_and_strategy_that_would_are_named(tmp_path: Path) -> None:
    class Wide(Bert):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(3000, 3000)

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.wide(torch.zeros(3000, device=tokens.device)).mean()

    chosen = [each for each in presets.candidates() if each.strategy in ("single", "fsdp") and not each.settings]
    with pytest.raises(UsageError, match=r"what may help: devices=4, with fsdp; a batch below 2 per process"):
        fit(AutoStrategy(gpu(0.74), candidates=chosen), Wide(), tmp_path)


def test_what_cannot_be_planned_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got Boring without example_input_array; expected a tensor.*set it in __init"):
        fit(AutoStrategy(gpu(24)), jobs.Boring(), tmp_path)
    with pytest.raises(UsageError, match="AutoStrategy.* on 1 x a small GPU: nothing fits .* lacks .* what may help: "):
        fit(AutoStrategy(gpu(0.5)), Bert(), tmp_path)
    with pytest.raises(
        UsageError, match="got run= for Bert; expected it for an SDLightningModule only.*leave run= out"
    ):
        fit(AutoStrategy(gpu(24), run=TrainingRun(8, 32)), Bert(), tmp_path)
    with pytest.raises(UsageError, match="got precision=64-true; expected one of 32-true, bf16-mixed"):
        fit(AutoStrategy(gpu(24)), Bert(), tmp_path, precision="64-true")

    class ReadsValues(Bert):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * float(tokens.sum())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch).mean()

    with pytest.raises(UsageError, match="ReadsValues cannot be traced with its example inputs on the meta device"):
        fit(AutoStrategy(gpu(24)), ReadsValues(), tmp_path)


def test_a_strategy_that_cannot_train_the_module_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the optimizer cannot be built before the run."""

    class Own(Bert):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1))

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * self.gain.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2 / self.trainer.estimated_stepping_batches)

    chosen = {
        name: [each for each in presets.candidates() if each.strategy == name] for name in ("fsdp", "gemini", "single")
    }
    with caplog.at_level(logging.INFO):
        trainer, losses = fit(AutoStrategy(gpu(24), candidates=chosen["gemini"] + chosen["single"]), Own(), tmp_path)
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy" and len(losses) == 4
    assert any("AdamW assumed" in record.message for record in caplog.records)
    leave_process_group()
    with pytest.raises(UsageError, match="all strategies that fit refuse the run: .*Own.gain to train, a parameter of"):
        fit(AutoStrategy(gpu(24), candidates=chosen["gemini"]), Own(), tmp_path)


def test_an_optimizer_that_needs_the_trainer_is_checked_before_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Settings(Bert):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-2 / self.trainer.max_steps)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    names = ("deepspeed_zero1_offload", "single")  # its CPU Adam steps no SGD
    candidates = [each for name in names for each in presets.candidates() if each.strategy == name]
    with caplog.at_level(logging.INFO):
        trainer, losses = fit(AutoStrategy(gpu(24), candidates=candidates), Settings(), tmp_path)
    assert type(trainer.strategy).__name__ == "SingleDeviceStrategy" and len(losses) == 4
    assert not any("AdamW assumed" in record.message for record in caplog.records)


def test_a_frozen_block_in_the_optimizer_is_nothing_to_train_under_gemini(tmp_path: Path) -> None:
    class Frozen(jobs.Boring):
        def __init__(self) -> None:
            super().__init__("tuple")
            self.example_input_array = torch.zeros(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.heads["main"](self.layers[0](self.inner(self.frozen(x))))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    gemini = [each for each in presets.candidates() if each.strategy == "gemini" and not each.settings]
    same_order = {"use_distributed_sampler": False}  # Lightning's shuffles
    trainer, losses = fit(AutoStrategy(gpu(24), candidates=gemini), Frozen(), tmp_path, **same_order)
    assert isinstance(trainer.strategy, GeminiStrategy)
    leave_process_group()
    assert losses == pytest.approx(fit("auto", Frozen(), tmp_path, **same_order)[1], abs=1e-6)


def test_modules_that_cannot_be_predicted_are_told_why(tmp_path: Path) -> None:
    class Later(Bert):
        def __init__(self) -> None:
            super().__init__()
            del self.model

        def configure_model(self) -> None:
            self.model = torch.nn.Linear(2, 2)

    with pytest.raises(UsageError, match="Later, whose layers are made in configure_model.*make them in __init__"):
        fit(AutoStrategy(gpu(24)), Later(), tmp_path)

    class Closure(Bert):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match="got LBFGS, which computes the loss several times.*write a strategy yourself"):
        fit(AutoStrategy(gpu(24)), Closure(), tmp_path)


def test_a_nested_example_is_searched_for_its_batch() -> None:
    class Nested(Bert):
        pass

    module = Nested()
    module.example_input_array = {"inputs": {"tokens": torch.zeros(3, 6)}}  # type: ignore[assignment]
    assert _batch_size(module) == 3


@pytest.mark.parametrize("kind", MODULES)
def test_the_traced_memory_of_a_step_is_that_of_the_allocator(kind: str) -> None:
    module = MODULES[kind]()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    many = 256  # tensors are rounded up to 512 bytes
    examples = {"bert": torch.zeros(many, 6, dtype=torch.int64), "vit": {"pixel_values": torch.zeros(many, 3, 16, 16)}}
    example: Any = examples[kind]
    module.example_input_array = example
    subject = _traced(module)
    assert subject.how == {"bert": "training_step", "vit": "forward"}[kind]
    trace = subject.trace(TrainingRun(many, 0), torch.float32, None)
    trace.freed[trace.is_gradient] = len(trace.operations)  # kept until the optimizer has stepped

    def step() -> None:
        loss = module.training_step(example, 0) if kind == "bert" else module(**example).sum()
        loss.backward()

    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    kineto: Any = profile.kineto_results
    events = sorted((event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]")
    allocated = max(itertools.accumulate(nbytes for _, nbytes in events))
    assert trace.live(many).max() == pytest.approx(allocated, rel=0.01)


def test_a_machine_that_is_not_known_is_to_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="run python -m sd_lightning.plan calibrate here"):
            fit(AutoStrategy(), Bert(), tmp_path)


def test_before_a_fit_it_validates_as_ddp_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    trainer = jobs.trainer(AutoStrategy(gpu(24)), tmp_path, jobs.Losses(), **QUIET)
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True", "which plans assume"
    found = trainer.validate(Bert(), verbose=False)
    assert isinstance(trainer.strategy, DDPStrategy) and found[0]["val"] > 0


@pytest.mark.slow
def test_two_processes_choose_alike_and_train(tmp_path: Path) -> None:
    job = {"do": "anything", "strategy": "auto", "name": "bert_with_example", "precisions": ["32-true"], "devices": 2}
    other = job | {"strategy": "ddp"}
    jobs_of_two = {name: each | {"folder": str(tmp_path)} for name, each in (("auto", job), ("ddp", other))}
    found = run_jobs("strategy_jobs", jobs_of_two, tmp_path, world_size=2)
    assert found["auto"]["32-true"]["losses"] == pytest.approx(found["ddp"]["32-true"]["losses"], abs=1e-5)
