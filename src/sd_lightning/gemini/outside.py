"""Parameters of chunks outside of their blocks' forward: hooks read and write whole weights and gradients there.

A chunk's memory holds its weights only while they are gathered, and never all that the optimizer steps. So user code
gets whole copies, gathered when it first touches a parameter. What it writes goes back at the next call of the engine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk, ChunkedNetworks
from sd_lightning.gemini.gathering import Reducer
from sd_lightning.gemini.guarded import (
    ALIASES,
    OUTSIDE,
    RESHAPING,
    SET_DATA,
    THAWS,
    ChunkOptimizer,
    GuardedParameter,
    WholeGradients,
    is_in_place,
    may_alias,
)
from sd_lightning.gemini.weights import ChunkState

_NUM_CHECKED = 16
"""Writes that are compared between the ranks, and views of a weight that are watched for writes, when a run begins."""
_NUM_SUMS = 251
"""A prime: values that change places change sums of bytes, too."""
_READABLE = {ChunkState.GATHERED, ChunkState.OVERWRITTEN}


class _Reading(torch.autograd.Function):
    """A whole weight in autograd's graph, in the memory that is written back, with a version counter of its own."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, whole: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        # No clone: the engine never writes this memory. No view: autograd forbids much of views of a function.
        return whole.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class OutsideAccess:
    """Whole weights and gradients for user code, gathered on first touch and written back by :meth:`close`.

    Touching a parameter is collective: all ranks do it in the same order, as they do in hooks that no rank skips.

    Args:
        chunked: The networks and their chunks.
        reducer: Reduces their gradients.
        optimizers: Those made so far, now and later.
        scale: Returns the factor of gradients in chunks, without which they are shown.
    """

    def __init__(
        self,
        chunked: ChunkedNetworks,
        reducer: Reducer,
        optimizers: Sequence[ChunkOptimizer],
        scale: Callable[[], float | Tensor],
    ) -> None:
        self.dtype: torch.dtype | None = None
        """The type in which trained weights are shown; by default that of the master weights."""
        self.is_active = True
        self._chunked = chunked
        self._weights: dict[int, Tensor] = {}
        """By chunk: whole weights that user code sees."""
        self._shown: dict[nn.Parameter, Tensor] = {}
        """Parts of whole weights, in autograd's graph if they are trained."""
        self._aliased: set[int] = set()
        """Chunks whose whole weights user code may have written."""
        self._watched: dict[nn.Parameter, Tensor] = {}
        """Sums of resident weights that user code has views of: other values may take their place."""
        self._num_checks: Counter[nn.Parameter] = Counter()
        """Comparisons of these sums."""
        self.gradients = WholeGradients(chunked, reducer, optimizers, scale, self.close)
        self._num_written = 0
        self._known_units: set[int] = set()
        """Units whose first forward pass was watched for writes."""
        self._before_forward: dict[int, tuple[list[nn.Parameter], Tensor]] = {}
        """By unit that is watched: weights that are copies of those that are trained, and their digests."""
        own = weakref.ref(self)
        for parameter in chunked.chunk_of:
            parameter.chunk_access = own  # type: ignore[attr-defined]
        self.guard(chunked.chunk_of)

    def guard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Show whole values of parameters from now on."""
        for parameter in parameters:
            parameter.__class__ = GuardedParameter

    def expose(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make parameters ordinary ones, whose values are in the chunk's memory."""
        for parameter in parameters:
            parameter.__class__ = nn.Parameter

    def begin_forward(self, unit: int, parameters: Sequence[nn.Parameter]) -> None:
        """Expose the parameters of a unit that is about to run, and watch its first pass for writes."""
        self.expose(parameters)
        self._before_forward.pop(unit, None)  # of a pass that raised
        if unit not in self._known_units and torch.is_grad_enabled():
            self._known_units.add(unit)
            if copies := [parameter for parameter in parameters if not self._is_direct(parameter)]:
                self._before_forward[unit] = copies, _digests(copies)

    def end_forward(self, unit: int) -> None:
        """Raise if the first pass of a unit has written weights that are copies of those that are trained.

        Raises:
            UsageError: It has.
        """
        if unit not in self._before_forward:
            return
        copies, before = self._before_forward.pop(unit)
        is_written = (_digests(copies) != before).any(1).tolist()
        if any(is_written):
            name = self._name(copies[is_written.index(True)])
            raise UsageError(
                f"Gemini got {name} written inside of its network's forward, where it is a gathered copy, so that the "
                "change would be lost; write it in a hook (on_train_batch_end), or make it a buffer"
            )

    def end(self) -> None:
        """Make all parameters ordinary ones for good."""
        self.is_active = False
        self.expose(self._chunked.chunk_of)
        for parameter in self._chunked.chunk_of:
            vars(parameter).pop("chunk_access", None)
        self._watched.clear()
        self._release()
        self._before_forward.clear()

    def _release(self) -> tuple[dict[int, Tensor], set[int], dict[int, Tensor]]:
        """Let go of what user code holds; return whole weights, chunks it may have written, and whole gradients."""
        released = self._weights, self._aliased, self.gradients.release()
        self._weights, self._aliased = {}, set()
        self._shown.clear()
        return released

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Show parameters as the chunks have them in the body: it needs names and shapes only."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    @property
    def is_open(self) -> bool:
        """Whether user code holds whole weights or gradients."""
        return bool(self._weights or self.gradients.whole or self.gradients.touched)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch with whole weights in place of parameters."""
        first = args[0] if args else None
        if func in THAWS:
            self._check_thaw(first, *args[1:], **kwargs)
        parameters = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedParameter)]
        written = [p for p in tree_leaves(first) if isinstance(p, GuardedParameter)] if is_in_place(func) else []
        is_initial = getattr(func, "__module__", "") == nn.init.__name__  # without gradients inside
        needs_gradients = torch.is_grad_enabled() and not is_initial
        is_refused = needs_gradients and any(leaf.requires_grad for leaf in written)
        is_kept = func in THAWS or is_refused  # torch refuses to write leaves that need gradients
        if not is_kept and isinstance(first, GuardedParameter) and self._takes_memory(func, first, args):
            self._replace(first, args[1])
            return first
        if is_kept or all(self._is_direct(parameter) for parameter in parameters):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_alias = func in ALIASES or not needs_gradients
        is_local = not is_alias and all(
            self._chunked.chunk_of[parameter].weights.is_resident for parameter in parameters
        )
        shown: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            chunk = self._chunked.chunk_of[parameter]
            if is_local and chunk.index not in self._weights:  # no other rank is needed, for a loss of this rank's own
                chunk.weights.settle()  # the last step may still be on its way to them
                shown[parameter] = parameter
            else:
                whole = self._whole(parameter, is_aliased=is_alias)
                shown[parameter] = whole.detach() if is_alias else whole
        before = [tensor._version for tensor in shown.values()]
        args, kwargs = tree_map_only(GuardedParameter, shown.__getitem__, (tuple(args), dict(kwargs)))
        with torch._C.DisableTorchFunctionSubclass() if is_local else nullcontext():
            result = func(*args, **kwargs)
            for (each, tensor), version in zip(shown.items(), before):
                is_written = tensor._version != version
                if not is_alias and (is_written or may_alias(result, tensor)):
                    self._note_alias(each, tensor, is_written=is_written)
        return first if isinstance(first, GuardedParameter) and written and result is shown[first] else result

    @torch.inference_mode(False)
    @torch.no_grad()
    def close(self) -> None:
        """Write back what user code may have written, and let go of its whole weights and gradients.

        Raises:
            UsageError: A weight was written where that cannot be taken over, or with other values on another rank. What
                user code has written is dropped then.
        """
        if self._watched:
            self._check_watched(list(self._watched))
            self._num_checks.update(self._watched)
            self._watched.clear()
        if not self.is_open:
            return
        recorded = next((each for each in self._shown if self._is_recorded(each)), None)
        weights, aliased, gradients = self._release()
        if recorded is not None:
            raise self._lost(recorded)
        written = [i for i in sorted(aliased) if self._write_back(self._chunked.chunks[i], weights[i])]
        self._compare(sorted(aliased), weights, written)
        self.gradients.write_back(gradients)

    def _whole(self, parameter: nn.Parameter, *, is_aliased: bool) -> Tensor:
        """Return the part of the whole weights that is one parameter; gather them on first touch."""
        chunk = self._chunked.chunk_of[parameter]
        if chunk.index not in self._weights or (is_aliased and chunk.index not in self._aliased):
            self._chunked.collectives.meet(f"touches {self._name(parameter)}{' to write' if is_aliased else ''}")
        if chunk.index not in self._weights:
            watched = [each for each in self._watched if self._chunked.chunk_of[each] is chunk]
            if watched:
                self._check_watched(watched)
                with torch._C.DisableTorchFunctionSubclass():  # what is written from now on would be written over
                    self._watched.update({each: _sums_of(each) for each in watched})
            layout = chunk.layout
            dtype = self.dtype or layout.master_dtype if chunk.is_trained else layout.dtype
            with torch.inference_mode(False), torch.no_grad():
                self._weights[chunk.index] = self._chunked.whole(chunk, as_swapped=True).to(dtype)
        if is_aliased:
            self._aliased.add(chunk.index)
        shown = self._shown.get(parameter)
        if shown is None or shown.requires_grad != parameter.requires_grad:
            shown = chunk.part_of(parameter, self._weights[chunk.index]).data  # each has a version counter of its own
            if parameter.requires_grad:
                with torch.inference_mode(False), torch.enable_grad():
                    shown = _Reading.apply(parameter, shown)  # type: ignore[no-untyped-call]
            self._shown[parameter] = shown
        return shown

    def _note_alias(self, parameter: nn.Parameter, tensor: Tensor, *, is_written: bool) -> None:
        """Note that user code may write a weight through what it was given while gradients are recorded."""
        if tensor is not parameter:
            if self._is_recorded(parameter):
                raise self._lost(parameter)
            self._whole(parameter, is_aliased=True)
        elif is_written and self._is_copy(parameter):
            raise self._lost(parameter)
        elif parameter not in self._watched and self._num_checks[parameter] < _NUM_CHECKED:
            self._watched[parameter] = _sums_of(parameter)

    def _is_recorded(self, parameter: nn.Parameter) -> bool:
        """Return whether autograd has recorded a write into a whole weight: it is no longer a plain reading."""
        shown = self._shown[parameter]
        return shown.grad_fn is not None and not isinstance(shown.grad_fn, _Reading._backward_cls)

    def _check_watched(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if user code has written resident weights, and other values take their place."""
        open_ones = self._weights
        lost = [each for each in parameters if self._is_copy(each) or self._chunked.chunk_of[each].index in open_ones]
        if not lost:
            return
        with torch._C.DisableTorchFunctionSubclass():
            differs = torch.stack(
                [(_sums_of(parameter) != self._watched[parameter]).any() for parameter in lost]
            ).tolist()
        if any(differs):
            self._watched.clear()
            raise self._lost(lost[differs.index(True)])

    def _lost(self, parameter: nn.Parameter) -> UsageError:
        return UsageError(
            f"Gemini got {self._name(parameter)} written while gradients are recorded, or through a view taken then, "
            "so that the change would be lost; take views of it (p[0], p.view(-1)) and write them under torch.no_grad()"
        )

    def _takes_memory(self, func: Callable[..., Any], parameter: nn.Parameter, args: Sequence[Any]) -> bool:
        """Return whether a function gives a parameter the memory of another tensor; raise if it changes its shape."""
        if func == SET_DATA or func == Tensor.set_ and len(args) == 2 and isinstance(args[1], Tensor):
            return True
        if func.__name__ in RESHAPING:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.{func.__name__}(), which changes its shape or its memory; "
                "expected a write of other values (p.data.copy_(values)): parameters in chunks keep their sizes"
            )
        return False

    def _replace(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Do what ``parameter.data = value`` does."""
        if value is parameter:
            return
        with torch._C.DisableTorchFunctionSubclass():
            shape = parameter.shape
        if value.shape != shape:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.data of shape {tuple(value.shape)}; expected {tuple(shape)}: "
                "parameters in chunks keep their sizes"
            )
        with torch.no_grad():
            if self._is_direct(parameter):
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.copy_(value)
            else:
                self._whole(parameter, is_aliased=True).detach().copy_(value)

    def _is_direct(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter's own memory is what is trained, and whole, or what a backward pass reads."""
        chunk = self._chunked.chunk_of[parameter]
        weights = chunk.weights
        if torch._C._current_graph_task_id() != OUTSIDE and weights.state in _READABLE:
            return not chunk.gradients.has_overwritten(parameter)
        is_whole = weights.is_resident and self._chunked.collectives.world_size == 1
        return is_whole and (weights.is_master or not weights.layout.is_trained)

    def _is_copy(self, parameter: nn.Parameter) -> bool:
        """Return whether the next step overwrites what user code writes into the parameter's own memory."""
        chunk = self._chunked.chunk_of[parameter]
        return chunk.is_trained and not chunk.weights.is_master and not self._chunked.is_swapped

    def _write_back(self, chunk: Chunk, whole: Tensor) -> bool:
        """Take over this rank's part of whole weights; return whether it has changed."""
        weights, is_master = chunk.weights, chunk.is_trained and not self._chunked.is_swapped
        shown = chunk.master.read() if is_master else weights.shard
        new = self._chunked.collectives.shard(whole).to(shown.device)
        old = shown.to(new.dtype)
        changed = (new != old) & ~(new.isnan() & old.isnan())
        has_changed = bool(changed.any())
        if has_changed:
            chunk.wait_on_host()
            weights.settle()
            values = torch.where(changed, new.to(shown.dtype), shown)
            with chunk.master.stepping(0, len(values)) if is_master else nullcontext(shown) as target:
                target.copy_(values)
            if is_master:
                chunk.master.publish()
        weights.settle()
        if weights.state is ChunkState.GATHERED:
            weights.storage.full.copy_(whole)
        return has_changed

    def _compare(self, aliased: Sequence[int], weights: Mapping[int, Tensor], written: Sequence[int]) -> None:
        """Raise if the ranks have written different weights: each keeps the part that it owns."""
        collectives = self._chunked.collectives
        if not aliased or collectives.world_size == 1 or self._num_written >= _NUM_CHECKED:
            return
        sums = _digests([weights[index] for index in aliased]).tolist()
        if collectives.agree(repr((list(aliased), sums))):
            # A write may lie in the part of one rank: all must count the same, to come here equally often.
            any_rank = collectives.all_reduce(torch.tensor([int(bool(written))]), dist.ReduceOp.MAX)
            self._num_written += int(any_rank)
            return
        names = self._chunked.chunks[(written or aliased)[0]].layout.slots
        raise UsageError(
            f"Gemini: the ranks have written different weights in a hook (among {names[0].name} and what shares its "
            "chunk); expected the same on every rank: write without asking for the rank, with the same random numbers"
        )

    def _check_thaw(self, parameter: Any, value: bool = True, **kwargs: Any) -> None:
        is_thawed = kwargs.get("requires_grad", value)
        if is_thawed and not self._chunked.chunk_of[parameter].is_trained:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.requires_grad = True during the run, a weight that was frozen "
                "when the run began and is not trained; let the callback BaseFinetuning (BackboneFinetuning) unfreeze "
                "it, or begin with requires_grad and a learning rate of 0"
            )

    def _name(self, parameter: nn.Parameter) -> str:
        return self._chunked.name_of(parameter)


def _digests(values: Sequence[Tensor]) -> Tensor:
    """Return sums of the bytes of tensors, a row each; they change with the order of values, too."""
    return torch.stack([_sums_of(each) for each in values])


def _sums_of(values: Tensor) -> Tensor:
    """Return sums of bytes, in int64 on the device of the values; they change with the order of values, too."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // _NUM_SUMS * _NUM_SUMS
    sums = flat[:whole].view(-1, _NUM_SUMS).sum(0, dtype=torch.int64)
    sums[: flat.numel() - whole].add_(flat[whole:])
    return sums
