"""Noise schedules, and prediction types: one class each, with its noising, target, loss weights and sampler config."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.flow_schedule import DynamicShift, FlowSchedule


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """The discrete variance-preserving schedule of DDPM, computed in float64, kept in float32.

    ``Objective.prepare`` reads the tables at the timesteps of a batch: move them to the device once with
    :meth:`to`, not in every step.
    """

    alphas_cumprod: Tensor
    """(T,) share of the signal's variance, decreasing with the timestep."""
    sqrt_alphas_cumprod: Tensor
    """(T,) factor of the clean latents."""
    sqrt_one_minus_alphas_cumprod: Tensor
    """(T,) factor of the noise."""
    snr: Tensor
    """(T,) signal-to-noise ratio alphas_cumprod / (1 - alphas_cumprod)."""

    @property
    def num_train_timesteps(self) -> int:
        """The number of timesteps T."""
        return len(self.alphas_cumprod)

    @classmethod
    def from_alphas_cumprod(cls, alphas_cumprod: Tensor) -> NoiseSchedule:
        """Make the tables from float64 ``alphas_cumprod`` (T,)."""
        noise_variance = 1.0 - alphas_cumprod
        return cls(
            alphas_cumprod=alphas_cumprod.float(),
            sqrt_alphas_cumprod=alphas_cumprod.sqrt().float(),
            sqrt_one_minus_alphas_cumprod=noise_variance.sqrt().float(),
            snr=(alphas_cumprod / noise_variance).float(),
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> NoiseSchedule:
        """Make the noise schedule of a diffusers scheduler config.

        Args:
            config: A diffusers scheduler config; keys that are missing have the defaults of
                ``diffusers.DDPMScheduler``, keys that do not shape the schedule are ignored.

        Raises:
            UsageError: If the config names a beta schedule that is not known here.
        """
        alphas_cumprod = torch.cumprod(1.0 - _betas(config), dim=0)
        if config.get("rescale_betas_zero_snr"):
            alphas_cumprod = rescale_zero_terminal_snr(alphas_cumprod)
        return cls.from_alphas_cumprod(alphas_cumprod)

    def to(self, device: torch.device | str) -> NoiseSchedule:
        """Return the schedule with its tables on ``device``."""
        return NoiseSchedule(*(getattr(self, table.name).to(device) for table in fields(self)))


def _betas(config: Mapping[str, Any]) -> Tensor:
    """Return float64 betas (T,) of a diffusers scheduler config."""
    trained_betas = config.get("trained_betas")
    if trained_betas is not None:
        return torch.as_tensor(trained_betas, dtype=torch.float64)
    num_train_timesteps = int(config.get("num_train_timesteps", 1000))
    beta_start = float(config.get("beta_start", 0.0001))
    beta_end = float(config.get("beta_end", 0.02))
    beta_schedule = config.get("beta_schedule", "linear")
    if beta_schedule == "linear":
        return torch.linspace(beta_start, beta_end, num_train_timesteps, dtype=torch.float64)
    if beta_schedule == "scaled_linear":
        ends = (beta_start**0.5, beta_end**0.5)
        return torch.linspace(*ends, num_train_timesteps, dtype=torch.float64) ** 2
    if beta_schedule == "squaredcos_cap_v2":
        return _cosine_betas(num_train_timesteps)
    raise UsageError(
        f"NoiseSchedule got beta_schedule={beta_schedule!r}; expected one of linear, scaled_linear, "
        "squaredcos_cap_v2, or trained_betas. Change the model's scheduler config."
    )


def _cosine_betas(num_train_timesteps: int) -> Tensor:
    """Return the betas of the cosine schedule, capped at 0.999 (Nichol & Dhariwal 2021, 2102.09672, eq. 17)."""
    time = torch.arange(num_train_timesteps + 1, dtype=torch.float64) / num_train_timesteps
    alphas_cumprod = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1.0 - alphas_cumprod[1:] / alphas_cumprod[:-1]).clamp(max=0.999)


def rescale_zero_terminal_snr(alphas_cumprod: Tensor) -> Tensor:
    """Shift and scale so that the last SNR is zero (Lin et al. 2023, 2305.08891, algorithm 1).

    Args:
        alphas_cumprod: (T,), float64 for accuracy.

    Returns:
        (T,), the first value unchanged, the last exactly zero.
    """
    roots = alphas_cumprod.sqrt()
    first, last = roots[0], roots[-1]
    return ((roots - last) * (first / (first - last))) ** 2


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """View (B,) as (B, 1, ..., 1) to multiply a tensor (B, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def add_noise(latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Sample q(x_t | x_0) with the given noise (Ho et al. 2020, 2006.11239, eq. 4).

    Args:
        latents: Clean latents (B, C, H, W).
        noise: Standard normal, (B, C, H, W).
        timesteps: int64 (B,) in [0, T).
        schedule: With its tables on the device of ``timesteps``.
    """
    signal = _per_sample(schedule.sqrt_alphas_cumprod[timesteps], latents)
    return signal * latents + _per_sample(schedule.sqrt_one_minus_alphas_cumprod[timesteps], latents) * noise


