"""Checkpoints saved under any strategy and world size load bit-equal under any other."""

from pathlib import Path
from typing import Any

import pytest

from sd_lightning import checkpoint
from strategy_driver import torchrun

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "gemini")
CONFIGURATIONS = [(name, world) for world in (1, 2) for name in STRATEGIES if (name, world) != ("single", 2)]
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
    """Seven steps of one process against a relay of engines on one process and on two."""
    pytest.importorskip("deepspeed")
    whole = {
        "do": "save",
        "strategy": "single",
        "devices": 1,
        "run_dir": str(tmp_path / "whole"),
        "steps": 7,
        "save_at": 7,
    }
    (reference,) = torchrun(1, [whole], tmp_path)
    relay = str(tmp_path / "relay")
    losses: list[float] = []
    resume = None
    for strategy, world, steps in (("zero3", 2, 2), ("gemini", 1, 3), ("fsdp", 1, 4), ("gemini", 2, 5), ("ddp", 2, 7)):
        job = {"do": "save", "strategy": strategy, "devices": world, "run_dir": relay, "steps": steps, "save_at": 0}
        (result,) = torchrun(world, [job | {"resume": resume}], tmp_path)
        losses += result["losses"]
        resume = str(checkpoint.newest_valid(tmp_path / "relay"))
    assert losses == pytest.approx(reference["losses"], abs=2e-6)
