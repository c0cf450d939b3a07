"""Optimizers of optional packages: resuming is exact, and schedule-free shows its average where weights are used."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import small_training as small
from composing import Compose
from sd_lightning import AutoStrategy, SDLightningModule, UsageError
from sd_lightning.apps.preflight import check_optimizer
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.callbacks import EMA
from sd_lightning.models.lora import Lora
from sd_lightning.planner.devices import DTYPES, Device
from sd_lightning.strategies import presets
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.sharding import ShardingStrategy
from sd_lightning.training.optimizers import prodigy, schedule_free_adamw

OPTIMIZERS: dict[str, Any] = {
    "prodigy": prodigy,
    "schedule_free": partial(schedule_free_adamw, lr=2e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}

DREAMBOOTH = ("instance_data_dir=photos", "instance_prompt=sks")
PACKAGES = {"prodigy": "prodigyopt", "schedule_free": "schedulefree", "adafactor": "torch"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[name])
    options = {"optimizer": OPTIMIZERS[name]}
    whole = small.train(tmp_path / "whole", 4, save=(2,), **options)
    rest = small.train(tmp_path / "rest", 4, resume=tmp_path / "whole/checkpoints/step-00000002", **options)
    small.assert_bitwise_equal(rest, whole)
    first = small.stored(tmp_path / "whole/checkpoints/step-00000002")
    last = small.stored(whole)
    assert any(not torch.equal(first[key], last[key]) for key in first if key.startswith("master/"))


class Weights(small.Callback):
    """The first trained weight after each step, where callbacks save and draw."""

    def __init__(self) -> None:
        self.after: list[torch.Tensor] = []
        self.modes: list[tuple[str, bool]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: SDLightningModule, *_: Any) -> None:
        self.after.append(next(p for p in pl_module.parameters() if p.requires_grad).detach().clone())
        self.modes.append(("saved", trainer.optimizers[0].param_groups[0]["train_mode"]))

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        self.modes.append(("stepped", trainer.optimizers[0].param_groups[0]["train_mode"]))


def test_schedule_free_is_at_its_average_between_steps() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    seen, module = (
        Weights(),
        small.module(lora=Lora(rank=2), train_text_encoder=False, optimizer=OPTIMIZERS["schedule_free"]),
    )
    trainer = small.fit(module, small.data(), 3, seen, val_check_interval=2, limit_val_batches=1)
    optimizer: Any = trainer.optimizers[0]
    assert isinstance(optimizer, schedulefree.AdamWScheduleFree)
    assert {mode for mode in seen.modes if mode[0] == "saved"} == {("saved", False)}
    assert {mode for mode in seen.modes if mode[0] == "stepped"} == {("stepped", True)}
    weight = next(p for p in module.parameters() if p.requires_grad)
    assert torch.equal(weight, seen.after[-1])
    optimizer.train()
    assert not torch.equal(weight, seen.after[-1]), "gradients are taken elsewhere"


def test_schedule_free_averages_and_validates_amid_accumulation() -> None:
    pytest.importorskip("schedulefree")

    def trained(**options: Any) -> dict[str, torch.Tensor]:
        lora = Lora(base="int8", rank=2)
        module = small.module(lora=lora, train_text_encoder=False, optimizer=partial(schedule_free_adamw, lr=1e-2))
        ema = EMA(0.5)
        small.fit(module, small.data(), 4, ema, accumulate_grad_batches=2, **options)
        return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    whole = trained(limit_val_batches=0)
    for interval in (1, 2, 3):
        validated = trained(val_check_interval=interval, limit_val_batches=1)
        assert max((validated[name] - whole[name]).abs().max() for name in whole) < 1e-6


def test_a_users_own_hook_is_called_once_a_batch() -> None:
    class Mine(SDLightningModule):
        batches: tuple[int, ...] = ()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches += (batch_idx,)

    module = small.module(train_text_encoder=False)
    module.__class__ = Mine
    small.fit(module, small.data(), 2)
    assert module.batches == (0, 1)


def test_they_need_whole_weights() -> None:
    pytest.importorskip("prodigyopt")
    module = small.module(optimizer=prodigy)
    with pytest.raises(UsageError, match="GeminiStrategy got Prodigy.*strategy=ddp"):
        small.fit(module, small.data(), 1, strategy=GeminiStrategy())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planner_goes_on_to_a_strategy_that_can_step_them(name: str) -> None:
    pytest.importorskip(PACKAGES[name])
    chosen = [
        each for each in presets.candidates() if each.strategy in ("gemini", "fsdp", "ddp", "single") and each.suits(1)
    ]
    assert len({each.strategy for each in chosen}) > 1
    device = Device("a small GPU", 24, 8, dict.fromkeys(DTYPES, 10.0), 300, 10)
    strategy = AutoStrategy(device, candidates=[*chosen[1:], chosen[0]], host_memory=2**40)
    module = small.module(lora=Lora(base="nf4", rank=2), train_text_encoder=False, optimizer=OPTIMIZERS[name])
    trainer = small.fit(module, small.data(), 1, strategy=strategy)
    assert not isinstance(trainer.strategy, ShardingStrategy)
    for each in chosen:
        engine = each.build(**each.settings)
        optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(2, 2))])
        with (
            pytest.raises(UsageError, match="which needs whole")
            if isinstance(engine, ShardingStrategy)
            else nullcontext()
        ):
            engine.check_optimizer(optimizer)


@pytest.mark.parametrize(
    ("name", "words"), [("prodigy", "Prodigy"), ("schedule_free", "AdamWScheduleFree"), ("adafactor", "Adafactor")]
)
@pytest.mark.parametrize(("strategy", "who"), [("gemini", "GeminiStrategy"), ("fsdp", r"FSDP\w*")])
def test_that_is_found_before_anything_is_read(
    name: str, words: str, strategy: str, who: str, compose: Compose
) -> None:
    pytest.importorskip(PACKAGES[name])
    options = [f"optimizer={name}", "trainable=lora", "base=nf4", "trainer.accelerator=cpu", "lr_scheduler=none"]
    options += ["optimizer.lr=1"] * (name == "prodigy")
    with pytest.raises(UsageError, match=rf"{who} got {words}, which needs whole weights.*strategy=ddp or single"):
        check_optimizer(RunSpec.of(compose("train", f"strategy={strategy}", *options)))
    check_optimizer(RunSpec.of(compose("train", "strategy=ddp", *options)))


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (
            "train",
            ["experiment=qlora", "optimizer=prodigy", "data.store=x"],
            r"prodigy got lr=0.0001, which.*optimizer.lr=1",
        ),
        (
            "dreambooth",
            ["optimizer=prodigy", *DREAMBOOTH],
            r"prodigy got lr=5e-06, which.*in dreambooth learning_rate=1",
        ),
        (
            "train",
            ["optimizer=prodigy", "optimizer.lr=1", "module.train_text_encoder=true", "module.text_encoder_lr=0.5"],
            r"prodigy got lr=1 and 0.5 for another group.*one learning rate.*module.text_encoder_lr=null",
        ),
        (
            "train",
            ["optimizer=schedule_free", "lr_scheduler=cosine"],
            r"lr_scheduler=cosine got AdamW.*lr_scheduler=none",
        ),
    ],
)
def test_rates_that_they_cannot_use_are_refused(
    program: str, options: list[str], message: str, compose: Compose
) -> None:
    pytest.importorskip("prodigyopt")
    common = ["trainer.accelerator=cpu"]
    with pytest.raises(UsageError, match=message):
        check_optimizer(RunSpec.of(compose(program, *common, *options)))


def test_rates_that_they_can_use_are_taken(compose: Compose) -> None:
    pytest.importorskip("prodigyopt")
    for program, options in (
        ("dreambooth", ["optimizer=prodigy", "learning_rate=1", *DREAMBOOTH]),
        ("train", ["optimizer=schedule_free", "lr_scheduler=constant"]),
        ("train", ["optimizer=schedule_free", "lr_scheduler=none"]),
    ):
        check_optimizer(RunSpec.of(compose(program, "trainer.accelerator=cpu", "strategy=single", *options)))
    with pytest.raises(UsageError, match="prodigy got lr=1.0 and 0.5 for another group"):
        text = {"train_text_encoder": True, "text_encoder_lr": 0.5}
        small.module(lora=Lora(rank=2), optimizer=prodigy, **text).configure_optimizers()


@pytest.mark.parametrize(("name", "build"), [("prodigy", prodigy), ("schedule_free", schedule_free_adamw)])
def test_a_missing_package_is_named_with_its_extra(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("prodigyopt", "schedulefree"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"optimizer={name}: package .* install it with.*\[optimizers\]"):
        build([torch.nn.Parameter(torch.zeros(2))])
