"""Activation checkpointing by operation against that of whole blocks: step time and memory, measured and predicted.

A UNet of 34.7 million parameters, batch 16, float32, on the CPU; no optimizer. Sides, in turns: no checkpointing; all
blocks whole; chosen by the planner for the memory of whole blocks; chosen for half of the activations. The choice is
made with the speeds of this machine.
"""

import time
from collections.abc import Callable, Mapping
from datetime import date
from functools import partial
from typing import Any

from timing import interleaved, ratios

BATCH = 16
BARS = {
    "chosen_to_whole": "<= 1.0",
    "chosen_memory_to_whole": "<= 1.02",
    "half_memory_to_none": "<= 0.6",
}
TABLE = {
    "step without checkpointing to: all blocks whole; chosen for their memory; chosen for half of the activations": (
        "{whole}; {chosen}; {half}"
    ),
    "the same, predicted": "{whole_predicted}; {chosen_predicted}; {half_predicted}",
    "activations of the same by those without, measured": (
        "{whole_memory_to_none}; {chosen_memory_to_none}; {half_memory_to_none}"
    ),
}


def measure(rounds: int = 12, threads: int = 2) -> dict[str, float | list[float]]:
    """Forward and backward passes of every side.

    Args:
        rounds: Passes of each side that count.
        threads: Of torch.
    """
    import torch

    import process_memory

    torch.set_num_threads(threads)
    choices, predicted = _choices()
    sides = _sides(choices)
    seconds = interleaved({name: partial(_timed, side) for name, side in sides.items()}, rounds=rounds)
    metrics: dict[str, float | list[float]] = {"none_ms": [1e3 * each for each in seconds["none"]]}
    process_memory.return_at_once()  # slower: after the times
    peaks = {name: _peak(side) for name, side in sides.items()}
    for name in ("whole", "chosen", "half"):
        metrics[name] = ratios(seconds[name], seconds["none"])
        metrics[f"{name}_predicted"] = predicted[name]
        metrics[f"{name}_memory_to_none"] = peaks[name] / peaks["none"]
        metrics[f"{name}_recomputed"] = len(choices[name])
    metrics["none_memory"] = peaks["none"]
    metrics["chosen_to_whole"] = ratios(seconds["chosen"], seconds["whole"])
    metrics["chosen_memory_to_whole"] = peaks["chosen"] / peaks["whole"]
    return metrics


def _choices() -> tuple[dict[str, Mapping[str, Any]], dict[str, float]]:
    """Return what blocks keep on each side, and the predicted times by that of no checkpointing."""
    import torch

    from sd_lightning.models.checkpointing import Kept
    from sd_lightning.planner.calibration import calibrate
    from sd_lightning.planner.checkpointing import choose
    from sd_lightning.planner.passes import training_pass
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.trace import Trace
    from unet_35m import LATENTS, build

    model, speeds = build(), calibrate(date.today().isoformat()).speeds

    def traced(kept: Mapping[str, Kept]) -> Trace:
        run = TrainingRun(BATCH, LATENTS[-1] * model.vae_scale_factor, "32-true", kept=kept)
        return training_pass(model, run, torch.float32, None)

    def held(trace: Trace) -> Any:
        return trace.live(BATCH)

    def seconds(trace: Trace) -> float:
        flops, moved = trace.flops.at(BATCH), trace.moved.at(BATCH)
        return float(speeds.seconds(trace.operations, flops, moved).sum())

    base = traced({})
    whole = dict.fromkeys(_blocks(model.denoiser), Kept.INPUTS)
    limits = {"chosen": int(held(traced(whole)).max()), "half": int(held(base).max()) // 2}
    choices: dict[str, Mapping[str, Kept]] = {"none": {}, "whole": whole}
    for name, limit in limits.items():
        choices[name] = choose(traced, held, limit, BATCH, speeds).kept
    return choices, {name: seconds(traced(kept)) / seconds(base) for name, kept in choices.items()}


def _blocks(network: Any) -> dict[str, Any]:
    from sd_lightning.models.families.blocks import recomputable

    return recomputable({"unet": network})


def _sides(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[[], None]]:
    """Return a forward and backward pass with each choice."""
    import torch

    from sd_lightning.models.checkpointing import recompute_
    from unet_35m import LATENTS, UNET, build

    torch.manual_seed(0)
    inputs = torch.randn(BATCH, *LATENTS), torch.arange(BATCH), torch.randn(BATCH, 16, int(UNET["cross_attention_dim"]))
    sides: dict[str, Callable[[], None]] = {}
    for name, kept in choices.items():
        network = build().denoiser.train()
        recompute_(_blocks(network), kept)
        sides[name] = partial(_pass, network, *inputs)
    return sides


def _pass(network: Any, latents: Any, timesteps: Any, captions: Any) -> None:
    network(latents, timesteps, captions).sample.square().mean().backward()
    network.zero_grad(set_to_none=True)


def _timed(side: Callable[[], None]) -> float:
    began = time.perf_counter()
    side()
    return time.perf_counter() - began


def _peak(side: Callable[[], None]) -> int:
    """Return the bytes that a pass needs."""
    import process_memory

    side()
    before = process_memory.begin_peak()
    side()
    return process_memory.peak() - before
