"""Layers whose weights are int8 buffers (linear, convolution, embedding), and the kernel of LLM.int8().

A layer is converted and restored in place, by changing its class, so that references to it (from LoRA adapters or
hooks) stay valid. The weights are buffers, not parameters: they are not trained, and the dtype of a network's first
parameter is still its compute dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from sd_lightning._errors import UsageError

Rows = Callable[[int, int], Tensor]
"""(begin, end) -> these rows of a weight, in any floating-point dtype."""

Range = tuple[int, int]
"""[begin, end)"""

_BLOCK_NUMEL = 2**18
"""Elements converted to float32 at a time: 1 MiB. Larger blocks fragment the heap, which then grows to twice."""


class Part(NamedTuple):
    """Some rows, or some columns of all rows, of a tensor (O, …); rows are along its first dimension."""

    shape: tuple[int, ...]
    rows: Sequence[Range]
    columns: Sequence[Range] | None = None
    """None for all."""

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, ranges: Sequence[Range]) -> Part:
        """Return the part with these ranges of the first or second dimension."""
        length = sum(end - begin for begin, end in ranges)
        if dim == 0:
            return cls((length, *shape[1:]), ranges)
        return cls((shape[0], length), [(0, shape[0])], ranges)

    def blocks(self, rows: Rows, row_numel: int) -> Iterator[tuple[slice, Tensor]]:
        """Read whole rows, a few at a time, and yield their places in the part and their values (N, row_numel)."""
        step, at = max(1, _BLOCK_NUMEL // max(1, row_numel)), 0
        for first, last in self.rows:
            for begin in range(first, last, step):
                end = min(begin + step, last)
                yield slice(at, at + end - begin), rows(begin, end).detach().reshape(end - begin, row_numel)
                at += end - begin

    def cut(self, block: Tensor) -> Tensor:
        """Return the columns of the part from whole rows."""
        return block if self.columns is None else torch.cat([block[:, b:e] for b, e in self.columns], dim=1)

    def read(self, source: Tensor, rows: Rows) -> Tensor:
        """Return the part of a tensor in memory, on the device of the rows.

        Args:
            source: Tells dtype and shape of the whole; it may be on the meta device.
            rows: Returns rows of its values.
        """
        values: Tensor | None = None
        for place, block in self.blocks(rows, source.shape[1:].numel()):
            if values is None:
                values = torch.empty(self.shape, dtype=source.dtype, device=block.device)
            values.view(self.shape[0], -1)[place] = self.cut(block)
        return torch.empty(self.shape, dtype=source.dtype) if values is None else values


class _Scratch(threading.local):
    """Reusable CPU buffer for one dequantised weight.

    Allocating new pages would take most of the time: a weight of 1280 x 1280 x 3 x 3 takes 23 ms without this buffer
    and 6 ms with it.
    """

    memory: Tensor | None = None

    def like(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory with the shape and strides of a weight; overwrites the previous result."""
        if weight.numel() * dtype.itemsize > _SCRATCH_BYTES:
            return torch.empty_like(weight, dtype=dtype)
        if self.memory is None:
            with torch.inference_mode(False):  # inference tensors cannot be written outside of inference mode
                self.memory = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8)
        return self.memory.view(dtype).as_strided(weight.shape, weight.stride())


_SCRATCH_BYTES = 128 * 2**20  # the largest weight of sd21 in float32; unused pages take no memory
_scratch = _Scratch()


