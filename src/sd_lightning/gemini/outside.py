"""Parameters of chunks outside of their blocks' forward: hooks read and write whole weights and gradients there.

A chunk's memory holds its weights only while they are gathered, and never all that the optimizer steps. So user code
gets whole copies, gathered when it first touches a parameter. What it writes goes back at the next call of the engine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.compute_weights import ChunkState
from sd_lightning.gemini.guarded import GuardedParameter
from sd_lightning.gemini.memory import Arrival

if TYPE_CHECKING:
    from sd_lightning.gemini.chunked import ChunkedNetworks
    from sd_lightning.gemini.loss_scale import LossScale
    from sd_lightning.gemini.optimizer import GeminiOptimizer

_OUTSIDE = -1
"""Autograd's number of the current graph task if none runs."""
_NUM_CHECKED = 16
"""Writes that are compared between the ranks, and views of a weight that are watched for writes, when a run begins."""
_NUM_WATCHED = 1
"""Forward passes of a unit that are watched for writes, at the beginning of a run."""
_THAWS: set[Any] = {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
_READABLE = {ChunkState.GATHERED, ChunkState.OVERWRITTEN}
_NUM_SUMS = 251
"""A prime: values that change places change sums of bytes, too."""


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
        engine: The networks and their chunks.
        dtype: The type in which trained weights are shown; by default that of the master weights.
    """

    def __init__(self, engine: ChunkedNetworks, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.is_active = True
        self.optimizers: Sequence[GeminiOptimizer] = ()
        self.loss_scale: LossScale | None = None
        """Gradients are shown without it."""
        self._engine = engine
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
        self._gradients: dict[int, Tensor] = {}
        self._touched: dict[GeminiOptimizer, set[nn.Parameter]] = {}
        """By optimizer: parameters with gradients on any rank."""
        self._num_written = 0
        self._num_watched: Counter[int] = Counter()
        """By unit: forward passes that were watched for writes."""
        self._before: dict[int, tuple[list[nn.Parameter], Tensor]] = {}
        """By unit: gathered weights, and their digests when its forward began."""
        self._after: dict[int, tuple[list[nn.Parameter], Tensor, Arrival]] = {}
        """By unit: gathered weights, and whether its forward has written them; read a pass later."""
        own = weakref.ref(self)
        for parameter in engine.chunk_of:
            parameter.chunk_access = own  # type: ignore[attr-defined]
        self.guard(engine.chunk_of)

    def guard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Show whole values of parameters from now on."""
        for parameter in parameters:
            parameter.__class__ = GuardedParameter

    def expose(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make parameters ordinary ones, whose values are in the chunk's memory."""
        for parameter in parameters:
            parameter.__class__ = nn.Parameter

    def begin_forward(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        """Expose the parameters of a unit that is about to run."""
        self.expose(parameters)
        self._before.pop(index, None)  # of a pass that raised
        if torch._C._current_graph_task_id() == _OUTSIDE:
            self._check_forward(index)
        if self._num_watched[index] < _NUM_WATCHED and torch.is_grad_enabled():
            self._num_watched[index] += 1
            copied = [parameter for parameter in parameters if not self._is_direct(parameter)]
            if copied:
                self._before[index] = copied, _digests(copied)

    def end_forward(self, index: int) -> None:
        """Note whether a unit has written its own weights while it ran: they are a copy of those that are trained."""
        if index in self._before:
            copied, before = self._before.pop(index)
            self._after[index] = copied, *self._engine.memory.tell((_digests(copied) != before).any(1))

    def check_forwards(self) -> None:
        """Raise if a unit has written its own weights while it ran; the host waits for the watched passes.

        Otherwise the unit's next pass raises, when the result has arrived.

        Raises:
            UsageError: A unit has.
        """
        for index in list(self._after):
            self._check_forward(index)

    def _check_forward(self, index: int) -> None:
        if index not in self._after:
            return
        copied, is_written, arrival = self._after.pop(index)
        arrival.wait()
        for parameter in (each for each, written in zip(copied, is_written.tolist()) if written):
            raise UsageError(
                f"Gemini got {self._name(parameter)} written inside of its network's forward, where it is a gathered "
                "copy, so that the change would be lost; write it in a hook (on_train_batch_end), or make it a buffer"
            )

    def end(self) -> None:
        """Make all parameters ordinary ones for good."""
        self.is_active = False
        self.expose(self._engine.chunk_of)
        for parameter in self._engine.chunk_of:
            vars(parameter).pop("chunk_access", None)
        self._weights.clear()
        self._shown.clear()
        self._aliased.clear()
        self._watched.clear()
        self._gradients.clear()
        self._touched.clear()
        self._after.clear()

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
        return bool(self._weights or self._gradients or self._touched)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch with whole weights in place of parameters."""
        first = args[0] if args else None
        if func in _THAWS:
            self._check_thaw(first, *args[1:], **kwargs)
        name = func.__name__
        is_in_place = name.endswith("_") and not name.endswith("__") or name in _IN_PLACE
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedParameter)]
        written = [leaf for leaf in tree_leaves(first) if isinstance(leaf, GuardedParameter)] if is_in_place else []
        is_initial = getattr(func, "__module__", "") == nn.init.__name__  # without gradients inside
        needs_gradients = torch.is_grad_enabled() and not is_initial
        is_refused = needs_gradients and any(leaf.requires_grad for leaf in written)
        is_kept = func in _THAWS or is_refused  # torch refuses to write leaves that need gradients
        if not is_kept and isinstance(first, GuardedParameter) and self._takes_memory(func, first, args):
            self._replace(first, args[1])
            return first
        if is_kept or all(self._is_direct(parameter) for parameter in given):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_alias = func in _ALIASES or not needs_gradients
        is_local = not is_alias and all(self._engine.chunk_of[parameter].weights.is_resident for parameter in given)
        shown: dict[nn.Parameter, Tensor] = {}
        for parameter in given:
            chunk = self._engine.chunk_of[parameter]
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
                if not is_alias and (is_written or _may_alias(result, tensor)):
                    self._note_alias(each, tensor, is_written=is_written)
        return first if isinstance(first, GuardedParameter) and written and result is shown[first] else result

    def gradient(self, parameter: nn.Parameter, *, is_asked_to_drop: bool = False) -> Tensor | None:
        """Return the gradient of a parameter, averaged over the ranks and added up since the last step.

        Args:
            parameter: The parameter.
            is_asked_to_drop: Only to be set to None, as Lightning does before each validation.
        """
        optimizer = self._optimizer_of(parameter)
        if is_asked_to_drop and optimizer is not None and optimizer.has_stepped:
            return None
        if optimizer is None or not self._has_gradient(parameter, optimizer):
            return None
        return self._slot_of(parameter, self._whole_gradients(parameter))

    def set_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of a parameter."""
        engine, optimizer = self._engine, self._optimizer_of(parameter)
        if optimizer is None:
            if value is None:
                return
            raise UsageError(
                f"Gemini got a gradient of {self._name(parameter)} from outside, and no optimizer steps it; expected a "
                "parameter of an optimizer"
            )
        if value is None:
            if not optimizer.has_stepped and self._has_gradient(parameter, optimizer):
                self.close()
                engine.chunk_of[parameter].gradients.forget(parameter)
                engine.runtime.touched.discard(parameter)
                engine.runtime.gradients_version += 1
            return
        if not self._has_gradient(parameter, optimizer):
            engine.chunk_of[parameter].gradients.allocate()
            engine.runtime.touched.add(parameter)
            self._touched[optimizer].add(parameter)
        self._slot_of(parameter, self._whole_gradients(parameter)).copy_(value)

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
        engine, weights, gradients = self._engine, self._weights, self._gradients
        recorded = next((each for each in self._shown if self._is_recorded(each)), None)
        self._weights, self._gradients = {}, {}
        self._shown.clear()
        self._touched.clear()
        aliased, self._aliased = sorted(self._aliased), set()
        if recorded is not None:
            raise self._lost(recorded)
        written = [index for index in aliased if self._write_back(engine.chunks[index], weights[index])]
        self._compare(aliased, weights, written)
        for index, whole in gradients.items():
            accumulated = engine.chunks[index].gradients.accumulated
            if accumulated is not None:
                accumulated.tensor.copy_(engine.collectives.shard(whole) * self._scale)
        if gradients:
            engine.runtime.gradients_version += 1

    def _whole(self, parameter: nn.Parameter, *, is_aliased: bool) -> Tensor:
        """Return the part of the whole weights that is one parameter; gather them on first touch."""
        chunk = self._engine.chunk_of[parameter]
        if self._engine.is_closed:
            raise UsageError(
                f"Gemini got {self._name(parameter)} to read after close(), when nothing gathers it; call restore() "
                "instead of close()"
            )
        if chunk.index not in self._weights or (is_aliased and chunk.index not in self._aliased):
            self._engine.collectives.meet(f"touches {self._name(parameter)}{' to write' if is_aliased else ''}")
        if chunk.index not in self._weights:
            watched = [each for each in self._watched if self._engine.chunk_of[each] is chunk]
            if watched:
                self._check_watched(watched)
                with torch._C.DisableTorchFunctionSubclass():  # what is written from now on would be written over
                    self._watched.update({each: _sums(each) for each in watched})
            with torch.inference_mode(False), torch.no_grad():
                self._weights[chunk.index] = self._engine.shown(chunk, self._shown_dtype(chunk))
        if is_aliased:
            self._aliased.add(chunk.index)
        shown = self._shown.get(parameter)
        if shown is None or shown.requires_grad != parameter.requires_grad:
            shown = self._slot_of(parameter, self._weights[chunk.index]).data  # each has a version counter of its own
            if parameter.requires_grad:
                with torch.inference_mode(False), torch.enable_grad():
                    shown = _Reading.apply(parameter, shown)
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
            self._watched[parameter] = _sums(parameter)

    def _is_recorded(self, parameter: nn.Parameter) -> bool:
        """Return whether autograd has recorded a write into a whole weight: it is no longer a plain reading."""
        shown = self._shown[parameter]
        return shown.grad_fn is not None and not isinstance(shown.grad_fn, _Reading._backward_cls)

    def _check_watched(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if user code has written resident weights, and other values take their place."""
        open_ones = self._weights
        lost = [each for each in parameters if self._is_copy(each) or self._engine.chunk_of[each].index in open_ones]
        if not lost:
            return
        with torch._C.DisableTorchFunctionSubclass():
            differs = torch.stack([(_sums(parameter) != self._watched[parameter]).any() for parameter in lost]).tolist()
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
        if self._engine.is_closed:
            return False  # the parameters have the memory now
        if func == _SET_DATA or func == Tensor.set_ and len(args) == 2 and isinstance(args[1], Tensor):
            return True
        if func.__name__ in _RESHAPING:
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

    def _shown_dtype(self, chunk: Chunk) -> torch.dtype:
        if not chunk.is_trained:
            return chunk.layout.dtype
        return self.dtype or chunk.layout.master_dtype

    def _is_direct(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter's own memory is what is trained, and whole, or what a backward pass reads."""
        chunk = self._engine.chunk_of[parameter]
        weights = chunk.weights
        if torch._C._current_graph_task_id() != _OUTSIDE and weights.state in _READABLE:
            return not chunk.gradients.has_overwritten(parameter)
        if self._engine.is_closed:
            return weights.is_resident  # the parameters have the memory now
        is_whole = weights.is_resident and self._engine.collectives.world_size == 1
        return is_whole and (weights.is_master or not weights.layout.is_trained)

    def _is_copy(self, parameter: nn.Parameter) -> bool:
        """Return whether the next step overwrites what user code writes into the parameter's own memory."""
        chunk = self._engine.chunk_of[parameter]
        return chunk.is_trained and not chunk.weights.is_master and not self._engine.is_swapped

    def _write_back(self, chunk: Chunk, whole: Tensor) -> bool:
        """Take over this rank's part of whole weights; return whether it has changed."""
        weights, is_swapped = chunk.weights, self._engine.is_swapped
        target = chunk.master.tensor if chunk.is_trained and not is_swapped else weights.shard
        new = self._engine.collectives.shard(whole).to(target.device)
        old = target.to(new.dtype)
        changed = (new != old) & ~(new.isnan() & old.isnan())
        has_changed = bool(changed.any())
        if has_changed:
            chunk.wait_on_host()
            weights.settle()
            target.copy_(torch.where(changed, new.to(target.dtype), target))
            if target is not weights.shard and not weights.is_master:
                weights.refresh(target)
        weights.settle()
        if weights.state is ChunkState.GATHERED:
            weights.storage.full.copy_(whole)
        return has_changed

    def _compare(self, aliased: Sequence[int], weights: Mapping[int, Tensor], written: Sequence[int]) -> None:
        """Raise if the ranks have written different weights: each keeps the part that it owns."""
        engine = self._engine
        if not aliased or engine.collectives.world_size == 1 or self._num_written >= _NUM_CHECKED:
            return
        sums = _digests([weights[index] for index in aliased]).tolist()
        if engine.collectives.agree(repr((list(aliased), sums))):
            # A write may lie in the part of one rank: all must count the same, to come here equally often.
            any_rank = engine.collectives.all_reduce(torch.tensor([int(bool(written))]), dist.ReduceOp.MAX)
            self._num_written += int(any_rank)
            return
        names = engine.chunks[(written or aliased)[0]].layout.slots
        raise UsageError(
            f"Gemini: the ranks have written different weights in a hook (among {names[0].name} and what shares its "
            "chunk); expected the same on every rank: write without asking for the rank, with the same random numbers"
        )

    def _optimizer_of(self, parameter: nn.Parameter) -> GeminiOptimizer | None:
        if torch._C._current_graph_task_id() != _OUTSIDE:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.grad inside of a backward pass, where gradients are not summed "
                "yet; use it in on_after_backward or on_before_optimizer_step"
            )
        return next((optimizer for optimizer in self.optimizers if optimizer.owns(parameter)), None)

    def _has_gradient(self, parameter: nn.Parameter, optimizer: GeminiOptimizer) -> bool:
        """Return whether a parameter has a gradient on any rank; a collective call."""
        if optimizer.has_stepped:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.grad after {type(optimizer.inner).__name__} has stepped, which "
                "frees the gradients; use it between the backward pass and the step, in on_after_backward or "
                "on_before_optimizer_step"
            )
        if optimizer not in self._touched:
            self._engine.collectives.meet(f"touches {self._name(parameter)}.grad")
            self._touched[optimizer] = set(optimizer.touched)
        return parameter in self._touched[optimizer]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _whole_gradients(self, parameter: nn.Parameter) -> Tensor:
        engine, chunk = self._engine, self._engine.chunk_of[parameter]
        if chunk.index not in self._gradients:
            engine.collectives.meet(f"touches {self._name(parameter)}.grad")
            chunk.gradients.wait_on_host()
            accumulated = chunk.gradients.accumulated
            assert accumulated is not None
            whole = torch.empty(chunk.layout.numel, dtype=chunk.layout.master_dtype, device=engine.memory.device)
            engine.collectives.shard(whole).copy_(accumulated.tensor)
            engine.collectives.all_gather(whole, chunk.index).wait()
            self._gradients[chunk.index] = whole.div_(self._scale)
        return self._gradients[chunk.index]

    @property
    def _scale(self) -> float | Tensor:
        return 1.0 if self.loss_scale is None else self.loss_scale.used

    def _slot_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        slot = self._engine.chunk_of[parameter].slots[parameter]
        with torch._C.DisableTorchFunctionSubclass():
            return whole[slot.begin : slot.end].view(parameter.shape)

    def _check_thaw(self, parameter: Any, value: bool = True, **kwargs: Any) -> None:
        is_thawed = kwargs.get("requires_grad", value)
        if is_thawed and not self._engine.chunk_of[parameter].is_trained:
            raise UsageError(
                f"Gemini got {self._name(parameter)}.requires_grad = True during the run, a weight that was frozen "
                "when the run began and is not trained; let the callback BaseFinetuning (BackboneFinetuning) unfreeze "
                "it, or begin with requires_grad and a learning rate of 0"
            )

    def _name(self, parameter: nn.Parameter) -> str:
        return self._engine.chunk_of[parameter].slots[parameter].name


def _digests(values: Sequence[Tensor]) -> Tensor:
    """Return sums of the bytes of tensors, a row each; they change with the order of values, too."""
    return torch.stack([_sums(each) for each in values])


def _sums(values: Tensor) -> Tensor:
    """Return sums of bytes, in int64 on the device of the values; they change with the order of values, too."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // _NUM_SUMS * _NUM_SUMS
    sums = flat[:whole].view(-1, _NUM_SUMS).sum(0, dtype=torch.int64)
    sums[: flat.numel() - whole].add_(flat[whole:])
    return sums


def _may_alias(result: Any, weight: Tensor) -> bool:
    """Return whether user code may write a weight through what a function returned."""
    return any(
        _is_alias_of(leaf, weight) if isinstance(leaf, Tensor) else not isinstance(leaf, _PLAIN)
        for leaf in tree_leaves(result)
    )


_RESHAPING = set("set_ resize_ resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())
"""In-place functions that change the shape of a tensor, or its memory."""
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ALIASES: set[Any] = {Tensor.data.__get__, _SET_DATA, Tensor.detach, torch.detach}  # type: ignore[attr-defined]
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE.add("__setitem__")
