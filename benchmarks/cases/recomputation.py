"""Activation checkpointing by operation against that of whole blocks: step time and memory, measured and predicted.

A UNet of 34.7 million parameters, batch 16, float32, on the CPU; no optimizer. Sides, in turns: no checkpointing; all
blocks whole; chosen by the planner for the memory of whole blocks; chosen for half of what whole blocks save. The
choice is made with the speeds of this machine. Memory is that of activations and gradients.
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
    "half_to_whole": "<= 1.0",
}
TABLE = {
    "recomputation, time to that of a pass without: all blocks whole; chosen for their memory; for half their saving": (
        "{whole}; {chosen}; {half}"
    ),
    "chosen by all blocks whole: time for their memory; for half their saving; memory": (
        "{chosen_to_whole}; {half_to_whole}; {chosen_memory_to_whole}"
    ),
    "the same, predicted": "{whole_predicted}; {chosen_predicted}; {half_predicted}",
    "the same for memory": "{whole_memory_to_none}; {chosen_memory_to_none}; {half_memory_to_none}",
    "the same for memory, predicted": ("{whole_memory_predicted}; {chosen_memory_predicted}; {half_memory_predicted}"),
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
    choices, times, memory = _choices()
    sides = _sides(choices)
    seconds = interleaved({name: partial(_timed, side) for name, side in sides.items()}, rounds=rounds)
    metrics: dict[str, float | list[float]] = {"none_ms": [1e3 * each for each in seconds["none"]]}
    process_memory.return_at_once()  # slower: after the times
    peaks = {name: _peak(side) for name, side in sides.items()}
    for name in ("whole", "chosen", "half"):
        metrics[name] = ratios(seconds[name], seconds["none"])
        metrics[f"{name}_predicted"] = times[name] / times["none"]
        metrics[f"{name}_memory_predicted"] = memory[name] / memory["none"]
        metrics[f"{name}_memory_to_none"] = peaks[name] / peaks["none"]
        metrics[f"{name}_recomputed"] = len(choices[name])
    metrics["none_memory"] = peaks["none"]
    for name in ("chosen", "half"):
        metrics[f"{name}_to_whole"] = ratios(seconds[name], seconds["whole"])
    metrics["chosen_memory_to_whole"] = peaks["chosen"] / peaks["whole"]
    return metrics


def _choices() -> tuple[dict[str, Mapping[str, Any]], dict[str, float], dict[str, int]]:
    """Return what blocks keep on each side, and the predicted seconds and bytes."""
    import torch

    from sd_lightning.models.checkpointing import SavedActivations
    from sd_lightning.planner.checkpointing import choose
    from sd_lightning.planner.measuring import calibrate
    from sd_lightning.planner.passes import training_pass
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.trace import Trace
    from unet_35m import LATENTS, build

    model, speeds = build(), calibrate(date.today().isoformat()).speeds

    def traced(kept: Mapping[str, SavedActivations]) -> Trace:
        run = TrainingRun(BATCH, LATENTS[-1] * model.latent_space.stride, "32-true", kept=kept)
        return training_pass(model, run, torch.float32, None)

    def held(trace: Trace) -> Any:
        return trace.live(BATCH) + trace.ready() * trace.gradient_bytes

    def seconds(trace: Trace) -> float:
        return float(speeds.seconds(trace, BATCH).sum())

    base = traced({})
    whole = dict.fromkeys(_blocks(model.denoiser), SavedActivations.INPUTS)
    choices: dict[str, Mapping[str, SavedActivations]] = {"none": {}, "whole": whole}
    most, least = (int(held(trace).max()) for trace in (base, traced(whole)))
    for name, limit in {"chosen": least, "half": (most + least) // 2}.items():
        choices[name] = choose(traced, held, limit, BATCH, speeds).kept
    traces = {name: traced(kept) for name, kept in choices.items()}
    peaks = {name: int(held(trace).max()) for name, trace in traces.items()}
    return choices, {name: seconds(trace) for name, trace in traces.items()}, peaks


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
