"""What happens while networks compute: gather, release, reduce, in an order that all ranks share."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from sd_lightning._errors import UsageError
from sd_lightning.gemini.calls import Call, Route, is_reached, merged, order_of
from sd_lightning.gemini.chunk import Chunk, ChunkState
from sd_lightning.gemini.collectives import Pending
from sd_lightning.gemini.tracer import Tracer
from sd_lightning.gemini.units import Unit

_MAX_REDUCTIONS = 4
"""Reductions under way at a time: each keeps a chunk of gradients in memory."""


class Monitor(Protocol):
    """Measures what takes memory beside the chunks."""

    def access(self, phase: str, unit: int) -> None:
        """A unit's weights are about to be gathered."""
        ...

    def end_backward(self) -> None:
        """A backward pass has ended."""
        ...

    def abort(self) -> None:
        """The pass under way is forgotten."""
        ...


class _TaskEnd:
    """What a graph task of autograd calls at its end, unless it fails; nothing else holds it."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime = runtime
        self._number = number
        self.is_called = False

    def __call__(self) -> None:
        self.is_called = True
        self._runtime._end_task(self._number)


class _Task:
    """A graph task of autograd that is a part of the backward pass."""

    def __init__(self, end: _TaskEnd) -> None:
        self._end = weakref.ref(end)
        self.node: Any = None
        """Of autograd, before which the last unit was opened."""
        self.at_node: list[int] = []
        """Units that were opened before it."""

    @property
    def is_running(self) -> bool:
        end = self._end()
        return end is not None and not end.is_called


Observer = Callable[[str, int], None]
"""(what happens: "forward", "backward" or "end", index of the unit): called when a unit's weights are there."""


