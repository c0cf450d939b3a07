"""Gemini against DDP, FSDP2 and DeepSpeed, in turns on two gloo processes: step time, memory, bytes sent."""

from typing import Any

from timing import fastest, ratios
from torchrun import torchrun

VARIANTS = {
    "fsdp2": ("fsdp2", "fsdp2_grad_op", "fsdp2_prefetch"),
    "fsdp2_offload": ("fsdp2_offload", "fsdp2_offload_grad_op"),
    "zero3_offload": ("zero3_offload", "zero3_offload_budget"),
}
"""Settings of a peer of which the best counts: the fastest for times, the smallest for peaks."""
COMPARED = (
    ("gathered", "ddp"),
    ("gathered", "fsdp2"),
    ("gathered", "zero2"),
    ("gathered", "zero3"),
    ("half_offloaded", "zero2_offload"),
    ("offloaded", "zero3_offload"),
    ("offloaded", "fsdp2_offload"),
)
"""Ours and theirs; the ratio of step times is ours over theirs."""
FORMS = ("reduced_over_form", "gathered_over_form", "gathered_over_continuous")
REVISION = 2
BARS = {
    "gathered_vs_ddp": "<= 1.3",
    "gathered_vs_fsdp2": "<= 0.8",
    "gathered_vs_zero2": "<= 0.8",
    "gathered_vs_zero3": "<= 0.8",
    "offloaded_vs_zero3_offload": "<= 0.8",
    "offloaded_vs_fsdp2_offload": "<= 0.8",
    "offloaded_peak_vs_zero3_offload": "<= 1",
    "offloaded_peak_vs_fsdp2_offload": "<= 1",
    **{f"{ours}_{form}": "== 1" for ours in ("gathered", "half_offloaded", "offloaded") for form in FORMS[:2]},
}
TABLE = {
    "Gemini's step to others', weights gathered: DDP; FSDP2 (fastest of three settings); ZeRO-2; ZeRO-3": (
        "{gathered_vs_ddp} ×; {gathered_vs_fsdp2} ×; {gathered_vs_zero2} ×; {gathered_vs_zero3} ×"
    ),
    "all offloaded, a budget of half the weights: step to ZeRO-3 offload's; FSDP2 offload's; peak memory to theirs "
    "(best of two settings each)": (
        "{offloaded_vs_zero3_offload} ×; {offloaded_vs_fsdp2_offload} ×; {offloaded_peak_vs_zero3_offload} ×, "
        "{offloaded_peak_vs_fsdp2_offload} ×"
    ),
    "bytes of gradients and weights that a step receives, to the closed form: gathered; all offloaded": (
        "{gathered_reduced_over_form}, {gathered_gathered_over_form}; {offloaded_reduced_over_form}, "
        "{offloaded_gathered_over_form}"
    ),
}


def peers() -> dict[str, dict[str, Any]]:
    """Return the settings of the loops by hand."""
    import hand_written

    settings = hand_written.settings()
    settings["torch"]["best_of"] = {name: VARIANTS[name] for name in ("fsdp2", "fsdp2_offload")}
    settings["torch"]["fsdp2_prefetch"] = "the next block's weights are gathered while this one computes"
    settings["deepspeed"]["best_of"] = {"zero3_offload": VARIANTS["zero3_offload"]}
    settings["deepspeed"]["zero3_offload_budget"] = "stage3_max_live_parameters: half of the weights"
    return settings


def measure(rounds: int = 12, warm_up: int = 2) -> dict[str, float | list[float]]:
    """Steps of every engine, all in one run.

    Args:
        rounds: Steps of each engine that count.
        warm_up: Steps in turns before those.
    """
    return summarize(torchrun("gemini_turns.py", 2, rounds, warm_up))


def summarize(found: dict[str, Any]) -> dict[str, float | list[float]]:
    """Turn what was measured of the engines into metrics."""
    seconds = {name: taken["seconds"] for name, taken in found.items()}
    metrics: dict[str, float | list[float]] = {}
    for name, taken in found.items():
        metrics |= {
            f"{name}_ms": [1e3 * each for each in taken["seconds"]],
            f"{name}_bytes_at_rest": taken["bytes_at_rest"],
            f"{name}_bytes_peak": taken["bytes_peak"],
            f"{name}_loss_difference": _distance(taken["losses"], found["ddp"]["losses"]),
        }
        metrics |= {f"{name}_{form}": taken[form] for form in FORMS if taken[form] is not None}
    for ours, theirs in COMPARED:
        best = fastest(seconds, VARIANTS.get(theirs, (theirs,)))
        metrics[f"{ours}_vs_{theirs}"] = ratios(seconds[ours], seconds[best])
    for theirs in ("zero3_offload", "fsdp2_offload"):
        smallest = min(found[name]["bytes_peak"] for name in VARIANTS[theirs])
        metrics[f"offloaded_peak_vs_{theirs}"] = found["offloaded"]["bytes_peak"] / smallest
    return metrics


def _distance(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=False))
