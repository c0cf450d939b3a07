"""The memory of an engine's step: logged, recorded unit by unit, and drawn in the report."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from sd_lightning._errors import UsageError
from sd_lightning.callbacks import EngineMemory
from sd_lightning.report import read_metrics, write_report
from sd_lightning.report.memory import TIMELINE_NAME, memory_section
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from small_training import data, fit, module


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with half of the optimizer in host memory and room for one gathered unit."""
    run_dir = tmp_path_factory.mktemp("traced")
    fit(
        module(),
        data(),
        4,
        EngineMemory(run_dir, every_n_steps=2),
        strategy=GeminiStrategy(offload_optim_frac=0.5, offload_param_frac=1.0, gathered_budget=0),
        logger=CSVLogger(run_dir, name="", version=""),
        log_every_n_steps=2,
    )
    leave_process_group()
    return run_dir


def test_every_unit_of_one_step_is_recorded_forward_and_backward(traced: Path) -> None:
    timeline = json.loads((traced / TIMELINE_NAME).read_text())
    assert timeline["step"] == 3
    events = timeline["events"]
    phases = [event["phase"] for event in events]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "end", "step"]
    forward, backward = ([e["unit"] for e in events if e["phase"] == p] for p in ("forward", "backward"))
    assert set(forward) == set(backward) and len(set(forward)) > 5
    assert forward[0].startswith("text_encoder") and backward[0].startswith("unet")


def test_gathered_weights_come_and_go_while_the_optimizer_stays(traced: Path) -> None:
    events = json.loads((traced / TIMELINE_NAME).read_text())["events"]
    gathered = [event["bytes"]["fast"].get("gathered", 0) for event in events]
    assert max(gathered) > 0 and gathered[-1] == 0
    # Two moments and, where weights live elsewhere than their optimizer, float32 weights.
    optimizer = {tier: {event["bytes"][tier].get("optimizer", 0) for event in events} for tier in ("fast", "slow")}
    assert len(optimizer["fast"]) == len(optimizer["slow"]) == 1
    weights = sum(p.numel() for network in module().trained_networks().values() for p in network.parameters())
    assert optimizer["fast"].pop() + optimizer["slow"].pop() >= 2 * 4 * weights


def test_counters_are_logged_at_their_interval(traced: Path) -> None:
    metrics = read_metrics(traced)
    steps = [step for step, _ in metrics["gemini/bytes/fast"]]
    assert steps == [1, 3]
    moved = [value for _, value in metrics["gemini/moved_bytes/slow_to_fast"]]
    assert 0 < moved[0] < moved[1]
    assert {"gemini/hits", "gemini/misses", "gemini/evictions"} <= metrics.keys()


def test_the_report_draws_a_figure_for_each_tier_in_use(traced: Path) -> None:
    section = memory_section(traced / TIMELINE_NAME)
    assert section.count("<figure") == 2 and section.count("<svg") == 4, "two charts, each for desktops and phones"
    assert "Memory of step 3 on rank 0" in section and "gathered weights" in section
    page = write_report(traced, {}, {}, "").read_text()
    assert "Memory of step 3 on rank 0" in page and page.count("<svg") == 4


def test_a_run_without_a_timeline_has_no_such_section(tmp_path: Path) -> None:
    assert memory_section(tmp_path / TIMELINE_NAME) == ""


def test_a_strategy_that_keeps_no_account_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="EngineMemory got strategy=SingleDeviceStrategy.*expected strategy=gemini"):
        fit(module(), data(), 1, EngineMemory(tmp_path))


@pytest.mark.parametrize("name", ["every_n_steps", "trace_step"])
def test_steps_are_counted_from_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"EngineMemory got {name}=0; expected at least 1"):
        EngineMemory(tmp_path, **{name: 0})
