"""Memory and time of drawing images, predicted without weights: also with blocks that stay in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import Any, cast

from sd_lightning.models.generation import SamplingOptions
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.models.offloading import Offload, OffloadedBytes
from sd_lightning.planner.passes import drawing_passes, weight_bytes
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.trace import Trace
from sd_lightning.quantization.layers import Int8Linear, int8_layers


@dataclass(frozen=True)
class DrawingForecast:
    """What it takes to draw a batch of images."""

    weights: int
    """Bytes of all weights; with blocks offloaded they are in host memory."""
    peak: int
    """Bytes on the device, without the libraries' workspaces."""
    copied: int
    """Bytes of weights that are copied to the device in each step."""
    copying: float | None = None
    """Seconds that these copies take, of which the computation hides some."""
    step: float | None = None
    """Seconds of a step. Like those of the copies, None if speeds are not known, or with LLM.int8: it is not traced."""

    def __str__(self) -> str:
        weights, peak, copied = map(readable_bytes, (self.weights, self.peak, self.copied))
        time = f"{copied} cross to it in each step"
        if self.step is not None:
            time = f"predicted {self.step:.2g} s a step (weights cross to it: {self.copying:.2g} s)"
        where = "in host memory" if self.copied else "on the device"
        return f"weights {weights} {where}, computed peak on the device {peak}, {time}"


def readable_bytes(size: float) -> str:
    """Return bytes in GB, or less than a tenth of one in MB."""
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def drawing_forecast(
    model: LatentDiffusion, options: SamplingOptions, *, speeds: Speeds | None = None, offload: Offload | None = None
) -> DrawingForecast:
    """Predict memory and time to draw a batch of images.

    Args:
        model: The model, possibly on the meta device; it is not changed.
        options: Of drawing; its batch is full.
        speeds: Of the device.
        offload: Whether blocks stay in host memory.
    """
    family, config = model.family, cast(Any, model.denoiser).config
    options = options.resolve(family, model.pipeline_options, config)
    count, scale = options.batch_size, options.guidance_scale or 0.0
    is_guided = scale > family.no_guidance and not family.embeds_guidance(config)
    calls, rows = (2, count) if is_guided and family.guides_in_turn else (1, 2 * count if is_guided else count)
    height, width = (size or model.resolution for size in (options.height, options.width))
    tiled = options.vae_tiling
    drawing = drawing_passes(model, height=height, width=width, batch_size=count, rows=rows, vae_tiling=tiled)
    weights = sum(map(weight_bytes, model.networks.values()))
    stored = {name: OffloadedBytes.of(model, name) for name in model.networks} if offload else {}
    blocks = {f"{name}.{key}": nbytes for name, each in stored.items() for key, nbytes in each.blocks.items()}

    def peak(trace: Trace, names: Iterable[str]) -> int:
        return trace.peak() + (max(stored[name].on_device for name in names) if offload else weights)

    encode, denoise, decode = drawing.traces.values()
    users = ((encode, model.text_encoders), (denoise, [family.denoiser]), (decode, ["vae"]))
    copied = calls * sum(blocks.get(block, 0) for block, _ in groupby(each.block for each in denoise.operations))
    forecast = DrawingForecast(weights, drawing.held + max(peak(*each) for each in users), copied)
    layers = (layer for _, layer in int8_layers(model.denoiser) if isinstance(layer, Int8Linear))
    if speeds is None or any(layer.kernel == "bitsandbytes" for layer in layers):
        return forecast
    return replace(forecast, copying=copied / speeds.to_device, step=calls * _seconds(denoise, blocks, speeds))


def _seconds(trace: Trace, blocks: Mapping[str, int], speeds: Speeds) -> float:
    """Return the seconds of one of many passes, in which a block's copy begins when the block before it does.

    Args:
        trace: Of a pass.
        blocks: Bytes of those that are copied.
        speeds: Of the device. On a CPU copies take the time of its cores.
    """
    seconds = speeds.seconds(trace, 0)
    pairs = groupby(zip((each.block for each in trace.operations), seconds), key=lambda pair: pair[0])
    runs = [(blocks.get(block, 0) / speeds.to_device, float(sum(own for _, own in group))) for block, group in pairs]
    copies = [copy for copy, _ in runs if copy]
    if not copies or not speeds.overlaps:
        return float(seconds.sum()) + sum(copies)
    begin = now = arrival = 0.0
    for _ in range(2):  # the second pass begins with the copy of the first block under way
        begin, upcoming = now, cycle(copies[1:] + copies[:1])
        for copy, own in runs:
            if copy:
                now = max(now, arrival)
                arrival = now + next(upcoming)
            now += own
    return now - begin
