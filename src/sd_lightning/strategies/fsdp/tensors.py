"""FSDP2's distributed tensors: as training state, and as whole tensors in hooks that were written for those."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import ShardedState

_TO_PYTHON = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy),
    *(Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__format__),
}
"""What makes Python's numbers: of a sum that is still divided over processes, torch gives each its part."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}
_SHARDED = ("DTensor", "sharding strategy", "data is not allocated yet", "storage of size 0")
"""In messages of torch about distributed tensors."""
_NO_IDENTITY = re.compile(
    r"(_foreach_|linalg_)?a?(rg)?(min|max|minmax)|(nan)?(median|quantile)|mode|kthvalue|cum(max|min)"
)
"""Reductions that torch refuses of nothing at all, and so on the ranks alone that have no row of a small weight."""
_NORM = re.compile(r"(_foreach_|linalg_)?(vector_|matrix_)?norm|get_total_norm")
_VIEW = re.compile(
    r"__getitem__|select|narrow|(h|v|d|tensor_)?split(_with_sizes)?|unsafe_split|chunk|unbind|diagonal|unfold|expand(_as)?"
    r"|view(_as)?|reshape(_as)?|flatten|unflatten|ravel|(un)?squeeze|t|adjoint|transpose|permute|mov(e|edim)|swap(axes|dims)"
)
"""Functions whose result shares memory with a whole tensor, so that writing the one writes the other."""


class WholeWhereNeeded(TorchFunctionMode):
    """Lets distributed tensors act as whole ones where torch refuses: with plain tensors, and as Python's numbers.

    What torch computes with shards stays in shards. Otherwise the operands are gathered, and what changes in place is
    written back, through a view as well. It is a collective call then: all ranks must do the same, and where torch
    would refuse on some ranks alone, the operands are gathered at once. A view of a gathered tensor shows the values
    of when it was taken or last written.
    """

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_SET_DATA, _SET_GRAD) and isinstance(args[0], DTensor) and isinstance(args[1], Tensor):
            return _set(func, args[0], args[1])
        leaves = tree_leaves((args, kwargs))
        views = [each for each in leaves if isinstance(each, Tensor) and each in _VIEWS]
        written = [each for each in _written(func, args, kwargs) if each in _VIEWS]
        for whole, shards in _bases(written):
            whole.copy_(shards.full_tensor().detach())
        result = self._compute(func, args, kwargs, [each for each in leaves if isinstance(each, DTensor)])
        for whole, shards in _bases(written):
            _write_back(shards, whole)
        if views:
            _note_views(result, [_VIEWS[each] for each in views])
        return result

    def _compute(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[DTensor]
    ) -> Any:
        if not operands:
            return func(*args, **kwargs)
        fails_alone = _needs_values(func, args, kwargs) and any(_has_empty_shard(each) for each in operands)
        if func not in _TO_PYTHON and not fails_alone:
            try:
                result = func(*args, **kwargs)
                if not _is_copy_of_view(func, args, result):
                    return result
            except (torch.OutOfMemoryError, dist.DistError):
                raise  # of this rank alone, perhaps: the others would not gather with it
            except (RuntimeError, NotImplementedError):
                pass  # if the mistake is the user's, it is made again with whole tensors
        return _on_whole(func, args, kwargs)


_VIEWS: WeakIdKeyDictionary = WeakTensorKeyDictionary()
"""View of a gathered tensor -> the gathered one, and the distributed one that it was gathered from."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]


@torch.no_grad()
def _set(func: Callable[..., Any], parameter: DTensor, value: Tensor) -> None:
    """Do what ``parameter.data = value`` or ``parameter.grad = value`` does; torch would not take over the values."""
    if value.shape != parameter.shape:
        name = "data" if func == _SET_DATA else "grad"
        raise UsageError(
            f"FSDPStrategy got a parameter's .{name} of shape {tuple(value.shape)}; expected {tuple(parameter.shape)}: "
            "weights in parts keep their sizes"
        )
    target: Any = parameter.detach() if func == _SET_DATA else torch.zeros_like(parameter)
    if isinstance(value, DTensor):
        target.copy_(value.detach())
    else:
        _write_back(target, value.detach())
    if func == _SET_GRAD:
        parameter.grad = target


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes."""
    written = tree_leaves(kwargs.get("out"))
    if _is_in_place(func) or kwargs.get("inplace"):
        written += tree_leaves(args[:1] or list(kwargs.values())[:1])  # nn.init names its tensor
    return [each for each in written if isinstance(each, Tensor)]


