"""Kernels that multiply int8 activations with int8 weights.

All kernels read the same int8 weight and scales, so a saved model does not depend on the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
