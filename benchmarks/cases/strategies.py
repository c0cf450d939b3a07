"""Our strategies against DDP, FSDP2 and DeepSpeed loops written by hand, in turns on two gloo processes; and memory."""

import statistics
from typing import Any

from timing import spread
from torchrun import torchrun

STRATEGIES = (
    "ddp",
    "fsdp",
    "fsdp_grad_op",
    "fsdp_offload",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "deepspeed_zero1_offload",
    "deepspeed_zero2_offload",
    "deepspeed_zero3_offload",
)
BARS = {f"{name}_ratio": "<= 1.05" for name in STRATEGIES}

WORLD_SIZE = 2


def measure(rounds: int = 16, warm_up: int = 2) -> dict[str, float]:
    """Medians over the steps of every strategy.

    Args:
        rounds: Steps of each side that count.
        warm_up: Steps before those, besides the first steps, in which ours is alone.
    """
    metrics: dict[str, float] = {}
    for name in STRATEGIES:  # each in fresh processes: what an engine leaves behind is not the next one's overhead
        (taken,) = torchrun("strategy_turns.py", WORLD_SIZE, rounds, warm_up, name).values()
        metrics |= {f"{name}_{key}": value for key, value in summarize(taken).items()}
    return metrics | {"rounds": rounds}


def summarize(taken: dict[str, Any]) -> dict[str, float]:
    """Turn what was measured of one strategy into metrics."""
    ratios = [ours / hand for ours, hand in zip(taken["ours"], taken["by_hand"], strict=True)]
    against_ddp = [ours / ddp for ours, ddp in zip(taken["ours"], taken["ddp"], strict=True)]
    both = zip(taken["losses"], taken["losses_by_hand"], strict=False)  # ours began some steps earlier
    return {
        "ratio": statistics.median(ratios),
        "step_ms": 1e3 * statistics.median(taken["ours"]),
        "times_ddp": statistics.median(against_ddp),
        "spread": spread(ratios),
        "loss_difference": max(abs(ours - hand) for ours, hand in both),
        "bytes_at_rest": taken["bytes_at_rest"],
        "bytes_peak": taken["bytes_peak"],
    }
