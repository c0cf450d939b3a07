"""The chunks of networks on one rank: flat memory with weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning.gemini.collectives import Collectives
from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.gradients import ChunkGradients
from sd_lightning.gemini.layout import (
    ChunkLayout,
    Reader,
    Shard,
    find_units,
    pack_as_set,
    parameter_names,
    parameter_specs,
    place_others,
    replace_meta_parameters,
)
from sd_lightning.gemini.masters import MasterWeights
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import (
    ChunkPlacement,
    Tier,
    TierBuffer,
    plan_static,
    plan_trace,
    slow_gradient_dtype,
)
from sd_lightning.gemini.weights import ComputeWeights


class Chunk:
    """One rank's part of a chunk: weights, gradients and optimizer states.

    Args:
        layout: Its parameters and their slots.
        placement: Where its parts live.
        memory: Allocates and copies.
        collectives: Gather and reduce.
        slow_dtype: Type of reduced gradients on the slow tier.
        seed: Of stochastic rounding.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        placement: ChunkPlacement,
        memory: Memory,
        collectives: Collectives,
        slow_dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self.layout = layout
        self.index, self.is_trained = layout.index, layout.is_trained
        self.memory = memory
        self.weights = ComputeWeights(layout, placement, memory, collectives)
        self.master = MasterWeights(self.weights, seed)
        self.gradients = ChunkGradients(self.weights, slow_dtype)
        self.states: dict[str, TierBuffer] = {}
        """Optimizer states by name."""
        self.converters: dict[str, Callable[[Shard, str, Tensor, torch.device], None]] = {}
        """By name of a state: converts it when it has come from another device, where it may have another form."""
        self.bounds = self.weights.bounds
        """The shard that this rank owns."""
        self.slots = self.weights.storage.slots

    @property
    def placement(self) -> ChunkPlacement:
        return self.weights.placement

    @property
    def step_device(self) -> torch.device:
        """Where the optimizer steps."""
        return self.memory.device if self.placement.step_tier is Tier.FAST else torch.device("cpu")

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return the view of one parameter in whole values of the chunk."""
        slot = self.slots[parameter]
        with torch._C.DisableTorchFunctionSubclass():
            return whole[slot.begin : slot.end].view(parameter.shape)

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
            source = state.tensor.device
            self.states[name] = moved = self.memory.moved(state, placement.optim_tier)
            if moved.tensor.device != source:
                self.converters[name](self.bounds, name, moved.tensor, source)
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


class ChunkedNetworks:
    """Networks whose parameters live in chunks, on one rank.

    Parameters stay the modules' ``nn.Parameter`` objects, except those on the meta device, which are replaced.

    Args:
        networks: By name prefix of their parameters ("unet"; "" for none).
        config: Sizes and placement of chunks.
        blocks: The repeated modules; by default the children of module lists and sequences.
        device: The fast tier.
        group: The ranks to shard over; the default process group if there is one.
        reader: Gives initial values; needed for networks on the meta device. Each rank reads only its own shards.
        order: Sort key for the names of units, if they do not run in the order of registration.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        config: GeminiConfig,
        *,
        blocks: Iterable[nn.Module] | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        reader: Reader | None = None,
        order: Callable[[str], Any] | None = None,
    ) -> None:
        self.networks = dict(networks)
        self.config = config
        self.collectives = Collectives(group, torch.device(device), config.reduce_dtype)
        self.memory = Memory(torch.device(device), config.offload_dir)
        replace_meta_parameters(self.networks.values(), reader)
        names = parameter_names(self.networks)
        units = find_units(self.networks, blocks)
        if order is not None:
            units.sort(key=lambda unit: order(unit.name))
        self.layouts = pack_as_set(parameter_specs(units, names, config), config, self.collectives.world_size)
        self.plan = plan_trace(self.layouts) if config.placement == "auto" else plan_static(self.layouts, config)
        self.is_swapped = False
        """Whether other weights are swapped in."""
        self.collectives.require_agreement("the layout of chunks", repr((self.layouts, self.plan)))
        self.chunks: list[Chunk] = []
        self.chunk_of: dict[nn.Parameter, Chunk] = {}
        by_name = {name: parameter for parameter, name in names.items()}
        with torch.no_grad():
            for layout, placement in zip(self.layouts, self.plan.chunks, strict=True):
                self._create(layout, placement, by_name, reader)
            place_others(self.networks, self.chunk_of, self.memory.device, reader)
        self.trained = {n: p for p, n in names.items() if p in self.chunk_of and self.chunk_of[p].is_trained}
        chunked = [replace(u, parameters=tuple(p for p in u.parameters if p in self.chunk_of)) for u in units]
        self.units = [unit for unit in chunked if unit.parameters]
        self.chunks_of = [sorted({self.chunk_of[p].index for p in unit.parameters}) for unit in self.units]
        """Chunk indices of each unit."""

    def _create(
        self,
        layout: ChunkLayout,
        placement: ChunkPlacement,
        parameters: Mapping[str, nn.Parameter],
        reader: Reader | None,
    ) -> None:
        """Allocate a chunk, fill this rank's shard, and make the parameters views of the chunk."""
        dtype = slow_gradient_dtype(layout, self.config)
        chunk = Chunk(layout, placement, self.memory, self.collectives, dtype, self.config.rounding_seed)
        values = torch.zeros(chunk.bounds.numel, dtype=layout.master_dtype)
        for slot in layout.slots:
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                if reader is None:
                    source = parameters[slot.name].detach().reshape(-1)[begin:end]
                else:
                    source = reader(slot.name, begin, end)
                chunk.bounds.view_of(slot, values).copy_(source.reshape(-1))
        for slot in layout.slots:
            chunk.weights.storage.add(slot, parameters[slot.name])
            self.chunk_of[parameters[slot.name]] = chunk
        chunk.master.fill(values)
        self.chunks.append(chunk)

    @property
    def trained_chunks(self) -> list[Chunk]:
        """The chunks that are not frozen."""
        return [chunk for chunk in self.chunks if chunk.is_trained]

    def chunks_around_units(self) -> tuple[tuple[int, ...], ...]:
        """Return the chunks of each unit, with those of all containers, which may enclose it."""
        around = {c for unit, indices in zip(self.units, self.chunks_of) if unit.is_container for c in indices}
        return tuple(tuple(sorted(around.union(indices))) for indices in self.chunks_of)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter in a chunk."""
        return self.chunk_of[parameter].slots[parameter].name

    def whole(self, chunk: Chunk, *, as_swapped: bool = False) -> Tensor:
        """Return a copy of a chunk's whole weights: as trained, or as swapped in; a collective call."""
        is_master = chunk.is_trained and not (as_swapped and self.is_swapped)
        return self.gathered(chunk, chunk.master.read() if is_master else chunk.weights.shard)

    def gathered(self, chunk: Chunk, shard: Tensor) -> Tensor:
        """Gather values of a chunk from the shards of all ranks; a collective call."""
        chunk.weights.wait()
        whole = torch.empty(chunk.layout.numel, dtype=shard.dtype, device=self.memory.device)
        self.collectives.shard(whole).copy_(shard)
        self.collectives.all_gather(whole, chunk.index).wait()
        return whole

    def synchronize(self) -> None:
        """Wait for all pending gathers and copies."""
        for chunk in self.chunks:
            chunk.weights.wait()
        self.memory.wait_for_copies()
