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
from sd_lightning.diffusion.flow_schedule import DynamicShift, FlowSchedule
from sd_lightning.diffusion.prediction import PREDICTIONS, Prediction, Schedule, is_flow
from sd_lightning.diffusion.randomness import Purpose, normal, uniform

PredictionType = Literal["epsilon", "v_prediction", "sample", "flow"]
WeightingScheme = Literal["none", "logit_normal", "mode", "sigma_sqrt", "cosmap"]
_SCHEME_FIELDS = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
"""Field -> the weighting scheme that uses it."""
_WEIGHED = ("sigma_sqrt", "cosmap")
"""Schemes that weigh the loss, of uniform timesteps."""
_LARGEST_MODE_SCALE = 2 / (math.pi - 2)
"""Above it, :func:`mode` is no longer monotonic (Esser et al. 2024, SD3, 2403.03206, 3.1)."""


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


def mode(uniforms: Tensor, scale: float) -> Tensor:
    """Turn uniform numbers into noise levels with a mode in the middle (Esser et al. 2024, SD3, 2403.03206, eq. 20).

    Args:
        uniforms: In [0, 1), (B,).
        scale: In [-1, 2 / (pi - 2)], where the function is monotonic; above 0 favours the middle, below 0 the ends.

    Returns:
        float64 (B,) in [0, 1], as :func:`logit_normal`.
    """
    u = uniforms.double()
    return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)


