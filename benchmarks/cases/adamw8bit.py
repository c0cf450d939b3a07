"""A step of bitsandbytes' 8-bit AdamW on a CPU against torch's fused AdamW, in turns in one process."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from timing import interleaved, ratios

BARS: dict[str, str] = {}
TABLE = {"a step of 8-bit AdamW on a CPU to one of torch's fused AdamW, 16.8 million weights": "{ratio} ×"}


def peers() -> dict[str, dict[str, Any]]:
    """Return both sides."""
    return {"torch": {"optimizer": "AdamW(fused=True)"}, "bitsandbytes": {"optimizer": "AdamW8bit()"}}


def measure(rounds: int = 7, side: int = 4096) -> dict[str, list[float]]:
    """Step one square matrix of float32 weights.

    Args:
        rounds: Steps of each side that count; one of each comes before.
        side: Of the matrix.
    """
    import torch
    from bitsandbytes.optim import AdamW8bit

    def stepped(make: Any) -> Any:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(side, side))
        weight.grad = torch.randn(side, side)
        return make([weight], lr=1e-4)

    sides = {"bitsandbytes": stepped(AdamW8bit), "torch": stepped(partial(torch.optim.AdamW, fused=True))}

    def seconds(optimizer: Any) -> float:
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    taken = interleaved({name: partial(seconds, each) for name, each in sides.items()}, rounds=rounds)
    return {
        "ratio": ratios(taken["bitsandbytes"], taken["torch"]),
        **{f"{name}_ms": [1e3 * each for each in figures] for name, figures in taken.items()},
    }
