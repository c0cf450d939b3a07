"""Record the operations and allocations of a computation on the meta device: shapes without values, in a second."""

from __future__ import annotations

import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from sd_lightning.planner.trace import Amount, Buffer, Cost, Operation, Trace

PRIME = 1093
"""Batch size of recordings that hold for all others: no layer has a multiple of it, or of 547, as its width."""


def record(
    step: Callable[[], Tensor | None],
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    parameters: Iterable[Tensor] = (),
    autocast: torch.dtype | None = None,
    batch_size: int | None = None,
) -> Trace:
    """Run a computation on meta tensors, and its backward pass if it returns a loss.

    Attention is recorded as flash attention, which saves its inputs, its output and one number per row (Dao 2023,
    arXiv:2307.08691). A parameter's gradient is dropped when it is ready; the recording says when.

    Args:
        step: Computes a loss, or nothing.
        blocks: Modules by name, to which operations are attributed: blocks, and layers of blocks.
        parameters: Those whose gradients are followed.
        batch_size: A prime number of samples that divides no other dimension, such as :data:`PRIME`. Sizes that it
            divides are proportional to the batch, those that the next number divides to the batch and one row more.
            Without it, all are constant.
        autocast: Dtype of matrix products, convolutions and attention, as ``torch.autocast("cuda")`` would choose; None
            leaves dtypes as they are.
    """
    recorder = _Recorder(batch_size)
    hooks = recorder.follow(blocks or {}, parameters)
    try:
        with _Functions(autocast) as functions, recorder:
            loss = step()
            for buffer in recorder.buffers_of(functions.forget_casts()):
                buffer.is_cast = True
            if loss is not None:
                # Not loss.backward(): no function mode is active inside of it, so none would see a recomputation.
                engine: Any = torch.autograd.Variable._execution_engine
                engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Trace(recorder.operations, recorder.buffers)