def velocity(latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: NoiseSchedule) -> Tensor:
    """Return v = alpha * noise - sigma * latents (Salimans & Ho 2022, 2202.00512, section 4).

    Args:
        latents: Clean latents (B, C, H, W).
        noise: Standard normal, (B, C, H, W).
        timesteps: int64 (B,) in [0, T).
        schedule: With its tables on the device of ``timesteps``.
    """
    signal = _per_sample(schedule.sqrt_alphas_cumprod[timesteps], latents)
    return signal * noise - _per_sample(schedule.sqrt_one_minus_alphas_cumprod[timesteps], latents) * latents


def flow_interpolate(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Interpolate latents and noise (Liu et al. 2022, 2209.03003, eq. 1; direction of SD3, 2403.03206, eq. 13).

    Args:
        latents: Clean latents (B, C, H, W).
        noise: Standard normal, (B, C, H, W).
        sigmas: (B,) in [0, 1]; 1 is pure noise.
    """
    sigmas = _per_sample(sigmas, latents)
    return (1.0 - sigmas) * latents + sigmas * noise


Schedule = NoiseSchedule | FlowSchedule


class Prediction(ABC):
    """Base class of prediction types; instances have no state."""

    name: ClassVar[str]

    @abstractmethod
    def schedule(self, scheduler_config: Mapping[str, Any]) -> Schedule:
        """Make the schedule to train with.

        Raises:
            UsageError: The model's schedule cannot be trained with this prediction.
        """

    @abstractmethod
    def add_noise(self, latents: Tensor, noise: Tensor, positions: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
        """Return noisy latents (B, C, H, W) and the network's timesteps (B,).

        Args:
            latents: Clean latents (B, C, H, W), float32.
            noise: Standard normal, (B, C, H, W).
            positions: (B,) in [0, T], float32 or float64.
            schedule: From :meth:`schedule`.
        """

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: Schedule) -> Tensor:
        """Return the network's target (B, C, H, W)."""

    def min_snr_weights(self, timesteps: Tensor, gamma: float, schedule: Schedule) -> Tensor:
        """Return the min-SNR loss weights (B,) (Hang et al. 2023, 2303.09556, section 3.4).

        The weight of a loss on the latents is min(SNR, gamma). For noise or velocity prediction, it is divided by SNR
        or by SNR + 1 (section 4.2; diffusers' ``train_text_to_image.py``). Flow has none, which ``Objective`` refuses.
        """
        raise NotImplementedError

    @abstractmethod
    def scheduler_overrides(self, scheduler_config: Mapping[str, Any], *, zero_snr: bool) -> dict[str, Any]:
        """Return the sampling scheduler's required config entries; see :meth:`Objective.scheduler_overrides`."""


class _Diffusion(Prediction):
    """Base class of DDPM's prediction types, which use integer timesteps."""

    def schedule(self, scheduler_config: Mapping[str, Any]) -> NoiseSchedule:
        if is_flow(scheduler_config):
            raise UsageError(
                f"Objective got prediction_type={self.name} for a flow-matching model (scheduler "
                f"{scheduler_config.get('_class_name', 'with use_flow_sigmas')}); expected flow. Set objective=flow."
            )
        return NoiseSchedule.from_config(scheduler_config)

    def add_noise(self, latents: Tensor, noise: Tensor, positions: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
        assert isinstance(schedule, NoiseSchedule)
        timesteps = positions.long().clamp_(max=schedule.num_train_timesteps - 1)  # rounding can reach T itself
        return add_noise(latents, noise, timesteps, schedule), timesteps

    def min_snr_weights(self, timesteps: Tensor, gamma: float, schedule: Schedule) -> Tensor:
        assert isinstance(schedule, NoiseSchedule)
        snr = schedule.snr[timesteps]
        return self._of_prediction(snr.clamp(max=gamma), snr)

    @abstractmethod
    def _of_prediction(self, weights: Tensor, snr: Tensor) -> Tensor:
        """Convert weights of a loss on the latents to weights of a loss on the prediction."""

    def scheduler_overrides(self, scheduler_config: Mapping[str, Any], *, zero_snr: bool) -> dict[str, Any]:
        overrides: dict[str, Any] = {"prediction_type": self.name}
        if zero_snr:  # leading spacing would never visit the last timestep, which has zero SNR
            overrides |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
            overrides["_class_name"] = "DPMSolverMultistepScheduler"
        return overrides


class Epsilon(_Diffusion):
    """Noise prediction (Ho et al. 2020, 2006.11239)."""

    name = "epsilon"

    def schedule(self, scheduler_config: Mapping[str, Any]) -> NoiseSchedule:
        schedule = super().schedule(scheduler_config)
        if float(schedule.alphas_cumprod[-1]) <= 0:
            raise UsageError(
                "Objective got prediction_type=epsilon for a model whose noise schedule ends at zero SNR, where the "
                "noise says nothing about the image. Set objective=v_prediction."
            )
        return schedule

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: Schedule) -> Tensor:
        return noise

    def _of_prediction(self, weights: Tensor, snr: Tensor) -> Tensor:
        return weights / snr


class Velocity(_Diffusion):
    """Velocity prediction: alpha * noise - sigma * latents (Salimans & Ho 2022, 2202.00512)."""

    name = "v_prediction"

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: Schedule) -> Tensor:
        assert isinstance(schedule, NoiseSchedule)
        return velocity(latents, noise, timesteps, schedule)

    def _of_prediction(self, weights: Tensor, snr: Tensor) -> Tensor:
        return weights / (snr + 1.0)


