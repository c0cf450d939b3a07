"""Bad (unusable) samples: each is logged once, and too many stop the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from sd_lightning._errors import UsageError
from sd_lightning.data.source import BadSample, Source
from sd_lightning.state.ranks import gathered

log = logging.getLogger(__name__)

_NAMED = 20
"""Number of bad samples that warnings and errors list by name."""


class BadSamples:
    """The bad samples of a run, with a limit on their number.

    Attributes:
        found: Name of each bad sample -> reason.
        limit: Number of bad samples tolerated.
    """

    def __init__(self, max_fraction: float, num_samples: int) -> None:
        """Start with no bad samples.

        Args:
            max_fraction: Fraction of the samples that may be bad.
            num_samples: Number of all samples, usable or not.
        """
        self.found: dict[str, str] = {}
        self.max_fraction = max_fraction
        self.limit = int(max_fraction * num_samples)

    def count(self, bad: Mapping[str, str]) -> None:
        """Add bad samples; log each new one, only the first twenty by name.

        Raises:
            UsageError: More than ``limit`` samples are bad.
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

    def still_bad(self, saved: Mapping[str, str], sources: Iterable[Source]) -> dict[str, str]:
        """Return the bad samples of an earlier start that are still there and bad, without those found by this one."""
        unknown = saved.keys() - self.found.keys()
        found: dict[str, str] = {}
        for source in sources if unknown else ():
            distinct = source.distinct
            for index in range(len(distinct)):
                if distinct.name(index) in unknown:
                    try:
                        distinct.captions(index)
                        distinct.image(index)
                    except BadSample as reason:
                        found[distinct.name(index)] = str(reason)
        return found

    def gather(self) -> None:
        """All-gather the bad samples of all ranks; a collective call."""
        for part in gathered(self.found):
            self.found |= part

    def check_all_ranks(self) -> None:
        """Gather the bad samples of all ranks, then :meth:`check` their total; a collective call.

        Raises:
            UsageError: More than ``limit`` samples are bad.
        """
        self.gather()
        self.check()

    def check(self) -> None:
        """Raise if too many samples are bad.

        Raises:
            UsageError: More than ``limit`` samples are bad.
        """
        if len(self.found) > self.limit:
            raise UsageError(
                f"data: {len(self.found)} samples cannot be used, more than data.max_bad_fraction={self.max_fraction} "
                f"allows ({self.limit}): {self.listed()}; mend or remove them, or raise data.max_bad_fraction"
            )

    def listed(self) -> str:
        """Return the first twenty bad samples with their reasons, for a message."""
        shown = [f"{name} ({reason})" for name, reason in list(self.found.items())[:_NAMED]]
        more = len(self.found) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")
