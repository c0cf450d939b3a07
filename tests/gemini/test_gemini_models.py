"""Models of transformers and diffusers train under Gemini as under plain torch, with each kind of checkpointing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_jobs import Findings, Job, run_ranks, train
from held_out_models import MODELS
from sd_lightning.gemini import GeminiConfig, GeminiEngine

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


class Padded(nn.Module):
    """The parts of Z-Image that amplify rounding: pad tokens at zero before an RMSNorm, where its slope is 1/sqrt(eps).

    Lists go in and out, and positions are rotated in complex numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pad_token = nn.Parameter(torch.zeros(1, 16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(16, eps=1e-5), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, given: list[Tensor]) -> list[Tensor]:
        mask = torch.arange(8).reshape(8, 1) > 5
        hidden = torch.stack([torch.where(mask, self.pad_token, each) for each in given])
        turned = torch.view_as_complex(hidden.reshape(*hidden.shape[:-1], 8, 2)) * torch.polar(
            torch.ones(8), torch.ones(8)
        )
        hidden = torch.view_as_real(turned).flatten(2)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return list(hidden)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pad_tokens_at_zero_train_as_with_torchs_fused_adamw_to_the_bit(placement: str) -> None:
    def weights(*, with_engine: bool) -> list[Tensor]:
        network, generator = Padded(), torch.Generator().manual_seed(1)
        engine = GeminiEngine({"": network}, GeminiConfig(**PLACEMENTS[placement])) if with_engine else None
        optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
        optimizer = optimizer if engine is None else engine.optimizer(optimizer)
        for _ in range(10):
            outputs = network(list(torch.randn(4, 8, 16, generator=generator)))
            (torch.stack(outputs) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in network.parameters()]

    ours, theirs = weights(with_engine=True), weights(with_engine=False)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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
