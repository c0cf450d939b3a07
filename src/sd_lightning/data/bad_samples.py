"""The samples that cannot be used: each is named once, and too many of them stop the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch.distributed as dist

from sd_lightning._errors import UsageError

log = logging.getLogger(__name__)

_NAMED = 20
"""Bad samples that warnings and errors name."""


class BadSamples:
    """The samples that cannot be used.

    Attributes:
        found: Their names, and why.
        limit: So many are tolerated.
    """

    def __init__(self, max_fraction: float, num_samples: int) -> None:
        """Start without any.

        Args:
            max_fraction: Fraction of the samples that may be bad.
            num_samples: All samples, usable or not.
        """
        self.found: dict[str, str] = {}
        self.max_fraction = max_fraction
        self.limit = int(max_fraction * num_samples)

    def count(self, bad: Mapping[str, str]) -> None:
        """Add bad samples; warn of each once, the first twenty by name.

        Raises:
            UsageError: They are too many.
        """
        for name, reason in bad.items():
            if name in self.found:
                continue
            self.found[name] = reason
            if len(self.found) <= _NAMED:
                log.warning("data: %s is left out: %s", name, reason)
            elif len(self.found) == _NAMED + 1:
                log.warning("data: more than %d samples are left out; further ones are only counted", _NAMED)
        self.check()

    def gather(self) -> None:
        """Add the bad samples of all ranks; a collective call."""
        if dist.is_available() and dist.is_initialized():
            parts = [self.found] * dist.get_world_size()
            dist.all_gather_object(parts, self.found)
            for part in parts:
                self.found |= part

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
        if len(self.found) > self.limit:
            raise UsageError(
                f"data: {len(self.found)} samples cannot be used, more than data.max_bad_fraction={self.max_fraction} "
                f"allows ({self.limit}): {self.listed()}; mend or remove them, or raise data.max_bad_fraction"
            )

    def listed(self) -> str:
        """Return the first twenty with their reasons, for a message."""
        shown = [f"{name} ({reason})" for name, reason in list(self.found.items())[:_NAMED]]
        more = len(self.found) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")
