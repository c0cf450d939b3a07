"""A chunk: flat memory for many parameters, and everything that training keeps for them."""

from __future__ import annotations

from torch import nn

from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.compute_weights import ComputeWeights
from sd_lightning.gemini.gradients import ChunkGradients
from sd_lightning.gemini.layout import ChunkLayout, Slot
from sd_lightning.gemini.master_weights import MasterWeights
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import ChunkPlacement
from sd_lightning.gemini.tiers import Buffer


class Chunk:
    """What one rank holds of a chunk.

    Args:
        layout: What is in it.
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
        """What this rank owns."""
        self.parameters = self.weights.storage.parameters
        self.slots = self.weights.storage.slots

    @property
    def placement(self) -> ChunkPlacement:
        return self.weights.placement

    def add(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Make a parameter a view of its slot."""
        self.weights.storage.add(slot, parameter)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of one of the parameters."""
        return self.slots[parameter].name

    def wait_on_host(self) -> None:
        """Block the host until it may change weights and read accumulated gradients on the slow tier."""
        self.weights.wait_on_host()
        self.gradients.wait_on_host()

    def move(self, placement: ChunkPlacement) -> None:
        """Move to other tiers, outside of backward passes; no value changes, also of other weights swapped in."""
        if placement == self.placement:
            return
        self.memory.wait_for_copies()  # nothing reads or writes what is freed
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
        """Free all memory; the parameters have other memory by now."""
        self.master.discard()
        self.weights.discard()
        self.free_states()
