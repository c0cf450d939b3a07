"""Dynamic loss scaling for float16."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Optimizer steps left out because of an overflow."""

    def overflowed(self) -> None:
        """Note that gradients were not finite."""
        self.value *= self.backoff_factor
        self.good_steps = 0
        self.skipped += 1

    def succeeded(self) -> None:
        """Note a step with finite gradients."""
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= self.growth_factor
            self.good_steps = 0
