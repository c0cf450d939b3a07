"""``placement=auto``: measure the memory that is not in chunks, and place the chunks in the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from sd_lightning.gemini.chunk import ChunkedNetworks
from sd_lightning.gemini.guarded import OUTSIDE
from sd_lightning.gemini.memory import Memory, fast_tier_bytes, reset_peak_allocated
from sd_lightning.gemini.placement import ChunkPlan, Demand, Tier, mib, plan_auto, plan_trace
from sd_lightning.gemini.runtime import Runtime

log = logging.getLogger(__name__)


class NetworkCall(NamedTuple):
    """What determines the memory of a network call."""

    network: str
    with_gradients: bool
    is_training: bool
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of all input tensors."""

    def covers(self, other: NetworkCall) -> bool:
        """Return whether another call takes no more memory: the same kind, with no larger input dimension."""
        same = self[:3] == other[:3] and [len(s) for s in self.shapes] == [len(s) for s in other.shapes]
        return same and all(a >= b for mine, its in zip(self.shapes, other.shapes) for a, b in zip(mine, its))


class Measurement(Enum):
    """State of the measurement of a pass."""

    NONE = auto()
    UNTIL_FORWARD = auto()
    """It ends with the current forward pass."""
    UNTIL_BACKWARD = auto()
    """It ends with the next backward pass."""
    COMPLETE = auto()
    """The next call records it, on all ranks together."""


_UNDER_WAY = (Measurement.UNTIL_FORWARD, Measurement.UNTIL_BACKWARD)
_TRANSITIONS = {
    Measurement.NONE: set(_UNDER_WAY),
    Measurement.UNTIL_FORWARD: {Measurement.COMPLETE},
    Measurement.UNTIL_BACKWARD: {Measurement.COMPLETE},
    Measurement.COMPLETE: {Measurement.NONE},
}


