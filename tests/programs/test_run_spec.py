"""A run is resolved once: nothing changes it, what it says is what runs, and another process can have it."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from composing import Compose
from refusals import call, refuse
from sd_lightning import UsageError
from sd_lightning.apps import planning, preflight, train
from sd_lightning.apps.run_spec import RunSpec, target_of
from sd_lightning.models.latent_diffusion import load_model
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.predicted import predicted

QUICK = ("data.batch_size=8", "trainer.max_steps=2", "trainer.limit_val_batches=0", "callbacks.samples=null")


def test_settings_are_plain_and_cannot_be_changed(compose: Compose) -> None:
    spec = RunSpec.of(compose("train", *QUICK, "strategy=gemini"))
    values = [spec.settings]
    for value in values:
        assert not isinstance(value, DictConfig | ListConfig)
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    assert not any(isinstance(value, str) and "${" in value for value in values), "nothing is left to interpolate"
    with pytest.raises(FrozenInstanceError):
        spec.settings = {}  # type: ignore[misc]
    assert spec["trainer.max_steps"] == 2 and spec.get("trainer.nothing") is None and spec.get("seed.nothing", 3) == 3
    with pytest.raises(UsageError, match="trainer.nothing is missing: expected a value; leave it as it was, without ~"):
        spec["trainer.nothing"]


def test_other_settings_make_another_run_which_keeps_what_does_not_depend_on_them(compose: Compose) -> None:
    spec = RunSpec.of(compose("train", *QUICK, "strategy=gemini"))
    parts = spec.strategy, spec.optimizer, spec.callbacks
    other = spec.with_settings({"optimizer.lr": 0.5, "data.batch_size": 4})
    assert (spec["optimizer.lr"], spec["data.batch_size"]) == (2e-3, 8)
    assert (other["optimizer.lr"], other["data.batch_size"]) == (0.5, 4)
    assert other.strategy is parts[0] is spec.strategy and isinstance(other.strategy, GeminiStrategy)
    assert other.callbacks is parts[2] and other.optimizer is not parts[1]
    assert other.optimizer([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]["lr"] == 0.5
    assert target_of(spec.optimizer) is torch.optim.AdamW and spec.model.builder.target is load_model
    resumed = other.resuming(Path("runs/a"), batch_size=4)
    assert resumed.callbacks is not other.callbacks and resumed.strategy is other.strategy


def test_a_part_that_cannot_be_built_is_named_by_its_path(compose: Compose) -> None:
    spec = RunSpec.of(compose("train")).with_settings({"speed.attention": "none"})
    with pytest.raises(UsageError, match="Speed got attention='none'; expected one of auto, "):
        _ = spec.speed
    spec = spec.with_settings({"optimizer.betas": 3})
    with pytest.raises(UsageError, match=r"optimizer: cannot build it with these arguments: .*betas"):
        spec.optimizer([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ("~trainer.accelerator", "trainer.accelerator is missing"),
        ("~trainer.num_nodes", "trainer.num_nodes is missing"),
        ("~data.batch_size", "data.batch_size"),
        ("~seed", "seed"),
        ("~overwrite", "overwrite"),
    ],
)
def test_a_setting_that_was_removed_is_named(
    removed: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(f"train {removed}", (words,), tmp_path, capfd)


def test_an_optimizer_may_be_a_factory_that_a_function_returns(compose: Compose) -> None:
    """Its target is not ``_partial_``: nothing is known of what it builds."""
    factory = {"_target_": "test_run_spec.sgd_factory", "lr": 0.5}
    spec = RunSpec.of(compose("train", *QUICK)).with_settings({"optimizer": factory})
    preflight.check_trainer(spec)
    preflight.check_optimizer(spec)
    assert isinstance(train.build_module(spec).configure_optimizers()["optimizer"], torch.optim.SGD)  # type: ignore[index]


def test_a_program_and_the_strategy_of_its_trainer_plan_the_same_run(compose: Compose) -> None:
    options = ("trainable=lora", "module.offload_encoders=true", "trainer.accumulate_grad_batches=2", "seed=3")
    spec = RunSpec.of(compose("train", *QUICK[:3], *options, "data.batch_size=7", "trainer.precision=bf16-mixed"))
    trainer, module = train.build_trainer(spec), train.build_module(spec)
    trainer.datamodule = spec.build("data")  # type: ignore[attr-defined]
    in_strategy, in_program = predicted(trainer, module, None).run, planning.run_of(spec, spec.model.describe(), 1)
    assert in_program.batch_size == 4 and in_program.sample_batch_size > 0 and in_program.averages
    own = {"optimizer": in_program.optimizer, "lora": in_program.lora, "from_files": in_program.from_files}
    assert replace(in_strategy, **own) == in_program and in_strategy.lora is not None
    ours, theirs = (run.optimizer([torch.nn.Parameter(torch.zeros(2))]) for run in (in_program, in_strategy))
    assert type(ours) is type(theirs) and ours.defaults == theirs.defaults


def sgd_factory(lr: float) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=lr)


def test_config_yaml_is_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what a pass changed: here the settings of a DeepSpeed file and of DreamBooth's switches."""
    monkeypatch.chdir(tmp_path)
    specs: list[RunSpec] = []
    build: Callable[[RunSpec], Any] = train.build_module
    monkeypatch.setattr(train, "build_module", lambda spec: specs.append(spec) or build(spec))
    assert call(f"train {' '.join(QUICK)} logger=csv output_dir=run seed=4") == 0
    written = yaml.safe_load(Path("run/config.yaml").read_text())
    assert written == specs[0].settings and written["module"]["seed"] == 4
    assert OmegaConf.load("run/config.yaml") == OmegaConf.create(dict(specs[0].settings))


def test_another_process_trains_the_same(compose: Compose, tmp_path: Path) -> None:
    spec = RunSpec.of(compose("train", *QUICK, "logger=csv", f"output_dir={tmp_path / 'here'}"))
    assert train.run(spec) == 0, "its objects are built, and are not sent"
    elsewhere = spec.with_settings({"output_dir": str(tmp_path / "there")} | _paths(spec, tmp_path / "there"))
    (tmp_path / "spec").write_bytes(pickle.dumps(elsewhere))
    code = "import pickle, sys; from sd_lightning.apps import train; train.run(pickle.load(open(sys.argv[1], 'rb')))"
    subprocess.run([sys.executable, "-c", code, tmp_path / "spec"], check=True, timeout=240)
    here, there = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("here", "there"))
    assert here["final_loss"] == there["final_loss"]


def _paths(spec: RunSpec, folder: Path) -> dict[str, str]:
    """The settings that the run's folder was interpolated into."""
    return {
        f"callbacks.{name}.run_dir": str(folder)
        for name, node in spec["callbacks"].items()
        if node is not None and "run_dir" in node
    } | {"logger.csv.save_dir": str(folder)}
