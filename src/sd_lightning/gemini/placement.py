"""Memory tiers, and the placement of chunks on them by pure functions with the same result on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.config import GeminiConfig, Master
from sd_lightning.gemini.layout import ChunkLayout


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
    SCRATCH = "scratch"
    """Float32 values of the block that is stepped, where weights, gradients or states have another form."""
    KEPT = "kept"
    """Free page-locked host memory, kept for reuse."""


STEP_BLOCK = {Tier.SLOW: 2**19, Tier.FAST: 2**24}
"""Elements that are stepped at a time where scratch is needed: few enough for the host's caches, and enough to be worth
an accelerator's kernels; multiples of 256."""


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

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Return the bytes now, by the names of tier and kind."""
        tiers: dict[str, dict[str, int]] = {}
        for (tier, kind), nbytes in self.by_kind.items():
            tiers.setdefault(str(tier), {})[str(kind)] = nbytes
        return tiers

    def relabel(self, tier: Tier, old: Kind, new: Kind, nbytes: int) -> None:
        """Count bytes under a new kind."""
        self.add(tier, old, -nbytes)
        self.add(tier, new, nbytes)

    def move(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Count bytes that were copied between tiers."""
        if source != target:
            self.moved[source, target] += nbytes


@dataclass(eq=False)
class TierBuffer:
    """A flat tensor on a tier, counted in the ledger until it is freed: in whole pages if it is page-locked."""

    tensor: Tensor
    tier: Tier
    kind: Kind

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def mib(nbytes: int) -> str:
    """Return bytes as text, in MiB."""
    return f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class ChunkPlacement:
    """Where the parts of a chunk live."""

    is_sharded: bool = True
    """Each rank keeps a shard of the compute weights between uses; otherwise the whole weights."""
    param_tier: Tier = Tier.FAST
    """Where the shard of the compute weights lives."""
    optim_tier: Tier = Tier.FAST
    """Where master weights and optimizer states live."""

    @property
    def fast_parts(self) -> int:
        """A score of the fast-tier memory that it takes, to compare two placements."""
        return 2 * (not self.is_sharded) + (self.param_tier is Tier.FAST) + 3 * (self.optim_tier is Tier.FAST)

    @property
    def step_tier(self) -> Tier:
        """Where reduced gradients are kept and the optimizer steps."""
        return Tier.FAST if self.optim_tier is Tier.FAST else Tier.SLOW

    def is_resident(self, *, is_alone: bool) -> bool:
        """Return whether the whole weights, of one rank alone or of several, stay on the fast tier between uses."""
        return not self.is_sharded or (is_alone and self.param_tier is Tier.FAST)

    def aliases_master(self, layout: ChunkLayout) -> bool:
        """Return whether the shard of the compute weights also serves as the master weights."""
        return layout.dtype == layout.kept_dtype and self.param_tier is self.optim_tier

    def splits_master(self, layout: ChunkLayout) -> bool:
        """Return whether the shard of the compute weights holds the upper halves of the master weights."""
        is_on_host = self.param_tier is Tier.SLOW and self.step_tier is Tier.SLOW
        return layout.master is Master.SPLIT and is_on_host

    def steps_copies(self, layout: ChunkLayout) -> bool:
        """Return whether the master weights of a trained chunk are stepped in float32 copies of them."""
        return self.splits_master(layout) or layout.kept_dtype != layout.master_dtype

    def master_itemsize(self, layout: ChunkLayout) -> int:
        """Return the bytes per element of a trained chunk that its master weights take beside the compute weights."""
        if self.aliases_master(layout):
            return 0
        return 2 if self.splits_master(layout) else layout.kept_dtype.itemsize


@dataclass(frozen=True)
class ChunkPlan:
    """A placement of every chunk."""

    chunks: tuple[ChunkPlacement, ...]
    gathered_budget: int | None = None
    """Bytes of temporarily gathered weights."""
    keeps_gradients: bool = False
    """Whether ``placement=auto`` has room to keep whole gradients from one micro-batch to the next."""
    spare_bytes: int | None = field(default=None, compare=False, repr=False)  # each rank has its own
    """Bytes that ``placement=auto`` leaves free beside chunks, activations and the largest unit."""

    def summary(self, layouts: Sequence[ChunkLayout]) -> str:
        """Describe how many chunks are on which tier."""
        trained = [place for layout, place in zip(layouts, self.chunks, strict=True) if layout.is_trained]
        tiers = ", ".join(f"{sum(p.optim_tier is tier for p in trained)} {tier}" for tier in Tier)
        slow = sum(place.param_tier is Tier.SLOW for place in self.chunks)
        whole = sum(not place.is_sharded for place in self.chunks)
        fast = len(self.chunks) - whole - slow
        return f"weights of {whole} chunks whole, {fast} fast, {slow} slow; optimizer {tiers}"