class Int8Layer(nn.Module):
    """Base of the int8 layers: an int8 weight, its scales and its compute dtype."""

    weight: Any
    """int8, in the shape of the original."""
    weight_scale: Tensor
    """(O,) float32, also after a cast of the network: half-precision scales would lose more accuracy than int8."""
    compute_dtype: torch.dtype
    """Dtype of the original weight, for dequantising; peft makes its adapters in it."""
    plain: ClassVar[type[nn.Module]]
    """The class of the layer before it was quantised."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a plain layer if called with arguments: peft builds its layers with the adapted layer's class."""
        return cls.plain(*args, **kwargs) if args or kwargs else super().__new__(cls)  # no args: a copy

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The quantised weight, by the name that tells peft (DoRA) to call :meth:`dequantize`."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight in the compute dtype."""
        return self.dequantized(self.compute_dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a floating-point dtype, rounded once."""
        return self.weight.to(dtype).mul_(self._broadcast_scale())

    def for_one_call(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight, valid only until the next layer dequantises its own."""
        if not self.weight.is_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.dequantized(dtype)
        return _scratch.like(self.weight, dtype).copy_(self.weight).mul_(self._broadcast_scale())

    def _broadcast_scale(self) -> Tensor:
        return self.weight_scale.view(-1, *[1] * (self.weight.dim() - 1))

    def dtype_for(self, x: Tensor) -> torch.dtype:
        """Return the compute dtype for an input: autocast's if that is enabled, else the input's."""
        kind = x.device.type
        on = kind != "meta" and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if on else x.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.weight_scale
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=scale.device)).dtype
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != scale.dtype:  # a cast: keep the float32 scales
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, int8"


class Int8Linear(Int8Layer, nn.Linear):
    """A linear layer that multiplies with ``kernel``: "weight_only" or "bitsandbytes", which reads the same weights.

    The kernel has no gradient. If one is needed (LoRA), the weight is dequantised, as bitsandbytes does on CPUs.
    """

    plain = nn.Linear
    kernel: str
    threshold: float

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.dtype_for(x)
        if self.kernel == "bitsandbytes" and not (x.requires_grad and torch.is_grad_enabled()):
            return _multiply(x, dtype, self.weight, self.weight_scale, self.bias, self.threshold)
        if x.requires_grad and torch.is_grad_enabled():
            return _FrozenProduct.apply(x.to(dtype), _cast(self.bias, dtype), self)
        return F.linear(x.to(dtype), self.for_one_call(dtype), _cast(self.bias, dtype))


class Int8Conv2d(Int8Layer, nn.Conv2d):
    """A convolution that dequantises its weight at each call."""

    plain = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.dtype_for(x)
        if x.requires_grad and torch.is_grad_enabled() and self.padding_mode == "zeros":
            return _FrozenProduct.apply(x.to(dtype), _cast(self.bias, dtype), self)
        return self._conv_forward(x.to(dtype), self.for_one_call(dtype), _cast(self.bias, dtype))


class Int8Embedding(Int8Layer, nn.Embedding):
    """An embedding, with one scale per entry."""

    plain = nn.Embedding

    def forward(self, indices: Tensor) -> Tensor:
        values = F.embedding(indices, self.weight).to(self.compute_dtype)
        return values.mul_(F.embedding(indices, self.weight_scale[:, None]))


# By exact type: a subclass may use its weight differently.
INT8_CLASSES: dict[type[nn.Module], type[Int8Layer]] = {
    int8.plain: int8 for int8 in (Int8Linear, Int8Conv2d, Int8Embedding)
}


