"""A call of an sd21-shaped UNet in int8 against fp32 on a CPU, or fp16 on a GPU, in turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from timing import interleaved, medians

BARS = {"ratio_weight_only": "<= 1.15"}
ROUNDS = 3


def measure() -> dict[str, float]:
    """Time the call that a 512 x 512 picture takes once per step."""
    import torch

    from int8_unet import sd21_blocks, step
    from sd_lightning.quantization import Int8, quantize_

    on_gpu = torch.cuda.is_available()
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.float16} if on_gpu else {}
    call = step(side=64, **where)
    sides = {"plain": sd21_blocks(**where)}
    for linear in ("weight_only", "bitsandbytes"):
        sides[linear] = quantize_(sd21_blocks(**where), Int8(linear=linear))  # type: ignore[arg-type]

    def timed(unet: Any) -> Callable[[], float]:
        def once() -> float:
            begin = time.perf_counter()
            call(unet)
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        return once

    seconds = medians(interleaved({name: timed(unet) for name, unet in sides.items()}, rounds=ROUNDS))
    return {
        "ratio_weight_only": seconds["weight_only"] / seconds["plain"],
        "ratio_bitsandbytes": seconds["bitsandbytes"] / seconds["plain"],
        "seconds": seconds["weight_only"],
        "seconds_plain": seconds["plain"],
    }
