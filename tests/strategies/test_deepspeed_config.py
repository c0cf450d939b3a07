"""DeepSpeed configurations of users: what is translated, what is refused, and what wins."""

import copy
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from sd_lightning import UsageError
from sd_lightning.apps import preflight
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.models.checkpointing import SavedActivations, recompute_
from sd_lightning.planner.footprint import Workload
from sd_lightning.strategies import compilers
from sd_lightning.strategies.deepspeed import DeepSpeedStrategy, deepspeed
from sd_lightning.strategies.deepspeed import config as deepspeed_config
from sd_lightning.strategies.deepspeed import machine as deepspeed_machine
from sd_lightning.strategies.deepspeed.config import AUTO, UserConfig, known_keys, put
from sd_lightning.strategies.deepspeed.machine import SwapFolder, check_swap_path

EXAMPLE = Path(__file__).with_name("ds_config_zero2.json")
"""The ZeRO-2 example that most tutorials copy, as they copy it."""


def example(**changes: Any) -> dict[str, Any]:
    """Return the example with values at dotted paths (``__`` for the dot) replaced."""
    config: dict[str, Any] = json.loads(EXAMPLE.read_text())
    for path, value in changes.items():
        put(config, path.replace("__", "."), value)
    return config


def on_cpu(**changes: Any) -> dict[str, Any]:
    """Return the example without float16 and without what has to be compiled."""
    return example(fp16={"enabled": "auto"}, zero_force_ds_cpu_optimizer=False, **changes)


@pytest.fixture(autouse=True)
def _environment_is_given_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_the_copied_example_is_accepted_and_each_mistake_is_named_once() -> None:
    user = UserConfig.read(EXAMPLE)
    config, warnings = user.values, user.warnings
    mistakes = (
        "zero_optimization.stage3_max_reuse_parameters is called zero_optimization.stage3_max_reuse_distance",
        "activation_checkpointing.partition_activations has no effect here",
        "zero_optimization.stage3_max_live_parameters, zero_optimization.stage3_max_reuse_distance: only stage 3 reads "
        "this",
        'train_batch_size="auto" is understood by Hugging Face\'s Trainer only',
    )
    assert len(warnings) == len(mistakes)
    for mistake, warning in zip(mistakes, warnings, strict=True):
        assert warning.startswith(f"strategy.config={EXAMPLE}: {mistake}")
    assert config["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": 50_000_000,
    }
    assert config["activation_checkpointing"] == {"cpu_checkpointing": True}


def test_deepspeed_itself_refuses_the_example_that_we_accept() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    with pytest.raises(Exception, match="stage3_max_reuse_parameters"):
        DeepSpeedConfig(example())
    DeepSpeedConfig(engine_config(EXAMPLE, "16-mixed"))


