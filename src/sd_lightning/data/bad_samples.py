"""The samples that cannot be used: each is named once, and too many of them stop the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch.distributed as dist

from sd_lightning._errors import UsageError

log = logging.getLogger(__name__)

_NAMED = 20
"""Bad samples that warnings and errors name."""


class BadSamples(dict[str, str]):
    """Names of samples that cannot be used, and why.

    Attributes:
        limit: So many are tolerated.
    """

    def __init__(self, max_fraction: float, num_samples: int) -> None:
        """Tolerate none yet.

        Args:
            max_fraction: Fraction of the samples that may be bad.
            num_samples: All samples, usable or not.
        """
        super().__init__()
        self.max_fraction = max_fraction
        self.limit = int(max_fraction * num_samples)

    def count(self, bad: Mapping[str, str]) -> None:
        """Add bad samples; warn of each once, the first twenty by name.

        Raises:
            UsageError: They are too many.
        """
        for name, reason in bad.items():
            if name in self:
                continue
            self[name] = reason
            if len(self) <= _NAMED:
                log.warning("data: %s is left out: %s", name, reason)
            elif len(self) == _NAMED + 1:
                log.warning("data: more than %d samples are left out; further ones are only counted", _NAMED)
        self.check()

    def gather(self) -> None:
        """Add the bad samples of all ranks; a collective call."""
        if dist.is_available() and dist.is_initialized():
            parts = [dict(self)] * dist.get_world_size()
            dist.all_gather_object(parts, dict(self))
            for part in parts:
                self |= part

    def check_all_ranks(self) -> None:
        """Stop all ranks when what each of them tolerates is too much together; a collective call.

        Raises:
            UsageError: They are more than ``limit``.
        """
        self.gather()
        self.check()

    def check(self) -> None:
        """Refuse too many.

        Raises:
            UsageError: They are more than ``limit``.
        """
        if len(self) > self.limit:
            raise UsageError(
                f"data: {len(self)} samples cannot be used, more than data.max_bad_fraction={self.max_fraction} allows "
                f"({self.limit}): {self.listed()}; mend or remove them, or raise data.max_bad_fraction"
            )

    def listed(self) -> str:
        """Return the first twenty with their reasons, for a message."""
        shown = [f"{name} ({reason})" for name, reason in list(self.items())[:_NAMED]]
        more = len(self) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")