class SamplePrediction(_Diffusion):
    """Prediction of the clean latents."""

    name = "sample"

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: Schedule) -> Tensor:
        return latents

    def _of_prediction(self, weights: Tensor, snr: Tensor) -> Tensor:
        return weights

    def scheduler_overrides(self, scheduler_config: Mapping[str, Any], *, zero_snr: bool) -> dict[str, Any]:
        # PNDM, the usual scheduler of SD 1.5, would ignore the key.
        overrides = super().scheduler_overrides(scheduler_config, zero_snr=zero_snr)
        return overrides | {"_class_name": "DPMSolverMultistepScheduler"}


class Flow(Prediction):
    """Flow prediction: the velocity of a straight path, noise - latents (Liu et al. 2022, 2209.03003, eq. 1)."""

    name = "flow"

    def schedule(self, scheduler_config: Mapping[str, Any]) -> FlowSchedule:
        own = is_flow_matching(scheduler_config)
        shift: float | DynamicShift = float(scheduler_config.get("shift" if own else "flow_shift", 1.0))
        if own and scheduler_config.get("use_dynamic_shifting"):
            shift = DynamicShift.from_config(scheduler_config)
        return FlowSchedule(int(scheduler_config.get("num_train_timesteps", 1000)), shift, whole_timesteps=not own)

    def add_noise(self, latents: Tensor, noise: Tensor, positions: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
        assert isinstance(schedule, FlowSchedule)
        sigmas = positions / schedule.num_train_timesteps
        if schedule.whole_timesteps:
            timesteps = positions.long().clamp_(max=schedule.num_train_timesteps - 1)
        else:
            timesteps = positions.float()
        return flow_interpolate(latents, noise, sigmas.float()), timesteps

    def target(self, latents: Tensor, noise: Tensor, timesteps: Tensor, schedule: Schedule) -> Tensor:
        return noise - latents

    def scheduler_overrides(self, scheduler_config: Mapping[str, Any], *, zero_snr: bool) -> dict[str, Any]:
        if is_flow_matching(scheduler_config):
            return {}
        return {
            "_class_name": "DPMSolverMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": scheduler_config.get("flow_shift", 1.0),
            "final_sigmas_type": "zero",
            # The model's scheduler may have set one of these, which would take precedence.
            **dict.fromkeys(
                ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas"), False
            ),
        }


PREDICTIONS: dict[str, Prediction] = {each.name: each for each in (Epsilon(), Velocity(), SamplePrediction(), Flow())}


def is_flow_matching(scheduler_config: Mapping[str, Any]) -> bool:
    """Return whether a diffusers scheduler config belongs to a flow-matching scheduler."""
    return str(scheduler_config.get("_class_name", "")).startswith("FlowMatch")


def is_flow(scheduler_config: Mapping[str, Any]) -> bool:
    """Return whether the model behind a diffusers scheduler config was trained by flow matching."""
    return bool(
        is_flow_matching(scheduler_config)
        or scheduler_config.get("use_flow_sigmas")
        or scheduler_config.get("prediction_type") == "flow_prediction"
    )