class _Recorder(TorchDispatchMode):
    """Notes every operation, and when each storage was allocated and freed.

    The meta device computes the shapes of results in Python, slowly. Blocks repeat, so results are remembered.
    """

    def __init__(self, batch_size: int | None) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.buffers: list[Buffer] = []
        # A network may append a row to a batch.
        self._rows = () if batch_size is None else ((batch_size, 0), (batch_size + 1, 1))
        self._uses = _uses_by_autograd()
        self._live: dict[int, tuple[Any, Buffer]] = {}
        self._entered: list[str] = []
        # Nodes of the autograd graph are numbered in the order of the forward pass: from which number on which modules,
        # the outermost and the innermost of those that are followed.
        self._numbers, self._places = [-1], [("", "")]
        self._known: dict[Any, tuple[Any, Cost]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        devices = {each.device.type for each in tensors} or {getattr(kwargs.get("device"), "type", "meta")}
        if _is_view(func) or devices == {"cpu"}:  # what a network counts on the host has values
            return func(*args, **kwargs)
        if len(devices) > 1:  # indices, too; kernels of the meta device want them there
            args = tree_map_only(Tensor, lambda each: each.to("meta") if each.dtype == torch.int64 else each, args)
        if self._adds_in_place(func, args):
            func = torch.ops.aten.add_.Tensor
        is_mutable = func._schema.is_mutable
        key = None if is_mutable else _key(func, args, kwargs)
        if key is not None and key in self._known:
            made, cost = self._known[key]
            result = _remade(made)
        else:
            result = func(*args, **kwargs)
            cost = self._cost(func, args, kwargs, result)
            if key is not None:
                self._known[key] = result, cost
                result = _remade(result)
        index, is_backward = len(self.operations), torch._C._current_graph_task_id() != -1
        self.operations.append(Operation(cost, *self._place(), is_backward))
        if not is_backward:
            for buffer in self.buffers_of((args, kwargs)):
                buffer.used = index
        if not is_mutable:
            for tensor in result if isinstance(result, tuple | list) else (result,):
                if isinstance(tensor, Tensor):
                    self._allocate(tensor, index)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
            # The kernel sums the query's gradient in float32, and keeps a number per row (Dao 2023, algorithm 2).
            size = self._amount(args[1], 4) + self._amount(args[5], 4)
            self.buffers.append(Buffer(size, index, index + 1))
        return result

    def _adds_in_place(self, func: Any, args: Any) -> bool:
        """Return whether autograd adds a gradient to another one in place, where no mode records it.

        It does so where only its buffer holds that one, and its values lie apart (torch, ``input_buffer.cpp``).
        """
        if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        return args[0].untyped_storage().nbytes() >= args[0].nbytes and _uses(args[0]) == self._uses

    def _cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> Cost:
        packet = func._overloadpacket
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        floats = [t for t in tensors if t.is_floating_point()]
        if packet is torch.ops.aten._scaled_dot_product_flash_attention:
            flops = _attention_flops(*args[:2])
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        moved = Amount()
        if not packet.__name__.startswith(("empty", "new_empty")):
            moved = sum((self._amount(tensor, tensor.element_size()) for tensor in tensors), moved)
        dtype = max(floats, key=lambda t: t.nbytes).dtype if floats else torch.int64
        return Cost(packet.__name__, self._share(flops), moved, dtype)

    def _amount(self, tensor: Tensor, width: int) -> Amount:
        """Return the bytes of a tensor with elements of a width."""
        elements = self._share(tensor.numel())
        return Amount(width * elements.constant, width * elements.per_sample)

    def _share(self, count: int) -> Amount:
        for rows, more in self._rows:
            each, rest = divmod(count, rows)
            if not rest:
                return Amount(more * each, each)
        return Amount(count)

    def follow(self, blocks: Mapping[str, nn.Module], parameters: Iterable[Tensor]) -> list[Any]:
        """Register hooks on blocks and parameters, and return them."""
        hooks: list[Any] = []
        for name, block in blocks.items():
            enter = functools.partial(self._enter, name)
            hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(block.register_forward_hook(lambda *values: self._leave(values[-1]), always_call=True))
        trained: Any = (parameter for parameter in parameters if parameter.requires_grad)
        return hooks + [parameter.register_post_accumulate_grad_hook(self._drop_gradient) for parameter in trained]

    def _enter(self, name: str, block: nn.Module, *inputs: Any) -> None:
        for buffer in self.buffers_of(inputs):
            buffer.enters.append(name)
        self._entered.append(name)
        self._mark()

    def _leave(self, outputs: Any) -> None:
        for buffer in self.buffers_of(outputs):
            buffer.is_output = True
        self._entered.pop()
        self._mark()

    def buffers_of(self, values: Any) -> Iterator[Buffer]:
        """Yield the buffers of the tensors in nested containers."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) in self._live:
                yield self._live[key][1]

    def _mark(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._places.append(self._here())

    def _here(self) -> tuple[str, str]:
        return (self._entered[0], self._entered[-1]) if self._entered else ("", "")

    def _place(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if self._entered or node is None:  # recomputation in backward enters blocks, too
            return self._here()
        return self._places[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _allocate(self, tensor: Tensor, index: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        buffer = Buffer(self._amount(tensor, tensor.element_size()), index)

        def freed(_: Any) -> None:
            del self._live[key]
            buffer.freed = len(self.operations)

        self._live[key] = weakref.ref(storage, freed), buffer
        self.buffers.append(buffer)

    def _drop_gradient(self, parameter: Tensor) -> None:
        for buffer in self.buffers_of(parameter.grad):
            buffer.is_gradient = True
        parameter.grad = None


def _uses(tensor: Any) -> tuple[int, int]:
    """Return how many places hold a tensor, and its memory."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def _uses_by_autograd() -> tuple[int, int]:
    """Return the uses of a gradient that only autograd holds, in a mode that is called to add to it."""
    found = []

    class Watch(TorchDispatchMode):
        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                found.append(_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Watch():
        values = torch.ones(1, device="meta", requires_grad=True)
        torch.autograd.grad(values.sin() * values.cos(), values)
    return found[0]


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operator returns views of its inputs, and changes nothing."""
    if func is torch.ops.aten._unsafe_view.default:  # its schema does not say so
        return True
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the shapes of an operator's results depend on; None if that cannot be compared."""
    key = func, _signature(args), _signature(tuple(kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(_signature(each) for each in value)
    return type(value), value


def _remade(result: Any) -> Any:
    """Return new tensors like the results of an operator."""
    if isinstance(result, Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    if isinstance(result, tuple | list):
        return type(result)(_remade(each) for each in result)
    return result


_LOW_PRECISION = frozenset(
    (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.scaled_dot_product_attention)
    + (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm, Tensor.bmm, torch.addmm, torch.baddbmm)
    + (torch.einsum,)
)
_FLOAT32 = frozenset(
    (F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.mse_loss, torch.exp, Tensor.exp)
    + (F.rms_norm, torch.pow, Tensor.pow, torch.sum, Tensor.sum, F.log_softmax, F.cross_entropy)
)
"""The functions of CUDA's autocast lists that denoisers, text encoders and losses call (torch, ``autocast_mode.h``)."""


class _Functions(TorchFunctionMode):
    """Records attention as flash attention, and casts as ``torch.autocast("cuda")`` does: meta has no autocast."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._casts: dict[int, Tensor] | None = {}

    def forget_casts(self) -> list[Tensor]:
        """Return and free the cast weights, as on leaving an autocast context; later casts are not kept."""
        casts, self._casts = list((self._casts or {}).values()), None
        return casts

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None:
            cast = self._lower if func in _LOW_PRECISION else self._raise if func in _FLOAT32 else None
            if cast is not None:
                args, kwargs = [cast(each) for each in args], {name: cast(each) for name, each in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            return _flash_attention(*args, **kwargs)
        if func is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if self._casts is None or not (value.is_leaf and value.requires_grad):
            return value.to(self._dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(self._dtype)
        return self._casts[id(value)]

    def _raise(self, value: Any) -> Any:
        is_low = isinstance(value, Tensor) and value.dtype == self._dtype
        return value.float() if is_low else value


def _attention_flops(query: Tensor, key: Tensor) -> int:
    """Return the operations of both matrix products; torch before 2.13 counts none if heads share keys and values."""
    return 4 * query.numel() * key.shape[-2]


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **_: Any
) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def _rms_norm(
    values: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Record the layer norm: as CUDA's fused kernel it saves its input, while meta would save every step between."""
    return F.layer_norm(values, normalized_shape, weight, None, eps or 1e-5)
