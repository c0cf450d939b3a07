"""Block-quantised optimizer states of bitsandbytes: checkpoints hold them dequantised, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from sd_lightning.state.shards import LazyTensor, Read, SavedParameter

BLOCK = 256
"""Values that share a scale."""


class EightBitOptimizer(Protocol):
    """The part of bitsandbytes' ``Optimizer2State`` that is used here."""

    def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Create ``state[p]``."""


def is_eight_bit(optimizer: object) -> TypeGuard[EightBitOptimizer]:
    """Return whether an optimizer is from bitsandbytes, without importing bitsandbytes."""
    return hasattr(optimizer, "init_state")


def dequantise(codes: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """Return the float32 values of quantised ones, in their shape.

    Args:
        codes: One byte per value.
        scales: One per block.
        code: The value of each byte.
    """
    from bitsandbytes.functional import dequantize_blockwise

    values: Tensor = dequantize_blockwise(codes.reshape(-1), absmax=scales, code=code, blocksize=BLOCK)
    return values.reshape(codes.shape)


def quantise(values: Tensor, codes: Tensor, scales: Tensor, code: Tensor) -> None:
    """Fill codes and scales from float32 values; not bit-exact for values that were dequantised."""
    from bitsandbytes.functional import quantize_blockwise

    quantised, state = quantize_blockwise(values.reshape(-1), code=code, blocksize=BLOCK)
    codes.reshape(-1).copy_(quantised)
    scales.copy_(state.absmax)


def dequantised(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return functions that dequantise a parameter's states, one at a time."""
    return {kind: partial(dequantise, *_parts(state, kind)) for kind in ("state1", "state2") if kind in state}


def fill_quantised(state: dict[str, Any], name: str, saved: SavedParameter, read: Read) -> None:
    """Fill a parameter's states that ``init_state`` has made.

    Args:
        state: The optimizer's state of the parameter.
        name: The parameter's name.
        saved: The checkpoint's record of the parameter.
        read: Reads its saved states.
    """
    state["step"] = int(saved.scalars["step"])
    for kind in saved.states:
        if "qmap1" not in state:  # bitsandbytes keeps small parameters' states in float32
            read(kind, name, state[kind], 0, state[kind].numel())
            continue
        values = torch.empty_like(state[kind], dtype=torch.float32)
        read(kind, name, values, 0, values.numel())
        quantise(values, *_parts(state, kind))


def _parts(state: Mapping[str, Any], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and code of a state."""
    number = kind.removeprefix("state")
    return state[kind], state[f"absmax{number}"], state[f"qmap{number}"]