def _needs_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function needs at least one value in each shard."""
    if _NORM.fullmatch(func.__name__):
        orders = [each for each in tree_leaves((args, kwargs)) if isinstance(each, int | float)]
        return any(math.isinf(each) or each < 0 for each in orders)
    return _NO_IDENTITY.fullmatch(func.__name__) is not None


def _has_empty_shard(tensor: DTensor) -> bool:
    """Return whether some rank has no row, by what all ranks know."""
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            rows, parts = tensor.shape[placement.dim], tensor.device_mesh.size(dim)
            largest = -(-rows // parts)
            if rows <= largest * (parts - 1):
                return True
    return False


def _is_copy_of_view(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> bool:
    """Return whether torch made a copy where a whole tensor would give a view of itself."""
    if not _VIEW.fullmatch(func.__name__) or not args or not isinstance(args[0], DTensor):
        return False
    if func.__name__ == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index):
            return False
    base = _storage(args[0])
    results = (each for each in tree_leaves(result) if isinstance(each, Tensor) and each.layout == torch.strided)
    return any(_storage(each) != base for each in results)


def _storage(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def _note_views(result: Any, bases: Iterable[tuple[Tensor, DTensor]]) -> None:
    """Note in each tensor of a result that it is a view of a gathered tensor."""
    by_storage = {_storage(whole): (whole.detach(), shards) for whole, shards in bases}
    for each in tree_leaves(result):
        if isinstance(each, Tensor) and each.layout == torch.strided and _storage(each) in by_storage:
            _VIEWS[each] = by_storage[_storage(each)]


def _bases(views: Iterable[Tensor]) -> list[tuple[Tensor, DTensor]]:
    """Return what views were gathered from, each once."""
    return list({id(base[1]): base for base in (_VIEWS[each] for each in views)}.values())


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wholes: dict[int, tuple[Tensor, DTensor]] = {}

    def gathered(each: Any) -> Any:
        if not isinstance(each, DTensor):
            return each
        if id(each) not in wholes:
            wholes[id(each)] = each.full_tensor(), each
        return wholes[id(each)][0]

    result = func(*tree_map(gathered, args), **tree_map(gathered, kwargs))
    changed = [each for each in _written(func, args, kwargs) if isinstance(each, DTensor)]
    for each in changed:
        _write_back(each, wholes[id(each)][0])
    if not changed:
        _note_views(result, wholes.values())
        return result
    for each in changed:
        result = each if result is wholes[id(each)][0] else result
    return result


@torch.no_grad()
def _write_back(shards: DTensor, whole: Tensor) -> None:
    rows, begin, end = local_rows(shards)
    rows.copy_(whole.reshape(-1)[begin:end].view_as(rows))


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name in _IN_PLACE or (name[-1] == "_" and name[-2] != "_")


def local_rows(parameter: DTensor) -> tuple[Tensor, int, int]:
    """Return this rank's rows of a sharded parameter, and the begin and end of their flat range."""
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    inner = parameter.numel() // max(parameter.shape[0], 1)
    begin = min(offset[0], parameter.shape[0]) * inner
    return parameter.to_local().detach(), begin, begin + math.prod(shape)


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about an error of torch that comes of sharded weights outside of hooks; None for others."""
    lines = str(error).strip().splitlines()
    if not isinstance(error, RuntimeError | NotImplementedError) or not any(part in str(error) for part in _SHARDED):
        return None
    return (
        f"FSDPStrategy: outside of a network's forward its weights are in parts, and {type(error).__name__} came of "
        f"them: {lines[0]}; call networks as a whole, and use a weight in the forward of its network (for a "
        "penalty on weights, the optimizer's weight_decay), or take strategy=ddp"
    )


class DTensorState(ShardedState, ReplicatedState):
    """Training state of parameters sharded in dim 0: this rank's rows are a flat range.

    Args:
        parameters: Trained parameters by name.
        optimizers: The optimizers that step them.
        modules: The FSDP modules that gather them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        modules: Iterable[FSDPModule],
    ) -> None:
        super().__init__(parameters, optimizers)
        self._modules = list(modules)

    @override
    def _local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()

    @override
    def _range(self, parameter: nn.Parameter) -> tuple[int, int]:
        assert isinstance(parameter, DTensor)
        return local_rows(parameter)[1:]

    @override
    def _writes(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank is in the one replica (HSDP) that writes."""
        assert isinstance(parameter, DTensor)
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        return all(
            position == 0
            for position, placement in zip(coordinate, parameter.placements, strict=True)
            if isinstance(placement, Replicate)
        )

    @override
    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> dict[str, Tensor]:
        self._reshard()
        trained = {}
        for name, parameter in self._parameters.items():
            local = self._local(parameter)
            trained[name] = local.clone()
            local.copy_(weights[name, self._range(parameter)[0]])
        return trained

    @override
    def _restore(self, trained: dict[str, Tensor]) -> None:
        self._reshard()
        for name, parameter in self._parameters.items():
            self._local(parameter).copy_(trained[name])

    def _reshard(self) -> None:
        """Free gathered weights: after a forward pass without backward the root keeps them and would use them."""
        for module in self._modules:
            module.reshard()