def plan_static(layouts: Sequence[ChunkLayout], config: GeminiConfig) -> ChunkPlan:
    """Place chunks by the fractions in the settings.

    Each fraction of the elements is rounded up to whole chunks, in the order of execution. Unsharded chunks are the
    last ones, so their weights are never offloaded.
    """
    offloads_optim = _first(layouts, config.offload_optim_frac, trained_only=True)
    on_disk = _first(layouts, config.disk_optim_frac, trained_only=True)
    offloads_param = _first(layouts, config.offload_param_frac)
    is_sharded = _first(layouts, config.shard_param_frac)
    placements = []
    for index in range(len(layouts)):
        optim = Tier.FAST
        if index in offloads_optim:
            optim = Tier.DISK if index in on_disk else Tier.SLOW
        param = Tier.SLOW if index in offloads_param else Tier.FAST
        placements.append(ChunkPlacement(index in is_sharded, param, optim))
    return ChunkPlan(tuple(placements), config.gathered_budget)


def _first(layouts: Sequence[ChunkLayout], fraction: float, *, trained_only: bool = False) -> set[int]:
    """Return the first chunks that together hold at least a fraction of all elements."""
    eligible = [layout for layout in layouts if layout.is_trained or not trained_only]
    wanted = fraction * sum(layout.numel for layout in eligible)
    chosen: set[int] = set()
    held = 0
    for layout in eligible:
        if held >= wanted * (1 - 1e-9):
            break
        chosen.add(layout.index)
        held += layout.numel
    return chosen


@dataclass(frozen=True)
class Demand:
    """The memory that ``placement=auto`` must fit into the fast tier of every rank."""

    cap_bytes: int
    """Bytes that may be used."""
    non_model_bytes: int
    """Peak bytes of activations and everything else that is not in chunks."""
    state_bytes: tuple[int, ...]
    """Bytes of the optimizer states of each chunk's shard."""
    units: tuple[tuple[int, ...], ...]
    """Chunk indices of each unit, with those of the containers around it."""
    world_size: int
    keeps_gradients: bool | None = False
    """Whether whole gradients are kept from one micro-batch to the next; None: only if they fit, too."""
    sent_dtype: torch.dtype | None = None
    """Type in which whole gradients are sent to be summed, if that may be wider than the compute type."""


def held_bytes(
    layout: ChunkLayout, place: ChunkPlacement, state_bytes: int, world_size: int
) -> Iterator[tuple[Tier, str, int]]:
    """Yield (tier, content, bytes) of one rank's part of a chunk, with its reduced gradients."""
    shard = layout.numel // world_size
    yield place.param_tier, "weights", (shard if place.is_sharded else layout.numel) * layout.dtype.itemsize
    if layout.is_trained:
        yield place.optim_tier, "master weights", shard * place.master_itemsize(layout)
        yield place.optim_tier, "optimizer states", state_bytes
        yield place.step_tier, "gradients", shard * layout.master_dtype.itemsize


def slow_gradient_dtype(layout: ChunkLayout, config: GeminiConfig) -> torch.dtype:
    """Return the type in which a chunk's reduced gradients are kept on the slow tier."""
    return config.gradient_dtype if layout.dtype == torch.bfloat16 else layout.master_dtype


