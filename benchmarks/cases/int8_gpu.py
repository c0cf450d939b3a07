"""A call of sd21's UNet on a GPU: int8 by either kernel against fp16, which decides what linear layers compute with."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cases import int8_speed
from timing import ratios

BARS: dict[str, str] = {}
"""None: int8 is for memory. The faster kernel in `bitsandbytes_to_weight_only_batch_2` is to be the default on CUDA."""
TABLE = {
    "a call of sd21's UNet on a GPU, int8 to fp16, batch 1; 2: `weight_only`; `bitsandbytes`": (
        "{weight_only_batch_1}, {weight_only_batch_2} ×; {bitsandbytes_batch_1}, {bitsandbytes_batch_2} ×"
    ),
    "the same, `bitsandbytes` to `weight_only`: batch 1; 2": (
        "{bitsandbytes_to_weight_only_batch_1} ×; {bitsandbytes_to_weight_only_batch_2} ×"
    ),
}
DRY: dict[str, Any] = {
    "rounds": 1,
    "side": 16,
    "changes": {"block_out_channels": [32, 32, 32, 32], "attention_head_dim": 4, "layers_per_block": 1},
}
peers = int8_speed.peers


def measure(
    *, rounds: int = 20, side: int = 64, changes: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float | list[float]]:
    """Time the calls of `int8_speed`; its arguments."""
    metrics = int8_speed.measure(rounds, side, changes)
    for rows in int8_speed.BATCHES:
        ours, theirs = (metrics[f"{kernel}_batch_{rows}_seconds"] for kernel in ("bitsandbytes", "weight_only"))
        assert isinstance(ours, list) and isinstance(theirs, list)
        metrics[f"bitsandbytes_to_weight_only_batch_{rows}"] = ratios(ours, theirs)
    return metrics
