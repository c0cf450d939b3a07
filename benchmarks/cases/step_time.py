"""Predicted against measured time of a training step under six strategies, of two models, on two gloo processes.

In each round the speeds are measured in the same processes, on both at once, and then all strategies train in turns,
each for the median of a few steps. A figure is the median of the rounds' predicted to measured time, "off_by" its
relative error; "ranked" is 1 if the strategies are in the measured order, but for those whose rounds overlap.
"""

import itertools
import statistics
from typing import Any

from torchrun import torchrun

REVISION = 2
WORLD_SIZE = 2
MODELS = ("tiny", "35m")
NAMES = ("ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "gemini")
BARS = {f"{model}_{name}_off_by": "<= 0.15" for model in MODELS for name in NAMES}
BARS |= {f"{model}_ranked": "== 1" for model in MODELS}
TABLE = {
    f"predicted to measured step, {title}: DDP; FSDP2; ZeRO-1, 2, 3; Gemini": (
        f"{{{model}_ddp}}; {{{model}_fsdp}}; {{{model}_deepspeed_zero1}}, {{{model}_deepspeed_zero2}}, "
        f"{{{model}_deepspeed_zero3}}; {{{model}_gemini}}"
    )
    for model, title in {"tiny": "tiny", "35m": "UNet of 35 million"}.items()
}
TABLE |= {
    f"their errors, {model}; order as measured": (
        "; ".join(f"{{{model}_{name}_off_by}}" for name in NAMES) + f"; {{{model}_ranked}}"
    )
    for model in MODELS
}


def measure(rounds: int = 5) -> dict[str, float | list[float]]:
    """Steps of every strategy.

    Args:
        rounds: Trainings of each strategy that count.
    """
    found: dict[str, dict[str, Any]] = torchrun("step_times.py", WORLD_SIZE, rounds)
    metrics: dict[str, float | list[float]] = {}
    for run, each in found.items():
        key = run.replace("/", "_")
        ratios = [ours / theirs for ours, theirs in zip(each["predicted"], each["measured"], strict=True)]
        metrics |= {key: ratios, f"{key}_off_by": abs(statistics.median(ratios) - 1)}
        metrics[f"{key}_ms"] = [1e3 * seconds for seconds in each["measured"]]
    for model in MODELS:
        own = {name: found[f"{model}/{name}"] for name in NAMES}
        metrics[f"{model}_ranked"] = float(not wrongly_ranked(own))
    return metrics


def wrongly_ranked(found: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return pairs of which the first is always faster, and predicted to be slower."""
    return [
        (a, b)
        for a, b in itertools.permutations(found, 2)
        if max(found[a]["measured"]) < min(found[b]["measured"])
        and statistics.median(found[a]["predicted"]) > statistics.median(found[b]["predicted"])
    ]
