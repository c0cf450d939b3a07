"""``placement=auto``: measure the memory that is not in chunks, and place the chunks in the rest."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.placement import Demand, Plan, fast_bytes, plan_auto, plan_trace
from sd_lightning.gemini.probe import AllocatorProbe, Probe, SavedTensorsProbe
from sd_lightning.gemini.tiers import mib

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """What determines the memory of a network call."""

    network: str
    with_gradients: bool
    is_training: bool
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of all input tensors."""

    def covers(self, other: Call) -> bool:
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
        engine: Owns the chunks.

    Raises:
        UsageError: The largest unit alone does not fit under ``memory_cap``.
    """

    def __init__(self, engine: ChunkedNetworks) -> None:
        self._engine = engine
        memory = engine.memory
        cap = engine.config.memory_cap_bytes(fast_tier_bytes(memory.device, engine.collectives.world_size))
        lowest = engine.collectives.all_reduce(torch.tensor([cap], dtype=torch.int64), dist.ReduceOp.MIN)
        self.cap_bytes = int(lowest)
        self.non_model_bytes = 0
        """Largest measurement so far, over all ranks."""
        self.spare_bytes: int | None = None
        """Bytes of the cap left after chunks, activations and the largest unit; None before there is a plan."""
        self.trace: list[tuple[str, str, int]] = []
        """Last measured pass on this rank: (phase, unit, bytes that are not in chunks)."""
        self._probe: Probe = AllocatorProbe(memory) if memory.on_accelerator else SavedTensorsProbe(self._is_weight)
        self._storages: set[int] = set()
        self._known: list[Call] = []
        """Calls that the plan covers."""
        self._new: list[Call] = []
        """Calls of the pass being measured."""
        self._measurement = Measurement.NONE
        self._is_stale = True
        self._last: Plan | None = None
        self._depth = 0
        """Number of nested network calls now running."""
        plan_auto(engine.layouts, self._demand())
        for name, network in engine.networks.items():
            before = torch._dynamo.disable(partial(self._before, name))
            after = torch._dynamo.disable(self._after)
            begin = network.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            end = network.register_forward_hook(after, always_call=True)
            engine.runtime.undo += [begin.remove, end.remove]
        engine.runtime.monitor = self

    def make_room(self) -> None:
        """Move all chunks to the slow tier, before a measurement or a new optimizer."""
        self._engine.move(plan_trace(self._engine.layouts))
        self._is_stale = True
        self.spare_bytes = None

    def access(self, phase: str, unit: int) -> None:
        if self._measurement in _UNDER_WAY:
            self.trace.append((phase, self._engine.runtime.units[unit].name, self._probe.note()))

    def end_backward(self) -> None:
        if self._measurement is Measurement.UNTIL_BACKWARD:
            self._complete()

    def abort(self) -> None:
        self._depth = 0  # an interrupted call may not have ended
        self._probe.exit()
        if self._measurement in _UNDER_WAY:
            self._begin()

    def _before(self, name: str, network: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # recomputation of a checkpointed block
        self._depth += 1
        if self._depth > 1:
            return
        self._engine.runtime.recover()
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        call = Call(name, torch.is_grad_enabled(), network.training, tuple(tuple(t.shape) for t in tensors))
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
        self._storages = {chunk.weights.storage.full.untyped_storage()._cdata for chunk in self._engine.chunks}
        self._probe.enter()

    def _after(self, network: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
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
        largest = self._engine.collectives.all_reduce(torch.tensor(own, dtype=torch.int64), dist.ReduceOp.MAX)
        is_new_anywhere, measured = largest.tolist()
        if is_complete:
            self.non_model_bytes = max(self.non_model_bytes, measured)
            self._known += self._new
            self._new = []
            self._is_stale = True
            self._go(Measurement.NONE)
        return bool(is_new_anywhere)

    def _plan(self) -> None:
        engine, demand = self._engine, self._demand()
        plan = plan_auto(engine.layouts, demand)
        engine.collectives.require_agreement("the placement of chunks", repr(plan))
        engine.move(plan)
        self._is_stale = False
        taken = fast_bytes(engine.layouts, plan.chunks, demand)
        self.spare_bytes = demand.cap_bytes - demand.non_model_bytes - taken
        if plan != self._last:
            self._last = plan
            use = f"{mib(taken)} of {mib(self.cap_bytes)} for chunks beside {mib(self.non_model_bytes)} of activations"
            log.info("Gemini: %s: %s", use, plan.summary(engine.layouts))

    def _demand(self) -> Demand:
        engine = self._engine
        world_size, mode = engine.collectives.world_size, engine.config.reduce_once
        return Demand(
            self.cap_bytes,
            self.non_model_bytes,
            tuple(sum(state.nbytes for state in chunk.states.values()) for chunk in engine.chunks),
            engine.runtime.chunks_of_units(),
            world_size,
            keeps_gradients=(None if world_size > 1 else False) if mode == "auto" else mode,
            sent_dtype=engine.collectives.widest_sent_dtype,
        )

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


def fast_tier_bytes(device: torch.device, world_size: int) -> int:
    """Return the bytes of a rank's fast tier: its accelerator's memory, or its share of the host memory."""
    if device.type == "cpu":
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local
    return int(torch.get_device_module(device).mem_get_info(device)[1])