def fast_bytes(layouts: Sequence[ChunkLayout], placements: Sequence[ChunkPlacement], demand: Demand) -> int:
    """Return the peak bytes of chunks on the fast tier in a step, with the smallest gathered budget.

    Per parameter and rank, with ``c`` bytes of the compute type and ``w`` ranks: ``c`` or ``c / w`` for weights,
    ``4 / w`` for float32 weights unless they are the compute weights, ``4 / w`` for the reduced gradient, and optimizer
    states. Once: the largest temporarily gathered unit, the whole gradients being reduced, in the type in which they
    are sent, and the scratch of a step.
    """
    chunks = zip(layouts, placements, demand.state_bytes, strict=True)
    held = (part for chunk in chunks for part in held_bytes(*chunk, demand.world_size))
    total = sum(nbytes for tier, _, nbytes in held if tier is Tier.FAST)
    if demand.keeps_gradients:
        total += whole_gradient_bytes(layouts)
    whole, sent = separate_gradients(layouts, placements, demand.world_size, demand.sent_dtype)
    total += sum(sorted(whole)[-_WHOLE_GRADIENTS:]) + sum(sorted(sent)[-SENT_GRADIENTS:])
    shards = (layout.numel // demand.world_size for layout in layouts if layout.is_trained)
    if any(place.step_tier is Tier.FAST and place.steps_copies(layout) for layout, place in zip(layouts, placements)):
        total += 4 * min(STEP_BLOCK[Tier.FAST], max(shards, default=0))
    return total + smallest_budget(layouts, placements, demand)


_WHOLE_GRADIENTS = 6
"""Chunks whose whole gradients can be in memory at a time: four in reduction, two being filled."""
SENT_GRADIENTS = 4
"""Chunks in reduction at a time."""


EARLY_GRADIENTS = {Tier.FAST: 1, Tier.SLOW: SENT_GRADIENTS + 2}
"""Chunks whose reduced gradients are kept at a time with ``step_in_backward``: on the host also those that arrive."""


def separate_gradients(
    layouts: Sequence[ChunkLayout],
    placements: Sequence[ChunkPlacement],
    world_size: int,
    sent_dtype: torch.dtype | None,
) -> tuple[list[int], list[int]]:
    """Return the bytes of each chunk's whole gradients in separate memory, and of those that are sent."""
    whole, sent = [], []
    for layout, place in zip(layouts, placements, strict=True):
        numel = layout.numel * layout.is_trained
        dtype = layout.master_dtype if world_size == 1 else layout.dtype
        whole.append(numel * dtype.itemsize * place.is_resident(is_alone=world_size == 1))
        width = 0 if sent_dtype is None else sent_dtype.itemsize
        sent.append(numel * width * (width > layout.dtype.itemsize))
    return whole, sent


def whole_gradient_bytes(layouts: Sequence[ChunkLayout]) -> int:
    """Return the bytes of whole gradients of all chunks, as they accumulate over micro-batches."""
    return sum(layout.numel * layout.master_dtype.itemsize for layout in layouts if layout.is_trained)


def smallest_budget(layouts: Sequence[ChunkLayout], placements: Sequence[ChunkPlacement], demand: Demand) -> int:
    """Return the bytes of the largest unit's temporarily gathered chunks."""
    sizes = (
        sum(layouts[c].nbytes for c in set(unit) if not placements[c].is_resident(is_alone=demand.world_size == 1))
        for unit in demand.units
    )
    return max(sizes, default=0)


def plan_auto(layouts: Sequence[ChunkLayout], demand: Demand) -> ChunkPlan:
    """Return the plan that keeps as much on the fast tier as fits.

    Start with all chunks unsharded on the fast tier. Until they fit, shard weights over the ranks, then move optimizer
    states to the slow tier, then weights; chunk by chunk in the order of execution. Spare memory holds the whole
    gradients of micro-batches, if the demand leaves that open and all of them fit. The rest is budget for gathered
    weights.

    Raises:
        UsageError: Chunks do not fit even on the slow tier.
    """
    placements = [ChunkPlacement(is_sharded=False) for _ in layouts]
    available = demand.cap_bytes - demand.non_model_bytes
    steps: list[tuple[int, dict[str, Any]]] = []
    if demand.world_size > 1:
        steps += [(layout.index, {"is_sharded": True}) for layout in layouts]
    steps += [(layout.index, {"optim_tier": Tier.SLOW}) for layout in layouts if layout.is_trained]
    steps += [(layout.index, {"param_tier": Tier.SLOW, "is_sharded": True}) for layout in layouts]
    needed = fast_bytes(layouts, placements, demand)
    for index, change in steps:
        if needed <= available:
            break
        placements[index] = replace(placements[index], **change)
        needed = fast_bytes(layouts, placements, demand)
    if needed > available:
        cap, beside, unit = (f"{n / 2**20:.2f} MiB" for n in (demand.cap_bytes, demand.non_model_bytes, needed))
        raise UsageError(
            f"Gemini got memory_cap={cap}, which is {(needed - available) / 2**20:.2f} MiB too little with everything "
            f"offloaded: activations take {beside}, and the largest unit and its gradients {unit}; set "
            f"memory_cap={demand.non_model_bytes + needed}B or more, or use a smaller batch, activation checkpointing, "
            "or a smaller chunk_numel"
        )
    spare = left = available - needed
    keeps = bool(demand.keeps_gradients)
    if demand.keeps_gradients is None and whole_gradient_bytes(layouts) <= spare:
        keeps, left = True, spare - whole_gradient_bytes(layouts)
    all_resident = all(place.is_resident(is_alone=demand.world_size == 1) for place in placements)
    budget = None if all_resident else smallest_budget(layouts, placements, demand) + left
    return ChunkPlan(tuple(placements), budget, keeps, spare)


def plan_trace(layouts: Sequence[ChunkLayout]) -> ChunkPlan:
    """Return the plan under which a pass is measured: everything on the slow tier."""
    return ChunkPlan(tuple(ChunkPlacement(True, Tier.SLOW, Tier.SLOW) for _ in layouts), 0)
