"""The gradients of one chunk on one rank: whole ones of a pass, and the shard of their sum."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from sd_lightning.gemini.collectives import Pending
from sd_lightning.gemini.memory import Arrival
from sd_lightning.gemini.placement import Kind, Tier, TierBuffer
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
