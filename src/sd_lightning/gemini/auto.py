"""``placement=auto``: measure what passes take beside the chunks, and place the chunks in what is left."""

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
    """What the memory of a network call depends on."""

    network: str
    with_gradients: bool
    is_training: bool
    shapes: tuple[tuple[int, ...], ...]
    """Of all tensors among the inputs."""

    def covers(self, other: Call) -> bool:
        """Whether another call takes no more memory: the same, with inputs that are larger nowhere."""
        same = self[:3] == other[:3] and [len(s) for s in self.shapes] == [len(s) for s in other.shapes]
        return same and all(a >= b for mine, its in zip(self.shapes, other.shapes) for a, b in zip(mine, its))


class Measurement(Enum):
    """How far the measurement of a pass has come."""

    NONE = auto()
    UNTIL_FORWARD = auto()
    """It ends with the forward pass under way."""
    UNTIL_BACKWARD = auto()
    """It ends with the backward pass to come."""
    COMPLETE = auto()
    """The next call takes it over, together with all ranks."""


_UNDER_WAY = (Measurement.UNTIL_FORWARD, Measurement.UNTIL_BACKWARD)
_TRANSITIONS = {
    Measurement.NONE: set(_UNDER_WAY),
    Measurement.UNTIL_FORWARD: {Measurement.COMPLETE},
    Measurement.UNTIL_BACKWARD: {Measurement.COMPLETE},
    Measurement.COMPLETE: {Measurement.NONE},
}


class AutoPlacement:
    """Adapts the engine's plan to the calls of its networks.

    Before a call that is larger than all before it (the first one, another resolution, sampling with a larger batch),
    everything moves to the slow tier, and the pass is measured at each unit. Before the next call a plan is made for
    the most that was measured so far. One small collective per call makes all ranks do so together.

    Args:
        engine: Whose chunks are placed.

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
        """The most that was measured so far, over all ranks."""
        self.spare_bytes: int | None = None
        """What the plan leaves of the cap beside chunks, activations and the largest unit; None before it is made."""
        self.trace: list[tuple[str, str, int]] = []
        """Of the last measured pass on this rank: phase, unit, bytes that are not in chunks."""
        self._probe: Probe = AllocatorProbe(memory) if memory.on_accelerator else SavedTensorsProbe(self._is_weight)
        self._storages: set[int] = set()
        self._known: list[Call] = []
        """Calls that the plan covers."""
        self._new: list[Call] = []
        """Calls of the pass that is measured."""
        self._measurement = Measurement.NONE
        self._is_stale = True
        self._last: Plan | None = None
        self._depth = 0
        """Networks that run inside each other."""
        plan_auto(engine.layouts, self._demand())
        self._removable: list[Any] = []
        for name, network in engine.networks.items():
            before = torch._dynamo.disable(partial(self._before, name))
            after = torch._dynamo.disable(self._after)
            self._removable.append(network.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._removable.append(network.register_forward_hook(after, always_call=True))
        engine.runtime.monitor = self

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._removable:
            handle.remove()

    def make_room(self) -> None:
        """Move everything to the slow tier: optimizers are about to come or go."""
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
        self._depth = 0  # an interrupted call has no end
        self._probe.exit()
        if self._measurement in _UNDER_WAY:
            self.trace = []
            self._probe.begin()

    def _before(self, name: str, network: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed block computes again
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
                    self._begin(call)
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

    def _begin(self, call: Call) -> None:
        self.make_room()
        self._go(Measurement.UNTIL_BACKWARD if call.with_gradients else Measurement.UNTIL_FORWARD)
        self.trace = []
        self._probe.begin()

    def _complete(self) -> None:
        self.trace.append(("end", "", self._probe.note()))
        self._go(Measurement.COMPLETE)

    def _agree(self, is_new: bool) -> bool:
        """Take over a complete measurement, together with all ranks; return whether any has a larger call now."""
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
            log.info(
                "Gemini: %s of %s for chunks beside %s of activations: %s",
                mib(taken),
                mib(self.cap_bytes),
                mib(self.non_model_bytes),
                plan.summary(engine.layouts),
            )

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
    """Return the size of a rank's fast tier: of its accelerator, or its share of the host's memory."""
    if device.type == "cpu":
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local
    return int(torch.get_device_module(device).mem_get_info(device)[1])
