"""Flow matching as diffusers trains and draws it: weighting schemes, shifts of the noise levels, loss weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.flow_schedule import DynamicShift, FlowSchedule
from sd_lightning.diffusion.objective import NoisyBatch, Objective, logit_normal, mode, scheme_weights
from sd_lightning.diffusion.randomness import Purpose, normal

FLUX: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
QWEN = FLUX | {"shift": 1.0, "max_shift": 0.9, "max_image_seq_len": 8192, "time_shift_type": "exponential"}
LINEAR = FLUX | {"time_shift_type": "linear", "base_shift": 1.5, "max_shift": 4.0}
SD3 = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
SCHEMES = ("none", "logit_normal", "mode", "sigma_sqrt", "cosmap")
SEED, EPOCH, INDEX = 3, 1, torch.arange(100, 116)
LATENTS = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))
DRAWS = 20_000


def prepare(objective: Objective, config: dict[str, Any], count: int | None = None, **options: Any) -> NoisyBatch:
    """Prepare LATENTS, or ``count`` latents of one number, for a model with that scheduler."""
    objective = objective.resolve(config)
    latents = LATENTS if count is None else torch.ones(count, 1, 1, 1)
    index = INDEX if count is None else torch.arange(count)
    options = {"image_tokens": 1024, "schedule": objective.noise_schedule(config)} | options
    return objective.prepare(latents, seed=SEED, epoch=EPOCH, index=index, **options)


def mu_of(config: dict[str, Any], image_tokens: int) -> float | None:
    """Return the ``mu`` that diffusers' pipelines pass to their scheduler."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    law = (config[name] for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
    return float(calculate_shift(image_tokens, *law)) if config.get("use_dynamic_shifting") else None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_laws_are_diffusers_densities_of_the_same_numbers(scheme: Any) -> None:
    from diffusers.training_utils import compute_density_for_timestep_sampling

    generator = torch.Generator().manual_seed(0)
    theirs = compute_density_for_timestep_sampling(scheme, 1000, -0.3, 0.8, 1.1, generator=generator)
    generator.manual_seed(0)
    if scheme == "logit_normal":
        ours = logit_normal(torch.randn(1000, generator=generator), -0.3, 0.8)
    else:
        uniforms = torch.rand(1000, generator=generator)
        ours = mode(uniforms, 1.1) if scheme == "mode" else uniforms
    torch.testing.assert_close(ours.float(), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("image_tokens", [64, 1024, 4096])
@pytest.mark.parametrize("config", [FLUX, QWEN, LINEAR, SD3], ids=["flux", "qwen", "linear", "sd3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_is_diffusers_training_step_at_the_same_noise_levels(
    scheme: Any, config: dict[str, Any], image_tokens: int
) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    drawn = prepare(Objective(weighting_scheme=scheme, shift=1), config).timesteps / 1000
    batch = prepare(Objective(weighting_scheme=scheme), config, image_tokens=image_tokens)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    scheduler.set_timesteps(sigmas=drawn.tolist(), mu=mu_of(config, image_tokens))
    noise = normal(SEED, EPOCH, INDEX, Purpose.NOISE, (4, 8, 8))
    torch.testing.assert_close(batch.timesteps, scheduler.timesteps, atol=0, rtol=1e-6)
    torch.testing.assert_close(
        batch.noisy_latents, scheduler.scale_noise(LATENTS, scheduler.timesteps, noise), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(batch.target, noise - LATENTS, atol=0, rtol=0)
    weights = compute_loss_weighting_for_sd3(scheme, scheduler.sigmas[:-1])
    torch.testing.assert_close(batch.weights, weights, atol=0, rtol=1e-6)
    assert batch.timesteps.dtype == torch.float32 and (batch.timesteps % 1 != 0).all()


def test_diffusers_scripts_mirror_the_mean_and_floor_what_we_keep() -> None:
    """Their scripts look ``u`` up in a table of falling timesteps: (u * 1000).long(), of 1000 noise levels."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    normals = normal(0, 0, torch.arange(1000), Purpose.TIMESTEP)
    u = logit_normal(-normals, 0.7, 0.8)
    theirs = FlowMatchEulerDiscreteScheduler().timesteps[(u * 1000).long()]
    ours = 1000 * logit_normal(normals, -0.7, 0.8)
    assert ((theirs - ours) > -1e-4).all() and ((theirs - ours) < 1 + 1e-4).all()


def inverse_of_mode(scale: float) -> Callable[[Tensor], Tensor]:
    """Return the distribution function of the law "mode": u falls with the noise level."""
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    levels = 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)

    def distribution(x: Tensor) -> Tensor:
        return 1 - u[torch.searchsorted(-levels, -x).clamp(max=len(u) - 1)]

    return distribution


def of_logit_normal(mean: float, std: float) -> Callable[[Tensor], Tensor]:
    return lambda x: (1 + torch.erf((torch.logit(x) - mean) / (std * math.sqrt(2)))) / 2


def identity(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("shift", [1.0, 0.5, "dynamic"])
@pytest.mark.parametrize(
    ("law", "distribution"),
    [
        ({"weighting_scheme": "none"}, identity),
        ({"weighting_scheme": "sigma_sqrt"}, identity),
        ({"weighting_scheme": "cosmap"}, identity),
        ({}, of_logit_normal(0.0, 1.0)),
        ({"weighting_scheme": "logit_normal", "logit_mean": -0.5, "logit_std": 0.7}, of_logit_normal(-0.5, 0.7)),
        ({"weighting_scheme": "mode"}, inverse_of_mode(1.29)),
        ({"weighting_scheme": "mode", "mode_scale": -0.8}, inverse_of_mode(-0.8)),
    ],
    ids=lambda each: " ".join(f"{value}" for value in each.values()) if isinstance(each, dict) else "",
)
def test_every_law_has_its_density(law: dict[str, Any], distribution: Callable[[Tensor], Tensor], shift: Any) -> None:
    batch = prepare(Objective(**law, shift=shift), FLUX, DRAWS)
    sigmas = (batch.timesteps / 1000).double().sort().values
    factor = math.exp(mu_of(FLUX, 1024) or 0) if shift == "dynamic" else shift
    unshifted = sigmas / (factor - (factor - 1) * sigmas)
    distance = (distribution(unshifted) - torch.arange(1, DRAWS + 1) / DRAWS).abs().max()
    assert distance < 1.63 / math.sqrt(DRAWS)  # Kolmogorov and Smirnov at 1 %


def test_what_the_scheduler_says_is_the_shift_unless_a_number_is_chosen() -> None:
    def schedule(shift: Any, config: dict[str, Any], prediction_type: Any = None) -> FlowSchedule:
        objective = Objective(prediction_type, shift=shift).resolve(config)
        made = objective.noise_schedule(config)
        assert isinstance(made, FlowSchedule)
        return made

    law = DynamicShift(0.5, 1.15, 256, 4096)
    static = FLUX | {"use_dynamic_shifting": False}
    assert schedule(None, FLUX).shift == law
    assert schedule(None, static).shift == 3.0
    assert schedule("dynamic", static).shift == law
    assert schedule(2, FLUX).shift == 2
    assert schedule(None, {"_class_name": FLUX["_class_name"], "use_dynamic_shifting": True}).shift == law
    solver = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
    assert schedule(None, solver) == FlowSchedule(1000, 3.0, whole_timesteps=True)
    assert Objective("flow").scheduler_overrides(solver)["flow_shift"] == 3.0, "sampled as it was trained"
    assert Objective("flow").scheduler_overrides({})["flow_shift"] == 1.0
    for shift in (None, 2.0):  # a model that flow is new to
        assert schedule(shift, {"_class_name": "DDIMScheduler"}, "flow") == FlowSchedule(1000, shift or 1.0, True)


def test_a_flow_that_diffusers_samplers_floor_is_shifted_too() -> None:
    whole, shifted = (prepare(Objective("flow", shift=shift), {}) for shift in (None, 3.0))
    assert whole.timesteps.dtype == shifted.timesteps.dtype == torch.int64
    expected = (1000 * 3 * (whole.timesteps / 1000) / (1 + 2 * whole.timesteps / 1000)).long()
    assert ((shifted.timesteps - expected) >= 0).all() and (shifted.timesteps - expected).max() <= 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SD3,
            r"shift=dynamic for a model whose scheduler \(FlowMatchEulerDiscreteScheduler\) has no base_shift, max_sh",
        ),
        (
            FLUX | {"use_dynamic_shifting": False, "max_shift": None},
            "has no max_shift; expected .*objective.shift=null",
        ),
        (FLUX | {"max_image_seq_len": 256}, "expected base_image_seq_len < max_image_seq_len"),
        (FLUX | {"time_shift_type": "cubic"}, "time_shift_type='cubic'.*exponential or linear"),
    ],
    ids=["none", "one missing", "no slope", "unknown type"],
)
def test_a_scheduler_without_a_law_is_refused_for_dynamic_shifts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Objective("flow", shift="dynamic").noise_schedule(config)


def test_a_dynamic_shift_needs_the_number_of_image_tokens() -> None:
    with pytest.raises(ValueError, match="dynamic shift; expected the number of image_tokens"):
        prepare(Objective(), FLUX, image_tokens=None)


def test_a_linear_law_is_not_extended_below_zero() -> None:
    law = DynamicShift(0.5, 9.0, 256, 4096, "linear")
    assert law.at(256) == 0.5
    with pytest.raises(UsageError, match="dynamic shift of -0.0312 for 16 image tokens .*expected one above 0"):
        law.at(16)


def test_weights_stay_finite_at_noise_level_zero() -> None:
    schedule = FlowSchedule(1000, 1e-9, whole_timesteps=False)
    batch = prepare(Objective(weighting_scheme="sigma_sqrt"), SD3, schedule=schedule)
    assert batch.timesteps.max() < 1e-3
    torch.testing.assert_close(batch.weights, torch.full((16,), 1e6))
    assert torch.equal(scheme_weights("mode", torch.tensor([0.1, 0.9])), torch.ones(2))
