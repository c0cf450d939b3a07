"""``DiffusionLoss``: what the objective is told of the model, and what held-out losses do not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor

from sd_lightning import LatentDiffusion, Objective
from sd_lightning.diffusion import objective
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


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_outside_of_a_mask_the_loss_has_exactly_the_gradient_of_its_weight(
    model: LatentDiffusion, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    monkeypatch.setattr(model.family, "denoise", lambda *_: prediction)
    batch = batch_of(model)
    batch["latents"] = torch.cat([batch["latents"], batch["latents"][:1]])
    batch |= {"epoch": torch.zeros(3, dtype=torch.int64), "index": torch.arange(3)}
    batch["input_ids"] = model.tokenize(["one", "two", "three"])
    losses = losses_of(model, weighting_scheme="none")
    (plain,) = torch.autograd.grad(3 * losses.mean(model.networks, batch), prediction)

    mask = torch.full((3, 1, 8, 8), weight)
    mask[0, :, :3], mask[1, 0, 2, 5], mask[2] = 1, 1, 1  # a part, a single latent, and all
    (masked,) = torch.autograd.grad(3 * losses.mean(model.networks, batch | {"loss_mask": mask}), prediction)
    expected = plain * mask * 64 / mask.sum((2, 3), keepdim=True)
    torch.testing.assert_close(masked, expected, atol=1e-8, rtol=1e-5)
    outside = (mask == weight).expand_as(masked) & (mask.amin((2, 3), keepdim=True) < 1)
    assert bool((masked[outside] == 0).all()) == (weight == 0)

    half = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(2)).bfloat16()  # as bf16-true casts batches
    both = [losses.mean(model.networks, batch | {"loss_mask": each}) for each in (half, half.float())]
    assert torch.equal(*both)

    nothing = losses.mean(model.networks, batch | {"loss_mask": torch.zeros(3, 1, 8, 8)})
    assert nothing.item() == 0 and torch.autograd.grad(nothing, prediction)[0].count_nonzero() == 0


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
@pytest.mark.parametrize("name", ["tiny_klein", "tiny_z_image"])
def test_loss_and_gradient_are_those_of_diffusers_dreambooth_scripts(
    name: str, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their step, as ``train_dreambooth_lora_flux2_klein.py`` and ``…_z_image.py`` have it, given our latents."""
    model = LatentDiffusion.build(name, seed=3)
    for network in model.networks.values():
        network.requires_grad_(network is model.denoiser)
    prompts = ["a handwritten three", "the digit seven"]
    torch.manual_seed(5)
    u = compute_density_for_timestep_sampling(scheme, 2, 0.0, 1.0, 1.29)
    latents = torch.randn(2, *model.latent_space.shape(32, 48))
    noise = torch.randn_like(latents)
    loss = script_loss(model.pipeline(), latents, noise, u, prompts, scheme)
    expected = torch.autograd.grad(loss, list(model.denoiser.parameters()))

    monkeypatch.setattr(objective, "normal", lambda *_: noise)
    monkeypatch.setattr(objective, "uniform", lambda *_: (1000 - (u * 1000).long()) / 1000)
    index = torch.arange(2)
    batch = {"latents": latents, "epoch": torch.zeros_like(index), "index": index, "input_ids": model.tokenize(prompts)}
    batch["conditioning"] = model.condition(model.text_encoders, batch)
    ours = losses_of(model, weighting_scheme=scheme).mean({"transformer": model.denoiser}, batch)
    torch.testing.assert_close(ours, loss, atol=1e-5, rtol=0)
    made = torch.autograd.grad(ours, list(model.denoiser.parameters()))
    for (key, _), one, other in zip(model.denoiser.named_parameters(), made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def script_loss(pipeline: Any, latents: Tensor, noise: Tensor, u: Tensor, prompts: list[str], scheme: Any) -> Tensor:
    scheduler = pipeline.scheduler
    timesteps = scheduler.timesteps[(u * scheduler.config.num_train_timesteps).long()]
    indices = [int((scheduler.timesteps == t).nonzero()) for t in timesteps]
    sigmas = scheduler.sigmas[indices].view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    encoded = pipeline.encode_prompt(prompt=list(prompts), max_sequence_length=16)
    if hasattr(pipeline, "_prepare_latent_ids"):
        ids = pipeline._prepare_latent_ids(noisy)
        made = pipeline.transformer(
            hidden_states=pipeline._pack_latents(noisy),
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=encoded[0],
            txt_ids=encoded[1],
            img_ids=ids,
            return_dict=False,
        )[0]
        prediction = pipeline._unpack_latents_with_ids(made, ids)
    else:
        given = list(noisy.unsqueeze(2).unbind(dim=0))
        made = pipeline.transformer(given, (1000 - timesteps) / 1000, encoded[0], return_dict=False)[0]
        prediction = -torch.stack(made).squeeze(2)
    weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
    return (weighting * (prediction - (noise - latents)) ** 2).flatten(1).mean(1).mean()
