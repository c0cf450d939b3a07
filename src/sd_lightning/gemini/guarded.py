"""The class of a chunk's parameter outside of its block's forward: it gives user code whole values."""

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
_APPLY = nn.Module._apply.__code__
_MOVES: set[Any] = {Tensor.to, Tensor.cpu, Tensor.cuda}
"""What a module calls for each of its parameters to move to a device."""


class Access(Protocol):
    """What gives the values: :class:`~sd_lightning.gemini.outside.OutsideAccess`."""

    is_active: bool

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of torch with whole weights in place of parameters."""
        ...

    def gradient(self, parameter: nn.Parameter, *, is_asked_to_drop: bool = False) -> Tensor | None:
        """Return a whole gradient."""
        ...

    def set_gradient(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace a gradient."""
        ...


class GuardedParameter(nn.Parameter):
    """The class of a chunk's parameter, except while its unit's forward runs: its values are those of the engine."""

    chunk_access: weakref.ref[Access]

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
        return access.gradient(self, is_asked_to_drop=caller is nn.Module.zero_grad.__code__)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        access = self.chunk_access()
        if access is not None and access.is_active:
            access.set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)
