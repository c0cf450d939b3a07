"""While images are drawn, the EMA takes the trained weights' place: predicted against what a swap allocates."""

from typing import Any

import pytest

from ranks import run_jobs

SHARDED = ("fsdp", "fsdp_offload", "zero2", "zero3", "gemini_default", "gemini_offload")
CASES = [("ddp", False), ("ddp", True), *((name, False) for name in SHARDED)]
"""Strategy, and whether the EMA is apart from the weights."""
PRECISIONS = ("32-true", "bf16-true")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, int]]:
    folder = tmp_path_factory.mktemp("swaps")
    jobs = {
        (name, apart, precision): {"strategy": name, "apart": apart, "precision": precision, "folder": str(folder)}
        for name, apart in CASES
        for precision in PRECISIONS
    }
    return run_jobs("swap_jobs", {key: job | {"devices": 2} for key, job in jobs.items()}, folder, world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "apart"), CASES)
def test_a_swap_takes_what_is_predicted(results: Any, name: str, apart: bool, precision: str) -> None:
    found = results[name, apart, precision]
    assert found["allocated"] == pytest.approx(found["predicted"], rel=0.03)
    keeps_masters = "zero" in name or "gemini" in name and precision == "bf16-true"
    is_pointed_at = name == "ddp" and not apart and precision == "32-true"
    assert (found["predicted"] == 0) == (keeps_masters or is_pointed_at)