def test_a_mistaken_key_keeps_its_value_where_it_counts() -> None:
    config = UserConfig.read(example(zero_optimization__stage=3)).values
    assert config["zero_optimization"]["stage3_max_reuse_distance"] == 100_000_000
    assert config["zero_optimization"]["stage3_max_live_parameters"] == 100_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation is no key .*; the nearest is zero_optimization"),
        ({"zero_optimization__overlap_com": True}, "nearest is zero_optimization.overlap_comm"),
        (
            {"zero_optimization__offload_optimizer__pin_mem": 1},
            "nearest is zero_optimization.offload_optimizer.pin_memory",
        ),
        ({"fp16__enable": True}, "fp16.enable is no key .*; the nearest is fp16.enabled"),
        ({"bfloat16": {"enabled": True}}, "bfloat16 is no key .*; the nearest is bf16"),
        (
            {"zero_optimization__cpu_offload": True},
            "zero_optimization.cpu_offload is a key of old releases; write zero_optimization.offload_optimizer",
        ),
        ({"aio": {"thread_count": 2}}, "aio.thread_count is no key"),
        ({"amp": {"enabled": "auto"}}, "amp is no key"),
        ({"stage": 2}, "stage is no key .*; you mean zero_optimization.stage"),
        ({"zero_optimization__gradient_clipping": 1}, "you mean gradient_clipping, outside of zero_optimization"),
        ({"zero_optimization__stage": 4}, "zero_optimization.stage=4; expected 1, 2 or 3"),
        ({"zero_optimization__stage": 0}, "zero_optimization.stage=0; .*strategy=ddp"),
        ({"zero_optimization__stage": True}, "zero_optimization.stage=true; expected 1, 2 or 3"),
        ({"zero_optimization": True}, "zero_optimization=true; expected an object"),
        ({"zero_optimization__reduce_bucket_size": "big"}, 'zero_optimization.reduce_bucket_size="big": .*integer'),
        (
            {"zero_optimization__offload_optimizer__device": "gpu"},
            "offload_optimizer.device=.gpu.: .*'none', 'cpu' or 'nvme'",
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0; expected a whole number of at least 1"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1; expected a norm of at least 0"),
        ({"bf16": {"enabled": True}}, "DeepSpeed refuses it: bfloat16 and fp16 modes cannot be simultaneously enabled"),
        ({"fp16__loss_scale": -1}, "fp16.loss_scale=-1: .*must be >= 0"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, "lr_scheduler=cosine"),
        ({"optimizer__type": "Lamb"}, "optimizer.type=Lamb; expected AdamW or Adam"),
        ({"optimizer__params__weightdecay": 0.1}, "optimizer.params.weightdecay .*; the nearest is weight_decay"),
        ({"optimizer__params__max_grad_norm": 1}, "you mean gradient_clipping"),
        (
            {"zero_optimization__zero_quantized_weights": True},
            "zero_quantized_weights=true cannot be used: EMA, portable",
        ),
        (
            {"zero_optimization__offload_param": {"device": "nvme"}},
            "offload_param.device=.nvme. cannot be used: .*half",
        ),
        ({"autotuning": {"enabled": True}}, "autotuning.enabled=true cannot be used"),
        ({"pipeline": {}}, "pipeline cannot be used: it is another kind of engine"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op=.sum. cannot be used"),
    ],
)
def test_what_cannot_work_ends_before_processes_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^strategy.config: .*{message}") as caught:
        DeepSpeedStrategy(config=example(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot be read \(No such file"),
        ("{", r"is not JSON \(.*line 1 column 2"),
        ("[]", "holds a list; expected an object"),
        ('{"fp16": {}, "fp16": {}}', "the key 'fp16' is there twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=rf"^strategy.config={re.escape(str(path))}: .*{message}"):
        UserConfig.read(path)


def test_float16_on_a_cpu_is_refused_and_the_remedy_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match='fp16.enabled=true needs a CUDA device.*write "fp16": {"enabled": "auto"}'):
        trainer_of(DeepSpeedStrategy(config=example(zero_force_ds_cpu_optimizer=False)))
    with pytest.raises(UsageError, match="trainer.precision=16-mixed needs a CUDA device.*bf16-mixed"):
        trainer_of(DeepSpeedStrategy(stage=2), precision="16-mixed")


def test_every_key_that_deepspeed_reads_is_known() -> None:
    """A release that adds a section shows here: decide whether it is passed on, has no effect, or is refused."""
    import deepspeed
    from deepspeed.runtime import constants

    source = (Path(deepspeed.__file__).parent / "runtime" / "config.py").read_text()
    names = set(re.findall(r"get_scalar_param\(param_dict, ([A-Z_]+),", source))
    names |= set(re.findall(r"if ([A-Z_]+) in param_dict\b(?!\[)", source))
    read = {getattr(constants, name) for name in names if isinstance(getattr(constants, name, None), str)}
    assert len(read) > 20
    ours = known_keys("") | {
        path.partition(".")[0] for path in (*deepspeed_config.REFUSED, *deepspeed_config.WITHOUT_EFFECT)
    }
    assert read - ours == set()


def engine_config(config: Any, precision: str, clip: float | None = 1.0) -> dict[str, Any]:
    """Return what the engine gets from a file in a run that accumulates two batches."""
    sizes = {"accumulate_grad_batches": 2, "gradient_clip_val": clip, "world_size": 2, "datamodule": None}
    settings = DeepSpeedStrategy(config=config, cpu_adam=False).settings
    return settings.engine_config(SimpleNamespace(precision=precision, **sizes), swap_folder=None)


def test_auto_is_filled_in_from_the_run() -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    engine = engine_config(
        dict.fromkeys(keys, AUTO) | {name: {"enabled": AUTO} for name in ("fp16", "bf16")}, "bf16-mixed"
    )
    assert {name: engine.get(name) for name in (*keys, "bf16", "fp16")} == {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": None,
    }
    assert "auto" not in json.dumps(engine_config(EXAMPLE, "16-mixed"))


def test_the_engine_computes_in_the_precision_of_the_run_with_the_options_of_the_file() -> None:
    half = engine_config(EXAMPLE, "16-mixed")
    assert half["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    assert not {"fp16", "bf16"} & engine_config(EXAMPLE, "32-true").keys()


def test_the_optimizer_of_a_file_is_not_the_engines_to_build() -> None:
    engine = engine_config(EXAMPLE, "16-mixed")
    assert not {"optimizer", "scheduler", "train_batch_size"} & engine.keys()


def test_a_norm_of_the_file_serves_where_the_trainer_has_none() -> None:
    assert engine_config({"gradient_clipping": 0.5}, "32-true", clip=None)["gradient_clipping"] == 0.5


def run_settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a run as the command line composes them."""
    settings: dict[str, Any] = {
        "strategy": {"stage": 2, "config": "ds.json", "reduce_bucket_size": 200_000_000, "cpu_checkpointing": False},
        "trainer": {"precision": "32-true", "accumulate_grad_batches": 1, "gradient_clip_val": 1.0},
        "data": {"batch_size": 64},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.01},
    }
    for path, value in changes.items():
        put(settings, path.replace("__", "."), value)
    return settings


def settle(config: Any, *given: str, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    user = dataclasses.replace(UserConfig.read(config), who="ds.json")
    return user.settle(run_settings(**changes), given, num_processes=world_size)


def test_explicit_values_of_the_file_beat_our_defaults() -> None:
    assert settle(EXAMPLE) == {
        "strategy.reduce_bucket_size": 50_000_000,
        "strategy.cpu_checkpointing": True,
        "trainer.accumulate_grad_batches": 4,
        "trainer.precision": "16-mixed",
        "optimizer.lr": 1e-5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
    }


def test_a_list_of_the_file_equals_the_tuple_that_it_stands_for() -> None:
    assert "optimizer.betas" not in settle(EXAMPLE, "optimizer.betas", optimizer__betas=(0.9, 0.999))


@pytest.mark.parametrize(
    ("key", "value", "theirs"),
    [
        ("trainer.accumulate_grad_batches", 2, "gradient_accumulation_steps=4"),
        ("trainer.precision", "bf16-mixed", "fp16.enabled=true"),
        ("trainer.gradient_clip_val", 0.1, "gradient_clipping=2.0"),
        ("strategy.stage", 3, "zero_optimization.stage=2"),
        ("strategy.reduce_bucket_size", 7, "zero_optimization.reduce_bucket_size=50000000"),
        ("optimizer.lr", 3e-3, "optimizer.params.lr=1e-05"),
        ("data.batch_size", 32, "train_batch_size=16"),
    ],
)
def test_contradicting_the_command_line_names_both(key: str, value: Any, theirs: str) -> None:
    config = example(gradient_clipping=2.0, train_batch_size=16)
    changes = {key.replace(".", "__"): value}
    with pytest.raises(
        UsageError, match=f"^ds.json: .*{re.escape(theirs)} contradicts {key}={re.escape(json.dumps(value))}"
    ):
        settle(config, key, **changes)
    assert key in settle(config, "trainer", "strategy", **changes)  # choosing a group sets no value


def test_a_whole_number_may_be_written_as_a_float() -> None:
    changes = settle(
        example(zero_optimization__reduce_bucket_size=5e6, gradient_clipping=0.5), trainer__gradient_clip_val=1
    )
    assert repr(changes["strategy.reduce_bucket_size"]) == "5000000"
    assert changes["trainer.gradient_clip_val"] == 0.5


def test_agreeing_with_the_command_line_is_no_contradiction() -> None:
    changes = settle(EXAMPLE, "trainer.accumulate_grad_batches", trainer__accumulate_grad_batches=4)
    assert "trainer.accumulate_grad_batches" not in changes


def test_another_optimizer_of_the_file_replaces_ours_unless_one_was_chosen() -> None:
    config = example(optimizer={"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}})
    assert settle(config)["optimizer"] == {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.1}
    with pytest.raises(UsageError, match="optimizer.type=torch.optim.AdamW contradicts optimizer=torch.optim.SGD"):
        settle(EXAMPLE, "optimizer", optimizer__=None, optimizer___target_="torch.optim.SGD")


def test_a_micro_batch_of_the_file_gives_the_global_batch() -> None:
    config = on_cpu(train_micro_batch_size_per_gpu=3)
    assert settle(config, world_size=2)["data.batch_size"] == 3 * 4 * 2
    with pytest.raises(UsageError, match="train_batch_size=16 is not train_micro_batch_size_per_gpu=3 on 2 processes"):
        settle(on_cpu(train_micro_batch_size_per_gpu=3, train_batch_size=16))
    with pytest.raises(
        UsageError, match="train_micro_batch_size_per_gpu=3 on 2 processes.* contradicts data.batch_size=64"
    ):
        settle(config, "data.batch_size")


def test_a_file_that_switches_a_precision_off_contradicts_the_trainer_that_wants_it() -> None:
    with pytest.raises(UsageError, match="bf16.enabled=false contradicts trainer.precision=bf16-mixed"):
        UserConfig.read({"bf16": {"enabled": False}}).check_precision("bf16-mixed", on_cuda=True)


def test_arguments_in_python_have_to_agree_with_the_configuration() -> None:
    with pytest.raises(UsageError, match=r"zero_optimization.stage=2 contradicts strategy.stage=3; make them agree"):
        DeepSpeedStrategy(stage=3, config=on_cpu())
    strategy = DeepSpeedStrategy(config=on_cpu(), cpu_adam=False)
    assert (strategy.settings.stage, strategy.settings.offload_device) == (2, "cpu")
    assert not strategy.settings.extensions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 3}, "gradient_accumulation_steps=4 contradicts trainer.accumulate_grad_batches=3"),
        ({"gradient_clip_val": 3.0}, "gradient_clipping=2.0 contradicts trainer.gradient_clip_val=3.0"),
        ({"accumulate_grad_batches": 4, "gradient_clip_algorithm": "value"}, "DeepSpeed clips by norm only"),
    ],
)
def test_a_trainer_in_python_has_to_agree_with_the_configuration(options: dict[str, Any], message: str) -> None:
    strategy = DeepSpeedStrategy(config=on_cpu(gradient_clipping=2.0))
    options = {"accumulate_grad_batches": 4} | options
    with pytest.raises(UsageError, match=message):
        strategy.check(trainer_of(strategy, **options), Module())


def test_the_modules_optimizer_has_to_be_the_one_of_the_configuration() -> None:
    strategy = DeepSpeedStrategy(config=on_cpu())
    trainer = trainer_of(strategy, accumulate_grad_batches=4)
    with pytest.raises(UsageError, match="optimizer.type=torch.optim.AdamW contradicts optimizer=torch.optim.SGD"):
        strategy.check(trainer, Module(torch.optim.SGD))
    with pytest.raises(UsageError, match="optimizer.params.lr=1e-05 contradicts optimizer.lr=0.001"):
        strategy.check(trainer, Module())
    strategy.check(trainer, Module(torch.optim.AdamW, lr=1e-5))


def test_our_settings_reach_deepspeed_under_its_names() -> None:
    strategy = deepspeed(
        stage=3, offload_optimizer="cpu", offload_parameters="cpu", cpu_adam=False, reduce_bucket_size=5
    )
    zero = strategy.settings.config["zero_optimization"]
    assert zero["stage"] == 3 and zero["reduce_bucket_size"] == 5 and zero["overlap_comm"] is True
    assert zero["offload_optimizer"] == {"device": "cpu"} and zero["offload_param"] == {"device": "cpu"}


def test_a_precision_of_the_file_is_the_trainers_in_python() -> None:
    strategy = DeepSpeedStrategy(config=on_cpu(bf16={"enabled": True}))
    assert trainer_of(strategy).precision == "bf16-mixed"


class Module(torch.nn.Module):
    """As much of a LightningModule as is checked."""

    def __init__(self, optimizer: Any = torch.optim.AdamW, **options: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.optimizer, self.options = optimizer, options or {"lr": 1e-3}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)


def trainer_of(strategy: DeepSpeedStrategy, **options: Any) -> Any:
    import lightning.pytorch as pl

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, **quiet, **options)


def compose(*overrides: str) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from sd_lightning import _conf

    with initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        return hydra_compose("train", [*overrides, "name=x", "hydra.run.dir=."])


def test_the_command_line_adopts_what_the_file_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(on_cpu()))
    overrides = ["strategy=deepspeed_zero2", f"strategy.config={path}", "data.batch_size=32", "trainer.accelerator=cpu"]
    monkeypatch.setattr("sys.argv", ["train", *overrides])
    spec = preflight.adopt_engine_file(RunSpec.of(compose(*overrides)))
    assert (spec["trainer.accumulate_grad_batches"], spec["data.batch_size"]) == (4, 32)
    assert (spec["optimizer.lr"], spec["optimizer.betas"]) == (1e-5, [0.9, 0.999])
    assert spec["strategy.reduce_bucket_size"] == 50_000_000
    monkeypatch.setattr("sys.argv", ["train", *overrides, "trainer.accumulate_grad_batches=2"])
    with pytest.raises(UsageError, match="gradient_accumulation_steps=4 contradicts trainer.accumulate_grad_batches=2"):
        preflight.adopt_engine_file(RunSpec.of(compose(*overrides, "trainer.accumulate_grad_batches=2")))


@pytest.mark.parametrize("device", ["offload_parameters=cpu", "offload_optimizer=nvme"])
def test_what_only_stage_3_can_offload_is_refused_elsewhere(tmp_path: Path, device: str) -> None:
    key, _, value = device.partition("=")
    options: dict[str, Any] = {key: value, "nvme_path": str(tmp_path)} if value == "nvme" else {key: value}
    with pytest.raises(UsageError, match=f"{device} with stage=2; only stage 3 can"):
        deepspeed(stage=2, **options)


def test_a_missing_compiler_gives_the_install_command_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    expected = (
        r"strategy.cpu_adam=true: DeepSpeed compiles cpu_adam.* no C\+\+ compiler \(no-such-compiler\); "
        r".*apt-get install g\+\+"
    )
    with pytest.raises(UsageError, match=expected + ".*strategy.cpu_adam=false"):
        deepspeed(stage=2, offload_optimizer="cpu")
    deepspeed(stage=2, offload_optimizer="cpu", cpu_adam=False)
    deepspeed(stage=2)


def test_a_missing_libaio_gives_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_machine, "_links_with_libaio", lambda: False)
    with pytest.raises(
        UsageError, match="async_io .* no libaio; .*apt-get install libaio-dev.*strategy.offload_optimizer=cpu"
    ):
        deepspeed(stage=3, offload_optimizer="nvme", nvme_path=str(tmp_path), cpu_adam=False)


@pytest.mark.parametrize("home", [None, "runtime"])
def test_a_missing_cuda_toolkit_is_named_where_the_extension_needs_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    monkeypatch.setattr(deepspeed_machine, "_links_with_libaio", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", home and str(tmp_path / home))
    options: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path), "cpu_adam": False}
    deepspeed(stage=3, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    expected = "async_io .* no CUDA toolkit .*cuda-toolkit=13.0.*write strategy.offload_optimizer=cpu"
    with pytest.raises(UsageError, match=expected):
        deepspeed(stage=3, **options)


def test_a_missing_ninja_gives_the_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c++").symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers.sysconfig, "get_path", _without_scripts(tmp_path))
    with pytest.raises(UsageError, match="no ninja; install it with: pip install ninja"):
        deepspeed(stage=2, offload_optimizer="cpu")


def _without_scripts(folder: Path) -> Any:
    import sysconfig

    original = sysconfig.get_path
    return lambda name, *args, **kwargs: str(folder) if name == "scripts" else original(name, *args, **kwargs)


def test_the_optimizer_that_cpu_adam_replaces_is_adam() -> None:
    strategy = deepspeed(stage=2, offload_optimizer="cpu", cpu_adam=False)
    strategy.settings.config["zero_force_ds_cpu_optimizer"] = True
    trainer = trainer_of(strategy)
    with pytest.raises(
        UsageError, match="strategy.cpu_adam=true replaces torch's Adam or AdamW, not SGD; .*cpu_adam=false"
    ):
        strategy.check(trainer, Module(torch.optim.SGD))
    with pytest.raises(UsageError, match="CPU Adam has no amsgrad"):
        strategy.check(trainer, Module(torch.optim.AdamW, lr=1e-3, amsgrad=True))


def test_optimizers_that_look_at_whole_weights_are_refused() -> None:
    strategy = deepspeed(stage=2)
    with pytest.raises(UsageError, match="got Adafactor, which needs whole weights.*or optimizer=adamw"):
        strategy.check(trainer_of(strategy), Module(torch.optim.Adafactor))


def test_an_unused_cpu_checkpointing_is_refused_as_an_argument_and_named_in_a_file(caplog: Any) -> None:
    strategy = deepspeed(stage=2, cpu_checkpointing=True)
    with pytest.raises(UsageError, match="no block is checkpointed; write speed.gradient_checkpointing=true"):
        strategy.check(trainer_of(strategy), Module())
    strategy = DeepSpeedStrategy(config=on_cpu())
    strategy.check(trainer_of(strategy, accumulate_grad_batches=4), Module(lr=1e-5))
    assert (
        "activation_checkpointing.cpu_checkpointing has no effect without speed.gradient_checkpointing" in caplog.text
    )


def test_blocks_that_keep_products_are_refused_at_stage_3() -> None:
    """DeepSpeed's linear layers add the bias to a kept product in place, unseen by autograd: gradients were wrong."""
    module = Module()
    module.block = torch.nn.Linear(2, 2)
    recompute_({"block": module.block}, {"block": SavedActivations.PRODUCTS})
    strategy = deepspeed(stage=2)
    strategy.check(trainer_of(strategy), module)
    strategy = deepspeed(stage=3)
    with pytest.raises(UsageError, match='stage 3 .* gradients would be wrong; let blocks keep "convolutions" or "inp'):
        strategy.check(trainer_of(strategy), module)
    assert SavedActivations.PRODUCTS not in strategy.footprint(Workload([], "32-true", torch.optim.SGD, 1)).menu


def test_a_swap_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="strategy.nvme_path=None: .*write strategy.nvme_path=/local_nvme"):
        check_swap_path(None)
    with pytest.raises(
        UsageError,
        match=f"strategy.nvme_path={tmp_path}/missing: DeepSpeed cannot swap there .No such file",
    ):
        deepspeed(stage=3, offload_optimizer="nvme", nvme_path=f"{tmp_path}/missing")
    assert check_swap_path(str(tmp_path)) == tmp_path and not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "open", _refusing(PermissionError(13, "Permission denied")))
    with pytest.raises(UsageError, match="swap there .Permission denied.; .* this user may write"):
        check_swap_path(str(tmp_path))
    monkeypatch.setattr(os, "open", _refusing(OSError(22, "Invalid argument")))
    with pytest.raises(UsageError, match=r"DeepSpeed cannot swap there \(Invalid argument\)"):
        check_swap_path(str(tmp_path))


def test_a_folder_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        user = os.geteuid()
        if user == 0:  # root may write everywhere
            os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match="swap there .Permission denied.; .* this user may write"):
                check_swap_path(folder)
        finally:
            os.seteuid(user)


def _refusing(error: OSError) -> Any:
    original = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise error
        return original(path, flags, *args, **kwargs)

    return refuse


def test_swap_files_go_with_their_run_and_leftovers_with_the_next(tmp_path: Path) -> None:
    mine, other = SwapFolder(tmp_path), SwapFolder(tmp_path)
    assert mine.path != other.path
    killed = tmp_path / "sd-lightning-swap-killed"
    killed.mkdir()
    (killed / "in-use").touch()
    (killed / "1.tensor.swp").write_bytes(b"x")
    (tmp_path / "of another program").mkdir()
    third = SwapFolder(tmp_path)
    assert not killed.exists() and mine.path.exists() and other.path.exists()
    for folder in (mine, other, third, mine):
        folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["of another program"]


def test_the_given_configuration_is_left_as_it_was() -> None:
    config = example()
    before = copy.deepcopy(config)
    UserConfig.read(config)
    assert config == before
