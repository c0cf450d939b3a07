"""While images are drawn, the EMA takes the trained weights' place: predicted against what a swap allocates."""

from typing import Any

import pytest

from ranks import run_jobs
from suites import keep, wanted

SHARDED = ("fsdp", "fsdp_offload", "zero2", "zero3", "gemini_default", "gemini_offload")
CASES = [("ddp", False), ("ddp", True), *((name, False) for name in SHARDED)]
"""Strategy, and whether the EMA is apart from the weights."""
PRECISIONS = ("32-true", "bf16-true")
TRAINED = [(name, apart, precision) for name, apart in CASES for precision in PRECISIONS]
KEPT = {
    ("ddp", True, "bf16-true"),
    ("ddp", False, "32-true"),
    ("fsdp", False, "32-true"),
    ("zero2", False, "bf16-true"),
}
KEPT |= {("gemini_default", False, precision) for precision in PRECISIONS}
"""One of each engine, and the one whose masters depend on the precision in both."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, int]]:
    folder = tmp_path_factory.mktemp("swaps")
    jobs = {
        f"{name} {apart} {precision}": {"strategy": name, "apart": apart, "precision": precision, "devices": 2}
        for name, apart, precision in TRAINED
    }
    jobs = {key: job | {"folder": str(folder)} for key, job in jobs.items() if key in wanted(request)}
    return run_jobs("swap_jobs", jobs, folder, world_size=2)


@pytest.mark.slow
@pytest.mark.needs("{name} {apart} {precision}")
@pytest.mark.parametrize(("name", "apart", "precision"), keep(KEPT, TRAINED))
def test_a_swap_takes_what_is_predicted(results: Any, name: str, apart: bool, precision: str) -> None:
    found = results[f"{name} {apart} {precision}"]
    assert found["allocated"] == pytest.approx(found["predicted"], rel=0.03)
    keeps_masters = "zero" in name or "gemini" in name and precision == "bf16-true"
    is_pointed_at = name == "ddp" and not apart and precision == "32-true"
    assert (found["predicted"] == 0) == (keeps_masters or is_pointed_at)
