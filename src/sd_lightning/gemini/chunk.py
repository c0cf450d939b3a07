"""A chunk: flat memory for many parameters, with weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.compute_weights import ComputeWeights
from sd_lightning.gemini.gradients import ChunkGradients
from sd_lightning.gemini.layout import ChunkLayout
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import ChunkPlacement
from sd_lightning.gemini.tiers import Buffer, Kind, Tier


class MasterWeights:
    """This rank's shard of a chunk in float32, or float64 if that is the compute type.

    It is the shard of the compute weights if these have that type and live on the same tier, or are frozen.

    Args:
        compute: The compute weights of the chunk.
    """

    def __init__(self, compute: ComputeWeights) -> None:
        self._compute = compute
        self._buffer: Buffer | None = None
        """Memory beside the compute weights; during a swap also if they are otherwise the only copy."""
        self._is_swapped = False
        if compute.layout.is_trained and not compute.is_master:
            self._buffer = self._allocate(compute.placement.optim_tier, Kind.OPTIMIZER)

    @property
    def tensor(self) -> Tensor:
        """The trained weights, also during a swap."""
        return self._compute.shard if self._buffer is None else self._buffer.tensor

    def fill(self, values: Tensor) -> None:
        """Set this rank's master and compute weights."""
        compute = self._compute
        self.tensor.copy_(values)
        if not compute.is_master:
            compute.memory.copy(compute.shard, values, Tier.SLOW, Tier.SLOW)
        compute.invalidate()

    def refresh(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Update the compute weights from the master weights.

        Args:
            changed: Parameters whose values changed; all by default.
        """
        if not self._compute.is_master:
            self._compute.refresh(self.tensor)
        self._compute.invalidate(changed)

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Swap other weights in: by name and first element, the parts of parameters that this rank owns."""
        compute = self._compute
        if compute.is_master:
            self._buffer = self._allocate(Tier.SLOW, Kind.SWAPPED)
            compute.memory.copy(self._buffer.tensor, compute.shard, compute.placement.param_tier, Tier.SLOW)
            compute.memory.wait_for_copies()
        self._is_swapped = True
        compute.wait()
        for slot in compute.layout.slots:
            begin, end = compute.bounds.owned(slot)
            if begin < end:
                compute.bounds.view_of(slot, compute.shard).copy_(weights[slot.name, begin].reshape(-1))
        compute.invalidate()

    def swap_out(self) -> None:
        """Restore the trained weights."""
        self._compute.wait()
        self._compute.shard.copy_(self.tensor)
        if self._compute.is_master:
            self.discard()
        self._is_swapped = False
        self._compute.invalidate()

    def move(self, placement: ChunkPlacement) -> None:
        """Move to another tier; call before the compute weights move."""
        compute, old = self._compute, self._buffer
        if not compute.layout.is_trained:
            return
        is_aliased = placement.aliases_master(compute.layout)
        new: Buffer | None = None
        if self._is_swapped or not is_aliased:
            tier, kind = (Tier.SLOW, Kind.SWAPPED) if is_aliased else (placement.optim_tier, Kind.OPTIMIZER)
            new = self._allocate(tier, kind)
            source_tier = compute.placement.param_tier if old is None else old.tier
            compute.memory.copy(new.tensor, self.tensor, source_tier, tier)
            compute.memory.wait_for_copies()
        self.discard()
        self._buffer = new

    def discard(self) -> None:
        """Free the memory beside the compute weights."""
        if self._buffer is not None:
            self._compute.memory.free(self._buffer)
            self._buffer = None

    def _allocate(self, tier: Tier, kind: Kind) -> Buffer:
        compute = self._compute
        return compute.memory.allocate(tier, kind, compute.bounds.numel, compute.layout.master_dtype)


class Chunk:
    """One rank's part of a chunk: weights, gradients and optimizer states.

    Args:
        layout: Its parameters and their slots.
        placement: Where its parts live.
        memory: Allocates and copies.
        collectives: Gather and reduce.
    """

    def __init__(
        self, layout: ChunkLayout, placement: ChunkPlacement, memory: Memory, collectives: Collectives
    ) -> None:
        self.layout = layout
        self.index, self.is_trained = layout.index, layout.is_trained
        self.memory = memory
        self.weights = ComputeWeights(layout, placement, memory, collectives)
        self.master = MasterWeights(self.weights)
        self.gradients = ChunkGradients(self.weights)
        self.states: dict[str, Buffer] = {}
        """Optimizer states by name."""
        self.bounds = self.weights.bounds
        """The shard that this rank owns."""
        self.slots = self.weights.storage.slots

    @property
    def placement(self) -> ChunkPlacement:
        return self.weights.placement

    def wait_on_host(self) -> None:
        """Block the host until it may change weights and read accumulated gradients on the slow tier."""
        self.weights.wait_on_host()
        self.gradients.wait_on_host()

    def move(self, placement: ChunkPlacement) -> None:
        """Move to other tiers, outside of backward passes; all values stay, also those of swapped-in weights."""
        self.memory.wait_for_copies()  # no copy may use memory that is freed below
        self.wait_on_host()
        self.weights.release()
        for name, state in self.states.items():
            self.states[name] = self.memory.moved(state, placement.optim_tier)
        self.gradients.move(placement.step_tier)
        self.master.move(placement)
        self.weights.move(placement)

    def free_states(self) -> None:
        """Free the optimizer states."""
        for state in self.states.values():
            self.memory.free(state)
        self.states.clear()

    def discard(self) -> None:
        """Free all memory but the gradients, and what parameters still view if they did not get other memory."""
        self.master.discard()
        self.weights.discard()
        self.free_states()