def scheme_weights(scheme: WeightingScheme, sigmas: Tensor) -> Tensor:
    """Return the loss weights of diffusers' ``compute_loss_weighting_for_sd3`` (Esser et al. 2024, 2403.03206, 3.1).

    Args:
        scheme: "sigma_sqrt" and "cosmap" weigh; the others do not.
        sigmas: Noise levels (B,) above 0.

    Returns:
        float32 (B,).
    """
    if scheme == "sigma_sqrt":
        return (sigmas**-2.0).float()
    if scheme == "cosmap":
        return (2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))).float()
    return torch.ones_like(sigmas, dtype=torch.float32)


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
    weighting_scheme: WeightingScheme | None = None
    """Timestep distribution: "logit_normal", "mode", or uniform ("none"); uniform with loss weights by noise level
    ("sigma_sqrt", "cosmap", for flow). None for "logit_normal" with flow, as Stable Diffusion 3 was trained
    (2403.03206, 3.1), and "none" otherwise."""
    logit_mean: float = 0.0
    """Location of the logit-normal distribution, as in the SD3 paper: below 0 favours little noise. diffusers' scripts
    look their numbers up in a table of falling timesteps, so that their mean has the other sign."""
    logit_std: float = 1.0
    """Scale of the logit-normal distribution."""
    mode_scale: float = 1.29
    """Scale of the distribution "mode"."""
    shift: float | Literal["dynamic"] | None = None
    """Shift of the noise levels of flow: a number (1 is none, which is how diffusers' scripts train models with a
    dynamic shift), "dynamic" for the shift of the model's scheduler by the number of image tokens, or None for what the
    scheduler says."""
    guidance_scale: float | None = None
    """Guidance that the network is told in training, if that is one of its inputs, as of FLUX.1-dev; None for 1, which
    is none. diffusers' scripts have 3.5, NeMo has 1, and sd-scripts recommends 1. Drawing has one of its own."""

    def __post_init__(self) -> None:
        """Check values and combinations."""
        for name, kind in (("prediction_type", PredictionType), ("weighting_scheme", WeightingScheme)):
            choices = get_args(kind)
            if getattr(self, name) not in (*choices, None):
                raise self._invalid(name, f"one of {', '.join(choices)}", choices[0])
        for name, example in (("noise_offset", 0.1), ("input_perturbation", 0.1), ("guidance_scale", 1)):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise self._invalid(name, "a number >= 0", f"{example}")
        if self.snr_gamma is not None and not 0 < self.snr_gamma < math.inf:
            raise self._invalid("snr_gamma", "a number > 0 or null", "5")
        self._check_distribution()
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

    def _check_distribution(self) -> None:
        """Check what says which timesteps are drawn, and how noise levels are weighed."""
        if not 0 < self.logit_std < math.inf:
            raise self._invalid("logit_std", "a number > 0", "1")
        if not math.isfinite(self.logit_mean):
            raise self._invalid("logit_mean", "a finite number", "0")
        if not -1 <= self.mode_scale <= _LARGEST_MODE_SCALE:
            raise self._invalid("mode_scale", f"a number in [-1, {_LARGEST_MODE_SCALE:.4f}]", "1.29")
        shift = None if isinstance(self.shift, bool) else self.shift
        is_positive = isinstance(shift, int | float) and 0 < shift < math.inf
        if self.shift not in (None, "dynamic") and not is_positive:
            raise self._invalid("shift", "a number > 0, dynamic, or null", "null")
        possible = {self.scheme}
        if self.prediction_type is None and self.weighting_scheme is None:
            possible.add("logit_normal")  # resolve() may find that the model is one of flow
        for name, scheme in _SCHEME_FIELDS.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default and scheme not in possible:
                raise UsageError(
                    f"Objective got {name}={value} with weighting_scheme={self.scheme}, which does not use it. "
                    f"Set objective.weighting_scheme={scheme}, or objective.{name}={default}."
                )
        of_flow = {"shift": self.shift, "weighting_scheme": self.scheme if self.scheme in _WEIGHED else None}
        for name, value in of_flow.items():
            if value is not None and self.prediction_type not in (None, "flow"):
                raise UsageError(
                    f"Objective got {name}={value} with prediction_type={self.prediction_type}; expected flow, whose "
                    f"noise levels it is for. Set objective.{name}=null, or train with objective=flow."
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

    def held_out(self) -> Objective:
        """Return the objective that held-out losses are measured with: uniform timesteps, not shifted, equal weights.

        They do not depend on the timestep distribution and the weights of the run, so that runs with different ones
        are comparable.
        """
        unshifted = 1.0 if self.prediction_type == "flow" else None
        defaults: dict[str, Any] = {name: type(self).__dataclass_fields__[name].default for name in _SCHEME_FIELDS}
        return replace(self, weighting_scheme="none", shift=unshifted, snr_gamma=None, **defaults)

    @property
    def scheme(self) -> WeightingScheme:
        """The timestep distribution: ``weighting_scheme``, or the default of the prediction type."""
        return self.weighting_scheme or ("logit_normal" if self.prediction_type == "flow" else "none")

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
        schedule = self.prediction.schedule({**scheduler_config, **rescaled})
        if self.shift is None:
            return schedule
        assert isinstance(schedule, FlowSchedule)
        return replace(
            schedule, shift=DynamicShift.from_config(scheduler_config) if self.shift == "dynamic" else self.shift
        )

    def prepare(
        self,
        latents: Tensor,
        *,
        seed: int,
        epoch: Tensor | int,
        index: Tensor,
        schedule: Schedule,
        min_timestep: int = 0,
        image_tokens: int | None = None,
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
            image_tokens: Number of tokens that the network makes of one sample's latents, for a dynamic shift.

        Raises:
            UsageError: If ``min_timestep`` is not in [0, T).
            ValueError: If ``index`` does not name one sample per latent, or a dynamic shift has no ``image_tokens``.
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
        fractions = self._fractions(seed, epoch, index)
        if isinstance(schedule, FlowSchedule):
            fractions = schedule.shifted(fractions, image_tokens)
        positions = fractions * (num_timesteps - min_timestep) + min_timestep
        noisy_latents, timesteps = prediction.add_noise(clean, input_noise, positions, schedule)
        target = prediction.target(clean, noise, timesteps, schedule)
        if self.snr_gamma is None:
            # diffusers' lowest level of T is 1 / T; weights of levels below it would grow without bound.
            weights = scheme_weights(self.scheme, positions.clamp(min=1.0) / num_timesteps)
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

    def _fractions(self, seed: int, epoch: Tensor | int, index: Tensor) -> Tensor:
        """Draw each sample's share of the schedule in [0, 1], from little to much noise, (B,)."""
        if self.scheme == "logit_normal":
            return logit_normal(normal(seed, epoch, index, Purpose.TIMESTEP), self.logit_mean, self.logit_std)
        uniforms = uniform(seed, epoch, index, Purpose.TIMESTEP)
        return mode(uniforms, self.mode_scale) if self.scheme == "mode" else uniforms

    def loss(self, prediction: Tensor, batch: NoisyBatch, mask: Tensor | None = None) -> Tensor:
        """Return the weighted mean squared error of each sample, float32 (B,).

        Args:
            prediction: The network's output (B, C, H, W), any float dtype.
            batch: From :meth:`prepare`.
            mask: Weights (B, 1, H, W) of a sample's mean, at least 0; a sample without any has no loss.

        Raises:
            UsageError: If the network's output has another shape than its target.
        """
        if prediction.shape != batch.target.shape:
            raise UsageError(
                f"Objective.loss got a prediction of shape {tuple(prediction.shape)}; expected "
                f"{tuple(batch.target.shape)}. Use a network whose out_channels equals its in_channels."
            )
        error = F.mse_loss(prediction.float(), batch.target, reduction="none")
        if mask is None:
            return error.flatten(1).mean(dim=1) * batch.weights
        mask = mask.to(error.dtype)  # strategies cast batches: bf16 would round the sum
        total = mask.flatten(1).sum(dim=1).clamp(min=torch.finfo(mask.dtype).tiny)
        return (error.mean(dim=1, keepdim=True) * mask).flatten(1).sum(dim=1) / total * batch.weights

    def scheduler_overrides(self, scheduler_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the required config entries of the exported sampling scheduler.

        If ``_class_name`` is among the keys, the scheduler must be of that diffusers class: not every scheduler can
        sample such a model (PNDM, the usual one of SD 1.5, supports neither sample prediction nor zero terminal SNR,
        and silently ignores the keys).

        Args:
            scheduler_config: The model's diffusers scheduler config.
        """
        return self.prediction.scheduler_overrides(scheduler_config, zero_snr=self.rescale_betas_zero_snr)
