"""Models of transformers and diffusers train under Gemini as under plain torch, with each kind of checkpointing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_jobs import Findings, Job, run_ranks, train
from held_out_models import MODELS

PLACEMENTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "kept_gathered": {"shard_param_frac": 0.0},
    "all_offloaded": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 60_000},
}
CHECKPOINTS = ["", "saved", "reentrant"]


def job_of(model: str, placement: str, checkpoints: str) -> Job:
    config = {"chunk_numel": 5000} | PLACEMENTS[placement]
    name = f"{model}/{placement}/{checkpoints}"
    return Job(name, network=model, config=config, steps=3, checkpoints=checkpoints)


@lru_cache
def plain(model: str) -> Findings:
    """Plain torch on the joined batch."""
    return train(Job(model, engine="torch", network=model, steps=3))


@lru_cache
def initial(model: str) -> Findings:
    return train(Job(model, engine="torch", network=model, steps=0))


def assert_as_plain_torch(found: Findings, model: str) -> None:
    """Each parameter has moved as far as it does there, but for rounding: AdamW moves each by up to 3e-3.

    What has no gradient, as a key's bias, only decays.
    """
    before, expected = initial(model).weights, plain(model).weights
    assert found.weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found.weights[name], weight, atol=5e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    still = [name for name, weight in expected.items() if (weight - before[name]).abs().max() < 1e-4]
    assert len(still) <= 0.15 * len(expected), still


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_trains_a_model_with_reentrant_checkpoints_as_plain_torch(model: str) -> None:
    assert_as_plain_torch(train(Job(model, network=model, steps=3, checkpoints="reentrant")), model)


@pytest.mark.slow
def test_two_ranks_train_models_as_plain_torch(tmp_path: Path) -> None:
    """Each model once, each placement and kind of checkpoint often."""
    names = [*PLACEMENTS]
    jobs = [job_of(model, names[i % 3], "reentrant" if i < 6 else "saved") for i, model in enumerate(MODELS)]
    assert_ranks_train_as_plain_torch(jobs, tmp_path)


@pytest.mark.full("engines")
def test_two_ranks_train_every_model_with_every_placement_and_checkpoint(tmp_path: Path) -> None:
    jobs = [job_of(model, placement, kind) for model in MODELS for placement in PLACEMENTS for kind in CHECKPOINTS]
    assert_ranks_train_as_plain_torch(jobs, tmp_path)


@pytest.mark.full("engines")
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_trains_every_model_with_every_placement_and_checkpoint(model: str) -> None:
    for placement in PLACEMENTS:
        for kind in CHECKPOINTS:
            assert_as_plain_torch(train(job_of(model, placement, kind)), model)


def assert_ranks_train_as_plain_torch(jobs: list[Job], folder: Path) -> None:
    ranks = run_ranks(2, jobs, folder, timeout=600)
    for job in jobs:
        assert_as_plain_torch(ranks[0][job.name], job.network)
        assert ranks[0][job.name].digest == ranks[1][job.name].digest, job.name
        assert ranks[0][job.name].notes["sequence"] == ranks[1][job.name].notes["sequence"], job.name