class Runtime:
    """Hooks on units and parameters.

    Everything that leads to a collective depends only on which units run, in which order: never on which parameters
    of a unit got gradients, on time, or on this rank's memory. So all ranks do the same, also where a parameter is
    used on one of them only. Where units themselves go backward on some ranks only, all ranks find that out as the
    pass begins, and follow one schedule: a rank takes part for what it does not compute.

    Args:
        units: All units of all networks.
        chunks: All chunks.
        chunk_of: Chunk of each parameter.
        budget: Bytes of temporarily gathered chunks, None for no limit.
        prefetch: Chunks gathered ahead.
        networks: What the units are in.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Chunk],
        chunk_of: dict[nn.Parameter, Chunk],
        *,
        budget: int | None,
        prefetch: int,
        networks: Iterable[nn.Module] = (),
    ) -> None:
        self.units = list(units)
        self.chunks = list(chunks)
        self.budget = budget
        self.prefetch = prefetch
        self.statistics: Counter[str] = Counter()
        self.touched: set[nn.Parameter] = set()
        """Parameters with gradients on this rank since the last optimizer step."""
        self.late: set[int] = set()
        """Chunks with gradients on this rank that came when no unit was there to have them reduced."""
        self.gradients_version = 0
        """Changes when gradients do: a backward pass begins, or all of them are forgotten."""
        self.keeps_gradients = False
        """Inside ``no_sync`` with memory for whole gradients."""
        self.observer: Observer | None = None
        self.monitor: Monitor | None = None
        self._chunk_of = chunk_of
        self._chunks_of = [sorted({chunk_of[p].index for p in unit.parameters}) for unit in units]
        self.tracer = Tracer(self._chunks_of)
        self._running: list[int] = []
        self._pinned: dict[int, int] = {}
        """Chunks of containers, and the graph task until whose end they are in use."""
        self._calls: Counter[int] = Counter()
        self._users: dict[int, set[int]] = {}
        self._open: dict[int, int] = {}
        """Units whose backward pass has begun, and the graph task that it began in."""
        self._spent: dict[int, set[int]] = {}
        """By chunk that is not reduced yet: units that may have gradients in the place of their weights."""
        self._visited: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        self._reductions: deque[tuple[Chunk, Pending]] = deque()
        self._tasks: dict[int, _Task] = {}
        """Of the backward pass under way, by autograd's numbers: others run inside of the first one's nodes."""
        self._graph: list[weakref.ref[Call]] = []
        """Calls that may go backward."""
        self._has_begun = False
        """Whether a unit went backward in the pass under way."""
        self._schedule: list[tuple[int, int]] | None = None
        """(number of the node, unit): how units go backward if ranks differ."""
        self._cursor = 0
        self._routes: list[Route] = []
        for network in networks:
            inside = set(network.modules())
            self._routes.append(Route(network, [i for i, unit in enumerate(self.units) if unit.module in inside]))
        self._removable: list[Any] = []
        self._attach()

    def chunks_of_units(self) -> tuple[tuple[int, ...], ...]:
        """Return the chunks of each unit, with those of all containers: they may be around it."""
        around = {c for unit, indices in zip(self.units, self._chunks_of) if unit.is_container for c in indices}
        return tuple(tuple(sorted(around.union(indices))) for indices in self._chunks_of)

    def largest_unit_bytes(self) -> int:
        """Return the most bytes that one unit, with the containers around it, gathers temporarily."""
        sizes = (
            sum(self.chunks[c].layout.nbytes for c in indices if not self.chunks[c].is_resident)
            for indices in self.chunks_of_units()
        )
        return max(sizes, default=0)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended: one that failed counts until it is forgotten."""
        return bool(self._tasks)

    # ---------------------------------------------------------------- hooks

    def _attach(self) -> None:
        for index, unit in enumerate(self.units):
            # A compiled module calls its hooks inside the compiled region: these stay outside of it.
            compiled = unit.module._compiled_call_impl
            if compiled is not None:
                unit.module._compiled_call_impl = partial(self._call, index, compiled)
                continue
            before = torch._dynamo.disable(partial(self._before, index))
            after = torch._dynamo.disable(partial(self._after, index))
            self._removable.append(unit.module.register_forward_pre_hook(before, prepend=True))
            self._removable.append(unit.module.register_forward_hook(after, always_call=True))
        for route in self._routes if self.chunks and self.chunks[0].collectives.world_size > 1 else []:
            if route.network._compiled_call_impl is None:
                begin = torch._dynamo.disable(partial(self._begin_route, route))
                end = torch._dynamo.disable(partial(self._end_route, route))
                self._removable.append(route.network.register_forward_pre_hook(begin, prepend=True))
                self._removable.append(route.network.register_forward_hook(end, always_call=True))
        for parameter, chunk in self._chunk_of.items():
            if chunk.is_trained:
                # Python's collector does not see these hooks: one that held the engine would keep it for ever.
                hook = partial(_accumulated, weakref.ref(self), chunk.index)
                self._removable.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._removable:
            handle.remove()
        for unit in self.units:
            compiled = unit.module._compiled_call_impl
            if isinstance(compiled, partial) and compiled.func == self._call:
                unit.module._compiled_call_impl = compiled.args[1]
        self._removable.clear()

    def _call(self, index: int, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before(index, self.units[index].module, args)
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            self._after(index, self.units[index].module, args, output)
        return output

    def _before(self, index: int, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.recover()
            if not self._running:
                self._begin_forward(index)
            for route in self._routes:
                if route.position is not None:
                    self._take_part(route.skipped_before(index))
                    route.called.append(index)
        else:
            self._renew(index, torch._C._current_graph_task_id())  # recomputation of a checkpointed block
        self._running.append(index)
        self._access(index, "forward")

    def _begin_route(self, route: Route, module: nn.Module, args: Any) -> None:
        """Follow a network in training: other ranks may call blocks that this one leaves out."""
        is_shared = any(not chunk.is_resident for chunk in self.chunks)
        if module.training and is_shared and torch._C._current_graph_task_id() == -1:
            route.position, route.called = 0, []

    def _end_route(self, route: Route, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1 and output is not None:
            self._take_part(route.skipped_before(None))
            route.position = None

    def _take_part(self, skipped: Iterable[int]) -> None:
        for unit in skipped:
            self._access(unit, "forward")

    def _begin_forward(self, index: int) -> None:
        self._graph = [call for call in self._graph if call() is not None]
        if torch.is_grad_enabled():
            self.tracer.begin(with_gradients=True)
        elif self.tracer.current_start in (None, index):
            # Otherwise it is a part of the pass under way, and on other ranks may have gradients.
            self.tracer.begin(with_gradients=False)
            self.tracer.end_pass()

    def _after(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if index in self._running:
            del self._running[self._running.index(index) :]
        if output is None or not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not tensors:
            raise UsageError(
                f"Gemini finds no tensors in what {self.units[index].name or 'the network'} returns "
                f"({type(output).__name__}); return tensors, tuples or dictionaries, or register the class with "
                "torch.utils._pytree"
            )
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable:
            return
        call = Call(index, max(order_of(tensor) for tensor in differentiable))
        if torch._C._current_graph_task_id() == -1:
            self._calls[index] += 1
            for chunk in self._chunks_of[index]:
                self._users.setdefault(chunk, set()).add(index)
            self._graph.append(weakref.ref(call))
        # Inside a backward pass, what is computed again goes backward in a task of its own (use_reentrant=True) or not
        # at all.
        register_multi_grad_hook(differentiable, partial(self._before_backward, call), mode="any")

    def _before_backward(self, call: Call, gradient: Tensor) -> None:
        index = call.unit
        number = self._begin_backward()
        if not self._has_begun:
            self._has_begun = True
            self._agree_on_calls()
        call.has_begun = True
        if torch.is_grad_enabled() and not all(self.chunks[c].is_resident for c in self._chunks_of[index]):
            raise UsageError(
                f"Gemini got a backward pass with create_graph=True through {self.units[index].name or 'the network'}, "
                "whose weights are gathered for one pass only; keep them whole on the accelerator "
                "(shard_param_frac=0, offload_param_frac=0)"
            )
        if call.position is not None and call.position >= self._cursor:
            self._follow_schedule(call.position + 1)
        else:
            self._begin_unit(index, number, torch._C._current_autograd_node())

    def _begin_unit(self, index: int, number: int, node: Any) -> None:
        """Gather a unit that goes backward, on this rank or another.

        Args:
            index: Of the unit.
            number: Of the graph task.
            node: Of autograd's graph, or its number in the schedule.
        """
        # Autograd runs in the reverse order of execution, so whatever ran later is done; but for units that return
        # the same tensor: a network and its last block, a block and the one after it that was left out.
        task = self._tasks[number]
        if node != task.node:
            task.node = node
            task.at_node.clear()
            for earlier in [unit for unit, opened_in in self._open.items() if opened_in == number]:
                if earlier != index and not self.units[earlier].is_container and self._calls[earlier] <= 0:
                    self._close(earlier)
        task.at_node.append(index)
        self._calls[index] -= 1
        self._renew(index, number)
        self._open[index] = number
        self._visited.update(dict.fromkeys(self._chunks_of[index]))
        if self.units[index].is_container:
            for chunk in self._chunks_of[index]:
                self._pinned.setdefault(chunk, number)
        self._access(index, "backward")

    def _agree_on_calls(self) -> None:
        """Find out, with one small collective, whether the same calls go backward on all ranks; else make a schedule.

        What a rank cannot foresee is whether this pass reaches a call; its trained parameters tell of most.
        """
        collectives = self.chunks[0].collectives
        alive = [call for reference in self._graph if (call := reference()) is not None and not call.has_begun]
        self._graph = [weakref.ref(call) for call in alive]
        if collectives.world_size == 1:
            return
        alive.sort(key=lambda call: -call.key)
        at_nodes = [list(calls) for _, calls in groupby(alive, key=lambda call: call.key)]
        own = [tuple(call.unit for call in calls) for calls in at_nodes]
        reached = [any(map(is_reached, unit.parameters)) for unit in self.units]
        called = [route.called for route in self._routes]
        digest = int.from_bytes(hashlib.sha256(repr((own, reached, called)).encode()).digest()[:7], "big")
        most, least = collectives.all_reduce(torch.tensor([digest, -digest]), dist.ReduceOp.MAX).tolist()
        if most == -least:
            for route in self._routes:
                route.learn()
            return
        everyone: list[list[tuple[int, ...]]] = [[]] * collectives.world_size
        dist.all_gather_object(everyone, own, group=collectives.group)
        nodes = reduce(merged, everyone)
        self._schedule = [(number, unit) for number, units in enumerate(nodes) for unit in units]
        self._cursor = 0
        places = iter(enumerate(nodes))
        for calls, units in zip(at_nodes, own, strict=True):
            number = next(number for number, others in places if others == units)
            begin = sum(map(len, nodes[:number]))
            for offset, call in enumerate(calls):
                call.position = begin + offset
        for route in self._routes:
            route.num_idle.clear()
        # From here on all ranks count alike.
        self._calls = Counter(unit for _, unit in self._schedule)
        self._users.clear()
        for unit in self._calls:
            for chunk in self._chunks_of[unit]:
                self._users.setdefault(chunk, set()).add(unit)
        self.tracer.forget()
        self.statistics["schedules"] += 1

    def _follow_schedule(self, end: int) -> None:
        """Go through the schedule up to a position: this rank computes what is there, and others what is before it."""
        assert self._schedule is not None
        first = next(iter(self._tasks))
        while self._cursor < end:
            node, unit = self._schedule[self._cursor]
            self._cursor += 1
            self._begin_unit(unit, first, node)

    def _on_gradient(self, chunk: Chunk, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        self._begin_backward()
        if chunk.index not in self._visited:
            self._note_late(chunk, parameter)
        elif len(self._tasks) > 1 and chunk.is_overwritten(parameter):
            raise UsageError(
                f"Gemini got a second gradient of {_name(chunk, parameter)} from a backward pass inside another "
                "(torch.utils.checkpoint with use_reentrant=True): the first one had taken the place of the weight, "
                "which is gathered for one pass only; write use_reentrant=False, or keep the weights whole on the "
                "accelerator (shard_param_frac=0, offload_param_frac=0)"
            )
        chunk.put_gradient(parameter, parameter.grad, keep=self.keeps_gradients)
        parameter.grad = None
        self.touched.add(parameter)

    def _note_late(self, chunk: Chunk, parameter: nn.Parameter) -> None:
        """Have the optimizer ask the ranks: a parameter was used outside of its unit's forward, here at least."""
        if not chunk.is_resident:
            raise UsageError(
                f"Gemini got a gradient of {_name(chunk, parameter)} outside of its block's part of the backward pass: "
                "it is used outside of that block's forward, where it is not gathered; use it inside, or keep the "
                "weights whole on the accelerator (shard_param_frac=0, offload_param_frac=0)"
            )
        self._finish_reductions_of(chunk)  # nothing is written to what is being sent
        self.late.add(chunk.index)

    # ---------------------------------------------------------------- backward

    def _begin_backward(self) -> int:
        """Note that the graph task that runs now belongs to the backward pass; return its number."""
        number = torch._C._current_graph_task_id()
        if number in self._tasks:
            return number
        if self._has_failed():
            self.abort()
        if not self._tasks:
            self.gradients_version += 1
        # Otherwise a node of the task before has begun this one: a checkpoint with use_reentrant=True, or a function
        # of the user's that calls backward.
        end = _TaskEnd(self, number)
        self._tasks[number] = _Task(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return number

    def _has_failed(self) -> bool:
        """Whether the backward pass has ended in an exception: autograd has let go of its first task."""
        return bool(self._tasks) and not next(iter(self._tasks.values())).is_running

    def _end_task(self, number: int) -> None:
        if number == next(iter(self._tasks), None):
            self._end_backward()
            return
        if self._tasks.pop(number, None) is None:
            return  # the pass around it was forgotten
        self._pinned = {chunk: task for chunk, task in self._pinned.items() if task != number}
        for index in [index for index, task in self._open.items() if task == number]:
            if self._calls[index] <= 0:
                self._close(index)
            else:
                self._note_spent(index)

    def _renew(self, index: int, number: int) -> None:
        """Reduce the gradients that may have taken the place of a unit's weights: it is about to compute again."""
        is_elsewhere = self._open.get(index, number) != number
        for chunk in self._chunks_of[index]:
            is_spent = chunk in self._visited and (is_elsewhere or index in self._spent.get(chunk, ()))
            if is_spent and not self.chunks[chunk].is_resident:
                self._reduce(chunk)
                self._visited[chunk] = None

    def _note_spent(self, index: int) -> None:
        for chunk in self._chunks_of[index]:
            if chunk in self._visited:
                self._spent.setdefault(chunk, set()).add(index)

    def _close(self, index: int) -> None:
        """A unit has all its gradients: reduce the chunks that no other unit still works on."""
        del self._open[index]
        for chunk in self._chunks_of[index]:
            users = self._users.get(chunk, set())
            users.discard(index)
            if not users and chunk in self._visited and chunk not in self._pinned:
                self._reduce(chunk)
        self._note_spent(index)

    def _reduce(self, index: int) -> None:
        del self._visited[index]
        self._spent.pop(index, None)
        self.late.discard(index)
        chunk = self.chunks[index]
        if not chunk.is_trained:
            return
        if self.keeps_gradients:
            self._kept[index] = None
        else:
            self._kept.pop(index, None)
            while len(self._reductions) >= _MAX_REDUCTIONS:
                self._finish_reduction()
            self._reductions.append((chunk, chunk.reduce()))
            self.statistics["reductions"] += 1

    def _finish_reduction(self) -> None:
        chunk, pending = self._reductions.popleft()
        chunk.finish_reduction(pending)

    def _end_backward(self) -> None:
        if self._schedule is not None:
            self._follow_schedule(len(self._schedule))
            self.tracer.forget()  # in their forward passes ranks may have recorded different ones
        self._pinned.clear()
        if not self.keeps_gradients:
            self._visited.update(self._kept)
        for index in sorted(self._visited):
            self._reduce(index)
        while self._reductions:
            self._finish_reduction()
        if self.monitor is not None:
            self.monitor.end_backward()
        self._reset_pass()
        self.release()
        self.tracer.end_pass()
        if self.observer is not None:
            self.observer("end", -1)

    def _reset_pass(self) -> None:
        self._calls.clear()
        self._users.clear()
        self._open.clear()
        self._spent.clear()
        self._visited.clear()
        self._pinned.clear()
        self._running.clear()
        self._tasks.clear()
        for route in self._routes:
            route.position, route.called = None, []
        self._has_begun, self._schedule, self._cursor = False, None, 0
        for reference in self._graph:
            if (call := reference()) is not None:
                call.position = None

    def flush(self, late: Iterable[int] = ()) -> None:
        """Reduce gradients that were kept whole, where no backward pass outside ``no_sync`` did.

        Args:
            late: Chunks that have late gradients on any rank.
        """
        keeps, self.keeps_gradients = self.keeps_gradients, False
        for index in sorted({*self._kept, *late}):
            self._visited[index] = None
            self._reduce(index)
        self.keeps_gradients = keeps
        while self._reductions:
            self._finish_reduction()

    def recover(self) -> None:
        """Forget the last backward pass if it ended in an exception; called outside of one.

        Raises:
            RuntimeError: It is still running: its gradients must not be lost.
        """
        if self._has_failed():
            self.abort()
        elif self._tasks and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "Gemini: a network was called while a backward pass runs in another thread; expected one thread"
            )

    def abort(self) -> None:
        """Forget a backward pass that ended in an exception, and all gradients since the last optimizer step.

        Raises:
            RuntimeError: Called inside the backward pass.
        """
        if torch._C._current_graph_task_id() in self._tasks:
            raise RuntimeError("Gemini: gradients were to be dropped inside the backward pass that computes them")
        while self._reductions:
            _, pending = self._reductions.popleft()
            pending.wait()
        self._reset_pass()
        self._kept.clear()
        for chunk in self.chunks:
            chunk.drop_gradients()
            chunk.release()
        self.touched.clear()
        self.late.clear()
        self.gradients_version += 1
        self.tracer.forget()
        if self.monitor is not None:
            self.monitor.abort()
        self.statistics["aborted"] += 1

    def release(self) -> None:
        """Free all temporarily gathered weights."""
        for chunk in self.chunks:
            if not chunk.is_resident:
                chunk.release()

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Keep whole gradients: they are reduced by the next backward pass outside."""
        before, self.keeps_gradients = self.keeps_gradients, True
        try:
            yield
        finally:
            self.keeps_gradients = before

    # ---------------------------------------------------------------- gathering

    def _access(self, index: int, phase: str) -> None:
        self.tracer.use(index)
        if self.monitor is not None:
            self.monitor.access(phase, index)
        chunks = [self.chunks[c] for c in self._chunks_of[index]]
        for chunk in chunks:
            self._finish_reductions_of(chunk)
        missing = [chunk for chunk in chunks if chunk.state is ChunkState.RELEASED]
        self._make_room(sum(chunk.layout.nbytes for chunk in missing), self.tracer.NEVER, keep=set(chunks))
        self.statistics["misses"] += len(missing)
        self.statistics["hits"] += sum(not c.is_resident for c in chunks) - len(missing)
        for chunk in missing:
            chunk.gather()
        self._prefetch(set(chunks))
        for chunk in chunks:
            chunk.wait()
        if self.observer is not None:
            self.observer(phase, index)

    def _finish_reductions_of(self, chunk: Chunk) -> None:
        while any(reduced is chunk for reduced, _ in self._reductions):
            self._finish_reduction()

    def _prefetch(self, current: set[Chunk]) -> None:
        begun = 0
        for position, index in self.tracer.upcoming():
            if begun >= self.prefetch:
                return
            chunk = self.chunks[index]
            if chunk.state is ChunkState.GATHERING and not chunk.is_resident:
                begun += 1
            if chunk.state is not ChunkState.RELEASED:
                continue
            if not self._make_room(chunk.layout.nbytes, position, keep=current):
                return
            chunk.gather()
            self.statistics["prefetches"] += 1
            begun += 1

    def _make_room(self, needed: int, until: int, keep: set[Chunk]) -> bool:
        """Release chunks that are used again after ``until``, the furthest first; tell whether there is room."""
        if self.budget is None or not needed:
            return True
        must = until == self.tracer.NEVER
        while self._temporary_bytes() + needed > self.budget:
            if must and self._reductions:
                self._finish_reduction()
                continue
            victim = self._furthest(until, keep)
            if victim is None:
                return False
            victim.release()
            self.statistics["evictions"] += 1
        return True

    def _furthest(self, until: int, keep: set[Chunk]) -> Chunk | None:
        units = [*self._running, *(index for task in self._tasks.values() for index in task.at_node)]
        # Whether gradients are in their memory already may differ between ranks; what they are asked for does not.
        gradients = {self.chunks[c] for c in self._visited if self.chunks[c].is_trained}
        in_use = keep | {self.chunks[c] for index in units for c in self._chunks_of[index]}
        in_use |= gradients | {self.chunks[c] for c in self._pinned}
        candidates = [
            (self.tracer.next_use(chunk.index), -chunk.index, chunk)
            for chunk in self.chunks
            if chunk not in in_use and not chunk.is_resident and chunk.state in _EVICTABLE
        ]
        if until != self.tracer.NEVER:
            candidates = [candidate for candidate in candidates if candidate[0] > until]
        return max(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None

    def _temporary_bytes(self) -> int:
        return sum(chunk.temporary_bytes for chunk in self.chunks)


_EVICTABLE = {ChunkState.GATHERING, ChunkState.GATHERED}


def _name(chunk: Chunk, parameter: nn.Parameter) -> str:
    return next(name for name, known in chunk.parameters.items() if known is parameter)


def _accumulated(runtime: weakref.ref[Runtime], chunk: int, parameter: Tensor) -> None:
    alive = runtime()
    assert alive is not None, "the modules' hooks hold the runtime"
    alive._on_gradient(alive.chunks[chunk], parameter)
