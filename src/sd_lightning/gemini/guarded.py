"""Parameters of chunks outside of their blocks' forward: their class, gradients, and the functions that write them.

User code gets whole values there: weights of :class:`~sd_lightning.gemini.outside.OutsideAccess`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import ChunkedNetworks
from sd_lightning.gemini.gathering import Reducer

_READ = (
    "shape dtype device layout requires_grad is_leaf grad_fn ndim is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested itemsize nbytes output_nr retains_grad _version _backward_hooks "
    "_post_accumulate_grad_hooks"
).split()
_ASKED = (
    "size dim numel nelement element_size stride is_contiguous is_floating_point is_complex is_inference "
    "get_device untyped_storage storage_offset is_same_size register_hook register_post_accumulate_grad_hook "
    "retain_grad backward __len__"
).split()
_TENSOR: Any = Tensor
_ON_ITSELF: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _READ),
    *(getattr(Tensor, name) for name in _ASKED),
    _TENSOR._backward_hooks.__set__,
    _TENSOR._post_accumulate_grad_hooks.__set__,
    torch.autograd.grad,
    torch.autograd.backward,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch._has_compatible_shallow_copy_type,
}
"""What needs no values."""
THAWS: set[Any] = {Tensor.requires_grad.__set__, Tensor.requires_grad_}  # type: ignore[attr-defined]
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
ALIASES: set[Any] = {Tensor.data.__get__, SET_DATA, Tensor.detach, torch.detach}  # type: ignore[attr-defined]
"""What returns the memory of a tensor, or replaces it."""
RESHAPING = set("set_ resize_ resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())
"""In-place functions that change the shape of a tensor, or its memory."""
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE.add("__setitem__")
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
OUTSIDE = -1
"""Autograd's number of the current graph task if none runs."""
_APPLY = nn.Module._apply.__code__
_MOVES: set[Any] = {Tensor.to, Tensor.cpu, Tensor.cuda}
"""What a module calls for each of its parameters to move to a device."""


