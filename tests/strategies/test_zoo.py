"""Other people's modules train under every strategy as under DDP, or are refused by a message; nothing is silent."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from places import REPO
from ranks import run_jobs_of_all
from sd_lightning.callbacks import EMA
from sd_lightning.strategies.networks import WrappedHooks, user_hooks
from suites import keep, wanted
from zoo import WritesAtFitStart
from zoo_table import CASES, STRATEGIES, guide, refusal

WORLDS = (1, 2)
EVERY = [f"{case}:{strategy}:{world}" for world in WORLDS for case in CASES for strategy in STRATEGIES]
FEW_STRATEGIES = ("fsdp", "zero3", "gemini", "zero1")
ALWAYS = ("target:fsdp", "logs_weights:fsdp", "unfreezes:fsdp", "backbone:fsdp", "batch_norm:fsdp", "penalty:fsdp")
ALWAYS += ("writes_at_fit_start:zero2", "target:zero3", "accumulates:zero2", "manual:zero2", "edits_gradients:zero3")
FEW = {f"{each}:2" for each in ALWAYS}
FEW |= {f"{case}:{FEW_STRATEGIES[number % len(FEW_STRATEGIES)]}:2" for number, case in enumerate(CASES)}
FEW &= set(EVERY)
"""What our code does for one engine, and each strategy with a fourth of the cases."""

Results = dict[str, list[str]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found in the chosen cases, by case, strategy and world size; in one set of processes per size."""
    pytest.importorskip("deepspeed")
    folder, needed = tmp_path_factory.mktemp("zoo"), wanted(request)
    found: Results = {}
    for world in WORLDS:
        jobs: dict[str, dict[str, object]] = {}
        for case in CASES:
            strategies = [each for each in STRATEGIES if f"{case}:{each}:{world}" in needed]
            if strategies:
                jobs[case] = {"case": case, "strategies": strategies, "devices": world}
        if jobs:
            ranks = run_jobs_of_all("zoo_jobs", jobs, folder, world_size=world, timeout=2000)
            for case, job in jobs.items():
                for each in job["strategies"]:  # type: ignore[attr-defined]
                    found[f"{case}:{each}:{world}"] = [rank[case][each] for rank in ranks]
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.needs("{name}")
@pytest.mark.parametrize("name", keep(FEW, EVERY, "zoo"))
def test_a_module_trains_as_under_ddp_or_is_refused_by_a_message(results: Results, name: str) -> None:
    case, strategy, _ = name.split(":")
    expected = refusal(case, strategy)
    for outcome in results[name]:
        if expected is None:
            assert outcome == "equal"
        else:
            assert re.match(f"refused: .*{expected}", outcome, re.DOTALL), outcome


class Logging(Callback):
    """A user's callback."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_hooks_of_users_are_found_wrapped_and_left_as_they_were() -> None:
    module, logging, inside = WritesAtFitStart(), Logging(), list[str]()
    given = LambdaCallback(on_train_end=lambda trainer, pl_module: None)
    callbacks = [logging, given, EMA(0.5), ModelCheckpoint(), BackboneFinetuning()]
    trainer = pl.Trainer(callbacks=callbacks, logger=False, accelerator="cpu", devices=1, enable_progress_bar=False)
    found = {(type(owner).__name__, name) for owner, name in user_hooks(trainer, module)}
    assert found == {
        ("WritesAtFitStart", "on_fit_start"),
        ("Logging", "on_train_batch_end"),
        ("LambdaCallback", "on_train_end"),
        *(("BackboneFinetuning", f"on_{each}_start") for each in ("fit", "train_epoch")),
    }

    @contextmanager
    def noted(owner: Any, name: str) -> Iterator[None]:
        inside.append(f"{type(owner).__name__}.{name}")
        yield

    own = given.on_train_end
    hooks = WrappedHooks(trainer, module, noted)
    module.on_fit_start()
    assert inside == ["WritesAtFitStart.on_fit_start"] and not module.body[0].weight.any()
    assert is_overridden("on_fit_start", module) and not is_overridden("on_train_start", module)
    hooks.release()
    assert "on_fit_start" not in vars(module) and "on_train_batch_end" not in vars(logging)
    assert given.on_train_end is own


def test_the_guides_table_says_what_the_zoo_expects() -> None:
    text = Path(REPO / "docs" / "modules.md").read_text()
    assert guide() in text, f"docs/modules.md: write in its section of other people's modules:\n\n{guide()}"
