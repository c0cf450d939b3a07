"""Hooks of other people's modules: Gemini does what DDP does, or refuses by name; nothing is lost in silence."""

from pathlib import Path
from typing import Any

import pytest

import hook_jobs
from ranks import run_jobs, run_jobs_of_all
from suites import keep, wanted

EQUAL = (
    *("FitStart", "TrainStart", "Clamped", "Averaged", "Copied", "InOneNetwork"),
    *("EditedGradients", "Penalised", "ThroughViews"),
)
KINDS = ("gemini_default", "gemini_kept", "gemini_offload")
CASES = [f"{module}:{kind}" for module in EQUAL for kind in KINDS]
KEPT = [f"{module}:{KINDS[index % len(KINDS)]}" for index, module in enumerate(EQUAL)]
REFUSED = {
    "LateGradients": r"backbone\.0\.weight\.grad after SGD has stepped.*on_after_backward or on_before_optimizer_step",
    "ThawedByHand": r"backbone\.0\.weight\.requires_grad = True during the run.*BaseFinetuning",
    "WrittenInForward": r"backbone\.codes written inside of its network's forward.*make it a buffer",
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needed = wanted(request)
    jobs = {case: dict(zip(("module", "strategy", "precision"), case.split(":"))) for case in sorted(needed)}
    of_two = {case: job | {"devices": 2} for case, job in jobs.items()}
    return run_jobs("hook_jobs", of_two, tmp_path_factory.mktemp("hooks"), world_size=2)


@pytest.mark.slow
@pytest.mark.needs("{case}", *(f"{module}:ddp" for module in EQUAL))
@pytest.mark.parametrize("case", keep(KEPT, CASES))
def test_weights_and_gradients_in_hooks_are_those_of_ddp(found: dict[str, Any], case: str) -> None:
    ours, theirs = found[case], found[f"{case.partition(':')[0]}:ddp"]
    assert "refused" not in ours, ours
    assert ours["noted"] == pytest.approx(theirs["noted"], abs=1e-5)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, sums in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(sums, rel=1e-5, abs=5e-5), name


@pytest.mark.slow
@pytest.mark.needs("Unfrozen:{kind}")
@pytest.mark.parametrize("kind", keep(KINDS[:1], KINDS))
def test_parameters_that_are_unfrozen_later_train_as_in_one_process(found: dict[str, Any], kind: str) -> None:
    """DDP of two does not sum the gradients of parameters that were frozen when it began."""
    theirs = hook_jobs.run({"module": "Unfrozen", "strategy": "ddp", "devices": 1})["weights"]
    for name, sums in found[f"Unfrozen:{kind}"]["weights"].items():
        assert sums == pytest.approx(theirs[name], rel=1e-5, abs=5e-5), name


@pytest.mark.slow
@pytest.mark.needs("Averaged:gemini_default:bf16-mixed", "Averaged:ddp:bf16-mixed")
def test_an_average_of_bf16_weights_is_one_of_their_float32_masters(found: dict[str, Any]) -> None:
    ours, theirs = (found[f"Averaged:{name}:bf16-mixed"] for name in ("gemini_default", "ddp"))
    assert ours["noted"] == pytest.approx(theirs["noted"], rel=3e-2)
    for name, sums in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(sums, rel=1e-2, abs=1e-2), name


@pytest.mark.slow
@pytest.mark.needs("ThroughViews:gemini_kept:bf16-mixed")
def test_a_write_through_a_view_of_whole_bf16_weights_is_refused(found: dict[str, Any]) -> None:
    refusal = found["ThroughViews:gemini_kept:bf16-mixed"]["refused"]
    assert "backbone.0.weight written while gradients are recorded" in refusal and "torch.no_grad()" in refusal


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_as_under_ddp_is_refused_by_name(name: str) -> None:
    job = {"module": name, "strategy": "gemini_offload", "devices": 1}
    with pytest.raises(AssertionError, match=REFUSED[name]):
        raise AssertionError(hook_jobs.run(job)["refused"])


@pytest.mark.slow
def test_hooks_that_one_rank_runs_alone_or_otherwise_are_refused(tmp_path: Path) -> None:
    (alone,) = run_jobs("hook_jobs", {0: {"do": "alone"}}, tmp_path, world_size=2).values()
    assert "rank 0 touches head.weight outside of the forward pass, and ranks [1] did not" in alone["refused"]
    assert "is_global_zero" in alone["refused"]
    job = {"module": "OfItsRank", "strategy": "gemini_default", "devices": 2}
    for rank in run_jobs_of_all("hook_jobs", {0: job}, tmp_path, world_size=2):
        assert "the ranks have written different weights in a hook (among " in rank[0]["refused"]
