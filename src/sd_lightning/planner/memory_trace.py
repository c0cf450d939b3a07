"""The peak of memory that a computation takes, found on the meta device: shapes without values, in a second."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDING = 512
"""CUDA's caching allocator rounds every block to so many bytes."""


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Return the most memory that a function's tensors take at a time, besides those that were there before.

    Args:
        compute: Computes on meta tensors, backward passes included. Attention counts as flash attention does, which
            saves its inputs, its output and one number per row (Dao 2023, arXiv:2307.08691).
    """
    with _flash_attention(), _LiveBytes() as live:
        compute()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._live: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        if key in self._live:
            return

        def freed(_: Any) -> None:
            del self._live[key]
            self._now -= size

        self._live[key] = weakref.ref(storage, freed)
        self._now += size
        self.peak = max(self.peak, self._now)


class _Flash(torch.autograd.Function):
    """The memory of flash attention, and none of its arithmetic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        query, key, value, _, logsumexp = ctx.saved_tensors
        temporaries = torch.empty_like(logsumexp), torch.empty_like(query, dtype=torch.float32)
        gradients = tuple(map(torch.empty_like, (query, key, value)))
        del temporaries
        return gradients


@contextmanager
def _flash_attention() -> Iterator[None]:
    """Replace the function that diffusers and transformers call; a mode would not be active in recomputation."""
    original = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Flash.apply(query, key, value)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
