"""Kernels that multiply int8 activations with int8 weights.

All kernels read the same int8 weight and scales, so a saved model does not depend on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sd_lightning._imports import require


def multiply(
    x: Tensor, dtype: torch.dtype, kernel: str, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """Multiply in int8 with one of :data:`KERNELS`, which have no gradient.

    Args:
        x: (…, I).
        dtype: Dtype of the result.
        kernel: A name in ``KERNELS``.
        weight: (O, I), int8.
        scale: (O,), float32.
        bias: (O,).
        threshold: Columns with activations of at least this magnitude are multiplied unquantised; 0 for none.

    Returns:
        (…, O).
    """
    shape = (*x.shape[:-1], len(weight))
    if x.is_meta:  # a memory trace: allocate what is live in a kernel: int8 input, int32 products and output
        _quantized, _products = x.to(torch.int8), x.new_empty(shape, dtype=torch.int32)
        return x.new_empty(shape)
    rows = x.to(dtype).reshape(-1, x.shape[-1]).contiguous()  # the CUDA kernels ignore strides
    return KERNELS[kernel](rows, weight, scale, bias, threshold).view(shape)


def bitsandbytes(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Multiply by LLM.int8(), arXiv 2208.07339: int8 activations per row, outlier columns unquantised."""
    return _llm_int8(rows, weight, scale, bias, threshold)


def torchao(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Multiply with torchao's kernel: int8 activations per row; ``threshold`` is ignored."""
    return _torchao_int8(rows, weight, scale, bias)


# Both kernels are custom operators, because torch.compile cannot trace them: the number of outliers depends on the
# data, and torchao 0.18 queries the CPU's capabilities.


@torch.library.custom_op("sd_lightning::llm_int8", mutates_args=())
def _llm_int8(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    if rows.is_cpu:
        return _llm_int8_on_cpu(rows, weight, scale, bias, threshold)
    dtype, rows = rows.dtype, rows.to(torch.float16)  # the CUDA kernel takes float16 only
    quantized, row_scale, outliers = torch.ops.bitsandbytes.int8_vectorwise_quant.default(rows, threshold)
    largest = scale * 127  # bitsandbytes takes the largest magnitudes as scales
    bias = None if bias is None else bias.to(rows.dtype)
    out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm.default(
        rows, quantized, weight, row_scale, largest, outliers, bias
    )
    return out.to(dtype)


_BLOCK_ROWS = 256
"""Rows that are quantised, multiplied and scaled at a time on a CPU, so that they stay in its cache."""


def _llm_int8_on_cpu(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Compute LLM.int8() block by block; bitsandbytes runs torch operations over the whole input.

    This takes at most half the time: the int8 product is fast, and the other operations are memory-bound. Outlier
    columns are found per block and excluded from its row scales.
    """
    out = rows.new_empty(len(rows), len(weight))
    for begin in range(0, len(rows), _BLOCK_ROWS):
        x, y = rows[begin : begin + _BLOCK_ROWS].float(), out[begin : begin + _BLOCK_ROWS]
        sizes = x.abs()
        outliers = (sizes.amax(0) >= threshold).nonzero().view(-1) if threshold else torch.empty(0, dtype=torch.int64)
        kept = x[:, outliers]
        if len(outliers):
            x, sizes = x.index_fill(1, outliers, 0), sizes.index_fill_(1, outliers, 0)
        row_scale = sizes.amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
        quantized = torch.div(x, row_scale, out=sizes).round_().to(torch.int8)
        product = torch.ops.bitsandbytes.int8_linear_matmul.default(quantized, weight) * row_scale
        product = product.mul_(scale) if bias is None else torch.addcmul(bias.float(), product, scale)
        y.copy_(product.addmm_(kept, (weight[:, outliers] * scale[:, None]).t()) if len(outliers) else product)
    return out


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


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]] = {
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
}
"""(rows (N, I), weight (O, I), scale (O,), bias (O,), threshold) -> (N, O)."""


def load_kernels(name: str) -> None:
    """Import the package of a kernel, before the kernel is called.

    Raises:
        UsageError: The package is not installed.
    """
    if name in KERNELS:
        require(name, extra="torchao" if name == "torchao" else "all", who=f"Int8(linear={name!r})")
