"""Gemini on one CUDA GPU: the UNets of SD 2.1 and SDXL in bfloat16, by batch and fraction offloaded, under one cap."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lines import Measured
from training_runs import Run

BARS: dict[str, str] = {}
TABLE = {
    "sd21 on a GPU, batch 8, images per second: torch's AdamW under autocast; Gemini resident; all offloaded": (
        "{sd21_b8_autocast_images_per_second}; {sd21_b8_resident_images_per_second}; {sd21_b8_all_images_per_second}"
    ),
}
SWEEP: dict[str, dict[str, Any]] = {
    "resident": {},
    "half_optim": {"offload_optim_frac": 0.5},
    "optim": {"offload_optim_frac": 1.0},
    "all": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 2**29},
}
TEXT_LENGTH = 77
RESOLUTIONS = {"sd21": 768, "sdxl": 1024}
STRATEGIES = {
    "autocast": "single",
    "resident": "gemini",
    "half_optim": "gemini offload_optim_frac=0.5",
    "optim": "gemini offload_optim_frac=1.0",
    "all": "gemini_offload",
}
MEASURED = {
    f"{architecture}_b{batch}_{name}": Run(architecture, resolution, strategy, batch, encoders="none", averages=False)
    for architecture, resolution in RESOLUTIONS.items()
    for batch in (1, 8)
    for name, strategy in STRATEGIES.items()
}
"""The UNet alone, from random weights; under a cap of memory."""
DRY: dict[str, Any] = {"architectures": ("tiny",), "batches": (2,), "steps": 1, "device": "cpu"}
NOTHING: Measured = {}


def measure(
    *,
    architectures: tuple[str, ...] = ("sd21", "sdxl"),
    batches: tuple[int, ...] = (1, 8),
    steps: int = 6,
    cap_gib: float = 40.0,
    device: str = "cuda",
    done: Measured = NOTHING,
) -> Iterator[Measured]:
    """Train the sweep, and torch's own AdamW on float32 weights under autocast beside it; yield all after each run.

    Args:
        architectures: Whose UNets are trained, from random weights, at the resolution they were made for.
        batches: Samples per step.
        steps: Optimizer steps of each run that count; two come before.
        cap_gib: What every run may take of the device. A run that does not fit has the metric ``…_fits`` 0 and no
            others.
        device: "cpu" measures times only.
        done: Metrics of a sweep that was stopped; runs that it has are not made again.

    Yields:
        By run: images per second, peak GB, GiB copied each way per step, and the milliseconds between the end
        of backward and the end of the step, in which the device waits for the host (``step_phase_ms``).
    """
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap_gib * 2**30 / total, 1.0))
    metrics: dict[str, float | list[float] | str] = {**done, "cap_gib": cap_gib, "steps": steps}
    yield metrics
    for architecture, batch in itertools.product(architectures, batches):
        for name in ("autocast", *SWEEP):
            run = f"{architecture}_b{batch}_{name}"
            if f"{run}_fits" in done:
                continue
            try:
                found = _run(architecture, batch, steps, device, SWEEP.get(name))
            except torch.cuda.OutOfMemoryError:
                found = {"fits": 0.0}
            metrics |= {f"{run}_{key}": value for key, value in found.items()}
            print(run, found, file=sys.stderr, flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            yield metrics


def _run(architecture: str, batch: int, steps: int, device: str, settings: dict[str, Any] | None) -> dict[str, float]:
    loop = _autocast(architecture, device) if settings is None else _gemini(architecture, device, settings)
    network, engine, backward, step = loop
    try:
        return _timed(network, engine, backward, step, batch, steps, device)
    finally:  # also without memory: a graph that is not gone through backwards keeps its engine
        if engine:
            engine.close()


def _timed(
    network: nn.Module, engine: Any, backward: Any, step: Any, batch: int, steps: int, device: str
) -> dict[str, float]:
    inputs = _inputs(network, batch, device)
    seconds: list[float] = []
    waits: list[float] = []
    moved: dict[Any, int] = {}
    for number in range(steps + 2):
        if number == 2 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = dict(engine.ledger.moved) if engine else {}
        begin = _now(device)
        backward(inputs)
        middle = _now(device)
        step()
        if engine:
            engine.synchronize()
        end = _now(device)
        if number >= 2:
            seconds.append(end - begin)
            waits.append(end - middle)
            moved = {key: value - before.get(key, 0) for key, value in engine.ledger.moved.items()} if engine else {}
    found = {"fits": 1.0, "images_per_second": batch * len(seconds) / sum(seconds)}
    found["step_phase_ms"] = 1e3 * sum(waits) / len(waits)
    found |= {f"{source}_to_{target}_gib": value / 2**30 for (source, target), value in moved.items()}
    if device == "cuda":
        found["gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def _network(architecture: str) -> nn.Module:
    """Return the UNet on the meta device, every block recomputed in backward."""
    from sd_lightning.models import families
    from sd_lightning.training.speed import Speed

    with torch.device("meta"):
        network = families.architecture(architecture).networks["unet"].instantiate()
    Speed(gradient_checkpointing=True, allow_tf32=True).apply_({"unet": network})
    return network


@functools.cache
def _values() -> Tensor:
    """Small random values: what they are does not matter to speed and memory, only that they are finite."""
    return torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02


def _read(name: str, begin: int, end: int) -> Tensor:
    block = _values()
    return block.repeat(-(-(end - begin) // block.numel()))[: end - begin]


def _autocast(architecture: str, device: str) -> Any:
    network = _network(architecture).to_empty(device=device)
    with torch.no_grad():
        for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
            tensor.copy_(_read(name, 0, tensor.numel()).reshape(tensor.shape))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)

    def backward(inputs: dict[str, Any]) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = network(**inputs).sample.float().square().mean()
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return network, None, backward, step


def _gemini(architecture: str, device: str, settings: dict[str, Any]) -> Any:
    from sd_lightning.gemini import GeminiConfig, GeminiEngine
    from sd_lightning.models.families.blocks import repeated_blocks

    network = _network(architecture)
    config = GeminiConfig(compute_dtype=torch.bfloat16, **settings)
    engine = GeminiEngine(
        {"unet": network}, config, blocks=repeated_blocks(network).values(), device=device, reader=_read
    )
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True))

    def backward(inputs: dict[str, Any]) -> None:
        inputs = {key: _to_bfloat16(value) for key, value in inputs.items()}
        engine.backward(network(**inputs).sample.float().square().mean())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return network, engine, backward, step


def _inputs(network: Any, batch: int, device: str) -> dict[str, Any]:
    config = network.config
    size, length = config.sample_size, TEXT_LENGTH
    inputs: dict[str, Any] = {
        "sample": torch.randn(batch, config.in_channels, size, size, device=device),
        "timestep": torch.randint(0, 1000, (batch,), device=device),
        "encoder_hidden_states": torch.randn(batch, length, config.cross_attention_dim, device=device),
    }
    if config.addition_embed_type == "text_time":  # SDXL
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.randn(batch, pooled, device=device),
            "time_ids": torch.tensor([[1024, 1024, 0, 0, 1024, 1024]] * batch, device=device),
        }
    return inputs


def _to_bfloat16(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_bfloat16(each) for key, each in value.items()}
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