class _FrozenProduct(torch.autograd.Function):
    """A layer's output, with a gradient to its input alone; the weight is dequantised again for the backward pass.

    Autograd of the plain operations would keep every dequantised weight until then: the whole network unquantised.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Int8Layer) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        weight = layer.dequantized(x.dtype)
        if isinstance(layer, Int8Conv2d):
            return layer._conv_forward(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        layer, (grad,) = ctx.layer, grads
        weight, grad_bias = layer.dequantized(grad.dtype), None
        if isinstance(layer, Int8Conv2d):
            how = layer.stride, layer.padding, layer.dilation, layer.groups
            if ctx.needs_input_grad[1]:
                grad_bias = grad.sum((0, 2, 3))
            return conv2d_input(ctx.shape, weight, grad, *how), grad_bias, None
        if ctx.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad @ weight, grad_bias, None


def int8_layers(network: nn.Module) -> Iterator[tuple[str, Int8Layer]]:
    """Yield the names and layers of a network that are in int8."""
    return ((name, module) for name, module in network.named_modules() if isinstance(module, Int8Layer))


def refuse_quantised(network: nn.Module, who: str) -> None:
    """Refuse a network whose weights are quantised already.

    Raises:
        UsageError: They are; the message begins with ``who``.
    """
    if any(int8_layers(network)):
        raise UsageError(
            f"{who}: the weights of {type(network).__name__} are quantised already, so they cannot be trained, nor "
            "quantised again; load the pipeline in floating point, and train adapters: trainable=lora base=int8"
        )


def check_finite_rows(part: Part, shape: torch.Size, rows: Rows, who: str) -> None:
    """Check the rows of a part of a weight, which :func:`quantize_rows` takes as they are.

    Raises:
        UsageError: A value is not finite.
    """
    for _, block in part.blocks(rows, shape[1:].numel()):
        extremes = torch.stack(block.float().aminmax())  # aminmax propagates NaN
        if not torch.isfinite(extremes).all():
            raise UsageError(f"quantize_: {who} holds NaN or infinite values; load the weights again")


def quantize_rows(shape: torch.Size, rows: Rows, part: Part | None = None) -> tuple[Tensor, Tensor]:
    """Quantise a weight, or a part of it, symmetrically per output channel.

    LLM.int8(), arXiv 2208.07339, equation 2: the largest magnitude of a channel becomes 127.

    Args:
        shape: Shape of the weight, (O, …).
        rows: Returns rows of the weight, all finite; called for a few at a time.
        part: The part to return; the scales are those of whole rows.

    Returns:
        The int8 weight and its scales (O,), float32, on the device of the rows.
    """
    part = part or Part.of(shape, 0, [(0, shape[0])])
    weight, scale = torch.empty(part.shape, dtype=torch.int8), torch.empty(part.shape[0])
    for place, block in part.blocks(rows, shape[1:].numel()):
        block = block.float()
        if weight.device != block.device:
            weight, scale = (torch.empty_like(each, device=block.device) for each in (weight, scale))
        largest = block.abs().amax(1)
        scale[place] = torch.where(largest == 0, 1.0, largest / 127)
        block = (block / scale[place, None]).round_()
        weight.view(part.shape[0], -1)[place] = part.cut(block)
    return weight, scale


def to_int8(layer: nn.Module, weight: Tensor, scale: Tensor, *, kernel: str, threshold: float) -> Int8Layer:
    """Convert a layer to its int8 class, in place."""
    new: Any = layer
    original: Tensor = new.weight
    del new.weight
    new.register_buffer("weight", weight)
    new.register_buffer("weight_scale", scale)
    new.compute_dtype = original.dtype
    new.__class__ = INT8_CLASSES[type(layer)]
    if isinstance(new, Int8Linear):
        new.kernel, new.threshold = kernel, threshold
    return new


def to_float(layer: Int8Layer) -> None:
    """Convert an int8 layer to the plain class, in place, with the dequantised weight."""
    weight = nn.Parameter(layer.dequantized(layer.compute_dtype), requires_grad=False)
    plain: Any = layer
    for name in ("weight", "weight_scale", "compute_dtype"):
        delattr(plain, name)
    if isinstance(layer, Int8Linear):
        del plain.kernel, plain.threshold
    plain.__class__ = layer.plain
    plain.weight = weight


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _multiply(
    x: Tensor, dtype: torch.dtype, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """Multiply by LLM.int8(), arXiv 2208.07339: int8 activations per row, outlier columns unquantised.

    Args:
        x: (…, I).
        dtype: Dtype of the result.
        weight: (O, I), int8.
        scale: (O,), float32.
        bias: (O,).
        threshold: Columns with activations of at least this magnitude are multiplied unquantised; 0 for none. On a GPU
            the largest columns are, whatever their magnitude.

    Returns:
        (…, O).
    """
    shape = (*x.shape[:-1], len(weight))
    if x.is_meta:  # a memory trace: allocate what is live in a kernel on a GPU
        num_rows = min(x.numel() // x.shape[-1], _BLOCK_ROWS_ON_GPU)
        _inputs = [
            x.new_empty(num_rows, x.shape[-1], dtype=each) for each in (torch.float32, torch.float32, torch.int8)
        ]
        _products = [x.new_empty(num_rows, len(weight), dtype=each) for each in (torch.int32, torch.float32)]
        return x.new_empty(shape)
    rows = x.to(dtype).reshape(-1, x.shape[-1]).contiguous()  # the CUDA kernels ignore strides
    return _llm_int8(rows, weight, scale, bias, threshold).view(shape)


# A custom operator, because torch.compile cannot trace it: the number of outliers depends on the data.
@torch.library.custom_op("sd_lightning::llm_int8", mutates_args=())
def _llm_int8(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    if rows.is_cpu:
        return _in_blocks(rows, weight, scale, bias, partial(_outliers, threshold=threshold), _BLOCK_ROWS)
    return _in_blocks(rows, weight, scale, bias, _largest if threshold else _no_columns, _BLOCK_ROWS_ON_GPU)


_BLOCK_ROWS = 256
"""Rows that are quantised, multiplied and scaled at a time on a CPU, so that they stay in its cache."""
_BLOCK_ROWS_ON_GPU = 4096
"""The same on a GPU, to bound the memory of float32 activations and int32 products."""
_LARGEST = 32
"""On a GPU, one of so many columns is multiplied unquantised, but at least eight."""

Columns = Callable[[Tensor], Tensor]
"""Magnitudes of activations (N, I) -> columns (K,) to multiply unquantised."""


def _outliers(sizes: Tensor, *, threshold: float) -> Tensor:
    """Return the columns that reach the threshold; the host waits for their number."""
    return (sizes.amax(0) >= threshold).nonzero().view(-1) if threshold else _no_columns(sizes)


def _largest(sizes: Tensor) -> Tensor:
    """Return the largest columns, whether or not they reach a threshold: a fixed number, so that the host waits not."""
    return sizes.amax(0).topk(min(max(sizes.shape[1] // _LARGEST, 8), sizes.shape[1]), sorted=False).indices


def _no_columns(sizes: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=sizes.device)


def _in_blocks(
    rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, columns: Columns, block_rows: int
) -> Tensor:
    """Compute LLM.int8() block by block in float32, of which only the products are int8.

    Of bitsandbytes only the product is used. On a CPU its other operations run over the whole input, which takes twice
    the time. On CUDA they take float16 only, in which activations beyond 65504 are infinite, and wait for the number of
    outliers. Outlier columns are found per block and excluded from its row scales.
    """
    import bitsandbytes  # noqa: F401  registers the operator

    out = rows.new_empty(len(rows), len(weight))
    for begin in range(0, len(rows), block_rows):
        x, y = rows[begin : begin + block_rows].float(), out[begin : begin + block_rows]
        sizes = x.abs()
        apart = columns(sizes)
        kept = x[:, apart]
        if len(apart):
            x, sizes = x.index_fill(1, apart, 0), sizes.index_fill_(1, apart, 0)
        row_scale = sizes.amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
        quantized = torch.div(x, row_scale, out=sizes).round_().to(torch.int8)
        product = torch.ops.bitsandbytes.int8_linear_matmul.default(quantized, weight) * row_scale
        product = product.mul_(scale) if bias is None else torch.addcmul(bias.float(), product, scale)
        y.copy_(product.addmm_(kept, (weight[:, apart] * scale[:, None]).t()) if len(apart) else product)
    return out


@_llm_int8.register_fake
def _(rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])
