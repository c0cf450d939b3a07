"""Hooks of the forward and backward pass: gather, release and reduce in the same order on all ranks."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from sd_lightning._errors import UsageError
from sd_lightning.gemini.auto import AutoPlacement
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.gathering import Accumulation, Gatherer, Reducer
from sd_lightning.gemini.guarded import OUTSIDE
from sd_lightning.gemini.outside import OutsideAccess
from sd_lightning.gemini.passes import Call, Calls, GraphTask, Pass, Route, order_of
from sd_lightning.gemini.tracer import Tracer

Observer = Callable[[str, str], None]
"""(phase: "forward", "backward" or "end", unit): called when the weights of the unit are gathered."""

log = logging.getLogger(__name__)

TORN = (
    "Gemini has stepped weights in a backward pass that failed, or that no optimizer step followed (step_in_backward), "
    "so that they may be of two different steps; resume from the last checkpoint"
)

Before = Callable[[nn.Module, Any], None]
"""(module, positional arguments)."""
After = Callable[[nn.Module, Any, Any], None]
"""(module, positional arguments, output): the output is None if the call failed."""
Undo = Callable[[], None]


def wrap_calls(module: nn.Module, before: Before, after: After) -> list[Undo]:
    """Call ``before`` first and ``after`` last in each forward of a module; return functions that remove them."""
    compiled = module._compiled_call_impl
    if compiled is None:
        begin = module.register_forward_pre_hook(torch._dynamo.disable(before), prepend=True)
        end = module.register_forward_hook(torch._dynamo.disable(after), always_call=True)
        return [begin.remove, end.remove]

    # A compiled module calls its hooks inside the compiled region; ``before`` and ``after`` must stay outside.
    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            after(module, args, output)
        return output

    def undo() -> None:
        if module._compiled_call_impl is call:
            module._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return [undo]


_GRAD: Any = Tensor.grad


class Runtime:
    """Hooks that gather units before their forward and backward, and have their gradients reduced.

    Collectives depend only on which units run and in which order, never on which parameters got gradients, on timing,
    or on this rank's memory. So all ranks run the same collectives, even if a parameter is used on one rank only. If
    units run backward on some ranks only, all ranks detect this when the backward pass begins, and follow one schedule:
    each rank also takes part in the collectives of units that it does not compute.

    Args:
        chunked: The networks and their chunks.
        reducer: Reduces their gradients.
        access: Shows whole values of parameters outside of their units.
        auto: Measures passes and places the chunks, if that is not settled by the settings.
    """

    def __init__(
        self, chunked: ChunkedNetworks, reducer: Reducer, access: OutsideAccess, auto: AutoPlacement | None
    ) -> None:
        self.units = chunked.units
        self.chunked = chunked
        self.reducer = reducer
        self.access = access
        self.observer: Observer | None = None
        self._auto = auto
        self._chunks = chunked.chunks
        self._chunks_of = chunked.chunks_of
        self.tracer = Tracer(self._chunks_of)
        budget, prefetch = chunked.plan.gathered_budget, chunked.config.prefetch
        self.gatherer = Gatherer(self.tracer, reducer, budget=budget, prefetch=prefetch)
        self.accumulation = Accumulation(chunked, reducer)
        self.statistics = reducer.statistics
        self._calls = Calls(self.units, chunked.networks.values(), chunked.collectives)
        self._reset()
        self.undo: list[Undo] = []
        """Functions that remove hooks."""
        self._attach(is_alone=chunked.collectives.is_alone)

    @property
    def is_torn(self) -> bool:
        """Whether a backward pass that failed or was dropped has stepped some of the weights."""
        return bool(self.reducer.stepped) and (self._pass.has_failed or not self.reducer.complete)

    def check_is_consistent(self, *, before_step: bool = False) -> None:
        """Raise if a backward pass has stepped, and failed, or the optimizer has not stepped after it.

        Args:
            before_step: The optimizer steps now.

        Raises:
            UsageError: It has.
        """
        if self.is_torn:
            raise UsageError(TORN)
        if self.reducer.stepped and not before_step:
            raise UsageError(
                "Gemini was asked for its state after a backward pass that has stepped the weights (step_in_backward), "
                "and before the optimizer's step; save after it, for example in on_train_batch_end"
            )

    def check_can_step(self) -> None:
        """Raise if an optimizer cannot step now."""
        self.access.close()
        self.check_is_consistent(before_step=True)
        if self.chunked.is_swapped:
            raise RuntimeError("an optimizer stepped between swap_in and swap_out")
        if self._pass.tasks:  # a failed one counts until it is aborted
            raise RuntimeError("an optimizer stepped after a backward pass that did not end; call abort() first")

    def detach(self) -> None:
        """Remove all hooks."""
        for undo in self.undo:
            undo()
        self.undo.clear()

    def recover(self) -> None:
        """Abort the last backward pass if it ended in an exception; call it outside of backward passes.

        Raises:
            RuntimeError: The pass is still running, so its gradients must not be lost.
        """
        if self._pass.has_failed:
            self.abort()
        elif self._pass.tasks and torch._C._current_graph_task_id() == OUTSIDE:
            raise RuntimeError(
                "Gemini: a network was called while a backward pass runs in another thread; expected one thread"
            )

    def abort(self) -> None:
        """Drop an unfinished backward pass, and all gradients since the last optimizer step.

        Raises:
            RuntimeError: Called inside the backward pass.
        """
        if torch._C._current_graph_task_id() in self._pass.tasks:
            raise RuntimeError("Gemini: gradients were to be dropped inside the backward pass that computes them")
        self._reset()
        if self.reducer.stepped and self.reducer.complete:
            log.warning(TORN)
        self.reducer.drop()
        self.tracer.forget()
        if self._auto is not None:
            self._auto.abort()
        self.statistics["aborted"] += 1

    def _attach(self, *, is_alone: bool) -> None:
        for index, unit in enumerate(self.units):
            self.undo += wrap_calls(unit.module, partial(self._before, index), partial(self._after, index))
        for route in self._calls.routes:
            if not is_alone and route.network._compiled_call_impl is None:
                self.undo += wrap_calls(
                    route.network, partial(self._begin_route, route), partial(self._end_route, route)
                )
        if self._auto is not None:
            self.undo += self._auto.attach(self.recover)
        for chunk in self._chunks:
            # Python's garbage collector does not see these hooks: a strong reference would keep the engine alive.
            hook = partial(_accumulated, weakref.ref(self), chunk.index)
            for parameter in chunk.slots if chunk.is_trained else ():
                self.undo.append(parameter.register_post_accumulate_grad_hook(hook).remove)

    def _reset(self) -> None:
        """Forget the current pass."""
        self._pass = Pass(self.units, self._chunks_of, self.reducer, self._access)
        self._calls.reset()

    def _access(self, index: int, phase: str) -> None:
        self.tracer.use(index)
        if self._auto is not None:
            self._auto.note_access()
        self.gatherer.gather(self._chunks_of[index], self._pass.chunks_in_use)
        if self.observer is not None:
            self.observer(phase, self.units[index].name)

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        if module is not self.units[index].module:
            return  # a deep copy has the hooks of its original
        number = torch._C._current_graph_task_id()
        if number == OUTSIDE:
            self.recover()
            self.access.close()
            if not self._pass.running:
                self._begin_forward(index)
            for skipped in self._calls.skipped_before(index):
                self._access(skipped, "forward")
        else:
            self._pass.renew(index, number)  # recomputation of a checkpointed block
        self._pass.running.append(index)
        self._access(index, "forward")
        self.access.begin_forward(index, self.units[index].parameters)

    def _guard(self, ended: Iterable[int]) -> None:
        """Guard the parameters of units, unless units that still run use them."""
        used = {parameter for unit in self._pass.running for parameter in self.units[unit].parameters}
        for unit in ended:
            parameters = self.units[unit].parameters
            self.access.guard([p for p in parameters if p not in used] if used else parameters)

    def _begin_forward(self, index: int) -> None:
        self._calls.alive()
        if torch.is_grad_enabled():
            self.tracer.begin(with_gradients=True)
        elif self.tracer.current_start in (None, index):
            # Otherwise the call is part of the current pass, and may have gradients on other ranks.
            self.tracer.begin(with_gradients=False)
            self.tracer.end_pass()

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        running = self._pass.running
        if module is not self.units[index].module:
            return
        if index in running:
            ended = running[running.index(index) :]
            del running[running.index(index) :]
            try:
                if output is not None:
                    self.access.end_forward(index)
            finally:
                self._guard(ended)
        if output is None or not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors:
            raise UsageError(
                f"Gemini finds no tensors in what {self._name(index)} returns ({type(output).__name__}); return "
                "tensors, tuples or dictionaries, or register the class with torch.utils._pytree"
            )
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable:
            return
        call = Call(index, max(order_of(tensor) for tensor in differentiable))
        if torch._C._current_graph_task_id() == OUTSIDE:
            self._pass.note_call(index)
            self._calls.add(call)
        # Inside a backward pass, a recomputed unit runs backward in a separate graph task (use_reentrant=True) or not
        # at all.
        register_multi_grad_hook(differentiable, partial(self._before_backward, call), mode="any")

    def _begin_route(self, route: Route, module: nn.Module, args: Any) -> None:
        """Track a network in training: other ranks may call blocks that this rank skips."""
        is_shared = any(not chunk.weights.is_resident for chunk in self._chunks)
        if module is route.network and module.training and is_shared and torch._C._current_graph_task_id() == OUTSIDE:
            route.position, route.called = 0, []

    def _end_route(self, route: Route, module: nn.Module, args: Any, output: Any) -> None:
        if module is route.network and torch._C._current_graph_task_id() == OUTSIDE and output is not None:
            for skipped in route.skipped_before(None):
                self._access(skipped, "forward")
            route.position = None

    def _before_backward(self, call: Call, gradient: Tensor) -> None:
        number = self._begin_backward()
        current = self._pass
        if not current.has_begun:
            current.has_begun = True
            schedule = self._calls.agree()
            if schedule is not None:
                current.follow(schedule)
                self.tracer.forget()
                self.statistics["schedules"] += 1
        call.has_begun = True
        chunks = self._chunks_of[call.unit]
        if torch.is_grad_enabled() and not all(self._chunks[chunk].weights.is_resident for chunk in chunks):
            raise UsageError(
                f"Gemini got a backward pass with create_graph=True through {self._name(call.unit)}, whose weights are "
                "gathered for one pass only; keep them whole on the accelerator (shard_param_frac=0, "
                "offload_param_frac=0)"
            )
        if call.position is not None and call.position >= current.cursor:
            current.advance(call.position + 1)
        else:
            current.open(call.unit, number, torch._C._current_autograd_node())

    def _begin_backward(self) -> int:
        """Add the running graph task to the backward pass; return its number."""
        number = torch._C._current_graph_task_id()
        if number in self._pass.tasks:
            return number
        if self._pass.has_failed:
            self.abort()
        if not self._pass.tasks:
            if self.is_torn:
                raise UsageError(TORN)
            self.access.close()
            self.reducer.version += 1
        # Otherwise a node of an earlier task started this one: a checkpoint with use_reentrant=True, or a user function
        # that calls backward.
        self._pass.tasks[number] = GraphTask(number, self._end_task)
        return number

    def _on_gradient(self, chunk: Chunk, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._begin_backward()
        with torch._C.DisableTorchFunctionSubclass():
            gradient = _GRAD.__get__(parameter)
            _GRAD.__set__(parameter, None)
        if chunk.index not in self._pass.visited:
            self._note_late(chunk, parameter)
        elif len(self._pass.tasks) > 1 and chunk.gradients.has_overwritten(parameter):
            raise UsageError(
                f"Gemini got a second gradient of {chunk.slots[parameter].name} from a backward pass inside another "
                "(torch.utils.checkpoint with use_reentrant=True): the first one had taken the place of the weight, "
                "which is gathered for one pass only; write use_reentrant=False, or keep the weights whole on the "
                "accelerator (shard_param_frac=0, offload_param_frac=0)"
            )
        chunk.gradients.put(parameter, gradient, keep=self.reducer.keeps_gradients)
        self.reducer.touched.add(parameter)

    def _note_late(self, chunk: Chunk, parameter: nn.Parameter) -> None:
        """Mark a chunk as late, for the optimizer to reduce: a parameter was used outside of its unit's forward."""
        if not chunk.weights.is_resident:
            raise UsageError(
                f"Gemini got a gradient of {chunk.slots[parameter].name} outside of its block's part of the backward "
                "pass: it is used outside of that block's forward, where it is not gathered; use it inside, or keep "
                "the weights whole on the accelerator (shard_param_frac=0, offload_param_frac=0)"
            )
        self.reducer.check_incomplete(chunk)
        self.reducer.finish(chunk)  # gradients being sent must not be overwritten
        self.reducer.late.add(chunk.index)

    def _end_task(self, number: int) -> None:
        if number != next(iter(self._pass.tasks), None):
            self._pass.end_inner_task(number)
            return
        if self._pass.schedule is not None:
            self._pass.advance(len(self._pass.schedule))
            self.tracer.forget()  # ranks may have recorded different forward orders
        self._pass.finish()
        if self._auto is not None:
            self._auto.end_backward()
        self._reset()
        self.gatherer.release()
        self.tracer.end_pass()
        if self.observer is not None:
            self.observer("end", "")

    def _name(self, index: int) -> str:
        return self.units[index].name or "the network"


def _accumulated(runtime: weakref.ref[Runtime], chunk: int, parameter: Tensor) -> None:
    alive = runtime()
    assert alive is not None, "the modules' hooks hold the runtime"
    alive._on_gradient(alive._chunks[chunk], parameter)
