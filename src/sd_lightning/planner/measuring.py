"""Measurement of what a device reaches: the figures of :class:`~sd_lightning.planner.roofline.Speeds`.

Operations are those of denoisers, forward and backward, from the size of a small model's to that of a large one's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.planner.roofline import BYTES_PER_CLIP, BYTES_PER_UPDATE, Curve

_ROUNDS = 3
"""Of each measurement; the median counts."""
_CONVOLUTIONS = ((64, 8, 32), (64, 32, 16), (32, 64, 16), (16, 128, 32), (8, 320, 32), (8, 640, 32))
"""Images, channels in and out, side: 3 x 3 convolutions. As the following, from few operations per byte to many."""
_MATMULS = ((65536, 16), (32768, 32), (16384, 64), (8192, 256), (8192, 1024), (16384, 2048))
"""Rows, width: products with a matrix of width x 4 width."""
_ATTENTIONS = ((8192, 4, 16), (4096, 16, 16), (1024, 64, 32), (128, 256, 64), (32, 1024, 64), (16, 4096, 64))
"""Heads of all images, tokens, width of a head."""
_ELEMENTWISE = tuple(2**power for power in range(12, 29, 2))
"""Elements."""
_COPIED = 64 * 2**20
"""Bytes of a copy between host and device."""
_STEPPED = 4 * 2**20
"""Elements that an optimizer steps."""


@dataclass(frozen=True)
class Effort:
    """How long measurements may take; the defaults are for a whole device in less than a minute."""

    least: float = 0.02
    """Seconds of each round, at least."""
    longest: float = 0.2
    """Seconds of one operation; larger ones are not measured."""
    sizes: int = 16
    """Sizes of each kind of operation, at most."""


class Stopwatch:
    """Times computations on a device.

    Args:
        device: A CUDA device, or the CPU.
        effort: How long it may take.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, in the median of a few rounds of calls."""
        first = self._round(run, 1)  # chooses kernels, and allocates
        if first > self.effort.longest:
            return first
        count = max(math.ceil(self.effort.least / max(self._round(run, 1), 1e-9)), 1)
        return statistics.median(self._round(run, count) / count for _ in range(_ROUNDS))

    def _round(self, run: Callable[[], object], count: int) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(count):
            run()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def product_rates(watch: Stopwatch, kind: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Return floating-point operations per second by operations per byte, forward and backward.

    Args:
        watch: Of the device.
        kind: "matmul", "convolution" or "attention".
        dtype: Of its inputs.

    Returns:
        By kind: "matmul", whose backward is two more products; or the kind and "<kind>_backward".
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for flops, forward, inputs in _examples(kind, dtype, watch):
        output = forward()
        grad = torch.ones_like(output)
        ahead = watch.seconds(forward)
        back = watch.seconds(partial(torch.autograd.grad, output, inputs, grad, retain_graph=True))
        read, written = sum(each.nbytes for each in inputs), output.nbytes
        intensity = flops / (read + written)
        if kind == "matmul":
            points.setdefault(kind, []).append((intensity, 3 * flops / (ahead + back)))
        else:
            again = _BACKWARD[kind] * flops
            moved = 2 * read + written * (2 if kind == "attention" else 1)
            points.setdefault(kind, []).append((intensity, flops / ahead))
            points.setdefault(f"{kind}_backward", []).append((again / moved, again / back))
        if max(ahead, back) > watch.effort.longest:
            break
    return {name: Curve(*zip(*found)) for name, found in points.items()}


_BACKWARD = {"convolution": 2.0, "attention": 2.5}
"""Operations of backward as multiples of forward's, as torch's flop counter has them."""

Example = tuple[float, Callable[[], Tensor], Sequence[Tensor]]
"""Floating-point operations, forward, and the tensors whose gradients backward computes."""


def _examples(kind: str, dtype: torch.dtype, watch: Stopwatch) -> Iterator[Example]:
    def new(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device=watch.device).to(dtype).requires_grad_()

    count = watch.effort.sizes
    if kind == "convolution":
        for images, width, side in _CONVOLUTIONS[:count]:
            x, w = new(images, width, side, side), new(width, width, 3, 3)
            yield 18.0 * images * width**2 * side**2, partial(F.conv2d, x, w, padding=1), (x, w)
    elif kind == "matmul":
        for rows, width in _MATMULS[:count]:
            x, w = new(rows, width), new(4 * width, width)
            yield 8.0 * rows * width**2, partial(F.linear, x, w), (x, w)
    else:
        for heads, tokens, width in _ATTENTIONS[:count]:
            q, k, v = (new(1, heads, tokens, width) for _ in range(3))
            attention = partial(F.scaled_dot_product_attention, q, k, v)
            yield 4.0 * heads * tokens**2 * width, attention, (q, k, v)


def bandwidth(watch: Stopwatch) -> Curve:
    """Return bytes per second of operations that memory limits, by bytes: a sum, an activation and a normalisation."""
    points = []
    for numel in _ELEMENTWISE[: watch.effort.sizes]:
        x = torch.randn(4, 32, numel // 128, device=watch.device).requires_grad_()
        y, weight = x.detach().clone(), torch.ones(32, device=watch.device)
        runs: list[tuple[float, Callable[[], object]]] = [(3, partial(torch.add, x.detach(), y))]
        for forward in (partial(F.silu, x), partial(F.group_norm, x, 32, weight)):
            runs.append((2, forward))
            runs.append((3, partial(torch.autograd.grad, forward(), x, y, retain_graph=True)))
        moved, seconds = 0.0, 0.0
        for tensors, run in runs:
            moved += tensors * x.nbytes
            seconds += watch.seconds(run)
        points.append((moved / len(runs), moved / seconds))
        if seconds > watch.effort.longest * len(runs):
            break
    return Curve(*zip(*points))


def launch(watch: Stopwatch) -> float:
    """Return the seconds per operation of a network of tiny layers, forward and backward."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(32))).to(watch.device)
    x = torch.zeros(1, 4, device=watch.device, requires_grad=True)
    inputs = [x, *layers.parameters()]
    operations = 32 * (2 + 4)  # a product and an activation; two products, a sum and an activation's gradient
    return watch.seconds(lambda: torch.autograd.grad(layers(x).sum(), inputs)) / operations


def update_bandwidth(watch: Stopwatch) -> float:
    """Return bytes per second of AdamW and clipping on the device."""
    weights = _trained(watch.device)
    optimizer = torch.optim.AdamW(weights, lr=1e-9)

    def run() -> None:
        nn.utils.clip_grad_norm_(weights, 1e9)
        optimizer.step()

    return _STEPPED * (BYTES_PER_UPDATE + BYTES_PER_CLIP) / watch.seconds(run)


def host_updates(effort: Effort) -> float:
    """Return elements per second that a fused AdamW steps in host memory."""
    device = torch.device("cpu")
    optimizer = torch.optim.AdamW(_trained(device), lr=1e-9, fused=True)
    return _STEPPED / Stopwatch(device, effort).seconds(optimizer.step)


def _trained(device: torch.device) -> list[nn.Parameter]:
    weights = [nn.Parameter(torch.randn(_STEPPED // 8, device=device)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def copies(watch: Stopwatch) -> tuple[float, float]:
    """Return bytes per second from host memory to the device, and back; on a CPU both are copies in memory."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
    there = torch.empty(_COPIED, dtype=torch.uint8, device=watch.device)
    to_device = watch.seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = watch.seconds(lambda: host.copy_(there, non_blocking=True))
    return _COPIED / to_device, _COPIED / to_host
