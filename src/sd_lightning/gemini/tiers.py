"""Memory tiers, flat buffers on them, and a ledger of every byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Tier(StrEnum):
    """Where a buffer lives."""

    FAST = "fast"
    """The accelerator's memory; host memory if the host computes."""
    SLOW = "slow"
    """Host memory, page-locked if there is an accelerator."""
    DISK = "disk"
    """Memory-mapped files."""


class Kind(StrEnum):
    """What a buffer holds."""

    WEIGHTS = "weights"
    """Resident weights in the compute type, or shards of them."""
    GATHERED = "gathered"
    """Temporarily gathered weights, and the gradients that overwrite them."""
    GRADIENTS = "gradients"
    """Unreduced whole gradients in separate memory."""
    ACCUMULATED = "accumulated"
    """This rank's shard of the reduced float32 gradients."""
    OPTIMIZER = "optimizer"
    """Master weights that are not the compute weights themselves, and optimizer states."""
    SWAPPED = "swapped"
    """Trained weights while others are swapped in."""
    STAGED = "staged"
    """Weights in the compute type during a copy from the host's master weights to the accelerator."""
    KEPT = "kept"
    """Free page-locked host memory, kept for reuse."""


class Ledger:
    """Bytes on each tier, now and at the peak, and bytes moved between tiers."""

    def __init__(self) -> None:
        self.current: Counter[Tier] = Counter()
        self.peak: Counter[Tier] = Counter()
        self.by_kind: Counter[tuple[Tier, Kind]] = Counter()
        self.kind_peak: Counter[tuple[Tier, Kind]] = Counter()
        self.moved: Counter[tuple[Tier, Tier]] = Counter()

    def add(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        """Count bytes that were allocated, or freed if negative."""
        self.current[tier] += nbytes
        self.by_kind[tier, kind] += nbytes
        if self.by_kind[tier, kind] < 0:
            raise RuntimeError(f"{-self.by_kind[tier, kind]} bytes of {kind} freed twice on the {tier} tier")
        self.peak[tier] = max(self.peak[tier], self.current[tier])
        self.kind_peak[tier, kind] = max(self.kind_peak[tier, kind], self.by_kind[tier, kind])

    def relabel(self, tier: Tier, old: Kind, new: Kind, nbytes: int) -> None:
        """Count bytes under a new kind."""
        self.add(tier, old, -nbytes)
        self.add(tier, new, nbytes)

    def move(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Count bytes that were copied between tiers."""
        if source != target:
            self.moved[source, target] += nbytes


@dataclass(eq=False)
class Buffer:
    """A flat tensor on a tier, counted in the ledger until it is freed."""

    tensor: Tensor
    tier: Tier
    kind: Kind

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def mib(nbytes: int) -> str:
    """Return bytes as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"
