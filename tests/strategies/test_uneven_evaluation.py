"""Evaluations in which ranks have different numbers of batches: as they should be, or refused on all ranks alike."""

from typing import Any

import pytest

from ranks import run_jobs_of_all

NONE = ([2, 0], [0, 2])
"""Batches of each rank."""
JOBS: dict[str, dict[str, Any]] = {
    f"{strategy} {batches}": {"do": "fit", "strategy": strategy, "batches": batches}
    for strategy in ("zero1", "zero2", "gemini_kept")
    for batches in NONE
}
GATHERING = ("fsdp", "zero3", "gemini_default")
REFUSED: dict[str, dict[str, Any]] = {
    f"{strategy} {what}": {"do": what, "strategy": strategy, "batches": [1, 0]}
    for strategy in GATHERING
    for what in ("fit", "validate", "predict")
} | {"fsdp beyond the sanity check": {"do": "fit", "strategy": "fsdp", "batches": [5, 6]}}
WITH_EMA: dict[str, dict[str, Any]] = {
    f"{strategy} {batches} ema": {"do": "fit", "strategy": strategy, "batches": batches, "ema": True}
    for strategy in ("zero1", "zero2", "gemini_kept")
    for batches in ([2, 0], [2, 1])
}
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("deepspeed")
    reference = {"ddp": {"do": "fit", "strategy": "ddp", "batches": [2, 2]}}
    folder = tmp_path_factory.mktemp("uneven")
    return run_jobs_of_all("uneven_jobs", reference | JOBS | REFUSED | WITH_EMA, folder, world_size=2, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_rank_without_batches_leaves_the_others_their_validation(found: Found, name: str) -> None:
    """And those validate with the running statistics of rank 0, as under DDP where all have batches."""
    for rank, batches in zip(found, JOBS[name]["batches"], strict=True):
        ours, theirs = rank[name], rank["ddp"]
        sanity, epochs = 2, 2
        expected = theirs["found"] if batches else []
        assert ours["found"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert len(theirs["found"]) == sanity + epochs * 2
        assert ours["is_left"]
        for weight, values in theirs["weights"].items():
            assert ours["weights"][weight] == pytest.approx(values, rel=1e-5, abs=1e-6), weight


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_uneven_evaluation_is_refused_where_forward_gathers_weights(found: Found, name: str) -> None:
    ours, theirs = REFUSED[name]["batches"]
    for rank in found:
        assert f"rank 0 has {ours}, rank 1 has {theirs} batches" in rank[name]["refused"]
        assert rank[name]["steps"] == 0, "before any training"
        assert "give every rank as many batches" in rank[name]["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_EMA)
def test_averages_that_all_ranks_swap_together_need_a_batch_on_every_rank(found: Found, name: str) -> None:
    """Only there: with one batch or more on each rank all of them start the validation."""
    ours, theirs = (rank[name] for rank in found)
    if WITH_EMA[name]["batches"] == [2, 1]:
        assert ours["weights"] == theirs["weights"], "both end with the same average"
        assert (len(ours["found"]), len(theirs["found"])) == (2 + 2 * 2, 1 + 2 * 1)
    else:
        for rank in (ours, theirs):
            assert "rank 1 has no batches" in rank["refused"] and "without the callback EMA" in rank["refused"]
            assert rank["steps"] == 0, "before any training"
