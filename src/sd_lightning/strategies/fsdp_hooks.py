"""How FSDP2's distributed tensors meet plain tensors in hooks that were written for whole weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

_TO_PYTHON = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy),
    *(Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__format__),
}
"""What makes Python's numbers: of a sum that is still divided over processes, torch gives each its part."""
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)}
_SHARDED = ("DTensor", "sharding strategy", "data is not allocated yet", "storage of size 0")
"""In messages of torch about distributed tensors."""


class WholeWhereNeeded(TorchFunctionMode):
    """Lets distributed tensors act as whole ones where torch refuses: with plain tensors, and as Python's numbers.

    What torch computes with shards stays in shards. Otherwise the operands are gathered, and what changes in place is
    written back. It is a collective call then: all ranks must do the same.
    """

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func not in _TO_PYTHON:
            try:
                return func(*args, **kwargs)
            except (torch.OutOfMemoryError, dist.DistError):
                raise  # of this rank alone, perhaps: the others would not gather with it
            except (RuntimeError, NotImplementedError):
                pass  # if the mistake is the user's, it is made again with whole tensors
        return _on_whole(func, args, kwargs)


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wholes: dict[int, Tensor] = {}

    def gathered(each: Any) -> Any:
        if not isinstance(each, DTensor):
            return each
        if id(each) not in wholes:
            wholes[id(each)] = each.full_tensor()
        return wholes[id(each)]

    result = func(*tree_map(gathered, args), **tree_map(gathered, kwargs))
    if not _is_in_place(func):
        return result
    changed = [each for each in tree_leaves(args[0]) if isinstance(each, DTensor)]
    with torch.no_grad():
        for each in changed:
            rows, begin, end = local_rows(each)
            rows.copy_(wholes[id(each)].reshape(-1)[begin:end].view_as(rows))
    return args[0] if changed else result


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
