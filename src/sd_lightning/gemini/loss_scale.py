"""The loss scale of float16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LossScale:
    """A factor on the loss that keeps small float16 gradients above zero (Micikevicius et al. 2018, section 3.2).

    The defaults are those of ``torch.amp.GradScaler``. The numbers live on the device, so that a step need not wait for
    them; reading one waits.

    Args:
        device: Of the chunks.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.growth_factor = 2.0
        self.backoff_factor = 0.5
        self.growth_interval = 2000
        """Steps without overflow after which the scale grows."""
        self._value = torch.full((), 2.0**16, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), device=device)
        self._begin()

    def _begin(self) -> None:
        self.used = self._value.clone()
        """The scale of the current gradients: several optimizers may step after one backward pass."""
        self._good_steps_before = self._good_steps.clone()
        self._found_inf = torch.zeros_like(self._value)
        """1 if one of these optimizers overflowed; the scale changes once for all of them."""

    @property
    def value(self) -> float:
        """The scale of the next loss."""
        return float(self._value)

    @value.setter
    def value(self, value: float) -> None:
        self._value.fill_(value)

    @property
    def good_steps(self) -> int:
        """Steps since the last change."""
        return int(self._good_steps)

    @property
    def skipped(self) -> int:
        """Optimizer steps skipped because of an overflow."""
        return int(self._skipped)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for backward."""
        self._begin()
        return loss * self.used

    def update(self, found_inf: Tensor) -> None:
        """Note an optimizer's step, and whether its gradients were not finite: 1 or 0."""
        found_inf = found_inf.to(self._value.device)
        self._skipped += found_inf
        self._found_inf = torch.maximum(self._found_inf, found_inf)
        self._value.copy_(self.used)
        self._good_steps.copy_(self._good_steps_before)
        torch._amp_update_scale_(
            self._value,
            self._good_steps,
            self._found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )

    def state_dict(self) -> dict[str, float]:
        """Return the scale and its settings as plain numbers."""
        names = ("value", "growth_factor", "backoff_factor", "growth_interval", "good_steps", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load what :meth:`state_dict` returned, of this or an earlier release."""
        for name in ("growth_factor", "backoff_factor", "growth_interval", "value"):
            setattr(self, name, state.get(name, getattr(self, name)))
        self._good_steps.fill_(min(int(state.get("good_steps", 0)), self.growth_interval - 1))
        self._skipped.fill_(int(state.get("skipped", 0)))
