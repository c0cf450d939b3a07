"""The discrete noise schedule of DDPM, made from a diffusers scheduler config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError


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
