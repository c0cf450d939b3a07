"""What blocks keep under a limit: simulated as traced, and nearly the best choice."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from sd_lightning import LatentDiffusion
from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.planner.checkpointing import Simulation, choose
from sd_lightning.planner.devices import load_device
from sd_lightning.planner.passes import training_pass
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.trace import Trace

BATCH = 16
GB = 1e9
MODEL = LatentDiffusion.build("sd21", device="meta")
SPEEDS = Speeds.of(load_device("a100-80gb"))


@cache
def _traced(kept: tuple[tuple[str, SavedActivations], ...]) -> Trace:
    run = TrainingRun(BATCH, 512, kept=dict(kept))
    return training_pass(MODEL, run, torch.bfloat16, None)


def traced(kept: Mapping[str, SavedActivations]) -> Trace:
    return _traced(tuple(sorted(kept.items(), key=lambda each: each[0])))


def live(trace: Trace) -> np.ndarray:
    return trace.live(BATCH)


def seconds(trace: Trace) -> float:
    return float(SPEEDS.seconds(trace, BATCH).sum())


@cache
def simulated() -> Simulation:
    return Simulation(traced({}), BATCH, SPEEDS)


@pytest.mark.parametrize("kept", SavedActivations)
def test_the_simulation_agrees_with_a_trace(kept: SavedActivations) -> None:
    simulation, base = simulated(), traced({})
    levels = np.full(len(simulation.blocks), list(SavedActivations).index(kept))
    real = traced(dict.fromkeys(simulation.blocks, kept) if kept is not SavedActivations.ALL else {})
    assert (live(base) + simulation.change(levels)).max() == pytest.approx(live(real).max(), rel=0.01)
    added = (seconds(real) - seconds(base)) / seconds(base)
    told = simulation.recomputed(levels) / simulation.seconds
    assert told == pytest.approx(added, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_simulation_agrees_with_a_trace_under_autocast(dtype: torch.dtype) -> None:
    """Autocast keeps cast weights until forward ends; a block's input is cast, and is not saved itself."""
    run = TrainingRun(BATCH, 512)
    base = training_pass(MODEL, run, dtype, torch.bfloat16)
    simulation = Simulation(base, BATCH, SPEEDS)
    for kept in (SavedActivations.PRODUCTS, SavedActivations.INPUTS):
        levels = np.full(len(simulation.blocks), list(SavedActivations).index(kept))
        real = training_pass(MODEL, replace(run, kept=dict.fromkeys(simulation.blocks, kept)), dtype, torch.bfloat16)
        assert (live(base) + simulation.change(levels)).max() == pytest.approx(live(real).max(), rel=0.01)


@pytest.mark.parametrize("kept", [each for each in SavedActivations if each is not SavedActivations.ALL])
def test_a_choice_is_better_than_one_for_all_blocks(kept: SavedActivations) -> None:
    simulation = simulated()
    levels = np.full(len(simulation.blocks), list(SavedActivations).index(kept))
    limit = int(live(traced(dict.fromkeys(simulation.blocks, kept))).max())
    found = choose(traced, live, limit, BATCH, SPEEDS)
    assert found.peak <= limit and found.seconds <= simulation.recomputed(levels)


def test_less_memory_takes_more_time_and_the_peak_is_below_every_limit() -> None:
    found = [choose(traced, live, int(limit * GB), BATCH, SPEEDS) for limit in (16, 12, 8, 6, 4, 3)]
    assert found[0].kept == {} and found[0].seconds == 0
    for limit, each in zip((16, 12, 8, 6, 4, 3), found):
        assert live(traced(each.kept)).max() == each.peak <= limit * GB
    times = [each.seconds for each in found]
    assert times == sorted(times) and times[-1] > 0.2 * simulated().seconds


def test_a_choice_is_nearly_that_of_an_integer_program() -> None:
    """Both on the simulated memory: at its local maxima, the memory is a sum of what each block's choice changes."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    simulation, memory = simulated(), live(traced({}))
    count, menu = len(simulation.blocks), len(SavedActivations)
    alone = np.array([[simulation.change(_only(count, b, level)) for level in range(menu)] for b in range(count)])
    for limit in (10, 6, 4):
        ours = choose(traced, live, int(limit * GB), BATCH, SPEEDS)
        ours_simulated = _levels(simulation, ours.kept)
        aimed = (memory + simulation.change(ours_simulated)).max()
        rows = np.argsort(memory)[-600:]
        solved = milp(
            simulation._recomputed.ravel(),
            constraints=[
                LinearConstraint(alone[:, :, rows].reshape(count * menu, -1).T / GB, ub=(aimed - memory[rows]) / GB),
                LinearConstraint(np.kron(np.eye(count), np.ones(menu)), 1, 1),
            ],
            integrality=np.ones(count * menu),
            bounds=Bounds(0, 1),
            options={"time_limit": 20, "mip_rel_gap": 0.001},
        )
        assert simulation.recomputed(ours_simulated) <= solved.fun + 0.003 * simulation.seconds, limit


def _only(count: int, block: int, level: int) -> np.ndarray:
    levels = np.zeros(count, int)
    levels[block] = level
    return levels


def _levels(simulation: Simulation, kept: Mapping[str, SavedActivations]) -> np.ndarray:
    return np.array([list(SavedActivations).index(kept.get(name, SavedActivations.ALL)) for name in simulation.blocks])


def test_if_nothing_fits_the_smallest_is_returned() -> None:
    found = choose(traced, live, int(1 * GB), BATCH, SPEEDS)
    assert (
        found.peak > 1 * GB
        and found.peak == live(traced(dict.fromkeys(simulated().blocks, SavedActivations.INPUTS))).max()
    )


def test_what_is_held_beside_activations_counts() -> None:
    held = 5 * GB

    def total(trace: Trace) -> np.ndarray:
        return trace.live(BATCH) + held

    ours = choose(traced, total, int(15 * GB), BATCH, SPEEDS)
    assert ours.kept == choose(traced, live, int(10 * GB), BATCH, SPEEDS).kept != {}
