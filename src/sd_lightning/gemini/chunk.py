"""The chunks of networks on one rank: flat memory with weights, gradients and optimizer states."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning.gemini.collectives import Collectives, Pending
from sd_lightning.gemini.config import GeminiConfig
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
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.placement import (
    ChunkPlacement,
    Kind,
    Tier,
    TierBuffer,
    plan_static,
    plan_trace,
    slow_gradient_dtype,
)
from sd_lightning.gemini.weights import ChunkState, ComputeWeights
from sd_lightning.state.host import host_step


class ChunkGradients:
    """Whole gradients of a backward pass, and the accumulated shard of their sum over ranks and passes.

    Whole gradients overwrite gathered weights. They have separate memory if the weights are resident, or if gradients
    are kept for more than one pass. The sum lives on the tier where the optimizer steps.

    Args:
        weights: The compute weights of the chunk.
        slow_dtype: Type of reduced gradients on the slow tier, as long as nothing is added to them.
    """

    def __init__(self, weights: ComputeWeights, slow_dtype: torch.dtype) -> None:
        self.accumulated: TierBuffer | None = None
        """This rank's shard of the reduced gradients."""
        self._slow_dtype = slow_dtype
        self._weights = weights
        self._memory = weights.memory
        self._whole: TierBuffer | None = None
        """Whole gradients in separate memory."""
        self._filled: set[str] = set()
        """Parameters whose gradient of this pass is in its slot."""
        self._pending = Pending()
        self._reduced: Tensor | None = None
        """The shard that receives the sums of the current reduction."""
        self._offloaded: tuple[TierBuffer, Arrival] | None = None
        """Reduced gradients that are being copied to the slow tier."""
        self._landing: deque[tuple[TierBuffer, Arrival]] = deque()
        """Offloaded gradients of later passes, not yet added to ``accumulated``."""
        self._landed = Arrival()
        """Arrival of the accumulated gradients on the slow tier."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no gradients on this rank, reduced or not."""
        return not (self._filled or self.accumulated or self._whole or self._offloaded)

    def put(self, parameter: nn.Parameter, gradient: Tensor, *, keep: bool) -> None:
        """Write the gradient of one parameter, divided by the number of ranks, into its slot.

        Args:
            parameter: One of this chunk.
            gradient: In the shape of the parameter.
            keep: Keep whole gradients for more than one pass: add them up in float32, in separate memory.
        """
        weights = self._weights
        slot = weights.storage.slots[parameter]
        target = self._slots(keep)[slot.begin : slot.end].view(gradient.shape)
        scale = 1.0 / weights.collectives.world_size
        if slot.name in self._filled:
            target.add_(gradient, alpha=scale)
        elif gradient.dtype == target.dtype:
            torch.mul(gradient, scale, out=target)
        else:
            target.copy_(gradient).mul_(scale)
        self._filled.add(slot.name)
        if weights.state is ChunkState.OVERWRITTEN:
            weights.note_overwritten(parameter)

    def has_overwritten(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient has overwritten this weight."""
        weights = self._weights
        return weights.state is ChunkState.OVERWRITTEN and weights.storage.slots[parameter].name in self._filled

    def reduce(self) -> None:
        """Start to reduce-scatter the gradients."""
        weights, layout = self._weights, self._weights.layout
        slots = self._slots(keep=False)
        for slot in layout.slots:
            if slot.name not in self._filled:
                slots[slot.begin : slot.end].zero_()  # not used on this rank, but maybe on others
        for begin, end in layout.gaps():
            slots[begin:end].zero_()
        self._filled.clear()
        slots = self._widened(slots)
        self._pending, self._reduced = weights.collectives.reduce_scatter(slots, layout.index)
        if weights.placement.step_tier is Tier.SLOW and not weights.collectives.is_direct:
            self._offload()

    def finish_reduction(self) -> None:
        """Add the result of :meth:`reduce` to the accumulated gradients."""
        if self._weights.placement.step_tier is Tier.SLOW:
            if self._offloaded is None:
                self._offload()
            self._receive()
        else:
            self._pending.wait()
            self._accumulate()
        self._reduced = None
        self._free_whole()

    def allocate(self) -> None:
        """Accumulate onto zeros if there are no gradients yet."""
        weights = self._weights
        if self.accumulated is None:
            numel, dtype = weights.bounds.numel, weights.layout.master_dtype
            tier = weights.placement.step_tier
            self.accumulated = self._memory.allocate(tier, Kind.ACCUMULATED, numel, dtype, zero=True)

    def widen(self) -> None:
        """Give the accumulated gradients the type of the master weights, for others to be added, or to be edited."""
        narrow, dtype = self.accumulated, self._weights.layout.master_dtype
        if narrow is None or narrow.tensor.dtype == dtype:
            return
        self._landed.wait()
        self.accumulated = self._memory.allocate(narrow.tier, narrow.kind, narrow.tensor.numel(), dtype)
        self.accumulated.tensor.copy_(narrow.tensor)
        self._memory.free(narrow)

    def wait_on_host(self) -> None:
        """Block the host until all gradients are accumulated."""
        self._landed.wait()
        while self._landing:
            self._add_landed(self._landing[0][0])

    def forget(self, parameter: nn.Parameter) -> None:
        """Set the whole and accumulated gradients of one parameter to zero."""
        slot = self._weights.storage.slots[parameter]
        self._filled.discard(slot.name)
        if self._weights.placement.step_tier is Tier.SLOW:
            self.wait_on_host()
        if self._whole is not None:
            self._whole.tensor[slot.begin : slot.end].zero_()
        if self.accumulated is not None:
            self._weights.bounds.view_of(slot, self.accumulated.tensor).zero_()

    def drop(self) -> None:
        """Free all gradients, including those being reduced."""
        self._pending.wait()
        self._filled.clear()
        if self._offloaded is not None:
            (buffer, arrival), self._offloaded = self._offloaded, None
            arrival.join()
            self._memory.free(buffer)
        while self._landing:
            self._memory.free(self._landing.popleft()[0])
        self._reduced = None
        self._free_whole()
        if self.accumulated is not None:
            self._memory.free(self.accumulated)
            self.accumulated = None

    def move(self, tier: Tier) -> None:
        """Move the accumulated gradients to another tier."""
        if self.accumulated is not None:
            self.accumulated = self._memory.moved(self.accumulated, tier)
            if tier is Tier.FAST:
                self.widen()

    def _slots(self, keep: bool) -> Tensor:
        """Return the memory of whole gradients; allocate it if needed."""
        weights, layout = self._weights, self._weights.layout
        if self._whole is None and not keep and not weights.is_resident:
            return weights.lend()
        if self._whole is None:
            is_alone = weights.collectives.is_alone and weights.placement.step_tier is Tier.FAST
            dtype = layout.master_dtype if keep or is_alone else layout.dtype
            self._whole = self._memory.allocate(Tier.FAST, Kind.GRADIENTS, layout.numel, dtype)
        return self._whole.tensor

    def _widened(self, slots: Tensor) -> Tensor:
        """Return whole gradients in the type in which they are sent, copied if it is wider."""
        dtype = self._weights.collectives.sent_dtype(slots.dtype)
        if dtype == slots.dtype:
            return slots
        wide = self._memory.allocate(Tier.FAST, Kind.GRADIENTS, slots.numel(), dtype)
        wide.tensor.copy_(slots)
        self._free_whole()
        self._whole = wide
        return wide.tensor

    def _accumulate(self) -> None:
        """Add the reduced gradients to the accumulated ones on the fast tier."""
        assert self._reduced is not None
        weights, whole = self._weights, self._whole
        dtype = weights.layout.master_dtype
        if self.accumulated is not None:
            self.accumulated.tensor.add_(self._reduced)
        elif whole is not None and whole.tensor.dtype == dtype and weights.collectives.is_alone:
            # With one rank the whole gradients are the reduced ones.
            whole.kind, self._whole, self.accumulated = Kind.ACCUMULATED, None, whole
            self._memory.ledger.relabel(Tier.FAST, Kind.GRADIENTS, Kind.ACCUMULATED, whole.nbytes)
        else:
            self.accumulated = self._memory.allocate(Tier.FAST, Kind.ACCUMULATED, weights.bounds.numel, dtype)
            self.accumulated.tensor.copy_(self._reduced)

    def _offload(self) -> None:
        """Copy the reduced gradients to the slow tier after the reduction, overlapping the computation."""
        assert self._reduced is not None
        dtype = self._slow_dtype if self.accumulated is None else self._reduced.dtype
        with self._memory.copying(Tier.SLOW) as arrival:
            self._pending.wait()
            buffer = self._memory.allocate(Tier.SLOW, Kind.ACCUMULATED, self._weights.bounds.numel, dtype)
            self._memory.copy(buffer.tensor, self._reduced, Tier.FAST, Tier.SLOW)
        self._offloaded = buffer, arrival

    def _receive(self) -> None:
        """Add the gradients copied to the slow tier to the accumulated ones there."""
        assert self._offloaded is not None
        (buffer, arrival), self._offloaded = self._offloaded, None
        arrival.join()  # their source memory will be reused
        if self.accumulated is None:
            self.accumulated, self._landed = buffer, arrival
            return
        self._landing.append((buffer, arrival))
        self._memory.land(arrival, partial(self._add_landed, buffer))

    def _add_landed(self, buffer: TierBuffer) -> None:
        """Add ``buffer`` to the accumulated gradients if it is the oldest one landing; otherwise do nothing."""
        if not self._landing or self._landing[0][0] is not buffer:
            return
        (_, arrival), self._landed = self._landing.popleft(), Arrival()
        arrival.wait()  # earlier copies are done then, too
        assert self.accumulated is not None
        with host_step():
            self.widen()
            self.accumulated.tensor.add_(buffer.tensor)
        self._memory.free(buffer, arrival)

    def _free_whole(self) -> None:
        if self._whole is not None:
            self._memory.free(self._whole)
            self._whole = None
        if self._weights.state is ChunkState.OVERWRITTEN:
            self._weights.release()


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
        self.convert: Callable[[Shard, str, Tensor, torch.device], None] | None = None
        """Converts a state that has come from another device, if an optimizer keeps it in a form of its own there."""
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
            if self.convert is not None and moved.tensor.device != source:
                self.convert(self.bounds, name, moved.tensor, source)
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
