"""objective.py and noise_schedule.py: against diffusers' formulas and samplers, and every wrong combination."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from sd_lightning._conf import config_dir, instantiate
from sd_lightning._errors import UsageError
from sd_lightning.diffusion.flow_schedule import shifted
from sd_lightning.diffusion.objective import (
    NoisyBatch,
    Objective,
    input_perturbation,
    logit_normal,
    offset_noise,
)
from sd_lightning.diffusion.prediction import (
    PREDICTIONS,
    NoiseSchedule,
    add_noise,
    flow_interpolate,
    rescale_zero_terminal_snr,
    velocity,
)
from sd_lightning.diffusion.randomness import Purpose, normal, uniform

STABLE_DIFFUSION: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
}
FLOW_MATCH: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
SCHEDULES = [
    {},
    STABLE_DIFFUSION,
    {"beta_schedule": "squaredcos_cap_v2"},
    {"num_train_timesteps": 50, "beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.2},
    {"trained_betas": [0.01, 0.02, 0.5, 0.7]},
]
INDEX = torch.arange(100, 116)
LATENTS = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def prepare(objective: Objective, latents: Tensor = LATENTS, index: Tensor = INDEX, **kwargs: Any) -> NoisyBatch:
    schedule = kwargs.pop("schedule", None) or objective.noise_schedule(STABLE_DIFFUSION)
    return objective.prepare(latents, seed=3, epoch=1, index=index, schedule=schedule, **kwargs)


def draw(purpose: Purpose, shape: tuple[int, ...]) -> Tensor:
    return normal(3, 1, INDEX, purpose, shape)


def many_timesteps(objective: Objective, count: int = 50_000, **kwargs: Any) -> Tensor:
    return prepare(objective, torch.zeros(count, 1, 1, 1), torch.arange(count), **kwargs).timesteps


@pytest.mark.parametrize("zero_snr", [False, True])
@pytest.mark.parametrize("config", SCHEDULES, ids=lambda c: str(c.get("beta_schedule", list(c))))
def test_the_noise_schedule_is_that_of_diffusers(config: dict[str, Any], zero_snr: bool) -> None:
    from diffusers import DDPMScheduler

    config = {**config, "rescale_betas_zero_snr": zero_snr}
    expected = DDPMScheduler(**config).alphas_cumprod
    schedule = NoiseSchedule.from_config({**config, "_class_name": "DDPMScheduler", "clip_sample": False})
    assert schedule.num_train_timesteps == len(expected)
    assert schedule.alphas_cumprod.dtype == torch.float32
    # diffusers multiplies up to 1000 factors in float32: the difference is its rounding.
    torch.testing.assert_close(schedule.alphas_cumprod, expected, atol=2e-6, rtol=0)
    squares = schedule.sqrt_alphas_cumprod**2 + schedule.sqrt_one_minus_alphas_cumprod**2
    torch.testing.assert_close(squares, torch.ones_like(squares), atol=2e-7, rtol=0)
    assert (float(schedule.snr[-1]) == 0) == zero_snr


def test_zero_terminal_snr_rescaling_is_that_of_diffusers() -> None:
    from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr as diffusers_rescale

    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    expected = torch.cumprod(1 - diffusers_rescale(betas), dim=0)
    rescaled = rescale_zero_terminal_snr(torch.cumprod(1 - betas, dim=0))
    torch.testing.assert_close(rescaled, expected, atol=1e-12, rtol=0)
    assert rescaled[-1] == 0 and math.isclose(rescaled[0], 1 - betas[0])
    assert torch.equal(rescale_zero_terminal_snr(rescaled), rescaled)


def test_an_unknown_beta_schedule_is_refused() -> None:
    with pytest.raises(UsageError, match="beta_schedule='sigmoid'; expected one of linear, scaled_linear, squaredcos"):
        NoiseSchedule.from_config({"beta_schedule": "sigmoid"})


def test_noisy_latents_and_velocity_are_those_of_diffusers() -> None:
    from diffusers import DDPMScheduler

    scheduler, schedule = DDPMScheduler(**STABLE_DIFFUSION), NoiseSchedule.from_config(STABLE_DIFFUSION)
    noise = draw(Purpose.NOISE, (4, 8, 8))
    timesteps = torch.linspace(0, 999, 16).long()
    torch.testing.assert_close(
        add_noise(LATENTS, noise, timesteps, schedule),
        scheduler.add_noise(LATENTS, noise, timesteps),
        atol=1e-5,
        rtol=0,
    )
    torch.testing.assert_close(
        velocity(LATENTS, noise, timesteps, schedule),
        scheduler.get_velocity(LATENTS, noise, timesteps),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_min_snr_weights_are_those_of_diffusers_training_script(prediction_type: Any) -> None:
    from diffusers import DDPMScheduler

    timesteps = torch.arange(1000)
    alphas_cumprod = DDPMScheduler(**STABLE_DIFFUSION).alphas_cumprod[timesteps]
    # compute_snr and the weights of train_text_to_image.py
    expected_snr = (alphas_cumprod**0.5 / (1.0 - alphas_cumprod) ** 0.5) ** 2
    expected = torch.stack([expected_snr, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    expected = expected / (expected_snr if prediction_type == "epsilon" else expected_snr + 1)
    schedule = NoiseSchedule.from_config(STABLE_DIFFUSION)
    torch.testing.assert_close(schedule.snr, expected_snr, rtol=2e-4, atol=0)
    ours = PREDICTIONS[prediction_type].min_snr_weights(timesteps, 5.0, schedule)
    torch.testing.assert_close(ours, expected, rtol=2e-4, atol=0)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_min_snr_weighs_the_same_error_of_the_latents_alike(prediction_type: Any) -> None:
    """The weighted losses of all predictions are one loss: min(SNR, gamma) times the error of the latents."""
    weighted = prepare(Objective(prediction_type=prediction_type, snr_gamma=5.0))
    schedule = NoiseSchedule.from_config(STABLE_DIFFUSION)
    t = weighted.timesteps
    wrong_latents = LATENTS + 0.1
    noise = (
        weighted.noisy_latents - schedule.sqrt_alphas_cumprod[t].view(-1, 1, 1, 1) * wrong_latents
    ) / schedule.sqrt_one_minus_alphas_cumprod[t].view(-1, 1, 1, 1)
    prediction = {
        "epsilon": noise,
        "sample": wrong_latents,
        "v_prediction": velocity(wrong_latents, noise, t, schedule),
    }[prediction_type]
    expected = 0.01 * schedule.snr[t].clamp(max=5.0)
    torch.testing.assert_close(
        Objective(prediction_type=prediction_type).loss(prediction, weighted), expected, rtol=2e-3, atol=1e-6
    )


def test_zero_snr_has_a_finite_velocity_weight_of_zero() -> None:
    schedule = NoiseSchedule.from_alphas_cumprod(torch.tensor([0.0, 1 - 1e-6], dtype=torch.float64))
    weights = PREDICTIONS["v_prediction"].min_snr_weights(torch.arange(2), 5.0, schedule)
    assert weights.tolist() == [0.0, pytest.approx(5e-6, rel=1e-4)]


def test_min_snr_has_no_weights_for_flow() -> None:
    with pytest.raises(UsageError, match="snr_gamma=5.0 with prediction_type=flow; min-SNR weights exist for epsilon"):
        Objective(snr_gamma=5.0).resolve({"_class_name": "FlowMatchEulerDiscreteScheduler"})


def test_flow_goes_straight_from_latents_to_noise() -> None:
    noise = draw(Purpose.NOISE, (4, 8, 8))
    torch.testing.assert_close(flow_interpolate(LATENTS, noise, torch.zeros(16)), LATENTS)
    torch.testing.assert_close(flow_interpolate(LATENTS, noise, torch.ones(16)), noise)
    step = flow_interpolate(LATENTS, noise, torch.full((16,), 0.75)) - flow_interpolate(
        LATENTS, noise, torch.full((16,), 0.5)
    )
    torch.testing.assert_close(step, 0.25 * (noise - LATENTS))


def test_logit_normal_has_the_density_of_sd3() -> None:
    mean, std = 0.5, 0.8
    drawn = logit_normal(normal(0, 0, torch.arange(200_000), Purpose.TIMESTEP), mean, std)
    points = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    # The integral of eq. 19: the normal distribution function at logit(t).
    expected = (1 + torch.erf((torch.logit(points) - mean) / (std * math.sqrt(2)))) / 2
    empirical = torch.searchsorted(drawn.sort().values, points) / len(drawn)
    assert (empirical - expected).abs().max() < 0.005


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_prepare_is_diffusers_training_step_with_the_samples_own_noise(prediction_type: Any) -> None:
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(**STABLE_DIFFUSION)
    batch = prepare(Objective(prediction_type=prediction_type))
    noise = draw(Purpose.NOISE, (4, 8, 8))
    target = {
        "epsilon": noise,
        "v_prediction": scheduler.get_velocity(LATENTS, noise, batch.timesteps),
        "sample": LATENTS,
    }[prediction_type]
    noisy = scheduler.add_noise(LATENTS, noise, batch.timesteps)
    torch.testing.assert_close(batch.noisy_latents, noisy, atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.target, target, atol=1e-5, rtol=0)
    assert torch.equal(batch.weights, torch.ones(16))
    assert batch.timesteps.dtype == torch.int64


def test_prepare_for_flow_tells_the_whole_timestep_below_sigma() -> None:
    batch = prepare(Objective(prediction_type="flow", weighting_scheme="logit_normal"))
    noise = draw(Purpose.NOISE, (4, 8, 8))
    torch.testing.assert_close(batch.target, noise - LATENTS)
    sigmas = ((batch.noisy_latents - LATENTS) / batch.target).flatten(1).median(dim=1).values
    expected = logit_normal(draw(Purpose.TIMESTEP, ()), 0.0, 1.0).float()
    torch.testing.assert_close(sigmas, expected, atol=1e-5, rtol=0)
    assert torch.equal(batch.timesteps, (expected * 1000).long())


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_flow_matching_scheduler_is_told_real_timesteps_of_shifted_noise_levels(shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift}
    objective = Objective(weighting_scheme="none").resolve(config)
    batch = prepare(objective, schedule=objective.noise_schedule(config))
    noise, fractions = draw(Purpose.NOISE, (4, 8, 8)), uniform(3, 1, INDEX, Purpose.TIMESTEP)
    sigmas = shifted(fractions, shift).float()
    torch.testing.assert_close(batch.noisy_latents, LATENTS + sigmas.view(-1, 1, 1, 1) * (noise - LATENTS))
    torch.testing.assert_close(batch.timesteps, 1000 * sigmas)
    # diffusers shifts the levels of its own timesteps in the same way, and keeps its scheduler.
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift).sigmas
    torch.testing.assert_close(shifted(torch.linspace(1, 1 / 1000, 1000), shift), theirs)
    assert objective.scheduler_overrides(config) == {}


@pytest.mark.parametrize(
    "objective",
    [
        Objective(prediction_type="epsilon", snr_gamma=5.0, noise_offset=0.1, input_perturbation=0.1),
        Objective(prediction_type="v_prediction", rescale_betas_zero_snr=True),
        Objective(prediction_type="flow", weighting_scheme="logit_normal"),
        Objective(prediction_type="flow", weighting_scheme="mode", shift="dynamic"),
        Objective(prediction_type="flow", weighting_scheme="sigma_sqrt", shift=3.0),
        Objective(prediction_type="flow", weighting_scheme="cosmap", shift="dynamic"),
    ],
    ids=lambda each: f"{each.prediction_type}-{each.scheme}",
)
def test_what_a_sample_gets_does_not_depend_on_its_batch(objective: Objective) -> None:
    model = FLOW_MATCH if objective.shift else STABLE_DIFFUSION
    options: dict[str, Any] = {"schedule": objective.noise_schedule(model), "image_tokens": 1024}
    whole = prepare(objective, **options)
    order = torch.tensor([5, 3, 11])
    part = prepare(objective, LATENTS[order], INDEX[order], **options)
    for name in ("noisy_latents", "timesteps", "target", "weights"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[order]), name


def test_noise_offset_shifts_input_and_target() -> None:
    batch = prepare(Objective(prediction_type="epsilon", noise_offset=0.5))
    noise = draw(Purpose.NOISE, (4, 8, 8)) + 0.5 * draw(Purpose.OFFSET_NOISE, (4,))[:, :, None, None]
    torch.testing.assert_close(batch.target, noise)
    schedule = NoiseSchedule.from_config(STABLE_DIFFUSION)
    torch.testing.assert_close(batch.noisy_latents, add_noise(LATENTS, noise, batch.timesteps, schedule))
    assert torch.equal(
        offset_noise(torch.zeros(1, 2, 2, 1), torch.tensor([[1.0, 2.0]]), 0.5)[0, :, 1, 0], torch.tensor([0.5, 1.0])
    )


def test_input_perturbation_changes_the_input_but_not_the_target() -> None:
    batch = prepare(Objective(prediction_type="epsilon", input_perturbation=0.1))
    noise = draw(Purpose.NOISE, (4, 8, 8))
    perturbed = input_perturbation(noise, draw(Purpose.INPUT_PERTURBATION, (4, 8, 8)), 0.1)
    schedule = NoiseSchedule.from_config(STABLE_DIFFUSION)
    assert torch.equal(batch.target, noise) and not torch.equal(perturbed, noise)
    torch.testing.assert_close(batch.noisy_latents, add_noise(LATENTS, perturbed, batch.timesteps, schedule))


def test_uniform_timesteps_cover_the_schedule_from_the_smallest_one_asked_for() -> None:
    objective = Objective(prediction_type="epsilon")
    counts = torch.bincount(many_timesteps(objective), minlength=1000)
    assert len(counts) == 1000
    assert 850 < float(((counts - 50.0) ** 2 / 50.0).sum()) < 1160  # chi squared, 999 degrees of freedom
    upper = many_timesteps(objective, min_timestep=990)
    assert upper.unique().tolist() == list(range(990, 1000))
    flow = Objective(prediction_type="flow", weighting_scheme="none")
    assert set(many_timesteps(flow, min_timestep=990).tolist()) == set(range(990, 1000))


def test_logit_normal_timesteps_follow_mean_and_stay_inside() -> None:
    def sampled(mean: float, std: float) -> Tensor:
        return many_timesteps(
            Objective(prediction_type="epsilon", weighting_scheme="logit_normal", logit_mean=mean, logit_std=std)
        )

    for mean in (-1.0, 1.0):
        assert abs(float(sampled(mean, 0.5).median()) / 1000 - 1 / (1 + math.exp(-mean))) < 0.01
    extreme = sampled(0.0, 100.0)
    assert extreme.min() == 0 and extreme.max() == 999


def test_low_precision_latents_are_noised_in_float32() -> None:
    latents = LATENTS.bfloat16()
    batch = prepare(Objective(prediction_type="v_prediction"), latents)
    exact = prepare(Objective(prediction_type="v_prediction"), latents.float())
    assert batch.noisy_latents.dtype == torch.bfloat16
    assert torch.equal(batch.noisy_latents, exact.noisy_latents.bfloat16())
    assert torch.equal(batch.target, exact.target)


def test_the_loss_is_the_weighted_mean_square_of_each_sample() -> None:
    objective = Objective(prediction_type="v_prediction", snr_gamma=1.0)
    batch = prepare(objective)
    prediction = torch.randn(16, 4, 8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = objective.loss(prediction, batch)
    expected = ((prediction.float() - batch.target) ** 2).mean(dim=(1, 2, 3)) * batch.weights
    assert loss.shape == (16,) and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    assert batch.weights.max() <= 0.5 and batch.weights.min() >= 0


def test_a_prediction_of_another_shape_is_refused() -> None:
    batch = prepare(Objective(prediction_type="epsilon"))
    with pytest.raises(UsageError, match=r"shape \(16, 8, 8, 8\); expected \(16, 4, 8, 8\).*out_channels"):
        Objective(prediction_type="epsilon").loss(torch.zeros(16, 8, 8, 8), batch)


@pytest.mark.parametrize("min_timestep", [-1, 1000])
def test_a_smallest_timestep_outside_the_schedule_is_refused(min_timestep: int) -> None:
    with pytest.raises(UsageError, match=f"min_timestep={min_timestep}; expected 0 <= min_timestep < 1000"):
        prepare(Objective(prediction_type="epsilon"), min_timestep=min_timestep)


def test_indices_of_another_batch_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"index has shape \(1,\); expected \(16,\)"):
        prepare(Objective(prediction_type="epsilon"), index=INDEX[:1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prediction_type": "eps"}, "prediction_type='eps'; expected one of epsilon, v_prediction, sample, flow. Set"),
        (
            {"weighting_scheme": "uniform"},
            "weighting_scheme='uniform'; expected one of none, logit_normal, mode, sigma",
        ),
        ({"noise_offset": -0.1}, "noise_offset=-0.1; expected a number >= 0"),
        ({"input_perturbation": math.nan}, "input_perturbation=nan; expected a number >= 0"),
        ({"snr_gamma": 0.0}, "snr_gamma=0.0; expected a number > 0 or null. Set objective.snr_gamma=5"),
        ({"snr_gamma": math.inf}, "snr_gamma=inf; expected a number > 0"),
        ({"weighting_scheme": "logit_normal", "logit_std": 0.0}, "logit_std=0.0; expected a number > 0"),
        ({"weighting_scheme": "logit_normal", "logit_mean": math.inf}, "logit_mean=inf; expected a finite"),
        (
            {"prediction_type": "sample", "logit_mean": 1.0},
            "logit_mean=1.0 with weighting_scheme=none, which does not use it. Set objective.weighting_scheme=logit",
        ),
        ({"weighting_scheme": "mode", "logit_std": 2.0}, "logit_std=2.0 with weighting_scheme=mode.*logit_std=1.0"),
        ({"mode_scale": 0.5}, "mode_scale=0.5 with weighting_scheme=none.*Set objective.weighting_scheme=mode"),
        ({"prediction_type": "flow", "mode_scale": 0.5}, "mode_scale=0.5 with weighting_scheme=logit_normal"),
        ({"weighting_scheme": "mode", "mode_scale": 1.8}, r"mode_scale=1.8; expected a number in \[-1, 1.7519\]"),
        ({"weighting_scheme": "mode", "mode_scale": math.nan}, "mode_scale=nan; expected a number in"),
        ({"shift": 0}, "shift=0; expected a number > 0, dynamic, or null. Set objective.shift=null"),
        ({"shift": True}, "shift=True; expected a number > 0, dynamic, or null"),
        ({"shift": -3.0}, "shift=-3.0; expected a number > 0, dynamic, or null"),
        ({"shift": math.nan}, "shift=nan; expected a number > 0, dynamic, or null"),
        ({"shift": "static"}, "shift='static'; expected a number > 0, dynamic, or null"),
        (
            {"prediction_type": "epsilon", "shift": 3.0},
            "shift=3.0 with prediction_type=epsilon; expected flow.*shift=null",
        ),
        (
            {"prediction_type": "v_prediction", "weighting_scheme": "cosmap"},
            "weighting_scheme=cosmap with prediction_type=v_prediction; expected flow.*objective.weighting_scheme=null",
        ),
        (
            {"prediction_type": "flow", "snr_gamma": 5.0},
            "snr_gamma=5.0 with prediction_type=flow.*Set objective.snr_gamma=null",
        ),
        (
            {"prediction_type": "epsilon", "rescale_betas_zero_snr": True},
            "rescale_betas_zero_snr=true with prediction_type=epsilon; expected v_prediction or sample",
        ),
        ({"prediction_type": "flow", "rescale_betas_zero_snr": True}, "with prediction_type=flow; expected v_pred"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_the_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Objective(**fields)


def test_without_a_choice_the_models_own_prediction_type_is_used() -> None:
    objective = Objective(noise_offset=0.1)
    assert objective.resolve({"prediction_type": "v_prediction"}) == Objective("v_prediction", noise_offset=0.1)
    assert objective.resolve({}).prediction_type == "epsilon"
    assert objective.resolve({"_class_name": "FlowMatchEulerDiscreteScheduler"}).prediction_type == "flow"
    assert objective.resolve(Objective("flow").scheduler_overrides({})).prediction_type == "flow"
    assert Objective("sample").resolve({"prediction_type": "epsilon"}).prediction_type == "sample"
    with pytest.raises(UsageError, match="snr_gamma=5.0 with prediction_type=flow"):
        Objective(snr_gamma=5.0).resolve({"prediction_type": "flow_prediction"})
    # Values that are right for one kind of model are refused once the other kind is known.
    assert Objective(logit_mean=1.0, shift=3.0).resolve({"_class_name": "FlowMatchHeunDiscreteScheduler"}).shift == 3.0
    for refused, name in ((Objective(logit_mean=1.0), "logit_mean=1.0"), (Objective(shift=3.0), "shift=3.0")):
        with pytest.raises(UsageError, match=name):
            refused.resolve({"prediction_type": "epsilon"})
    with pytest.raises(ValueError, match="expected one from resolve"):
        objective.noise_schedule(STABLE_DIFFUSION)


def test_a_schedule_the_prediction_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(UsageError, match="prediction_type=epsilon for a model whose noise schedule ends at zero SNR"):
        Objective("epsilon").noise_schedule({**STABLE_DIFFUSION, "rescale_betas_zero_snr": True})
    for config in ({"_class_name": "FlowMatchEulerDiscreteScheduler"}, Objective("flow").scheduler_overrides({})):
        with pytest.raises(UsageError, match="prediction_type=v_prediction for a flow-matching model.*objective=flow"):
            Objective("v_prediction").noise_schedule(config)


def test_the_objective_rescales_a_schedule_that_is_not_and_keeps_one_that_is() -> None:
    rescaled = {**STABLE_DIFFUSION, "rescale_betas_zero_snr": True}
    schedules = [
        Objective("v_prediction", rescale_betas_zero_snr=True).noise_schedule(STABLE_DIFFUSION),
        Objective("v_prediction", rescale_betas_zero_snr=True).noise_schedule(rescaled),
        Objective("v_prediction").noise_schedule(rescaled),
    ]
    for schedule in schedules:
        assert torch.equal(schedule.alphas_cumprod, schedules[0].alphas_cumprod) and schedule.snr[-1] == 0


@pytest.mark.parametrize("name", ["auto", "epsilon", "v_prediction", "sample", "flow"])
def test_every_objective_yaml_builds_and_shows_every_field(name: str) -> None:
    node = OmegaConf.load(f"{config_dir()}/objective/{name}.yaml")
    objective = instantiate(node)
    assert objective.prediction_type == (None if name == "auto" else name)
    assert set(node) - {"_target_"} == set(Objective.__dataclass_fields__)


SAMPLED = [
    (Objective("epsilon"), "DDIMScheduler"),
    (Objective("epsilon"), "PNDMScheduler"),
    (Objective("v_prediction"), "DDIMScheduler"),
    (Objective("v_prediction"), "DPMSolverMultistepScheduler"),
    (Objective("v_prediction", rescale_betas_zero_snr=True), "DDIMScheduler"),
    (Objective("v_prediction", rescale_betas_zero_snr=True), "PNDMScheduler"),
    (Objective("sample"), "PNDMScheduler"),
    (Objective("flow"), "PNDMScheduler"),
    (Objective("flow"), "DPMSolverMultistepScheduler"),
]


@pytest.mark.parametrize(
    ("objective", "own_class"), SAMPLED, ids=lambda x: x if isinstance(x, str) else x.prediction_type
)
def test_the_exported_scheduler_samples_what_a_perfect_network_knows(objective: Objective, own_class: str) -> None:
    """Check a perfect network for a data set of one picture against ``prepare``, then sample it with diffusers."""
    import diffusers

    # set_alpha_to_one: Stable Diffusion's own setting leaves the first timestep's noise in the picture.
    config = {**STABLE_DIFFUSION, "clip_sample": False, "set_alpha_to_one": True, "steps_offset": 1}
    config |= {"use_karras_sigmas": True} if own_class == "DPMSolverMultistepScheduler" else {}
    config |= objective.scheduler_overrides({})
    scheduler = getattr(diffusers, config.pop("_class_name", own_class)).from_config(config)
    scheduler.set_timesteps(25)
    schedule = objective.noise_schedule(STABLE_DIFFUSION)

    def perfect(noisy: Tensor, timestep: Tensor) -> Tensor:
        """What the network should answer if LATENTS were all the data; the noise is what is left of the input."""
        t = timestep.long().clamp(max=999).expand(16)
        if objective.prediction_type == "flow":
            sigma = (t.float() + 0.5) / 1000  # the middle of what shares this timestep in training
            return (noisy - LATENTS) / sigma.view(-1, 1, 1, 1)
        if objective.prediction_type == "sample":
            return LATENTS
        signal, spread = schedule.sqrt_alphas_cumprod[t], schedule.sqrt_one_minus_alphas_cumprod[t]
        noise = (noisy - signal.view(-1, 1, 1, 1) * LATENTS) / spread.view(-1, 1, 1, 1)
        return noise if objective.prediction_type == "epsilon" else velocity(LATENTS, noise, t, schedule)

    # The stand-in is right: on what the objective prepares, it gives the target.
    batch = prepare(objective)
    error = (perfect(batch.noisy_latents, batch.timesteps) - batch.target).abs().flatten(1)
    allowed = 0.02 if objective.prediction_type == "flow" else 1e-3
    assert error.median() < allowed
    sample = draw(Purpose.SAMPLING_LATENTS, (4, 8, 8)) * scheduler.init_noise_sigma
    first = int(scheduler.timesteps[0])
    assert first == 999 or not (objective.rescale_betas_zero_snr or objective.prediction_type == "flow")
    for timestep in scheduler.timesteps:
        model_input = scheduler.scale_model_input(sample, timestep)
        sample = scheduler.step(perfect(model_input, timestep), timestep, sample).prev_sample
    torch.testing.assert_close(sample, LATENTS, atol=0.05, rtol=0)


def test_held_out_losses_are_measured_at_the_same_timesteps_whatever_the_run_trains_with() -> None:
    trained = [
        Objective(),
        Objective(weighting_scheme="logit_normal", logit_mean=1.0, logit_std=2.0, shift=2.0),
        Objective(weighting_scheme="mode", mode_scale=0.5, shift="dynamic"),
        Objective(weighting_scheme="sigma_sqrt"),
    ]
    for each in trained:
        held_out = each.resolve(FLOW_MATCH).held_out()
        assert held_out == Objective("flow", weighting_scheme="none", shift=1.0)
        batch = prepare(held_out, schedule=held_out.noise_schedule(FLOW_MATCH), min_timestep=500)
        expected = 500 + 500 * uniform(3, 1, INDEX, Purpose.TIMESTEP)
        torch.testing.assert_close(batch.timesteps, expected)
        assert torch.equal(batch.weights, torch.ones(16))
    weighted = Objective("v_prediction", snr_gamma=5.0, weighting_scheme="logit_normal", noise_offset=0.1)
    assert weighted.held_out() == Objective("v_prediction", weighting_scheme="none", noise_offset=0.1)


@pytest.mark.gpu
def test_prepare_on_a_gpu_does_not_wait_and_agrees_with_the_cpu() -> None:
    for objective in (
        Objective("epsilon", snr_gamma=5.0, noise_offset=0.1, input_perturbation=0.1),
        Objective("flow", weighting_scheme="logit_normal"),
        Objective("flow", weighting_scheme="mode", shift="dynamic"),
        Objective("flow", weighting_scheme="cosmap", shift=3.0),
    ):
        schedule = objective.noise_schedule(FLOW_MATCH if objective.shift else STABLE_DIFFUSION)
        options: dict[str, Any] = {"seed": 3, "epoch": 1, "image_tokens": 1024}
        expected = objective.prepare(LATENTS, index=INDEX, schedule=schedule, **options)
        latents, index, on_gpu = LATENTS.cuda(), INDEX.cuda(), schedule.to("cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = objective.prepare(latents, index=index, schedule=on_gpu, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(batch.timesteps.cpu(), expected.timesteps)
        torch.testing.assert_close(batch.noisy_latents.cpu(), expected.noisy_latents, atol=1e-6, rtol=0)
        torch.testing.assert_close(batch.weights.cpu(), expected.weights)
