"""Checkpoints saved under any strategy and world size load bit-equal under any other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sd_lightning import checkpoint

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")
CONFIGURATIONS = [(name, world) for world in (1, 2) for name in STRATEGIES if (name, world) != ("single", 2)]
SAVED_AT = 2


def torchrun(world_size: int, jobs: list[dict[str, Any]], folder: Path, *, timeout: int = 420) -> list[dict[str, Any]]:
    """Run jobs of ``strategy_driver`` on gloo processes and return what they found."""
    job_file, result_file = folder / f"jobs-{world_size}.json", folder / f"results-{world_size}.json"
    job_file.write_text(json.dumps(jobs))
    driver = Path(__file__).with_name("strategy_driver.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, str(driver), str(job_file), str(result_file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    failure = (
        done.stdout[done.stdout.find("JOB FAILED") :][-3500:] if "JOB FAILED" in done.stdout else done.stderr[-4000:]
    )
    assert done.returncode == 0, failure
    results: list[dict[str, Any]] = json.loads(result_file.read_text())
    return results


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
    """Five steps of one process against two under ZeRO-3, then one under FSDP2, then two under ZeRO-2."""
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
    for strategy, world, steps in (("zero3", 2, 2), ("fsdp", 1, 4), ("zero2", 2, 6), ("ddp", 2, 7)):
        job = {"do": "save", "strategy": strategy, "devices": world, "run_dir": relay, "steps": steps, "save_at": 0}
        (result,) = torchrun(world, [job | {"resume": resume}], tmp_path)
        losses += result["losses"]
        resume = str(checkpoint.newest_valid(tmp_path / "relay"))
    assert losses == pytest.approx(reference["losses"], abs=2e-6)
