"""What multiplies in int8 linear layers.

Each function takes the layer and its input (…, I) and returns (…, O). They read the same int8 weight and scales, so
that a saved model does not depend on the choice. The kernels for int8 activations have no gradient: where one is
wanted (LoRA), the weight is dequantised, as bitsandbytes does on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sd_lightning._imports import require

if TYPE_CHECKING:
    from sd_lightning.quantization.layers import Int8Linear


def weight_only(layer: Int8Linear, x: Tensor) -> Tensor:
    """Dequantise the weight, then multiply in floating point."""
    dtype = layer.dtype_for(x)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return F.linear(x.to(dtype), layer.for_one_call(dtype), bias)


def bitsandbytes(layer: Int8Linear, x: Tensor) -> Tensor:
    """LLM.int8(), arXiv 2208.07339: activations in int8 row by row, columns of outliers apart."""
    threshold = layer.threshold
    return _by_rows(layer, x, lambda *arguments: _llm_int8(*arguments, threshold))


def torchao(layer: Int8Linear, x: Tensor) -> Tensor:
    """Activations in int8 row by row, multiplied by torchao's kernel."""
    return _by_rows(layer, x, _torchao_int8)


def _by_rows(layer: Int8Linear, x: Tensor, multiply: Callable[..., Tensor]) -> Tensor:
    """Multiply (N, I) by a kernel that has no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        return weight_only(layer, x)
    shape = (*x.shape[:-1], layer.out_features)
    if x.is_meta:  # a trace of memory: what is alive in a kernel is the int8 input, int32 products and the output
        _quantized, _products = x.to(torch.int8), x.new_empty(shape, dtype=torch.int32)
        return x.new_empty(shape)
    rows = x.to(layer.dtype_for(x)).reshape(-1, x.shape[-1]).contiguous()  # the CUDA kernels do not look at strides
    return multiply(rows, layer.weight, layer.weight_scale, layer.bias).view(shape)


# Both kernels are operators of their own for torch.compile, which can trace neither: the number of outliers is not
# known in advance, and torchao 0.18 asks the CPU what it can do.


@torch.library.custom_op("sd_lightning::llm_int8", mutates_args=())
def _llm_int8(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    # The CUDA kernel takes float16 alone; on a CPU there is no need for the detour.
    dtype, rows = rows.dtype, rows.to(torch.float16) if rows.is_cuda else rows
    quantized, row_scale, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows, threshold)
    largest = scale * 127  # bitsandbytes keeps the largest magnitudes themselves
    bias = None if bias is None else bias.to(rows.dtype)
    out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default(
        rows, quantized, weight, row_scale, largest, outliers, bias
    )
    return out.to(dtype)


@torch.library.custom_op("sd_lightning::torchao_int8", mutates_args=())
def _torchao_int8(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    from torchao.kernel import int_scaled_matmul

    row_scale = (rows.abs().amax(1, keepdim=True).float() / 127).clamp_min(torch.finfo(torch.float32).tiny)
    out = int_scaled_matmul((rows / row_scale).round().to(torch.int8), weight.t(), row_scale) * scale
    return (out if bias is None else out + bias).to(rows.dtype)


@_llm_int8.register_fake
@_torchao_int8.register_fake
def _(rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


MATMULS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "weight_only": weight_only,
}


def load_kernels(name: str) -> None:
    """Import what a kernel needs, once, before it is called.

    Raises:
        UsageError: The package is not installed.
    """
    if name != "weight_only":
        require(name, extra="torchao" if name == "torchao" else "all", who=f"Int8(linear={name!r})")
