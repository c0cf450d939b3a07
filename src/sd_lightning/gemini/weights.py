"""Compute weights of a chunk, which are sharded, gathered and overwritten by gradients."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

import torch
from torch import Tensor, nn

from sd_lightning.gemini.collectives import Collectives, Pending
from sd_lightning.gemini.layout import ChunkLayout, Shard, Slot
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.placement import ChunkPlacement, Kind, Tier, TierBuffer


class ChunkState(Enum):
    """Content of a chunk's flat memory."""

    RELEASED = auto()
    """Nothing; the memory is not allocated."""
    GATHERING = auto()
    """Weights that are being gathered."""
    GATHERED = auto()
    """Weights."""
    OVERWRITTEN = auto()
    """Gradients, and the weights of parameters that have no gradient yet."""


_TRANSITIONS = {
    ChunkState.RELEASED: {ChunkState.GATHERING, ChunkState.OVERWRITTEN},
    ChunkState.GATHERING: {ChunkState.GATHERED},
    ChunkState.GATHERED: {ChunkState.RELEASED, ChunkState.OVERWRITTEN, ChunkState.GATHERING},
    ChunkState.OVERWRITTEN: {ChunkState.RELEASED},
}


class ChunkStorage:
    """Flat memory of a chunk; the parameters are views of it.

    It is freed and allocated again through its untyped storage, so that views saved by autograd stay valid. While it
    is freed, parameters read as NaN.

    Args:
        layout: The chunk's parameters and their slots.
        device: The fast tier.
    """

    def __init__(self, layout: ChunkLayout, device: torch.device) -> None:
        self.full = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.slots: dict[nn.Parameter, Slot] = {}
        """In the order of the layout."""
        # Reading freed memory would crash the process. NaN is seen at once, and the expanded NaN refuses writes.
        self._nan = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._views: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """The view of each parameter, and the NaNs that it shows while the memory is freed."""

    def add(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Make a parameter a view of its slot."""
        self.slots[parameter] = slot
        view = self.full[slot.begin : slot.end].view(parameter.shape)
        self._views[parameter] = view, self._nan.expand(parameter.shape)
        parameter.data = view  # the parameter is not guarded yet

    def show(self) -> None:
        """Make all parameters views of the memory."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, (view, _) in self._views.items():
                parameter.data = view

    def hide(self) -> None:
        """Make all parameters read as NaN."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, (_, nan) in self._views.items():
                parameter.data = nan

    def hide_one(self, parameter: nn.Parameter) -> None:
        """Make one parameter read as NaN."""
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = self._views[parameter][1]

    def resize(self, nbytes: int) -> None:
        """Allocate the memory, or free it with 0 bytes."""
        if not self.full.untyped_storage().resizable():
            # numpy() was called on a weight: the array keeps the old memory, and the chunk gets new memory.
            with torch.inference_mode(False):
                self.full = torch.empty_like(self.full)
            for parameter, (_, nan) in self._views.items():
                slot = self.slots[parameter]
                self._views[parameter] = self.full[slot.begin : slot.end].view(nan.shape), nan
        self.full.untyped_storage().resize_(nbytes)

    def discard(self) -> None:
        """Forget the memory, after the parameters got other memory."""
        self._views.clear()
        self.full = self.full[:0].clone()


class ComputeWeights:
    """This rank's shard of a chunk in the compute type, and the whole chunk while it is gathered.

    Resident weights stay gathered: the flat memory stays allocated, and the shard is a view of it.

    Args:
        layout: The chunk's parameters and their slots.
        placement: Where its parts live.
        memory: Allocates and copies.
        collectives: Gather the shards.
    """

    def __init__(
        self, layout: ChunkLayout, placement: ChunkPlacement, memory: Memory, collectives: Collectives
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.memory = memory
        self.collectives = collectives
        self.is_resident = placement.is_resident(is_alone=collectives.is_alone)
        """Whether the whole weights stay in memory, so that gathering moves nothing."""
        self.bounds = Shard(layout, collectives.rank, collectives.world_size)
        self.storage = ChunkStorage(layout, memory.device)
        self.state = ChunkState.GATHERED
        self._shard: TierBuffer | None = None
        self._pending = Pending()
        self._gathered, self._refreshed = Arrival(), Arrival()
        self._versions: dict[nn.Parameter, int] = {}
        """Autograd's version counters of weights before gradients overwrote them."""
        memory.ledger.add(Tier.FAST, Kind.WEIGHTS if self.is_resident else Kind.GATHERED, layout.nbytes)
        if not self.is_resident:
            self._shard = self._allocate_shard()

    @property
    def is_master(self) -> bool:
        """Whether the shard also serves as the master weights."""
        return self.placement.aliases_master(self.layout)

    @property
    def shard(self) -> Tensor:
        """This rank's shard of the weights."""
        return self.collectives.shard(self.storage.full) if self._shard is None else self._shard.tensor

    @property
    def temporary_bytes(self) -> int:
        """Bytes of gathered weights, or of the gradients in their place; 0 for resident weights."""
        return 0 if self.is_resident or self.state is ChunkState.RELEASED else self.layout.nbytes

    def gather(self) -> None:
        """Start to gather released weights; call :meth:`wait` before using them."""
        self._go(ChunkState.GATHERING)
        self._resize(self.layout.nbytes)
        self.storage.show()
        with self.memory.copying(Tier.FAST) as self._gathered:
            self._refreshed.join()  # new weights may still be being copied to a shard on the slow tier
            assert self._shard is not None
            own = self.collectives.shard(self.storage.full)
            self.memory.copy(own, self._shard.tensor, self._shard.tier, Tier.FAST)
            self._pending = self.collectives.all_gather(self.storage.full, self.layout.index)

    def wait(self) -> None:
        """Order the computation after the all-gather."""
        if self.state is not ChunkState.GATHERING:
            return
        self._pending.wait()
        self._gathered.join()
        self._go(ChunkState.GATHERED)

    def settle(self) -> None:
        """Order the computation after all copies of the weights, so that it may change them."""
        self.wait()
        self._refreshed.join()

    def wait_on_host(self) -> None:
        """Block the host until all copies of the weights are done."""
        self._gathered.wait()
        self._refreshed.wait()

    def release(self) -> None:
        """Free gathered weights, or the gradients in their place."""
        self.wait()
        if self.is_resident or self.state is ChunkState.RELEASED:
            return
        self._go(ChunkState.RELEASED)
        self._resize(0)
        self.storage.hide()
        if self._versions:  # the weights come back unchanged: backward through other graphs stays valid
            torch._C._autograd._unsafe_set_version_counter(tuple(self._versions), tuple(self._versions.values()))
            self._versions.clear()

    def invalidate(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Discard outdated gathered weights: free temporary ones, gather resident ones again from the shards.

        Args:
            changed: Parameters whose values changed; all by default. Backward through earlier graphs of them fails.
        """
        if not self.is_resident:
            self.release()
        torch.autograd.graph.increment_version(self.storage.slots if changed is None else changed)
        if not self.is_resident:
            return
        self.wait()
        if not (self.collectives.is_alone and self.is_master):
            self._go(ChunkState.GATHERING)
            with self.memory.copying(Tier.FAST) as self._gathered:
                self._pending = self.collectives.all_gather(self.storage.full, self.layout.index)

    def refresh(self, master: Tensor) -> None:
        """Copy new master weights to the shard, overlapping the computation; :meth:`invalidate` must follow."""
        place = self.placement
        with self.memory.copying(place.param_tier) as self._refreshed:
            self.memory.copy(self.shard, master, place.step_tier, place.param_tier)

    def lend(self) -> Tensor:
        """Return the flat memory, for gradients to overwrite the weights."""
        if self.state is not ChunkState.OVERWRITTEN:
            if self.state is ChunkState.RELEASED:
                self._resize(self.layout.nbytes)
            self.wait()
            self._go(ChunkState.OVERWRITTEN)
        return self.storage.full

    def note_overwritten(self, parameter: nn.Parameter) -> None:
        """Mark a weight as overwritten by its gradient, so that autograd refuses to read it."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions.setdefault(parameter, parameter._version)
        torch.autograd.graph.increment_version(parameter)
        self.storage.hide_one(parameter)

    def move(self, placement: ChunkPlacement) -> None:
        """Move to other tiers, after :meth:`release` and with no copy pending."""
        memory, old, was_resident, shard = self.memory, self.placement, self.is_resident, self.shard
        self.placement, self.is_resident = placement, placement.is_resident(is_alone=self.collectives.is_alone)
        if was_resident and not self.is_resident:
            self.wait()
            self._shard = self._allocate_shard()
            memory.copy(self._shard.tensor, shard, old.param_tier, placement.param_tier)
            memory.wait_for_copies()
            memory.ledger.add(Tier.FAST, Kind.WEIGHTS, -self.layout.nbytes)
            self.storage.resize(0)
            self._go(ChunkState.RELEASED)
            self.storage.hide()
        elif self.is_resident and not was_resident:
            self.gather()
            self.wait()
            memory.ledger.relabel(Tier.FAST, Kind.GATHERED, Kind.WEIGHTS, self.layout.nbytes)
            memory.wait_for_copies()
            self._free_shard()
        elif self._shard is not None:
            self._shard = memory.moved(self._shard, placement.param_tier)

    def discard(self) -> None:
        """Free all memory but what parameters still view, if they did not get other memory."""
        self._free_shard()
        kind = Kind.WEIGHTS if self.is_resident else Kind.GATHERED
        self.memory.ledger.add(Tier.FAST, kind, -self.storage.full.untyped_storage().nbytes())
        self.storage.discard()

    def _allocate_shard(self) -> TierBuffer:
        return self.memory.allocate(self.placement.param_tier, Kind.WEIGHTS, self.bounds.numel, self.layout.dtype)

    def _free_shard(self) -> None:
        if self._shard is not None:
            self.memory.free(self._shard)
            self._shard = None

    def _go(self, state: ChunkState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"chunk {self.layout.index} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def _resize(self, nbytes: int) -> None:
        allocated = self.storage.full.untyped_storage().nbytes()
        self.memory.ledger.add(Tier.FAST, Kind.GATHERED, nbytes - allocated)
        self.storage.resize(nbytes)
