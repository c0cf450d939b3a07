"""Gemini against DDP, FSDP2 and DeepSpeed, in turns on two gloo processes: step time, memory, bytes sent."""

import statistics

from timing import spread
from torchrun import torchrun

# Our step time over theirs. The better of FSDP2's two reshard settings counts.
RATIOS = {
    "gathered_vs_ddp": ("gathered", ("ddp",)),
    "gathered_vs_fsdp2": ("gathered", ("fsdp2", "fsdp2_grad_op")),
    "gathered_vs_zero2": ("gathered", ("zero2",)),
    "gathered_vs_zero3": ("gathered", ("zero3",)),
    "half_offloaded_vs_zero2_offload": ("half_offloaded", ("zero2_offload",)),
    "offloaded_vs_zero3_offload": ("offloaded", ("zero3_offload",)),
    "offloaded_vs_fsdp2_offload": ("offloaded", ("fsdp2_offload",)),
}
BARS = {
    "gathered_vs_ddp": "<= 1.3",
    "gathered_vs_fsdp2": "<= 0.8",
    "gathered_vs_zero2": "<= 0.8",
    "gathered_vs_zero3": "<= 0.8",
    "offloaded_vs_zero3_offload": "<= 0.8",
    "offloaded_vs_fsdp2_offload": "<= 0.8",
    "offloaded_peak_vs_zero3_offload": "<= 1",
    "offloaded_peak_vs_fsdp2_offload": "<= 1",
    "gathered_reduced_over_form": "== 1",
    "gathered_gathered_over_form": "== 1",
    "half_offloaded_reduced_over_form": "== 1",
    "half_offloaded_gathered_over_form": "== 1",
    "offloaded_reduced_over_form": "== 1",
    "offloaded_gathered_over_form": "== 1",
}


def measure(rounds: int = 12, warm_up: int = 2) -> dict[str, float]:
    """Medians of the steps of every engine, all in one run.

    Args:
        rounds: Steps of each engine that count.
        warm_up: Steps in turns before those.
    """
    found = torchrun("gemini_turns.py", 2, rounds, warm_up)
    metrics: dict[str, float] = {"rounds": rounds}
    for name, taken in found.items():
        metrics |= {
            f"{name}_ms": 1e3 * statistics.median(taken["seconds"]),
            f"{name}_bytes_at_rest": taken["bytes_at_rest"],
            f"{name}_bytes_peak": taken["bytes_peak"],
            f"{name}_loss_difference": _distance(taken["losses"], found["ddp"]["losses"]),
        }
        forms = ("reduced_over_form", "gathered_over_form", "gathered_over_continuous")
        metrics |= {f"{name}_{form}": taken[form] for form in forms if taken[form] is not None}
    for metric, (ours, theirs) in RATIOS.items():
        peer = min(theirs, key=lambda name: metrics[f"{name}_ms"])
        ratios = [a / b for a, b in zip(found[ours]["seconds"], found[peer]["seconds"], strict=True)]
        metrics |= {metric: statistics.median(ratios), f"{metric}_spread": spread(ratios)}
    for peer in ("zero3_offload", "fsdp2_offload"):
        metrics[f"offloaded_peak_vs_{peer}"] = metrics["offloaded_bytes_peak"] / metrics[f"{peer}_bytes_peak"]
    return metrics


def _distance(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=False))