class WholeValues(Protocol):
    """What guarded parameters ask for their values: :class:`~sd_lightning.gemini.outside.OutsideAccess`."""

    is_active: bool
    gradients: WholeGradients

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch with whole weights in place of parameters."""


class GuardedParameter(nn.Parameter):
    """The class of a chunk's parameter, except while its unit's forward runs: its values are those of the engine."""

    chunk_access: weakref.ref[WholeValues]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES and sys._getframe(2).f_code is _APPLY:
            return args[0]  # of module.to(device): weights stay where the engine has placed them
        if func not in _ON_ITSELF:
            first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedParameter))
            access = first.chunk_access()
            if access is None:
                raise UsageError("Gemini got a weight of an engine that is gone; call its restore() before")
            if access.is_active:
                return access.call(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Take over values; torch asks no ``__torch_function__`` about this method."""
        return self.__torch_function__(_TENSOR.set_, (type(self),), (self, *args), kwargs)

    @property
    def grad(self) -> Tensor | None:
        access = self.chunk_access()
        if access is None or not access.is_active:
            return None
        caller = sys._getframe(1).f_code
        if caller is _APPLY:
            return None
        return access.gradients.read(self, is_asked_to_drop=caller is nn.Module.zero_grad.__code__)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        access = self.chunk_access()
        if access is not None and access.is_active:
            access.gradients.write(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy: nn.Parameter | None = memo.get(id(self))
        if copy is None:
            copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class ChunkOptimizer(Protocol):
    """An optimizer of chunks: :class:`~sd_lightning.gemini.optimizer.GeminiOptimizer`."""

    inner: torch.optim.Optimizer

    @property
    def touched(self) -> set[nn.Parameter]:
        """Its parameters that have gradients on any rank; a collective call."""

    @property
    def has_stepped(self) -> bool:
        """Whether a step has consumed the gradients of the last backward pass."""

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return whether it steps a parameter."""


class WholeGradients:
    """Gradients averaged over the ranks and added up since the last step, gathered on first touch.

    Args:
        chunked: The networks and their chunks.
        reducer: Reduces the gradients.
        optimizers: Those made so far, now and later.
        scale: Returns the factor of gradients in chunks, without which they are shown.
        close: Writes back all that user code may have written.
    """

    def __init__(
        self,
        chunked: ChunkedNetworks,
        reducer: Reducer,
        optimizers: Sequence[ChunkOptimizer],
        scale: Callable[[], float | Tensor],
        close: Callable[[], None],
    ) -> None:
        self._chunked = chunked
        self._reducer = reducer
        self._optimizers = optimizers
        self._scale = scale
        self._close = close
        self.whole: dict[int, Tensor] = {}
        """By chunk: whole gradients that user code sees."""
        self.touched: dict[ChunkOptimizer, set[nn.Parameter]] = {}
        """By optimizer: parameters with gradients on any rank."""

    def read(self, parameter: nn.Parameter, *, is_asked_to_drop: bool) -> Tensor | None:
        """Return the gradient of a parameter.

        Args:
            parameter: The parameter.
            is_asked_to_drop: Only to be set to None, as Lightning does before each validation.
        """
        optimizer = self._optimizer_of(parameter)
        is_dropped = is_asked_to_drop and not self._reducer.complete
        if optimizer is None or is_dropped and optimizer.has_stepped:
            return None
        return self._gathered(parameter) if self._has_gradient(parameter, optimizer) else None

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of a parameter."""
        chunked, optimizer = self._chunked, self._optimizer_of(parameter)
        if value is None:
            may_have = optimizer is not None and (self._reducer.complete or not optimizer.has_stepped)
            if optimizer is not None and may_have and self._has_gradient(parameter, optimizer):
                self._close()
                chunked.chunk_of[parameter].gradients.forget(parameter)
                self._reducer.touched.discard(parameter)
                self._reducer.version += 1
            return
        if optimizer is None:
            raise UsageError(
                f"Gemini got a gradient of {chunked.name_of(parameter)} from outside, and no optimizer steps it; "
                "expected a parameter of an optimizer"
            )
        if not self._has_gradient(parameter, optimizer):
            chunked.chunk_of[parameter].gradients.allocate()
            self._reducer.touched.add(parameter)
            self.touched[optimizer].add(parameter)
        self._gathered(parameter).copy_(value)

    def release(self) -> dict[int, Tensor]:
        """Let go of whole gradients, and return them by chunk."""
        whole, self.whole = self.whole, {}
        self.touched.clear()
        return whole

    def write_back(self, whole: Mapping[int, Tensor]) -> None:
        """Take over this rank's parts of whole gradients."""
        for index, gradients in whole.items():
            accumulated = self._chunked.chunks[index].gradients.accumulated
            if accumulated is not None:
                accumulated.tensor.copy_(self._chunked.collectives.shard(gradients) * self._scale())
        if whole:
            self._reducer.version += 1

    def _optimizer_of(self, parameter: nn.Parameter) -> ChunkOptimizer | None:
        if torch._C._current_graph_task_id() != OUTSIDE:
            raise UsageError(
                f"Gemini got {self._chunked.name_of(parameter)}.grad inside of a backward pass, where gradients are "
                "not summed yet; use it in on_after_backward or on_before_optimizer_step"
            )
        return next((optimizer for optimizer in self._optimizers if optimizer.owns(parameter)), None)

    def _has_gradient(self, parameter: nn.Parameter, optimizer: ChunkOptimizer) -> bool:
        """Return whether a parameter has a gradient on any rank; a collective call."""
        if optimizer.has_stepped:
            between = "use it between the backward pass and the step, in on_after_backward or on_before_optimizer_step"
            early = "leave step_in_backward out to use or drop it: the backward pass has stepped"
            raise UsageError(
                f"Gemini got {self._chunked.name_of(parameter)}.grad after {type(optimizer.inner).__name__} has "
                f"stepped, which frees the gradients; {early if self._chunked.config.step_in_backward else between}"
            )
        if optimizer not in self.touched:
            self._chunked.collectives.meet(f"touches {self._chunked.name_of(parameter)}.grad")
            self.touched[optimizer] = set(optimizer.touched)
        return parameter in self.touched[optimizer]

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        chunked, chunk = self._chunked, self._chunked.chunk_of[parameter]
        if chunk.index not in self.whole:
            chunked.collectives.meet(f"touches {chunked.name_of(parameter)}.grad")
            with torch.inference_mode(False), torch.no_grad():
                chunk.gradients.wait_on_host()
                chunk.gradients.widen()
                accumulated = chunk.gradients.accumulated
                assert accumulated is not None
                self.whole[chunk.index] = chunked.gathered(chunk, accumulated.tensor).div_(self._scale())
        return chunk.part_of(parameter, self.whole[chunk.index])


def is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function of torch writes its first argument."""
    name = func.__name__
    return name.endswith("_") and not name.endswith("__") or name in _IN_PLACE


def may_alias(result: Any, weight: Tensor) -> bool:
    """Return whether user code may write a weight through what a function returned."""
    return any(
        _is_alias_of(leaf, weight) if isinstance(leaf, Tensor) else not isinstance(leaf, _PLAIN)
        for leaf in tree_leaves(result)
    )
