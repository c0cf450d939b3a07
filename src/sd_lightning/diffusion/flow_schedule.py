"""Noise levels of flow matching, and their shift for larger pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError


def shifted(sigmas: Tensor, shift: float) -> Tensor:
    """Shift noise levels (B,) in [0, 1] for larger latents (Esser et al. 2024, SD3, 2403.03206, eq. 23)."""
    return shift * sigmas / (1.0 + (shift - 1.0) * sigmas)


_FLOW_MATCH_EULER = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
"""Defaults of diffusers' FlowMatchEulerDiscreteScheduler, which every flow-matching pipeline of diffusers uses."""


@dataclass(frozen=True)
class DynamicShift:
    """Shift that grows with the number of image tokens: larger pictures need more noise (SD3, 2403.03206, 5.3.2).

    Its mu is linear in the number of tokens, as in ``calculate_shift`` of diffusers' pipelines. The sampler's
    ``shift_terminal`` moves its last step, and is no part of training.
    """

    base_shift: float
    """mu at ``base_image_seq_len`` tokens."""
    max_shift: float
    """mu at ``max_image_seq_len`` tokens."""
    base_image_seq_len: int
    max_image_seq_len: int
    time_shift_type: str = "exponential"
    """Whether the shift is exp(mu) ("exponential"), or mu itself ("linear")."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DynamicShift:
        """Read the shift from a diffusers scheduler config.

        Args:
            config: A diffusers scheduler config. Where it has ``use_dynamic_shifting``, keys that are missing have the
                defaults of ``diffusers.FlowMatchEulerDiscreteScheduler``.

        Raises:
            UsageError: A number is missing, or the numbers do not fit.
        """
        given = {name: config[name] for name in _FLOW_MATCH_EULER if config.get(name) is not None}
        numbers = {**_FLOW_MATCH_EULER, **given} if config.get("use_dynamic_shifting") else given
        scheduler = config.get("_class_name", "without a _class_name")
        lacking = [name for name in _FLOW_MATCH_EULER if name not in numbers]
        if lacking:
            raise UsageError(
                f"Objective got shift=dynamic for a model whose scheduler ({scheduler}) has no {', '.join(lacking)}; "
                "expected a scheduler that knows them. Set objective.shift=null, or a number such as 3."
            )
        made = cls(**numbers, time_shift_type=config.get("time_shift_type", "exponential"))
        known = made.time_shift_type in ("exponential", "linear")
        if made.base_image_seq_len >= made.max_image_seq_len or not known:
            raise UsageError(
                f"Objective got {made} from the model's scheduler ({scheduler}); expected base_image_seq_len < "
                "max_image_seq_len, and time_shift_type exponential or linear. Change the model's scheduler config, or "
                "set objective.shift to a number such as 3."
            )
        return made

    def at(self, image_tokens: int) -> float:
        """Return the shift for latents of that many image tokens.

        Raises:
            UsageError: It is not above 0, where the linear shift is extended too far.
        """
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        mu = self.base_shift + slope * (image_tokens - self.base_image_seq_len)
        shift = math.exp(mu) if self.time_shift_type == "exponential" else mu
        if shift <= 0:
            raise UsageError(
                f"Objective got a dynamic shift of {shift:.3g} for {image_tokens} image tokens from {self}; expected "
                "one above 0. Train at a larger resolution, or set objective.shift to a number such as 1."
            )
        return shift


@dataclass(frozen=True)
class FlowSchedule:
    """Linear noise levels of flow matching."""

    num_train_timesteps: int
    """T, the timestep of noise level 1."""
    shift: float | DynamicShift = 1.0
    """Shift of the noise levels that are drawn: one number, or one for each number of image tokens."""
    whole_timesteps: bool = True
    """Whether timesteps are sigma * T rounded down to integers, as in diffusers' DPMSolverMultistepScheduler;
    its flow-matching schedulers use sigma * T itself."""

    def to(self, device: torch.device | str) -> FlowSchedule:
        return self

    def shifted(self, sigmas: Tensor, image_tokens: int | None) -> Tensor:
        """Shift noise levels (B,) in [0, 1]; ``image_tokens`` is that of each sample, for a dynamic shift."""
        shift = self.shift
        if isinstance(shift, DynamicShift):
            if image_tokens is None:
                raise ValueError("this FlowSchedule has a dynamic shift; expected the number of image_tokens")
            shift = shift.at(image_tokens)
        return sigmas if shift == 1.0 else shifted(sigmas.double(), shift)
