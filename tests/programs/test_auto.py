"""``strategy=auto``, ``data.batch_size=auto`` and ``experiment=auto``: what the planner chooses is what runs."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from composing import Compose
from refusals import call
from sd_lightning import SDLightningModule, UsageError
from sd_lightning.apps import planning
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.planner.choice import PlanChoice
from sd_lightning.planner.devices import DTYPES, GIB, Cluster, Device
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.search import TrainingPlan

TRAIN = "train callbacks.samples=null trainer.limit_val_batches=0 logger=csv "
HOST = 64 * 10**9

Hardware = Callable[[float], None]


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Sets the gigabytes of memory of this machine's device, of which 0.6 are the allowance."""

    def has(gigabytes: float) -> None:
        device = Device("a small GPU", gigabytes * GB / GIB, 8, dict.fromkeys(DTYPES, 10.0), 300, 10)
        monkeypatch.setattr(planning, "hardware_here", lambda: (device, Speeds.of(device)))
        monkeypatch.setattr(Cluster, "here", lambda d, count, on_cpu: Cluster(d, count, HOST))

    has(24)
    return has


def choose(compose: Compose, *options: str) -> tuple[RunSpec, PlanChoice]:
    return planning.choose_plan(RunSpec.of(compose("train", "strategy=auto", *options)))


def summary_of(run: str) -> Any:
    return json.loads(Path(run, "summary.json").read_text())