class AutoPlacement:
    """Placement of chunks, adapted to the measured memory of network calls.

    Before a call that no earlier one covers (the first one, another resolution, sampling with a larger batch), all
    chunks move to the slow tier, and memory is measured at each unit of the pass. Before the next call, a plan is made
    for the largest measurement so far. One small all-reduce per call makes all ranks do this together.

    Args:
        chunked: The networks and their chunks.
        runtime: Runs the passes.
        move: Moves the chunks to the tiers of a plan.

    Raises:
        UsageError: The largest unit alone does not fit under ``memory_cap``.
    """

    def __init__(self, chunked: ChunkedNetworks, runtime: Runtime, move: Callable[[ChunkPlan], None]) -> None:
        self._chunked = chunked
        self._runtime = runtime
        self._move = move
        memory, collectives = chunked.memory, chunked.collectives
        cap = chunked.config.memory_cap_bytes(fast_tier_bytes(memory.device, collectives.world_size))
        lowest = collectives.all_reduce(torch.tensor([cap], dtype=torch.int64), dist.ReduceOp.MIN)
        self.cap_bytes = int(lowest)
        self.non_model_bytes = 0
        """Largest measurement so far, over all ranks."""
        self.trace: list[tuple[str, str, int]] = []
        """Last measured pass on this rank: (phase, unit, bytes that are not in chunks)."""
        self._storages: set[int] = set()
        """Addresses of the storages of chunks, whose tensors are no activations."""
        self._probe: Probe = AllocatorProbe(memory) if memory.on_accelerator else SavedTensorsProbe(self._storages)
        self._known: list[NetworkCall] = []
        """Calls that the plan covers."""
        self._new: list[NetworkCall] = []
        """Calls of the pass being measured."""
        self._measurement = Measurement.NONE
        self._is_stale = True
        self._last: ChunkPlan | None = None
        self._depth = 0
        """Number of nested network calls now running."""
        plan_auto(chunked.layouts, self._demand())
        for name, network in chunked.networks.items():
            before = torch._dynamo.disable(partial(self._before, name))
            after = torch._dynamo.disable(self._after)
            begin = network.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            end = network.register_forward_hook(after, always_call=True)
            runtime.undo += [begin.remove, end.remove]
        runtime.measurement = self

    def make_room(self) -> None:
        """Move all chunks to the slow tier, before a measurement or a new optimizer."""
        self._move(plan_trace(self._chunked.layouts))
        self._is_stale = True

    def access(self, phase: str, unit: int) -> None:
        """Note that a unit's weights are about to be gathered."""
        if self._measurement in _UNDER_WAY:
            self.trace.append((phase, self._chunked.units[unit].name, self._probe.note()))

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self._measurement is Measurement.UNTIL_BACKWARD:
            self._complete()

    def abort(self) -> None:
        """Forget the current pass."""
        self._depth = 0  # an interrupted call may not have ended
        self._probe.exit()
        if self._measurement in _UNDER_WAY:
            self._begin()

    def _before(self, name: str, network: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch._C._current_graph_task_id() != OUTSIDE:
            return  # recomputation of a checkpointed block
        self._depth += 1
        if self._depth > 1:
            return
        self._runtime.recover()
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        call = NetworkCall(name, torch.is_grad_enabled(), network.training, tuple(tuple(t.shape) for t in tensors))
        is_new = not any(known.covers(call) for known in [*self._known, *self._new])
        with torch.inference_mode(False), torch.no_grad():
            is_new_anywhere = self._agree(is_new)
            if self._measurement is Measurement.NONE:
                if is_new_anywhere:
                    self.make_room()
                    self._go(Measurement.UNTIL_BACKWARD if call.with_gradients else Measurement.UNTIL_FORWARD)
                    self._begin()
                elif self._is_stale:
                    self._plan()
        if is_new:
            self._new.append(call)
        self._storages.clear()
        self._storages.update(chunk.weights.storage.full.untyped_storage()._cdata for chunk in self._chunked.chunks)
        self._probe.enter()

    def _after(self, network: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != OUTSIDE:
            return
        self._depth -= 1
        if self._depth == 0:
            self._probe.exit()
            if self._measurement is Measurement.UNTIL_FORWARD:
                self._complete()

    def _go(self, measurement: Measurement) -> None:
        if measurement not in _TRANSITIONS[self._measurement]:
            raise RuntimeError(f"a measurement cannot go from {self._measurement.name} to {measurement.name}")
        self._measurement = measurement

    def _begin(self) -> None:
        """Start a measurement, or start it again."""
        self.trace = []
        self._probe.begin()

    def _complete(self) -> None:
        self.trace.append(("end", "", self._probe.note()))
        self._go(Measurement.COMPLETE)

    def _agree(self, is_new: bool) -> bool:
        """Record a complete measurement, on all ranks together; return whether any rank has a new call now."""
        is_complete = self._measurement is Measurement.COMPLETE
        own = [is_new, self._probe.end() if is_complete else 0]
        largest = self._chunked.collectives.all_reduce(torch.tensor(own, dtype=torch.int64), dist.ReduceOp.MAX)
        is_new_anywhere, measured = largest.tolist()
        if is_complete:
            self.non_model_bytes = max(self.non_model_bytes, measured)
            self._known += self._new
            self._new = []
            self._is_stale = True
            self._go(Measurement.NONE)
        return bool(is_new_anywhere)

    def _plan(self) -> None:
        chunked = self._chunked
        plan = plan_auto(chunked.layouts, self._demand())
        chunked.collectives.require_agreement("the placement of chunks", repr(plan))
        self._move(plan)
        self._is_stale = False
        if plan != self._last:
            self._last = plan
            assert plan.spare_bytes is not None
            taken = self.cap_bytes - self.non_model_bytes - plan.spare_bytes
            use = f"{mib(taken)} of {mib(self.cap_bytes)} for chunks beside {mib(self.non_model_bytes)} of activations"
            log.info("Gemini: %s: %s", use, plan.summary(chunked.layouts))

    def _demand(self) -> Demand:
        chunked = self._chunked
        world_size, mode = chunked.collectives.world_size, chunked.config.reduce_once
        return Demand(
            self.cap_bytes,
            self.non_model_bytes,
            tuple(sum(state.nbytes for state in chunk.states.values()) for chunk in chunked.chunks),
            chunked.chunks_around_units(),
            world_size,
            keeps_gradients=(None if world_size > 1 else False) if mode == "auto" else mode,
            sent_dtype=chunked.collectives.widest_sent_dtype,
        )


class Probe(Protocol):
    """Measurement of one pass at a time."""

    def begin(self) -> None:
        """Start a measurement."""

    def enter(self) -> None:
        """Note that a network's forward begins, with or without gradients."""
        return None

    def exit(self) -> None:
        """Note that the network's forward has ended."""
        return None

    def note(self) -> int:
        """Return the bytes taken now; called between units."""

    def end(self) -> int:
        """Return the peak bytes since :meth:`begin`."""


class AllocatorProbe(Probe):
    """Probe that reads the peak of the accelerator's allocator, and resets it at every note.

    The allocator has one peak only, so a probe must reset it; :func:`peak_allocated` remembers the peak of the whole
    process. The current bytes of chunks are subtracted from the peak since the last note. Chunks that were freed in
    between count as activations, which errs on the safe side.

    Args:
        memory: Counts the bytes of chunks.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._module = torch.get_device_module(memory.device)
        self._peak = 0

    def begin(self) -> None:
        self._reset()
        self._peak = 0

    def note(self) -> int:
        in_chunks = self._memory.ledger.current[Tier.FAST]
        peak = self._module.max_memory_allocated(self._memory.device) - in_chunks
        self._peak = max(self._peak, peak)
        self._reset()
        return max(int(self._module.memory_allocated(self._memory.device)) - in_chunks, 0)

    def end(self) -> int:
        self.note()
        return self._peak

    def _reset(self) -> None:
        reset_peak_allocated(self._memory.device)


class SavedTensorsProbe(Probe):
    """Probe that counts tensors saved for the backward pass; the host has no allocator statistics.

    Inputs of checkpointed blocks are kept by the blocks themselves and are not counted.

    Args:
        of_weights: Addresses of storages that are not counted, which may change over time.
    """

    def __init__(self, of_weights: Set[int]) -> None:
        self._of_weights = of_weights
        self._seen: set[int] = set()
        self._bytes = 0
        self._hooks: saved_tensors_hooks | None = None
        self._measures = False

    def begin(self) -> None:
        self._measures, self._bytes = True, 0
        self._seen.clear()

    def enter(self) -> None:
        if self._measures:
            self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._hooks.__enter__()

    def exit(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def note(self) -> int:
        return self._bytes

    def end(self) -> int:
        self._measures = False
        return self._bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and storage._cdata not in self._of_weights:
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
        return tensor
