"""Dynamic loss scaling for float16."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LossScale:
    """A factor on the loss that keeps small float16 gradients above zero (Micikevicius et al. 2018, section 3.2).

    The defaults are those of ``torch.amp.GradScaler``.
    """

    value: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps without overflow after which the scale grows."""
    good_steps: int = 0
    """Steps since the last change."""
    skipped: int = 0
    """Optimizer steps skipped because of an overflow."""
    used: float = 2.0**16
    """The scale of the current gradients: several optimizers may step after one backward pass."""
    has_succeeded: bool = False
    has_overflowed: bool = False
    """Whether one of these optimizers overflowed; the scale changes once for all of them."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for backward."""
        self.used, self.has_succeeded, self.has_overflowed = self.value, False, False
        return loss * self.value

    def overflowed(self) -> None:
        """Note that an optimizer's gradients were not finite."""
        self.skipped += 1
        if self.has_overflowed:
            return
        self.has_overflowed = True
        self.value = self.used * self.backoff_factor
        self.good_steps = 0

    def succeeded(self) -> None:
        """Note an optimizer's step with finite gradients."""
        if self.has_succeeded or self.has_overflowed:
            return
        self.has_succeeded = True
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0
