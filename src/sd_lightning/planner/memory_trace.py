"""Peak memory of a computation, traced on the meta device: shapes without values, in a second."""

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
"""CUDA's caching allocator rounds every block up to a multiple of this, bytes."""


def peak_bytes(compute: Callable[[], Any]) -> int:
    """Return the peak bytes of the tensors that a function allocates; earlier tensors do not count.

    Args:
        compute: Computes on meta tensors, backward passes included. Attention counts as flash attention does, which
            saves its inputs, its output and one number per row (Dao 2023, arXiv:2307.08691).
    """
    with _flash_attention(), _LiveBytes() as live:
        compute()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Dispatch mode that tracks the bytes of live storages and their peak."""

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
    """The allocations of flash attention, without its arithmetic."""

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
    """Replace ``scaled_dot_product_attention``, as a dispatch mode would not be active in recomputation."""
    original = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Flash.apply(query, key, value)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