def test_a_run_is_that_of_the_plan(
    hardware: Hardware, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hardware(0.72)
    assert call(f"{TRAIN} strategy=auto data.batch_size=128 trainer.max_steps=2 output_dir=planned") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("strategy=auto on 1 x a small GPU, seconds assumed, from the data sheet: ")
    assert [line[:9] for line in lines[1:4]] == 3 * ["  rival: "] and not lines[4].startswith("  rival")

    plans = json.loads(Path("planned/plan.json").read_text())
    plan, config = plans["plans"][0], OmegaConf.load("planned/config.yaml")
    assert plan["gradient_checkpointing"] == "auto" and plan["device_peak"] <= 0.97 * 0.72 * GB, "it just fits"
    assert config.data.batch_size == plan["global_batch"] and "Auto" not in config.strategy._target_

    summary = summary_of("planned")["plan"]
    assert summary["options"] == " ".join(plan["options"]) and summary["speeds"] == "assumed, from the data sheet"
    assert summary["memory_gb"]["predicted"] == pytest.approx((plan["device_peak"] + plan["host_peak"]) / GB)
    assert summary["step_seconds"]["predicted"] == plan["seconds"]["step"] and summary["step_seconds"]["measured"] > 0
    (told,) = (line for line in lines if line.startswith("plan "))
    assert (
        f"{summary['memory_gb']['measured']:.3g} measured" in told
        and "a step predicted (assumed, from the data sheet)" in told
    )

    explicit = [each for each in plan["options"] if "checkpointing" not in each]
    assert call(f"{TRAIN} {shlex.join(explicit)} trainer.max_steps=2 output_dir=explicit") == 0
    assert summary_of("planned")["final_loss"] == summary_of("explicit")["final_loss"]
    assert not Path("explicit/plan.json").exists() and summary_of("explicit")["plan"] is None


def test_a_resumed_run_keeps_its_batch_on_a_machine_with_more_memory(
    hardware: Hardware, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hardware(0.66)
    command = f"{TRAIN} strategy=auto data.batch_size=auto output_dir=run"
    assert call(f"{command} trainer.max_steps=1") == 0
    first = json.loads(Path("run/plan.json").read_text())["plans"][0]["global_batch"]
    hardware(24)
    assert call(f"{command} trainer.max_steps=2 resume=auto") == 0
    assert {plan["global_batch"] for plan in json.loads(Path("run/plan.json").read_text())["plans"]} == {first}
    assert (
        call(
            f"{command.replace('=auto', '=gemini', 1).replace('=auto', f'={first}', 1)} trainer.max_steps=3 resume=auto"
        )
        == 0
    )
    assert not Path("run/plan.json").exists(), "this plan is not that of the last start"


def test_the_batch_is_kept_and_is_split_into_passes(compose: Compose, hardware: Hardware) -> None:
    hardware(0.68)
    options = ("data.batch_size=120", "trainer.devices=2", "speed.gradient_checkpointing=false")
    spec, choice = choose(compose, *options)
    assert spec["data.batch_size"] == 120 == choice.plan.global_batch
    assert spec["trainer.accumulate_grad_batches"] == choice.plan.run.accumulate > 1
    assert compose("train", *choice.plan.options()).strategy == spec["strategy"]


def test_batches_and_samples_that_cannot_be_divided_evenly(compose: Compose, hardware: Hardware) -> None:
    spec, _ = choose(compose, "data.batch_size=7", "trainer.devices=2")
    assert spec["data.batch_size"] == 7 and 2 * spec["trainer.accumulate_grad_batches"] <= 7
    spec, _ = choose(compose, "data.batch_size=auto", "trainer.devices=2")
    assert 2 <= spec["data.batch_size"] <= 1437, "digits has so many"


def test_the_strategy_that_is_given_is_kept_with_its_settings(
    compose: Compose, hardware: Hardware, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = compose("train", "strategy=gemini", "strategy.offload_optim_frac=0.5", "data.batch_size=auto")
    spec, choice = planning.choose_plan(RunSpec.of(cfg))
    assert spec["strategy.offload_optim_frac"] == 0.5 and isinstance(spec["data.batch_size"], int)
    assert choice.lines()[0].startswith("data.batch_size=auto on 1 x a small GPU, ") and len(choice.lines()) == 1


def test_what_the_command_line_says_about_recomputation_is_kept(
    compose: Compose, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, kept in (("true", True), ("false", False)):
        spec, choice = choose(compose, f"speed.gradient_checkpointing={given}")
        assert spec.speed.gradient_checkpointing is kept is choice.plan.recompute


def test_out_of_memory_names_the_plan_and_a_safer_one(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SDLightningModule, "training_step", fails)
    assert call(f"{TRAIN} strategy=auto data.batch_size=64 trainer.max_steps=2 output_dir=run") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: strategy=auto: out of memory with strategy=single data.batch_size=64 ")
    assert "predicted were" in error and "in a training step" in error
    safer = shlex.split(error.partition("; write ")[2])
    assert safer != [] and safer != json.loads(Path("run/plan.json").read_text())["plans"][0]["options"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.accumulate_grad_batches=2"], "got trainer.accumulate_grad_batches=2, which it chooses itself"),
        (["speed.gradient_checkpointing=2.5"], "got speed.gradient_checkpointing=2.5, a limit beside the memory"),
        (["trainer.num_nodes=2"], "got trainer.num_nodes=2, and the planner knows the GPUs of one machine only"),
        (["data=latents", "data.store=x"], "needs the size of the images; write data.resolution="),
    ],
)
def test_contradictions_are_refused(compose: Compose, options: list[str], message: str) -> None:
    cfg = compose("train", "strategy=auto", *options)
    with pytest.raises(UsageError, match=message):
        planning.check(RunSpec.of(cfg))


def test_what_lacks_is_said_if_nothing_fits(compose: Compose, hardware: Hardware) -> None:
    hardware(0.61)
    with pytest.raises(UsageError) as error:
        choose(compose)
    told = str(error.value)
    assert told.startswith("strategy=auto on 1 x a small GPU: nothing fits with 1 sample(s) per pass; the closest, ")
    assert " GB of GPU memory (GB on the device: " in told and "); write " in told


def test_a_strategy_that_measures_cannot_be_planned(compose: Compose, hardware: Hardware) -> None:
    cfg = compose("train", "strategy=gemini_auto", "data.batch_size=auto")
    with pytest.raises(UsageError, match="no strategy can be planned: the strategy chooses what it offloads by meas"):
        planning.choose_plan(RunSpec.of(cfg))


@pytest.mark.full("platform")
def test_the_preset_of_dreambooth_is_computed(compose: Compose, hardware: Hardware) -> None:
    def plan_for(gigabytes: float) -> TrainingPlan:
        hardware(gigabytes)
        cfg = compose("dreambooth", "experiment=auto", "instance_data_dir=photos", "instance_prompt=a sks dog")
        spec = RunSpec.of(cfg)
        planning.check(spec)
        spec, choice = planning.choose_plan(spec)
        assert choice.plan.global_batch == 4 == spec["data.batch_size"]
        return choice.plan

    small, large = plan_for(5), plan_for(24)
    assert "offload" in " ".join(small.candidate.options) and "offload" not in " ".join(large.candidate.options)
    assert small.memory.host > large.memory.host and small.images_per_second < large.images_per_second


def test_auto_without_a_known_machine_says_how_to_measure_it(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for options in (["strategy=auto"], ["data.batch_size=auto", "data=images", "data.train_data_dir=nowhere"]):
        cfg = compose("train", *options)
        with pytest.raises(UsageError, match="run python -m sd_lightning.plan calibrate"):
            planning.choose_plan(RunSpec.of(cfg))
