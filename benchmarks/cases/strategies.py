"""Our strategies against DDP, FSDP2 and DeepSpeed loops written by hand, in turns on two gloo processes; and memory."""

from typing import Any

from timing import ratios
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
REVISION = 2
BARS = {f"{name}_ratio": "<= 1.05" for name in STRATEGIES}
TABLE = {
    "our step to a loop by hand: DDP; FSDP2, both settings; ZeRO-1, 2, 3": (
        "{ddp_ratio}; {fsdp_ratio}, {fsdp_grad_op_ratio}; {deepspeed_zero1_ratio}, {deepspeed_zero2_ratio}, "
        "{deepspeed_zero3_ratio}"
    ),
    "the same with offloading: FSDP2; ZeRO-1, 2, 3": (
        "{fsdp_offload_ratio}; {deepspeed_zero1_offload_ratio}, {deepspeed_zero2_offload_ratio}, "
        "{deepspeed_zero3_offload_ratio}"
    ),
}
WORLD_SIZE = 2


def peers() -> dict[str, dict[str, Any]]:
    """Return the settings of the loops by hand, which are ours, too."""
    import hand_written

    return hand_written.settings()


def measure(rounds: int = 16, warm_up: int = 2) -> dict[str, float | list[float]]:
    """Steps of every strategy.

    Args:
        rounds: Steps of each side that count.
        warm_up: Steps before those, besides the first steps, in which ours is alone.
    """
    metrics: dict[str, float | list[float]] = {}
    for name in STRATEGIES:  # each in fresh processes: what an engine leaves behind is not the next one's overhead
        (taken,) = torchrun("strategy_turns.py", WORLD_SIZE, rounds, warm_up, name).values()
        metrics |= {f"{name}_{key}": value for key, value in summarize(taken).items()}
    return metrics


def summarize(taken: dict[str, Any]) -> dict[str, float | list[float]]:
    """Turn what was measured of one strategy into metrics."""
    both = zip(taken["losses"], taken["losses_by_hand"], strict=False)  # ours began some steps earlier
    return {
        "ratio": ratios(taken["ours"], taken["by_hand"]),
        "step_ms": [1e3 * each for each in taken["ours"]],
        "times_ddp": ratios(taken["ours"], taken["ddp"]),
        "loss_difference": max(abs(ours - hand) for ours, hand in both),
        "bytes_at_rest": taken["bytes_at_rest"],
        "bytes_peak": taken["bytes_peak"],
    }
