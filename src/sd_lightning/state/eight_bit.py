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
        ...


def is_eight_bit(optimizer: object) -> TypeGuard[EightBitOptimizer]:
    """Return whether an optimizer is from bitsandbytes, without importing bitsandbytes."""
    return hasattr(optimizer, "init_state")


def dequantised(state: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Return functions that dequantise a parameter's states, one at a time."""

    def dequantise(kind: str) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        number = kind.removeprefix("state")
        quantised: Tensor = state[kind]
        return dequantize_blockwise(
            quantised.reshape(-1), absmax=state[f"absmax{number}"], code=state[f"qmap{number}"], blocksize=BLOCK
        ).reshape(quantised.shape)

    return {kind: partial(dequantise, kind) for kind in ("state1", "state2") if kind in state}


def fill_quantised(state: dict[str, Any], name: str, saved: SavedParameter, read: Read) -> None:
    """Fill a parameter's states that ``init_state`` has made; not bit-exact, since blocks are quantised again.

    Args:
        state: The optimizer's state of the parameter.
        name: The parameter's name.
        saved: The checkpoint's record of the parameter.
        read: Reads its saved states.
    """
    from bitsandbytes.functional import quantize_blockwise

    state["step"] = int(saved.scalars["step"])
    for kind in saved.states:
        if "qmap1" not in state:  # bitsandbytes keeps small parameters' states in float32
            read(kind, name, state[kind], 0, state[kind].numel())
            continue
        number = kind.removeprefix("state")
        values = torch.empty_like(state[kind], dtype=torch.float32)
        read(kind, name, values, 0, values.numel())
        quantised, quant_state = quantize_blockwise(values.reshape(-1), code=state[f"qmap{number}"], blocksize=BLOCK)
        state[kind].reshape(-1).copy_(quantised)
        state[f"absmax{number}"].copy_(quant_state.absmax)
