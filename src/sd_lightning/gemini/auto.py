"""``placement=auto``: measure the memory that is not in chunks, and place the chunks in the rest."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from sd_lightning.gemini.chunk import ChunkedNetworks
from sd_lightning.gemini.guarded import OUTSIDE
from sd_lightning.gemini.memory import Memory, fast_tier_bytes, reset_peak_allocated
from sd_lightning.gemini.placement import ChunkPlan, Demand, Tier, mib, plan_auto, plan_trace

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


class AutoPlacement:
    """Placement of chunks, adapted to the measured memory of network calls.

    Before a call that no earlier one covers (the first one, another resolution, sampling with a larger batch), all
    chunks move to the slow tier, and memory is measured at each unit of the pass. Before the next call, a plan is made
    for the largest measurement so far. One small all-reduce per call makes all ranks do this together.

    Args:
        chunked: The networks and their chunks.
        move: Moves the chunks to the tiers of a plan.

    Raises:
        UsageError: The largest unit alone does not fit under ``memory_cap``.
    """

    def __init__(self, chunked: ChunkedNetworks, move: Callable[[ChunkPlan], None]) -> None:
        self._chunked = chunked
        self._move = move
        memory, collectives = chunked.memory, chunked.collectives
        cap = chunked.config.memory_cap_bytes(fast_tier_bytes(memory.device, collectives.world_size))
        lowest = collectives.all_reduce(torch.tensor([cap], dtype=torch.int64), dist.ReduceOp.MIN)
        self.cap_bytes = int(lowest)
        self.non_model_bytes = 0
        """Largest measurement so far, over all ranks."""
        self._storages: set[int] = set()
        """Addresses of the storages of chunks, whose tensors are no activations."""
        self._probe: Probe = AllocatorProbe(memory) if memory.on_accelerator else SavedTensorsProbe(self._storages)
        self._planned_calls: list[NetworkCall] = []
        """Calls that the plan covers."""
        self._measured_calls: list[NetworkCall] = []
        """Calls of the pass being measured."""
        self._measurement = Measurement.NONE
        self._is_stale = True
        self._last: ChunkPlan | None = None
        self._depth = 0
        """Number of nested network calls now running."""
        plan_auto(chunked.layouts, self._demand())

    def attach(self, recover: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Add hooks to the networks; yield functions that remove them.

        Args:
            recover: Aborts the last backward pass if it failed.
        """
        for name, network in self._chunked.networks.items():
            before = torch._dynamo.disable(partial(self._before, name, recover))
            after = torch._dynamo.disable(self._after)
            yield network.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove
            yield network.register_forward_hook(after, always_call=True).remove

    def make_room(self) -> None:
        """Move all chunks to the slow tier, before a measurement or a new optimizer."""
        self._move(plan_trace(self._chunked.layouts))
        self._is_stale = True

    def note_access(self) -> None:
        """Note that a unit's weights are about to be gathered."""
        if self._measurement in _UNDER_WAY:
            self._probe.note()

    def end_backward(self) -> None:
        """Note that a backward pass has ended."""
        if self._measurement is Measurement.UNTIL_BACKWARD:
            self._complete()

    def _complete(self) -> None:
        self._probe.note()
        self._measurement = Measurement.COMPLETE

    def abort(self) -> None:
        """Forget the current pass."""
        self._depth = 0  # an interrupted call may not have ended
        self._probe.exit()
        if self._measurement in _UNDER_WAY:
            self._probe.begin()

    def _before(
        self, name: str, recover: Callable[[], None], network: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if torch._C._current_graph_task_id() != OUTSIDE:
            return  # recomputation of a checkpointed block
        self._depth += 1
        if self._depth > 1:
            return
        recover()
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        call = NetworkCall(name, torch.is_grad_enabled(), network.training, tuple(tuple(t.shape) for t in tensors))
        is_new = not any(each.covers(call) for each in [*self._planned_calls, *self._measured_calls])
        with torch.inference_mode(False), torch.no_grad():
            is_new_anywhere = self._agree(is_new)
            if self._measurement is Measurement.NONE:
                if is_new_anywhere:
                    self.make_room()
                    has_backward = call.with_gradients
                    self._measurement = Measurement.UNTIL_BACKWARD if has_backward else Measurement.UNTIL_FORWARD
                    self._probe.begin()
                elif self._is_stale:
                    self._plan()
        if is_new:
            self._measured_calls.append(call)
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

    def _agree(self, is_new: bool) -> bool:
        """Record a complete measurement, on all ranks together; return whether any rank has a new call now."""
        is_complete = self._measurement is Measurement.COMPLETE
        own = [is_new, self._probe.end() if is_complete else 0]
        largest = self._chunked.collectives.all_reduce(torch.tensor(own, dtype=torch.int64), dist.ReduceOp.MAX)
        is_new_anywhere, measured = largest.tolist()
        if is_complete:
            self.non_model_bytes = max(self.non_model_bytes, measured)
            self._planned_calls += self._measured_calls
            self._measured_calls = []
            self._is_stale = True
            self._measurement = Measurement.NONE
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
            held = self.cap_bytes - self.non_model_bytes - plan.spare_bytes
            use = f"{mib(held)} of {mib(self.cap_bytes)} for chunks beside {mib(self.non_model_bytes)} of activations"
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


class Probe(ABC):
    """Measurement of one pass at a time."""

    @abstractmethod
    def begin(self) -> None:
        """Start a measurement, or start it again."""

    def enter(self) -> None:  # noqa: B027
        """Note that a network's forward begins, with or without gradients."""

    def exit(self) -> None:  # noqa: B027
        """Note that the network's forward has ended."""

    def note(self) -> None:  # noqa: B027
        """Note the bytes taken now; called between units."""

    @abstractmethod
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
        self._peak = 0

    @override
    def begin(self) -> None:
        reset_peak_allocated(self._memory.device)
        self._peak = 0

    @override
    def note(self) -> None:
        device = self._memory.device
        peak = torch.get_device_module(device).max_memory_allocated(device)
        self._peak = max(self._peak, peak - self._memory.ledger.current[Tier.FAST])
        reset_peak_allocated(device)

    @override
    def end(self) -> int:
        self.note()
        return self._peak


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

    @override
    def begin(self) -> None:
        self._measures, self._bytes = True, 0
        self._seen.clear()

    @override
    def enter(self) -> None:
        if self._measures:
            self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._hooks.__enter__()

    @override
    def exit(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    @override
    def end(self) -> int:
        self._measures = False
        return self._bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and storage._cdata not in self._of_weights:
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
        return tensor
