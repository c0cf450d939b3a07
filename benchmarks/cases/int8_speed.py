"""A call of sd21's whole UNet in int8 against fp32 on a CPU, or fp16 on a GPU: batch 1 and 2, with outliers too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

from timing import interleaved, ratios

REVISION = 2
BARS = {"weight_only_batch_1": "<= 1.15", "weight_only_batch_2": "<= 1.15"}
TABLE = {
    "a call of sd21's UNet on a CPU, int8 to fp32: batch 1; batch 2 (one picture with guidance)": (
        "{weight_only_batch_1} ×; {weight_only_batch_2} ×"
    ),
    "the same by bitsandbytes' kernels": "{bitsandbytes_batch_1} ×; {bitsandbytes_batch_2} ×",
    "the same with columns of outliers in activations": (
        "{bitsandbytes_outliers_batch_1} ×; {bitsandbytes_outliers_batch_2} ×"
    ),
}
BATCHES = (1, 2)


def peers() -> dict[str, dict[str, Any]]:
    """Return bitsandbytes, and torch without int8."""
    return {"bitsandbytes": {"threshold": 6.0}, "torch": {"dtype": "float32 on a CPU, float16 on a GPU"}}


def measure(
    rounds: int = 5, side: int = 64, changes: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, float | list[float]]:
    """Time the call that a picture takes once per step.

    Only bitsandbytes looks at the values of activations, so the others are timed without outliers.

    Args:
        rounds: Calls of each side that count.
        side: Of the latents; 64 is a picture of 512 x 512.
        changes: Of the UNet's configuration.
    """
    import torch

    from int8_networks import network, outliers, share_with_outliers, unet_call
    from sd_lightning.quantization import Int8, quantize_

    on_gpu = torch.cuda.is_available()
    where: Any = ("cuda", torch.float16) if on_gpu else ("cpu", torch.float32)
    unets = {"plain": network("unet", **changes).to(*where)}
    for linear in ("weight_only", "bitsandbytes"):
        unets[linear] = quantize_(network("unet", **changes).to(*where), Int8(linear=linear))  # type: ignore[arg-type]
    int8 = unets["bitsandbytes"]

    def seconds(name: str, rows: int) -> float:
        unet, call = unets[name.removesuffix("_outliers")], unet_call(side=side, rows=rows)
        with outliers(unet) if name.endswith("_outliers") else nullcontext():
            begin = time.perf_counter()
            call(unet)
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - begin

    names = (*unets, "bitsandbytes_outliers")
    sides = {f"{name}_batch_{rows}": partial(seconds, name, rows) for name in names for rows in BATCHES}
    taken = interleaved(sides, rounds=rounds)
    metrics: dict[str, float | list[float]] = {f"{name}_seconds": figures for name, figures in taken.items()}
    for name, figures in taken.items():
        if not name.startswith("plain"):
            metrics[name] = ratios(figures, taken[f"plain_batch_{name[-1]}"])
    call = unet_call(side=side)
    metrics["outlier_blocks_random"] = share_with_outliers(int8, call)
    with outliers(int8):
        metrics["outlier_blocks_outliers"] = share_with_outliers(int8, call)
    return metrics
