"""Record the operations and allocations of a computation on the meta device: shapes without values, in a second."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

NEVER = 2**62


@dataclass
class Operation:
    """One call of an aten operator."""

    name: str
    """Its name without overload: "addmm", "convolution"."""
    block: str
    """The repeated block that it belongs to, also in backward; "" outside of blocks."""
    is_backward: bool
    """Whether it ran in the backward pass, as a gradient or a recomputation."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention; 0 for others."""
    moved: int
    """Bytes of its inputs and outputs; 0 for views."""
    dtype: torch.dtype
    """Of its largest floating-point tensor."""


@dataclass
class Buffer:
    """A storage that an operation allocated."""

    size: int
    """Bytes, not rounded."""
    born: int
    """Index of the operation that allocated it."""
    block: str
    freed: int = NEVER
    """Index of the first operation that ran without it."""
    gradient_of: int | None = None
    """Index of the parameter whose gradient it is."""


@dataclass
class Recording:
    """The operations of a computation, and the storages that they allocated, in order."""

    operations: list[Operation] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)


def record(
    step: Callable[[], Tensor | None],
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    parameters: Iterable[Tensor] = (),
    autocast: torch.dtype | None = None,
) -> Recording:
    """Run a computation on meta tensors, and its backward pass if it returns a loss.

    Attention is recorded as flash attention, which saves its inputs, its output and one number per row (Dao 2023,
    arXiv:2307.08691). A parameter's gradient is dropped when it is ready; the recording says when.

    Args:
        step: Computes a loss, or nothing.
        blocks: Modules by name, to which operations and storages are attributed.
        parameters: Those whose gradients are followed.
        autocast: Dtype of matrix products, convolutions and attention, as ``torch.autocast("cuda")`` would choose; None
            leaves dtypes as they are.
    """
    recorder = _Recorder()
    hooks = recorder.follow(blocks or {}, parameters)
    try:
        with _Functions(autocast) as functions, recorder:
            loss = step()
            functions.forget_casts()
            if loss is not None:
                # Not loss.backward(): function modes are off inside of a method of a tensor.
                torch.autograd.backward([loss])
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.recording


class _Recorder(TorchDispatchMode):
    """Notes every operation, and when each storage was allocated and freed."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._live: dict[int, tuple[Any, Buffer]] = {}
        self._entered: list[str] = []
        # Nodes of the autograd graph are numbered in the order of the forward pass: from which number on which block.
        self._numbers, self._blocks = [-1], [""]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        block, index = self._block(), len(self.recording.operations)
        old = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in old]
        self.recording.operations.append(_operation(func, args, kwargs or {}, result, given, made, new, block))
        for tensor in new:
            self._allocate(tensor, index, block)
        return result

    def follow(self, blocks: Mapping[str, nn.Module], parameters: Iterable[Tensor]) -> list[Any]:
        """Register hooks on blocks and parameters, and return them."""
        hooks: list[Any] = []
        for name, block in blocks.items():
            hooks.append(block.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            hooks.append(block.register_forward_hook(lambda *_: self._leave(), always_call=True))
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hooks.append(
                    parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._take(p, number))
                )
        return hooks

    def _enter(self, name: str) -> None:
        self._entered.append(name)
        self._mark()

    def _leave(self) -> None:
        self._entered.pop()
        self._mark()

    def _mark(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._blocks.append(self._entered[-1] if self._entered else "")

    def _block(self) -> str:
        node = torch._C._current_autograd_node()
        if self._entered or node is None:  # recomputation in backward enters blocks, too
            return self._entered[-1] if self._entered else ""
        return self._blocks[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _allocate(self, tensor: Tensor, index: int, block: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        buffer = Buffer(storage.nbytes(), index, block)

        def freed(_: Any) -> None:
            del self._live[key]
            buffer.freed = len(self.recording.operations)

        self._live[key] = weakref.ref(storage, freed), buffer
        self.recording.buffers.append(buffer)

    def _take(self, parameter: Tensor, number: int) -> None:
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        if key in self._live:
            self._live[key][1].gradient_of = number
        parameter.grad = None


def _operation(
    func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor], made: list[Tensor], new: list[Tensor], block: str
) -> Operation:
    packet = func._overloadpacket
    flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
    is_free = not (new or func._schema.is_mutable) or packet.__name__.startswith(("empty", "new_empty"))
    floats = [t for t in (*given, *made) if t.is_floating_point()]
    dtype = max(floats, key=lambda t: t.nbytes).dtype if floats else torch.int64
    return Operation(
        name=packet.__name__,
        block=block,
        is_backward=torch._C._current_graph_task_id() != -1,
        flops=flops,
        moved=0 if is_free else sum(t.nbytes for t in (*given, *made)),
        dtype=dtype,
    )


_LOW_PRECISION = frozenset(
    (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.scaled_dot_product_attention)
    + (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm, Tensor.bmm, torch.addmm, torch.baddbmm)
    + (torch.einsum,)
)
_FLOAT32 = frozenset(
    (F.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.mse_loss, torch.exp, Tensor.exp)
    + (torch.pow, Tensor.pow, torch.sum, Tensor.sum, F.log_softmax, F.cross_entropy)
)
"""The functions of CUDA's autocast lists that denoisers, text encoders and losses call (torch, ``autocast_mode.h``)."""


class _Functions(TorchFunctionMode):
    """Records attention as flash attention, and casts as ``torch.autocast("cuda")`` does: meta has no autocast."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._casts: dict[int, Tensor] | None = {}

    def forget_casts(self) -> None:
        """Free the cast weights, as on leaving an autocast context; later casts are not kept."""
        self._casts = None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None:
            cast = self._lower if func in _LOW_PRECISION else self._raise if func in _FLOAT32 else None
            if cast is not None:
                args, kwargs = [cast(each) for each in args], {name: cast(each) for name, each in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            return _flash_attention(*args, **kwargs)
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


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **_: Any
) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return output
