"""Whether CUDA rounds products of float32 tensors to TensorFloat-32, as torch does in convolutions by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def allow_tf32(allowed: bool) -> None:
    """Let matrix products and convolutions of float32 tensors use TensorFloat-32, in the whole process."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Compute as suits frozen networks of a dtype, whatever the process allows elsewhere.

    In float32 products are exact, so that training, ``precompute`` and ``generate`` agree. In a model of 16 bits the
    parts that stay in float32, such as a VAE that overflows, may use TensorFloat-32: it is finer than the rest.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32(dtype != torch.float32)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
