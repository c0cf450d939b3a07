"""The contract of strategies: what others may ask of ours is answered for Lightning's own, too."""

import ast
import inspect
import pkgutil
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import FSDPStrategy as LightningFSDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_jobs as jobs
from places import PACKAGE, REPO
from sd_lightning import UsageError
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.strategies import EngineStrategy, ddp, engine_of
from sd_lightning.strategies.base import is_whole, whole_shape
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.presets import PRESETS

REGISTERED = [preset.registered_as for preset in PRESETS.values() if preset.registered_as is not None]
OURS = [name for name in REGISTERED if "colossalai" not in name and "_offload" not in name]


def test_every_preset_has_a_file() -> None:
    assert {file.stem for file in (REPO / "conf" / "strategy").glob("*.yaml")} == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_sets_what_its_preset_sets_and_otherwise_defaults(name: str) -> None:
    written = yaml.safe_load((REPO / "conf" / "strategy" / f"{name}.yaml").read_text())
    preset = PRESETS[name]
    assert written.pop("_target_") == preset.target.replace(":", ".")
    parameters = inspect.signature(pkgutil.resolve_name(preset.target)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    settings = {key: value for key, value in written.items() if value != defaults[key]}
    if preset.target.endswith("deepspeed"):  # null is DeepSpeed's own default, which the file shows
        pytest.importorskip("deepspeed")
        if "nvme_path" in settings:
            assert preset.settings.items() <= settings.items()
            return  # needs the folder, and async_io
        own = {"activation_checkpointing": {"cpu_checkpointing": False}, "zero_force_ds_cpu_optimizer": True}
        assert own | preset.build(**settings).settings.config == own | preset.build().settings.config
        settings = {key: value for key, value in settings.items() if key in preset.settings}
    assert settings == preset.settings


@pytest.mark.parametrize("name", OURS)
def test_every_strategy_of_ours_answers_for_itself(name: str) -> None:
    if "deepspeed" in name:
        pytest.importorskip("deepspeed")
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, EngineStrategy) and engine_of(strategy) is strategy
    assert type(strategy).settings_of_file({"strategy": {}}, (), num_processes=2, on_cuda=False) == {}
    assert strategy.owns_precision is ("gemini" in name or "deepspeed" in name)
    assert strategy.loads_weights is (name in ("sd_fsdp", "gemini", "sd_deepspeed_zero3"))


@pytest.mark.parametrize(
    "strategy", ["auto", SingleDeviceStrategy("cpu"), LightningDDPStrategy(), LightningFSDPStrategy()]
)
def test_lightnings_own_hold_whole_weights(strategy: Any) -> None:
    engine = engine_of(strategy)
    assert not (engine.loads_weights or engine.owns_precision or engine.moves_weights) and engine.statistics() == {}
    engine.check(pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), jobs.Boring())


def test_the_training_state_of_lightnings_own_is_replicated_or_refused() -> None:
    strategy = SingleDeviceStrategy("cpu")
    strategy.connect(jobs.Boring())
    state = engine_of(strategy).training_state()
    assert type(state) is ReplicatedState and "inner.0.weight" in {shard.name for shard in state.parameter_shards()}
    with pytest.raises(UsageError, match="strategy=FSDPStrategy, whose training state cannot be read; expected single"):
        engine_of(LightningFSDPStrategy()).training_state()


@pytest.mark.parametrize("scaler", [None, object()])
def test_an_update_is_skipped_by_its_gradients_unless_a_scaler_does_it(scaler: Any) -> None:
    strategy, parameter = SingleDeviceStrategy("cpu"), torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    plugin: Any = Precision()
    plugin.scaler, strategy.precision_plugin = scaler, plugin
    engine_of(strategy).skip_update(torch.optim.SGD([parameter], lr=0.1))
    assert (parameter.grad is None) is (scaler is None)


def test_a_weight_is_whole_unless_its_values_are_elsewhere() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 2))
    assert is_whole(weight) and is_whole(weight.to("meta")) and whole_shape(weight) == (4, 2)
    assert not is_whole(torch.full((), float("nan")).expand(4, 2)), "Gemini's"
    pytest.importorskip("deepspeed")
    from sd_lightning.strategies.deepspeed import DeepSpeedStrategy

    partitioned: Any = torch.nn.Parameter(torch.empty(0))
    partitioned.ds_shape = torch.Size([4, 2])
    assert not is_whole(partitioned) and whole_shape(partitioned) == DeepSpeedStrategy.whole_shape_of(partitioned) == (
        4,
        2,
    )


def test_nobody_asks_a_strategy_or_a_tensor_whether_it_has_a_member() -> None:
    asked = []
    for path in PACKAGE.rglob("*.py"):
        if "strategies" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                text = ast.unparse(node)
                if "strategy" in text or any(
                    mark in text for mark in ("ds_", "device_mesh", "is_in_colossalai_chunk", "IN_CHUNK")
                ):
                    asked.append(f"{path.name}: {text}")
    assert asked == []


def test_ddp_is_built_on_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    strategy, module = DDPStrategy(), torch.nn.Linear(2, 2)
    monkeypatch.setattr(strategy, "determine_ddp_device_ids", lambda: [0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda: pytest.fail("a side stream"))
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda *given, **options: built.append((given, options)))
    strategy._setup_model(module)
    assert built == [((module,), {"device_ids": [0], **strategy._ddp_kwargs})]


@pytest.mark.parametrize(("name", "value", "least"), [("replicas", 0, 1), ("forward_prefetch", -1, 0)])
def test_numbers_of_fsdp_that_are_too_small_are_refused(name: str, value: int, least: int) -> None:
    with pytest.raises(UsageError, match=f"FSDPStrategy got {name}={value}; expected at least {least}"):
        FSDPStrategy(**{name: value})  # type: ignore[arg-type]
