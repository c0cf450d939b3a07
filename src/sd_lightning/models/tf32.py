"""Whether CUDA rounds products of float32 tensors to TensorFloat-32, as torch does in convolutions by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    exact = dtype == torch.float32
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # a script has used torch's newer settings, which do not mix with these
        with _newer_settings("ieee" if exact else "tf32"):
            yield
        return
    allow_tf32(not exact)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _newer_settings(precision: str) -> Iterator[None]:
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = precision
    try:
        yield
    finally:
        for place, value in zip(places, before):
            place.fp32_precision = value
