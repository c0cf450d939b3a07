"""A seed trains to the losses that it always has, under every strategy and objective, on every CPU."""

import json
from typing import Any

import pytest

from kept_losses import CASES, FILE, OBJECTIVES, STEPS, train_all
from suites import wanted

KEPT: dict[str, list[float]] = json.loads(FILE.read_text())
ALWAYS = ("single v_prediction", "single flow")
"""What the default suite trains."""
ENGINES = ("ddp", "fsdp", "deepspeed_zero3_nvme", "gemini")
SLOW = {f"{strategy} v_prediction" for strategy in ENGINES} | {f"single {objective}" for objective in OBJECTIVES}
"""What the slow suite trains, too: every engine and every objective; test_strategies_common.py has every strategy."""


def marks_of(case: str) -> Any:
    if case in ALWAYS:
        return ()
    return pytest.mark.slow if case in SLOW else pytest.mark.full("matrix")


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    chosen = wanted(request)
    if any(not case.startswith("single") for case in chosen):
        pytest.importorskip("deepspeed")
    return train_all([case for case in CASES if case in chosen], tmp_path_factory.mktemp("losses"))


def test_there_are_losses_for_every_strategy_and_objective() -> None:
    assert sorted(KEPT) == sorted(CASES), "run make keep-losses, and name the change in CHANGELOG.md"
    assert all(len(losses) == STEPS for losses in KEPT.values())


@pytest.mark.needs("{case}")
@pytest.mark.parametrize("case", [pytest.param(each, marks=marks_of(each)) for each in CASES])
def test_losses_are_those_that_were_kept(losses: dict[str, list[float]], case: str) -> None:
    assert losses[case] == pytest.approx(KEPT[case], abs=1e-5), (
        "meant? then make keep-losses, and name it in CHANGELOG.md"
    )
