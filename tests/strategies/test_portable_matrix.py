"""Checkpoints saved under any strategy and world size load bit-equal under any other."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from comparing import rms
from ranks import run_jobs
from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state
from sd_lightning.storage import checkpoint
from strategy_jobs import OPTIMIZERS
from strategy_table import STRATEGIES as ALL_STRATEGIES

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3", "gemini")
Case = tuple[str, int]
EVERY: list[Case] = [(name, world) for world in (1, 2) for name in STRATEGIES if (name, world) != ("single", 2)]
EVERY.append(("gemini_small_chunks", 2))
SAVED: list[Case] = [("single", 1), ("fsdp", 1), ("zero2", 1), ("gemini", 1)]
SAVED += [("ddp", 2), ("zero1", 2), ("zero3", 2), ("gemini_small_chunks", 2)]
LOADED: list[Case] = [("single", 1), ("ddp", 1), ("zero1", 1), ("zero3", 1), ("fsdp", 2), ("zero2", 2), ("gemini", 2)]
"""Strategies and world sizes: each strategy saves on one and loads on the other."""
SAVED_AT = 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(SAVED, LOADED, id="each strategy"),
        pytest.param(EVERY, EVERY, id="every pair", marks=pytest.mark.full("matrix")),
    ],
)
def test_a_checkpoint_loads_bit_equal_under_another_strategy_and_world_size(
    saved: list[Case], loaded: list[Case], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    checkpoints = {f"{n}-{w}": str(checkpoint.checkpoint_path(tmp_path / f"{n}-{w}", SAVED_AT)) for n, w in saved}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    # Two processes load what one has saved, and then one what two have saved.
    for do, world in (("save", 1), ("save load", 2), ("load", 1)):
        jobs: dict[tuple[str, str], dict[str, Any]] = {}
        for name in (n for n, w in saved if w == world and "save" in do):
            run_dir = str(tmp_path / f"{name}-{world}")
            jobs["save", f"{name}-{world}"] = {"strategy": name, "run_dir": run_dir, "steps": 3, "save_at": SAVED_AT}
        for name in (n for n, w in loaded if w == world and "load" in do):
            jobs["load", f"{name}-{world}"] = {"strategy": name, "checkpoints": checkpoints, "steps": SAVED_AT}
        full = {key: {"do": key[0], "devices": world} | job for key, job in jobs.items()}
        found |= run_jobs("strategy_jobs", full, tmp_path, world_size=world)

    losses = {name: result["losses"] for (do, name), result in found.items() if do == "save"}
    for name, values in losses.items():
        assert values == pytest.approx(losses["single-1"], abs=1e-6), name
    for (do, target), result in found.items():
        if do == "load":
            assert result["found"].keys() == checkpoints.keys()
            for source, entry in result["found"].items():
                assert entry["differing"] == [], f"{source} -> {target}"
                assert entry["loss"] == pytest.approx(losses[source][SAVED_AT], abs=1e-6), f"{source} -> {target}"


@pytest.mark.full("matrix")  # test_family_strategies.py has shorter relays, one of each family
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "legs",
    [
        pytest.param(((2, {"zero3": 2, "zero1": 4, "fsdp": 6}), (1, {"gemini": 8, "zero2": 9, "ddp": 11})), id="once"),
        pytest.param(
            (
                (2, {"zero3": 2}),
                (1, {"gemini": 3, "zero1": 4, "fsdp": 5}),
                (2, {"zero1": 6, "gemini_small_chunks": 7, "zero2": 8, "ddp": 9, "zero3": 11}),
            ),
            id="there and back",
        ),
    ],
)
def test_a_run_goes_on_under_another_strategy_and_world_size(
    legs: tuple[tuple[int, dict[str, int]], ...], tmp_path: Path
) -> None:
    """Eleven steps of one process against a relay of engines on one process and on two; every ZeRO stage takes over."""
    pytest.importorskip("deepspeed")
    whole = {"do": "save", "strategy": "single", "devices": 1, "run_dir": str(tmp_path / "whole"), "save_at": 0}
    relay = whole | {"run_dir": str(tmp_path / "relay")}
    reference: dict[str, Any] = {}
    losses: list[float] = []
    resume = None
    for world, ends in legs:
        jobs = {"whole": whole | {"steps": 11}} if world == 1 else {}
        for strategy, steps in ends.items():
            jobs[strategy] = relay | {"devices": world, "strategy": strategy, "steps": steps, "resume": resume}
            resume = str(checkpoint.checkpoint_path(tmp_path / "relay", steps))
        found = run_jobs("strategy_jobs", jobs, tmp_path, world_size=world)
        if world == 1:
            reference = found.pop("whole")
        losses += [loss for each in found.values() for loss in each["losses"]]
        last = found[strategy]
    assert losses == pytest.approx(reference["losses"], abs=2e-6)
    for kind in ("master", "exp_avg", "ema"):
        assert rms(last["checkpoint"], reference["checkpoint"], kind) <= 1e-6, kind
    ours, theirs = (read_trainer_state(Path(found["checkpoint"])) for found in (last, reference))
    assert {float(entry["scalars"]["step"]) for entry in ours["parameters"].values()} == {11.0}
    assert ours["callbacks"] == theirs["callbacks"], "the average has counted other updates"


@pytest.mark.full("matrix")
@pytest.mark.timeout(2000)
def test_every_strategy_goes_on_with_every_other_optimizer_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")

    def jobs(world: int, strategies: Sequence[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
        return {
            (strategy, old, new): {
                "do": "save",
                "strategy": strategy,
                "devices": world,
                "optimizer": new,
                "run_dir": str(tmp_path / f"{world}-{strategy}-{old}-{new}"),
                "resume": str(checkpoint.checkpoint_path(tmp_path / old, SAVED_AT)),
                "steps": SAVED_AT + 2,
                "save_at": 0,
            }
            for strategy in strategies
            for old, new in itertools.permutations(OPTIMIZERS, 2)
        }

    first = {"do": "save", "strategy": "single", "devices": 1, "steps": SAVED_AT, "save_at": 0}
    begun = {("begun", "", name): first | {"optimizer": name, "run_dir": str(tmp_path / name)} for name in OPTIMIZERS}
    expected = run_jobs("strategy_jobs", begun | jobs(1, ["single"]), tmp_path, world_size=1)
    found = run_jobs("strategy_jobs", jobs(2, ALL_STRATEGIES), tmp_path, world_size=2, timeout=1800)
    for (strategy, old, new), ours in found.items():
        theirs = expected["single", old, new]
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-6), f"{strategy}: {old} -> {new}"
        states = [read_trainer_state(Path(each["checkpoint"])) for each in (ours, theirs)]
        assert states[0]["optimizers"] == states[1]["optimizers"], f"{strategy}: {old} -> {new}"
        kinds = [{(name, kind) for name, e in s["parameters"].items() for kind in e["states"]} for s in states]
        assert kinds[0] == kinds[1], f"{strategy}: {old} -> {new}"
