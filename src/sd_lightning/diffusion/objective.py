"""The training objective: prediction type, distribution of timesteps and loss weights.

Field names are those of diffusers' training scripts. Notation: ``alphas_cumprod`` is the DDPM paper's alpha-bar; a
noisy latent is ``sqrt(alphas_cumprod) * latents + sqrt(1 - alphas_cumprod) * noise``. For flow matching it is
``(1 - sigma) * latents + sigma * noise``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.diffusion.prediction import PREDICTIONS, Prediction, Schedule, is_flow
from sd_lightning.diffusion.randomness import Purpose, normal, uniform

PredictionType = Literal["epsilon", "v_prediction", "sample", "flow"]
TimestepSampling = Literal["uniform", "logit_normal"]


def offset_noise(noise: Tensor, channel_noise: Tensor, strength: float) -> Tensor:
    """Shift each channel's mean (Guttenberg 2023, crosslabs.org, "Diffusion with Offset Noise").

    Args:
        noise: Standard normal, (B, C, H, W).
        channel_noise: Standard normal, (B, C).
        strength: diffusers' ``noise_offset``; 0.1 in the source.
    """
    return noise + strength * channel_noise.view(*channel_noise.shape, *[1] * (noise.dim() - 2))


def input_perturbation(noise: Tensor, extra_noise: Tensor, strength: float) -> Tensor:
    """Perturb the noise of the input, not of the target (Ning et al. 2023, 2301.11706, algorithm 1).

    Args:
        noise: Standard normal, (B, C, H, W).
        extra_noise: Standard normal, (B, C, H, W), independent of ``noise``.
        strength: The paper's gamma, 0.1 there.
    """
    return noise + strength * extra_noise


def logit_normal(normals: Tensor, mean: float, std: float) -> Tensor:
    """Return the sigmoid of a normal, in [0, 1] (Esser et al. 2024, SD3, 2403.03206, eq. 19).

    Args:
        normals: Standard normal draws (B,).
        mean: Location; below 0 favours little noise.
        std: Scale, above 0.

    Returns:
        float64 (B,): a sigmoid in float32 differs in the last bit between devices and batch
        sizes, and that bit can decide a timestep.
    """
    return torch.sigmoid(normals.double() * std + mean)


@dataclass(frozen=True)
class NoisyBatch:
    """Inputs and targets of the denoising network."""

    noisy_latents: Tensor
    """(B, C, H, W) in the dtype of the clean latents."""
    timesteps: Tensor
    """(B,): int64, or float32 if the network takes real numbers."""
    target: Tensor
    """float32 (B, C, H, W)."""
    weights: Tensor
    """float32 (B,), loss weight of each sample."""


@dataclass(frozen=True)
class Objective:
    """What the network predicts, how latents are noised and how the loss is weighted.

    Raises:
        UsageError: A value is out of range, or a combination has no meaning.
    """

    prediction_type: PredictionType | None = None
    """The target: the noise, the velocity, the clean latents, or the flow noise - latents; None
    for the model's own type, which :meth:`resolve` looks up."""
    snr_gamma: float | None = None
    """Min-SNR weighting with this gamma (the paper uses 5); None for equal weights."""
    noise_offset: float = 0.0
    """Strength of offset noise."""
    input_perturbation: float = 0.0
    """Strength of input perturbation."""
    rescale_betas_zero_snr: bool = False
    """Rescale the noise schedule to zero terminal SNR."""
    timestep_sampling: TimestepSampling = "uniform"
    """Distribution of the timesteps."""
    logit_mean: float = 0.0
    """Location of the logit-normal distribution."""
    logit_std: float = 1.0
    """Scale of the logit-normal distribution."""

    def __post_init__(self) -> None:
        """Check values and combinations."""
        types, samplings = get_args(PredictionType), get_args(TimestepSampling)
        of_choices = {"prediction_type": (*types, None), "timestep_sampling": samplings}
        for name, choices in of_choices.items():
            if getattr(self, name) not in choices:
                raise self._invalid(name, f"one of {', '.join(filter(None, choices))}", choices[0])
        for name in ("noise_offset", "input_perturbation"):
            if not 0 <= getattr(self, name) < math.inf:
                raise self._invalid(name, "a number >= 0", "0 (off) or 0.1")
        if self.snr_gamma is not None and not 0 < self.snr_gamma < math.inf:
            raise self._invalid("snr_gamma", "a number > 0 or null", "5")
        if not 0 < self.logit_std < math.inf:
            raise self._invalid("logit_std", "a number > 0", "1")
        if not math.isfinite(self.logit_mean):
            raise self._invalid("logit_mean", "a finite number", "0")
        if self.timestep_sampling == "uniform" and (self.logit_mean, self.logit_std) != (0.0, 1.0):
            raise UsageError(
                f"Objective got logit_mean={self.logit_mean}, logit_std={self.logit_std} with "
                "timestep_sampling=uniform, which does not use them. "
                "Set objective.timestep_sampling=logit_normal, or leave them at 0 and 1."
            )
        if self.prediction_type == "flow" and self.snr_gamma is not None:
            raise UsageError(
                f"Objective got snr_gamma={self.snr_gamma} with prediction_type=flow; min-SNR weights exist for "
                "epsilon, v_prediction and sample. Set objective.snr_gamma=null."
            )
        if self.rescale_betas_zero_snr and self.prediction_type in ("epsilon", "flow"):
            raise UsageError(
                f"Objective got rescale_betas_zero_snr=true with prediction_type={self.prediction_type}; expected "
                "v_prediction or sample: at zero SNR the noise says nothing about the image, and flow has no betas. "
                "Set objective.prediction_type=v_prediction, or objective.rescale_betas_zero_snr=false."
            )

    def _invalid(self, name: str, expected: str, example: str) -> UsageError:
        return UsageError(
            f"Objective got {name}={getattr(self, name)!r}; expected {expected}. Set objective.{name}={example}."
        )

    def resolve(self, scheduler_config: Mapping[str, Any]) -> Objective:
        """Return the objective with the model's own prediction type where none was chosen.

        Args:
            scheduler_config: The model's diffusers scheduler config.

        Raises:
            UsageError: If the model's prediction type is unknown or does not fit the other fields.
        """
        if self.prediction_type is not None:
            return self
        own: Any = "flow" if is_flow(scheduler_config) else scheduler_config.get("prediction_type", "epsilon")
        return replace(self, prediction_type=own)

    @property
    def prediction(self) -> Prediction:
        """The :class:`Prediction` of ``prediction_type``."""
        if self.prediction_type is None:
            raise ValueError("this Objective has no prediction_type; expected one from resolve(scheduler_config)")
        return PREDICTIONS[self.prediction_type]

    def noise_schedule(self, scheduler_config: Mapping[str, Any]) -> Schedule:
        """Make the schedule to train with.

        Args:
            scheduler_config: The model's diffusers scheduler config. A schedule that is already
                rescaled to zero terminal SNR stays so.

        Raises:
            UsageError: If the model's schedule cannot be trained with this prediction type.
        """
        rescaled = {"rescale_betas_zero_snr": True} if self.rescale_betas_zero_snr else {}
        return self.prediction.schedule({**scheduler_config, **rescaled})

    def prepare(
        self,
        latents: Tensor,
        *,
        seed: int,
        epoch: Tensor | int,
        index: Tensor,
        schedule: Schedule,
        min_timestep: int = 0,
    ) -> NoisyBatch:
        """Add noise to clean latents and compute the network's target.

        All random numbers depend on the sample: see :mod:`sd_lightning.diffusion.randomness`. The arithmetic is in
        float32 and elementwise, which autocast does not change.

        Args:
            latents: Clean, scaled latents (B, C, H, W), float.
            seed: Seed of the run.
            epoch: Epoch of each sample, int or (B,).
            index: Global sample index (B,).
            schedule: From :meth:`noise_schedule`, on the device of ``latents``.
            min_timestep: Timesteps are drawn from [min_timestep, T).

        Raises:
            UsageError: If ``min_timestep`` is not in [0, T).
            ValueError: If ``index`` does not name one sample per latent.
        """
        prediction = self.prediction
        num_timesteps = schedule.num_train_timesteps
        if not 0 <= min_timestep < num_timesteps:
            raise UsageError(
                f"Objective.prepare got min_timestep={min_timestep}; expected 0 <= min_timestep < {num_timesteps}, "
                "the model's num_train_timesteps."
            )
        if index.shape != latents.shape[:1]:
            raise ValueError(f"index has shape {tuple(index.shape)}; expected {tuple(latents.shape[:1])}")
        index = index.to(latents.device)
        clean = latents.float()
        noise, input_noise = self._noises(clean, seed, epoch, index)
        positions = self._positions(seed, epoch, index, num_timesteps, min_timestep)
        noisy_latents, timesteps = prediction.add_noise(clean, input_noise, positions, schedule)
        target = prediction.target(clean, noise, timesteps, schedule)
        if self.snr_gamma is None:
            weights = torch.ones_like(timesteps, dtype=torch.float32)
        else:
            weights = prediction.min_snr_weights(timesteps, self.snr_gamma, schedule)
        return NoisyBatch(noisy_latents.to(latents.dtype), timesteps, target, weights)

    def _noises(self, latents: Tensor, seed: int, epoch: Tensor | int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise of the target and the noise of the input, both (B, C, H, W)."""
        shape = tuple(latents.shape[1:])
        noise = normal(seed, epoch, index, Purpose.NOISE, shape)
        if self.noise_offset:
            channel_noise = normal(seed, epoch, index, Purpose.OFFSET_NOISE, shape[:1])
            noise = offset_noise(noise, channel_noise, self.noise_offset)
        if not self.input_perturbation:
            return noise, noise
        extra_noise = normal(seed, epoch, index, Purpose.INPUT_PERTURBATION, shape)
        return noise, input_perturbation(noise, extra_noise, self.input_perturbation)

    def _positions(
        self, seed: int, epoch: Tensor | int, index: Tensor, num_timesteps: int, min_timestep: int
    ) -> Tensor:
        """Draw each sample's position in time, a real number in [min_timestep, T], (B,)."""
        if self.timestep_sampling == "uniform":
            fractions = uniform(seed, epoch, index, Purpose.TIMESTEP)
        else:
            normals = normal(seed, epoch, index, Purpose.TIMESTEP)
            fractions = logit_normal(normals, self.logit_mean, self.logit_std)
        return fractions * (num_timesteps - min_timestep) + min_timestep

    def loss(self, prediction: Tensor, batch: NoisyBatch) -> Tensor:
        """Return the weighted mean squared error of each sample, float32 (B,).

        Args:
            prediction: The network's output (B, C, H, W), any float dtype.
            batch: From :meth:`prepare`.

        Raises:
            UsageError: If the network's output has another shape than its target.
        """
        if prediction.shape != batch.target.shape:
            raise UsageError(
                f"Objective.loss got a prediction of shape {tuple(prediction.shape)}; expected "
                f"{tuple(batch.target.shape)}. Use a network whose out_channels equals its in_channels."
            )
        error = F.mse_loss(prediction.float(), batch.target, reduction="none")
        return error.flatten(1).mean(dim=1) * batch.weights

    def scheduler_overrides(self, scheduler_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the required config entries of the exported sampling scheduler.

        If ``_class_name`` is among the keys, the scheduler must be of that diffusers class: not every scheduler can
        sample such a model (PNDM, the usual one of SD 1.5, supports neither sample prediction nor zero terminal SNR,
        and silently ignores the keys).

        Args:
            scheduler_config: The model's diffusers scheduler config.
        """
        return self.prediction.scheduler_overrides(scheduler_config, zero_snr=self.rescale_betas_zero_snr)
