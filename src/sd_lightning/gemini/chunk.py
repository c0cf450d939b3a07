"""A chunk: flat memory for many parameters, its shards, and the moves between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from sd_lightning.gemini.collectives import Collectives, Pending
from sd_lightning.gemini.layout import ChunkLayout, Shard, Slot
from sd_lightning.gemini.placement import ChunkPlacement
from sd_lightning.gemini.tiers import Arrival, Buffer, Kind, Memory, Tier


class ChunkState(Enum):
    """What the memory of a chunk's parameters holds."""

    RELEASED = auto()
    """Nothing; it is not allocated."""
    GATHERING = auto()
    """Weights that are on their way."""
    GATHERED = auto()
    """Weights."""
    OVERWRITTEN = auto()
    """Gradients, or some gradients and the weights of parameters that have none yet."""


_TRANSITIONS = {
    ChunkState.RELEASED: {ChunkState.GATHERING},
    ChunkState.GATHERING: {ChunkState.GATHERED},
    ChunkState.GATHERED: {ChunkState.RELEASED, ChunkState.OVERWRITTEN, ChunkState.GATHERING},
    ChunkState.OVERWRITTEN: {ChunkState.RELEASED},
}


class Chunk:
    """The memory of one chunk on one rank.

    ``full`` is what parameters are views of. It is allocated and freed through its storage, so that views taken by
    autograd stay valid; meanwhile parameters read as NaN. Where weights are not sharded, or there is one rank and they
    live on the fast tier, ``full`` stays and the shard is a view of it. Where the compute type is float32 and weights
    and optimizer live together, the optimizer's ``master`` weights are the shard itself.

    Args:
        layout: What is in it.
        placement: Where its parts live.
        memory: Allocates and accounts.
        collectives: Gathers and reduces.
    """

    def __init__(
        self, layout: ChunkLayout, placement: ChunkPlacement, memory: Memory, collectives: Collectives
    ) -> None:
        self.layout = layout
        self.placement = placement
        self.memory = memory
        self.collectives = collectives
        self.bounds = Shard(layout, collectives.rank, collectives.world_size)
        """What this rank owns of it."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.slots: dict[nn.Parameter, Slot] = {}
        self.states: dict[str, Buffer] = {}
        self.accumulator: Buffer | None = None
        self.gradients: Buffer | None = None
        self.filled: set[str] = set()
        """Parameters whose gradients of this pass are in their slots."""
        self._versions: dict[nn.Parameter, int] = {}
        """For autograd, of the weights that gradients have taken the place of."""
        self._is_swapped = False
        self._stash: Buffer | None = None
        self._pending: Pending | None = None
        self._gathered, self._refreshed = Arrival(), Arrival()
        self._reduced: Tensor | None = None
        """This rank's part of the gradients that are being reduced, and their sum when they are."""
        self._offloaded: tuple[Buffer, Arrival] | None = None
        """Reduced gradients on their way to the slow tier."""
        self._landing: deque[tuple[Buffer, Arrival]] = deque()
        """Those of later passes, that the host has not yet added to those there."""
        self._landed = Arrival()
        self._faces: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        """Of each parameter: its view of the chunk, and what it shows while there is no memory behind that."""
        self.state = ChunkState.GATHERED
        self._allocate()

    def _allocate(self) -> None:
        layout, memory = self.layout, self.memory
        self.full = torch.empty(layout.numel, dtype=layout.dtype, device=memory.device)
        # Reading memory that is not there would end the process. NaN is seen at once, and cannot be written to.
        self._nan = torch.full((), float("nan"), dtype=layout.dtype, device=memory.device)
        self._shard: Buffer | None = None
        self._master: Buffer | None = None
        if self.is_resident:
            memory.ledger.add(Tier.FAST, Kind.WEIGHTS, layout.nbytes)
        else:
            memory.ledger.add(Tier.FAST, Kind.GATHERED, layout.nbytes)
            self._shard = memory.allocate(self.placement.param_tier, Kind.WEIGHTS, self.bounds.numel, layout.dtype)
        if layout.is_trained and not self.is_aliased:
            self._master = memory.allocate(
                self.placement.optim_tier, Kind.OPTIMIZER, self.bounds.numel, self.bounds.master_dtype
            )

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def is_trained(self) -> bool:
        return self.layout.is_trained

    @property
    def is_resident(self) -> bool:
        """Whether the whole chunk stays in memory: gathering it moves nothing."""
        place = self.placement
        return not place.is_sharded or (self.collectives.world_size == 1 and place.param_tier is Tier.FAST)

    @property
    def is_aliased(self) -> bool:
        """Whether the optimizer's weights are the compute weights themselves."""
        place = self.placement
        return self.layout.dtype == self.bounds.master_dtype and place.param_tier == place.optim_tier

    @property
    def shard(self) -> Tensor:
        """This rank's compute weights."""
        return self.collectives.shard(self.full) if self._shard is None else self._shard.tensor

    @property
    def master(self) -> Tensor:
        """This rank's weights as the optimizer sees them, also while others are swapped in."""
        if self._stash is not None:
            return self._stash.tensor
        return self.shard if self._master is None else self._master.tensor

    def own_master(self) -> list[Buffer]:
        """Return the buffer of the optimizer's weights, none if they are the compute weights."""
        return [] if self._master is None else [self._master]

    @property
    def temporary_bytes(self) -> int:
        """Bytes that gathered weights or their gradients take beyond what is resident."""
        return 0 if self.is_resident or self.state is ChunkState.RELEASED else self.layout.nbytes

    def add(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Make a parameter a view of its slot."""
        self.parameters[slot.name] = parameter
        self.slots[parameter] = slot
        view = self.full[slot.begin : slot.end].view(parameter.shape)
        self._faces.append((parameter, view, self._nan.expand(parameter.shape)))
        parameter.data = view

    def fill(self, values: Tensor) -> None:
        """Set this rank's weights from float32 values of its shard, and the compute weights with them."""
        self.master.copy_(values)
        if not self.is_aliased:
            self.memory.copy(self.shard, values, Tier.SLOW, Tier.SLOW)
        self.invalidate()

    # ---------------------------------------------------------------- weights

    def gather(self) -> None:
        """Begin to gather the weights; :meth:`wait` before they are used."""
        if self.state is not ChunkState.RELEASED:
            return
        self._go(ChunkState.GATHERING)
        self._resize(self.layout.nbytes)
        for parameter, view, _ in self._faces:
            parameter.data = view
        with self.memory.copying(Tier.FAST) as self._gathered:
            self._refreshed.join()  # new weights may still be on their way to a shard on the slow tier
            assert self._shard is not None
            self.memory.copy(self.collectives.shard(self.full), self._shard.tensor, self._shard.tier, Tier.FAST)
            self._pending = self.collectives.all_gather(self.full, self.index)

    def wait(self) -> None:
        """Let the computation see the gathered weights."""
        if self.state is not ChunkState.GATHERING:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._gathered.join()
        self._go(ChunkState.GATHERED)

    def wait_on_host(self) -> None:
        """Let the host change the weights and read the gradients on the slow tier: after all that still copies them."""
        for arrival in (self._gathered, self._refreshed, self._landed):
            arrival.wait()
        while self._landing:
            self._add_landed(self._landing[0][0])

    def settle(self) -> None:
        """Let the computation change the weights: it comes after all that still copies them."""
        self.wait()
        self._refreshed.join()

    def release(self) -> None:
        """Free gathered weights, or the gradients in their place."""
        self.wait()
        if self.is_resident or self.state is ChunkState.RELEASED:
            return
        self._go(ChunkState.RELEASED)
        self._resize(0)
        self._hide()
        if self._versions:  # the weights are what they were: other graphs can still go backward
            torch._C._autograd._unsafe_set_version_counter(tuple(self._versions), tuple(self._versions.values()))
            self._versions.clear()

    def _hide(self) -> None:
        for parameter, _, absent in self._faces:
            parameter.data = absent

    def invalidate(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Compute with what the shards now hold: free gathered copies, gather again what is resident.

        Args:
            changed: Parameters whose values differ, all if not given: a graph from before cannot go backward.
        """
        if not self.is_resident:
            self.release()
        torch.autograd.graph.increment_version(self.parameters.values() if changed is None else changed)
        if not self.is_resident:
            return
        self.wait()
        if self.collectives.world_size > 1 or not self.is_aliased:
            self._go(ChunkState.GATHERING)
            with self.memory.copying(Tier.FAST) as self._gathered:
                self._pending = self.collectives.all_gather(self.full, self.index)

    def refresh(self, changed: Iterable[nn.Parameter] | None = None) -> None:
        """Bring the optimizer's new weights to the compute weights, beside whatever is computed next.

        Args:
            changed: As of :meth:`invalidate`.
        """
        if not self.is_aliased:
            place = self.placement
            with self.memory.copying(place.param_tier) as self._refreshed:
                self.memory.copy(self.shard, self.master, place.step_tier, place.param_tier)
        self.invalidate(changed)

    # ---------------------------------------------------------------- gradients

    def put_gradient(self, parameter: nn.Parameter, gradient: Tensor, *, keep: bool = False) -> None:
        """Write the gradient of one parameter, divided by the number of ranks, into its slot.

        Args:
            parameter: One of this chunk.
            gradient: In the shape of the parameter.
            keep: Gradients stay whole for more than one pass: they are added up in float32, in memory of their own.
        """
        slot = self.slots[parameter]
        target = self._gradient_slots(keep)[slot.begin : slot.end].view(gradient.shape)
        scale = 1.0 / self.collectives.world_size
        if slot.name in self.filled:
            target.add_(gradient, alpha=scale)
        elif gradient.dtype == target.dtype:
            torch.mul(gradient, scale, out=target)
        else:
            target.copy_(gradient).mul_(scale)
        self.filled.add(slot.name)
        if self.state is ChunkState.OVERWRITTEN:
            # Whatever would still read the weight in this backward pass gets autograd's error, not the gradient.
            self._versions.setdefault(parameter, parameter._version)
            torch.autograd.graph.increment_version(parameter)
            parameter.data = self._nan.expand(parameter.shape)

    def is_overwritten(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient is in the place of this weight."""
        return self.state is ChunkState.OVERWRITTEN and self.slots[parameter].name in self.filled

    def _gradient_slots(self, keep: bool) -> Tensor:
        if self.gradients is not None:
            return self.gradients.tensor
        if keep or self.is_resident:
            alone = self.collectives.world_size == 1 and self.placement.step_tier is Tier.FAST
            dtype = self.bounds.master_dtype if keep or alone else self.layout.dtype
            self.gradients = self.memory.allocate(Tier.FAST, Kind.GRADIENTS, self.layout.numel, dtype)
            return self.gradients.tensor
        if self.state is ChunkState.RELEASED:
            self._resize(self.layout.nbytes)
            self.state = ChunkState.OVERWRITTEN
        elif self.state is not ChunkState.OVERWRITTEN:
            self.wait()
            self._go(ChunkState.OVERWRITTEN)
        return self.full

    def reduce(self) -> Pending:
        """Begin to sum the gradients over the ranks; :meth:`finish_reduction` when the result is waited for."""
        slots = self._gradient_slots(False)
        for slot in self.layout.slots:
            if slot.name not in self.filled:
                slots[slot.begin : slot.end].zero_()  # unused on this rank: others may have used it
        for begin, end in self.layout.gaps():
            slots[begin:end].zero_()
        self.filled.clear()
        slots = self._widened(slots)
        pending, self._reduced = self.collectives.reduce_scatter(slots, self.index)
        if self.placement.step_tier is Tier.SLOW and not self.collectives.wait_on_host:
            self._offload(pending)
        return pending

    def _widened(self, slots: Tensor) -> Tensor:
        """Give whole gradients memory of their own in the type in which they are summed, if that is a wider one."""
        dtype = self.collectives.sent_dtype(slots.dtype)
        if dtype == slots.dtype:
            return slots
        wide = self.memory.allocate(Tier.FAST, Kind.GRADIENTS, self.layout.numel, dtype)
        wide.tensor.copy_(slots)
        self._free_gradients()
        self.gradients = wide
        return wide.tensor

    def finish_reduction(self, pending: Pending) -> None:
        """Add the reduced gradients of this rank's shard to those of earlier passes, on the optimizer's tier."""
        if self.placement.step_tier is Tier.SLOW:
            if self._offloaded is None:
                self._offload(pending)
            self._receive()
        else:
            pending.wait()
            self._keep()
        self._reduced = None
        self._free_gradients()

    def _keep(self) -> None:
        """Add the reduced gradients to those on the fast tier."""
        assert self._reduced is not None
        whole = self.gradients
        if whole is not None and self.accumulator is None and self._can_adopt(whole):
            whole.kind, self.gradients, self.accumulator = Kind.ACCUMULATED, None, whole
            self.memory.ledger.add(Tier.FAST, Kind.GRADIENTS, -whole.nbytes)
            self.memory.ledger.add(Tier.FAST, Kind.ACCUMULATED, whole.nbytes)
        elif self.accumulator is None:
            self.accumulator = self.memory.allocate(
                Tier.FAST, Kind.ACCUMULATED, self.bounds.numel, self.bounds.master_dtype
            )
            self.accumulator.tensor.copy_(self._reduced)
        else:
            self.accumulator.tensor.add_(self._reduced)

    def _offload(self, pending: Pending) -> None:
        """Let the reduced gradients go to the slow tier as soon as they are there, beside the computation."""
        assert self._reduced is not None
        dtype = self.bounds.master_dtype if self.accumulator is None else self._reduced.dtype
        with self.memory.copying(Tier.SLOW) as arrival:
            pending.wait()
            buffer = self.memory.allocate(Tier.SLOW, Kind.ACCUMULATED, self.bounds.numel, dtype)
            self.memory.copy(buffer.tensor, self._reduced, Tier.FAST, Tier.SLOW)
        self._offloaded = buffer, arrival

    def _receive(self) -> None:
        """Add the gradients that went to the slow tier to those there."""
        assert self._offloaded is not None
        (buffer, arrival), self._offloaded = self._offloaded, None
        arrival.join()  # the memory they came from is used again
        if self.accumulator is None:
            self.accumulator, self._landed = buffer, arrival
            return
        self._landing.append((buffer, arrival))
        self.memory.land(arrival, partial(self._add_landed, buffer))

    def _add_landed(self, buffer: Buffer) -> None:
        """Add the gradients that came to the slow tier first to those there; do nothing if these are no longer they."""
        if not self._landing or self._landing[0][0] is not buffer:
            return
        (_, arrival), self._landed = self._landing.popleft(), Arrival()
        arrival.wait()  # and so for those that came before
        assert self.accumulator is not None
        self.accumulator.tensor.add_(buffer.tensor)
        self.memory.free(buffer, arrival)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients on this rank, reduced or not."""
        return bool(self.filled) or any(b is not None for b in (self.accumulator, self.gradients, self._offloaded))

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """Set a parameter's gradients to zero, whole and reduced ones; others of this chunk stay."""
        slot = self.slots[parameter]
        self.filled.discard(slot.name)
        if self.placement.step_tier is Tier.SLOW:
            self.wait_on_host()
        if self.gradients is not None:
            self.gradients.tensor[slot.begin : slot.end].zero_()
        if self.accumulator is not None:
            self.bounds.view_of(slot, self.accumulator.tensor).zero_()

    def drop_gradients(self) -> None:
        """Free all gradients, finished or not."""
        self.filled.clear()
        if self._offloaded is not None:
            (buffer, arrival), self._offloaded = self._offloaded, None
            arrival.join()
            self.memory.free(buffer)
        while self._landing:
            self.memory.free(self._landing.popleft()[0])
        self._reduced = None
        self._free_gradients()
        self.free_accumulator()

    def free_accumulator(self) -> None:
        """Free the reduced gradients."""
        if self.accumulator is not None:
            self.memory.free(self.accumulator)
            self.accumulator = None

    def _can_adopt(self, gradients: Buffer) -> bool:
        """With one rank the whole gradients are the reduced ones."""
        same = gradients.tensor.dtype == self.bounds.master_dtype and self.placement.step_tier is Tier.FAST
        return self.collectives.world_size == 1 and same

    def _free_gradients(self) -> None:
        if self.gradients is not None:
            self.memory.free(self.gradients)
            self.gradients = None
        if self.state is ChunkState.OVERWRITTEN:
            self.release()

    def discard(self) -> None:
        """Free all of it: its parameters have other memory by now."""
        self._faces.clear()
        for buffer in (self._shard, self._master, self._stash, *self.states.values()):
            if buffer is not None:
                self.memory.free(buffer)
        self._shard = self._master = self._stash = None
        self.states.clear()
        self.full = self.full[:0].clone()

    # ---------------------------------------------------------------- other weights

    def swap_in(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with other weights; each is the part of a parameter that this rank owns."""
        if self.is_aliased:
            # The compute weights are the only copy of the trained ones.
            self._stash = self.memory.allocate(Tier.SLOW, Kind.SWAPPED, self.bounds.numel, self.bounds.master_dtype)
            self.memory.copy(self._stash.tensor, self.shard, self.placement.param_tier, Tier.SLOW)
            self.memory.wait_for_copies()
        self._is_swapped = True
        self.wait()
        for slot in self.layout.slots:
            target = self.bounds.view_of(slot, self.shard)
            if target.numel():
                target.copy_(weights[slot.name].reshape(-1))
        self.invalidate()

    def swap_out(self) -> None:
        """Compute with the trained weights again."""
        self.wait()
        source = self.master
        self.shard.copy_(source)
        if self._stash is not None:
            self.memory.free(self._stash)
            self._stash = None
        self._is_swapped = False
        self.invalidate()

    # ---------------------------------------------------------------- other tiers

    def place(self, placement: ChunkPlacement) -> None:
        """Move to other tiers, outside of backward passes; values stay the same, also of other weights swapped in."""
        if placement == self.placement:
            return
        self.memory.wait_for_copies()  # nothing reads or writes what is freed
        self.wait_on_host()
        self.release()
        self._place_weights(placement, *self._place_optimizer(placement))

    def _place_optimizer(self, placement: ChunkPlacement) -> tuple[Buffer | None, Buffer | None]:
        """Move states and gradients; return the master weights at their new place, as ``_master`` and ``_stash``."""
        memory = self.memory
        for name, state in self.states.items():
            self.states[name] = memory.moved(state, placement.optim_tier)
        if self.accumulator is not None:
            self.accumulator = memory.moved(self.accumulator, placement.step_tier)
        if not self.is_trained:
            return None, None
        own = self._stash or self._master
        is_aliased = self.layout.dtype == self.bounds.master_dtype and placement.param_tier == placement.optim_tier
        if is_aliased and not self._is_swapped:
            if own is not None:
                memory.free(own)  # the compute weights are the same values
            return None, None
        tier, kind = (Tier.SLOW, Kind.SWAPPED) if is_aliased else (placement.optim_tier, Kind.OPTIMIZER)
        new = memory.allocate(tier, kind, self.bounds.numel, self.bounds.master_dtype)
        memory.copy(new.tensor, self.master, self.placement.param_tier if own is None else own.tier, tier)
        memory.wait_for_copies()
        if own is not None:
            memory.free(own)
        return (None, new) if is_aliased else (new, None)

    def _place_weights(self, placement: ChunkPlacement, master: Buffer | None, stash: Buffer | None) -> None:
        memory, old, was_resident, shard = self.memory, self.placement, self.is_resident, self.shard
        self.placement, self._master, self._stash = placement, master, stash
        if self.is_resident and was_resident:
            return
        if not self.is_resident and not was_resident:
            assert self._shard is not None
            self._shard = memory.moved(self._shard, placement.param_tier)
        elif was_resident:
            self.wait()
            self._shard = memory.allocate(placement.param_tier, Kind.WEIGHTS, self.bounds.numel, self.layout.dtype)
            memory.copy(self._shard.tensor, shard, old.param_tier, placement.param_tier)
            memory.wait_for_copies()
            memory.ledger.add(Tier.FAST, Kind.WEIGHTS, -self.layout.nbytes)
            self._resize_storage(0)
            self._go(ChunkState.RELEASED)
            self._hide()
        else:
            self.gather()
            self.wait()
            memory.ledger.add(Tier.FAST, Kind.GATHERED, -self.layout.nbytes)
            memory.ledger.add(Tier.FAST, Kind.WEIGHTS, self.layout.nbytes)
            memory.wait_for_copies()
            assert self._shard is not None
            memory.free(self._shard)
            self._shard = None

    # ---------------------------------------------------------------- inner

    def _go(self, state: ChunkState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"chunk {self.index} cannot go from {self.state.name} to {state.name}")
        self.state = state

    def _resize(self, nbytes: int) -> None:
        storage = self.full.untyped_storage()
        self.memory.ledger.add(Tier.FAST, Kind.GATHERED, nbytes - storage.nbytes())
        self._resize_storage(nbytes)

    def _resize_storage(self, nbytes: int) -> None:
        if not self.full.untyped_storage().resizable():
            # numpy() was called on a weight: that memory is freed when the array is, and the chunk gets another.
            with torch.inference_mode(False):
                self.full = torch.empty_like(self.full)
            for index, (parameter, _, absent) in enumerate(self._faces):
                slot = self.slots[parameter]
                self._faces[index] = parameter, self.full[slot.begin : slot.end].view(parameter.shape), absent
        self.full.untyped_storage().resize_(nbytes)
