"""With its collectives, one rank trains the same bits as without: `gpu` tests use this to run NCCL on one card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemini_jobs import PLACEMENTS, Findings, Job, train
from one_rank import one_rank_group

JOBS = {
    job.name: replace(job, steps=4)
    for job in (
        *(Job(name, config=PLACEMENTS[name]) for name in ("sharded", "kept_gathered", "small_budget", "disk")),
        Job("clip", config=PLACEMENTS["half_offloaded"], clip=0.05),
        Job("reduce_once", config={"reduce_once": True}, accumulate=3, clip=0.05),
        Job("reduce_each", config=PLACEMENTS["all_offloaded"], accumulate=3),
        Job("bf16", config=PLACEMENTS["optimizer_offloaded"], dtype="bfloat16", clip=0.05),
        Job("bf16_sharded", dtype="bfloat16"),
        Job("swap", config=PLACEMENTS["half_offloaded"], act="swap"),
        Job("raise", config=PLACEMENTS["kept_gathered"], act="accumulate_then_raise"),
        Job("two_optimizers", two_optimizers=True, clip=0.05),
        Job("auto", config=PLACEMENTS["auto_some"]),
    )
}


@pytest.mark.parametrize("native", [True, False], ids=["as_nccl", "exchanged"])
@pytest.mark.parametrize("name", JOBS)
def test_one_rank_trains_the_same_bits_with_its_collectives(name: str, native: bool) -> None:
    with one_rank_group("gloo") as counts:
        found = train(replace(JOBS[name], native=native))
    assert counts["all_reduce"] > 0
    if native:
        assert counts["reduce_scatter_tensor"] > 0 and counts["all_gather_into_tensor"] > 0
    expected: Findings = train(JOBS[name])
    assert found.losses == expected.losses and found.norms == expected.norms and found.digest == expected.digest
