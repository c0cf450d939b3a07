"""Checkpoints saved under any strategy and world size load bit-equal under any other."""

from pathlib import Path
from typing import Any

import pytest

from sd_lightning import checkpoint
from sd_lightning.trainer_state import read_trainer_state
from strategy_driver import torchrun
from test_strategies_common import rms

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "gemini")
CONFIGURATIONS = [(name, world) for world in (1, 2) for name in STRATEGIES if (name, world) != ("single", 2)]
CONFIGURATIONS.append(("gemini_small_chunks", 2))
SAVED_AT = 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_checkpoint_loads_bit_equal_under_every_strategy_and_world_size(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    saves: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for name, world in CONFIGURATIONS:
        run_dir = str(tmp_path / f"{name}-{world}")
        job = {"do": "save", "strategy": name, "devices": world, "run_dir": run_dir, "steps": 3, "save_at": SAVED_AT}
        saves[world].append(job)
    losses: dict[str, list[float]] = {}
    for world, jobs in saves.items():
        for job, result in zip(jobs, torchrun(world, jobs, tmp_path), strict=True):
            losses[Path(job["run_dir"]).name] = result["losses"]
    reference = losses["single-1"]
    for name, values in losses.items():
        assert values == pytest.approx(reference, abs=1e-6), name

    checkpoints = {
        f"{n}-{w}": str(checkpoint.checkpoint_path(tmp_path / f"{n}-{w}", SAVED_AT)) for n, w in CONFIGURATIONS
    }
    for world in (1, 2):
        targets = [name for name, w in CONFIGURATIONS if w == world]
        jobs = [
            {"do": "load", "strategy": n, "devices": world, "checkpoints": checkpoints, "steps": SAVED_AT}
            for n in targets
        ]
        for target, result in zip(targets, torchrun(world, jobs, tmp_path), strict=True):
            assert result["found"].keys() == checkpoints.keys()
            for source, found in result["found"].items():
                assert found["differing"] == [], f"{source} -> {target}-{world}"
                assert found["loss"] == pytest.approx(losses[source][SAVED_AT], abs=1e-6), (
                    f"{source} -> {target}-{world}"
                )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_under_another_strategy_and_world_size(tmp_path: Path) -> None:
    """Eleven steps of one process against a relay of engines on one process and on two; every ZeRO stage takes over."""
    pytest.importorskip("deepspeed")
    legs = (
        (2, {"zero3": 2}),
        (1, {"gemini": 3, "zero1": 4, "fsdp": 5}),
        (2, {"zero1": 6, "gemini_small_chunks": 7, "zero2": 8, "ddp": 9, "zero3": 11}),
    )
    whole = {"do": "save", "strategy": "single", "devices": 1, "run_dir": str(tmp_path / "whole"), "save_at": 0}
    (reference,) = torchrun(1, [whole | {"steps": 11}], tmp_path)
    last: dict[str, Any] = {"checkpoint": None}
    losses: list[float] = []
    for world, ends in legs:
        relay = whole | {"run_dir": str(tmp_path / "relay"), "devices": world}
        jobs, resume = [], last["checkpoint"]
        for strategy, steps in ends.items():
            jobs.append(relay | {"strategy": strategy, "steps": steps, "resume": resume})
            resume = str(checkpoint.checkpoint_path(tmp_path / "relay", steps))
        for last in torchrun(world, jobs, tmp_path):
            losses += last["losses"]
    assert losses == pytest.approx(reference["losses"], abs=2e-6)
    for kind in ("master", "exp_avg", "ema"):
        assert rms(last["checkpoint"], reference["checkpoint"], kind) <= 1e-6, kind
    ours, theirs = (read_trainer_state(Path(found["checkpoint"])) for found in (last, reference))
    assert {float(entry["scalars"]["step"]) for entry in ours["parameters"].values()} == {11.0}
    assert ours["callbacks"] == theirs["callbacks"], "the average has counted other updates"
