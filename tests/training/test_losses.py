"""``DiffusionLoss``: what the objective is told of the model, and what held-out losses do not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_lightning import LatentDiffusion, Objective
from sd_lightning.training.losses import DiffusionLoss
from small_models import few_blocks

FLOW_MATCH = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    """Return a small model of flow matching, whose scheduler shifts by the number of image tokens."""
    made = few_blocks(seed=1)
    made.use_scheduler(FLOW_MATCH)
    return made


def batch_of(model: LatentDiffusion, side: int = 8) -> dict[str, Any]:
    captions = ["a handwritten three", "the digit seven"]
    latents = torch.randn(2, 4, side, side, generator=torch.Generator().manual_seed(0))
    index = torch.arange(2)
    ids = {"input_ids": model.tokenize(captions), "wrong_input_ids": model.tokenize(captions[::-1])}
    return {"latents": latents, "epoch": torch.zeros(2, dtype=torch.int64), "index": index, **ids}


def losses_of(model: LatentDiffusion, **fields: Any) -> DiffusionLoss:
    return DiffusionLoss(model, Objective(**fields).resolve(model.scheduler_config), seed=3)


@pytest.mark.parametrize("side", [8, 16])
def test_the_dynamic_shift_is_that_of_the_image_tokens_of_the_family(
    model: LatentDiffusion, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def denoise(denoiser: Any, latents: Tensor, timesteps: Tensor, conditioning: Any) -> Tensor:
        seen.append(timesteps)
        return torch.zeros_like(latents)

    monkeypatch.setattr(model.family, "denoise", denoise)
    monkeypatch.setattr(model.family, "image_tokens", lambda height, width: height * width // 4, raising=False)
    for fields in ({}, {"shift": 1.0}):
        losses_of(model, **fields).mean(model.networks, batch_of(model, side))
    shifted, drawn = (each.double() / 1000 for each in seen)
    factor = math.exp(0.5 + (1.15 - 0.5) / (4096 - 256) * (side * side // 4 - 256))
    torch.testing.assert_close(shifted, factor * drawn / (1 + (factor - 1) * drawn), atol=0, rtol=1e-6)


def test_held_out_losses_do_not_depend_on_the_law_that_the_run_trains_with(model: LatentDiffusion) -> None:
    batch = batch_of(model)
    settings: list[dict[str, Any]] = [
        {"weighting_scheme": "none", "shift": 1.0},
        {"weighting_scheme": "logit_normal", "logit_mean": -1.0},
        {"weighting_scheme": "mode", "shift": 3.0},
        {"weighting_scheme": "sigma_sqrt"},
    ]
    with torch.no_grad():
        losses = [losses_of(model, **each) for each in settings]
        trained = [float(each.mean(model.networks, batch)) for each in losses]
        held_out = [each.held_out(model.networks, batch) for each in losses]
    assert len(set(trained)) == len(settings)
    for each in held_out[1:]:
        assert each.keys() == held_out[0].keys() == {"loss", "caption_gap"}
        assert all(torch.equal(values, held_out[0][name]) for name, values in each.items())
