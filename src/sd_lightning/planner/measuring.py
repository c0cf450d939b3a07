"""Measurement of what this machine reaches: the figures of :class:`~sd_lightning.planner.roofline.Speeds`.

Operations are those of denoisers, forward and backward, from the size of a small model's to that of a large one's.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from sd_lightning.planner.calibration import Calibration, device_name
from sd_lightning.planner.devices import DTYPES, GIB, Device, host_bytes, table_of
from sd_lightning.planner.recording import record
from sd_lightning.planner.roofline import BYTES_PER_CLIP, BYTES_PER_UPDATE, KINDS_OF_PRODUCTS, Curve, Speeds

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
_TENSORS = 8
"""Tensors that an optimizer steps."""
_GATHERED = 8 * 2**20
"""Bytes of a collective's whole tensor."""
_ROUNDS_OF_COLLECTIVES = 5
_NUM_LARGE, _NUM_SMALL = 10, 200
"""Collectives in a round: of many bytes, and of next to nothing."""
_PATIENCE = timedelta(seconds=120)
_ALIKE_ON_CPU = ("tf32", "float16")
"""Dtypes that are not measured on a CPU, where nothing trains in them: float32's figures stand in their place."""
_TORCH = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Effort:
    """How long measurements may take; the defaults are for a whole device in less than a minute."""

    least: float = 0.02
    """Seconds of each round, at least."""
    longest: float = 0.2
    """Seconds of one operation; larger ones are not measured."""
    sizes: int = 16
    """Sizes of each kind of operation, at most."""
    stepped: int = 64 * 2**20
    """Elements that an optimizer steps: 1 GiB of weights, gradients and moments, more than caches hold."""
    links: bool = True
    """Whether collectives are measured, in processes of their own."""


class Stopwatch:
    """Times computations on a device.

    Args:
        device: A CUDA device, or the CPU.
        effort: How long it may take.
    """

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self._spreads: list[float] = []

    @property
    def spread(self) -> float:
        """By how much rounds of the same computation differed, as a part of their median; the median of all."""
        return statistics.median(self._spreads) if self._spreads else 0.0

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, in the median of a few rounds of calls."""
        self.round(run, 1)  # chooses kernels, allocates, starts threads
        once = self.round(run, 1)
        if once > self.effort.longest:
            return once
        count = max(math.ceil(self.effort.least / max(once, 1e-9)), 1)
        rounds = [self.round(run, count) / count for _ in range(_ROUNDS)]
        middle = statistics.median(rounds)
        self._spreads.append((max(rounds) - min(rounds)) / max(middle, 1e-9))
        return middle

    def round(self, run: Callable[[], object], count: int) -> float:
        """Return the seconds of several calls in a row."""
        self._wait()
        started = time.perf_counter()
        for _ in range(count):
            run()
        self._wait()
        return time.perf_counter() - started

    def busy(self, seconds: float, latency: float) -> float:
        """Return what the work takes of the measured seconds of a call: on a GPU all, which hide the next launch.

        Args:
            seconds: Of a call.
            latency: Of a call with next to nothing to do.
        """
        return seconds if self.device.type == "cuda" else _beyond(seconds, latency)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def calibrate(date: str, effort: Effort | None = None) -> Calibration:
    """Measure this machine's first GPU, or its CPU.

    What cannot be measured is assumed from the GPU's table, if one ships.

    Args:
        date: Today's, ISO 8601.
        effort: How long it may take; less than a minute by default.
    """
    on_cuda = torch.cuda.is_available()
    watch = Stopwatch(torch.device("cuda" if on_cuda else "cpu"), effort or Effort())
    latency = latencies(watch)
    flops = _flops(watch, latency)
    bandwidth, functions = bandwidths(watch, latency["elementwise"])
    to_device, to_host = copies(watch)
    device = _device(flops, bandwidth, min(to_device, to_host))
    links = measured_links() if watch.effort.links else None
    assumed = Speeds.of(device)
    speeds = Speeds(
        flops=flops,
        bandwidth=bandwidth,
        functions=functions,
        update_bandwidth=update_bandwidth(watch),
        launch=launch(watch, latency),
        latency=latency,
        to_device=to_device,
        to_host=to_host,
        link=links[0] if links else assumed.link,
        host_updates=host_updates(watch.effort),
        collective=links[1] if links else assumed.collective,
        source=f"calibrated on {date}",
        assumed=("link",) * (links is None) + ("hooks", "what threads hide") * (not on_cuda),
        fresh=None if on_cuda else fresh(watch),
        overlaps=on_cuda,
        spread=watch.spread,
    )
    return Calibration(device, speeds, date, torch.__version__)


def _flops(watch: Stopwatch, latency: Mapping[str, float]) -> dict[tuple[str, str], Curve]:
    on_cuda = watch.device.type == "cuda"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    flops: dict[tuple[str, str], Curve] = {}
    try:
        for dtype in DTYPES:
            if not on_cuda and dtype in _ALIKE_ON_CPU:
                continue
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
            for kind in KINDS_OF_PRODUCTS:
                for name, curve in product_rates(watch, kind, _TORCH[dtype], latency).items():
                    flops[name, dtype] = curve
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    if not on_cuda:
        as_float32 = {name: curve for (name, dtype), curve in flops.items() if dtype == "float32"}
        flops |= {(name, dtype): curve for name, curve in as_float32.items() for dtype in _ALIKE_ON_CPU}
    return flops


def _device(flops: Mapping[tuple[str, str], Curve], bandwidth: Curve, pcie: float) -> Device:
    """Return this device's table with this machine's memory; with measured figures if none ships."""
    name, host, on_cuda = device_name(), host_bytes() / GIB, torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if on_cuda else host
    host /= torch.cuda.device_count() if on_cuda else 1
    table = table_of(name)
    if table is not None:
        return replace(table, memory_gib=memory, host_memory_gib=host)
    peaks = {dtype: max(flops[kind, dtype].best for kind in KINDS_OF_PRODUCTS) / 1e12 for dtype in DTYPES}
    return Device(name, memory, host, peaks, bandwidth.best / 1e9, pcie / 1e9)


def latencies(watch: Stopwatch) -> dict[str, float]:
    """Return the seconds of calls with next to nothing to do, by kind of operation."""

    def new(*shape: int) -> Tensor:
        return torch.ones(shape, device=watch.device, requires_grad=True)

    x = new(4, 4)
    seconds = {"elementwise": watch.seconds(partial(torch.add, x.detach(), x.detach()))}
    seconds["function"] = watch.seconds(partial(F.silu, x.detach()))
    inputs: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {
        "matmul": (F.linear, (x, new(4, 4))),
        "convolution": (partial(F.conv2d, padding=1), (new(16, 4, 4, 4), new(4, 4, 3, 3))),
        "attention": (F.scaled_dot_product_attention, [new(1, 1, 4, 16) for _ in range(3)]),
    }
    for kind, (compute, tensors) in inputs.items():
        seconds[kind] = watch.seconds(partial(compute, *(each.detach() for each in tensors)))
        if kind != "matmul":
            output = compute(*tensors)
            back = partial(torch.autograd.grad, output, tensors, torch.ones_like(output), retain_graph=True)
            seconds[f"{kind}_backward"] = watch.seconds(back)
    return seconds


def product_rates(watch: Stopwatch, kind: str, dtype: torch.dtype, latency: Mapping[str, float]) -> dict[str, Curve]:
    """Return floating-point operations per second by operations per byte, forward and backward.

    Args:
        watch: Of the device.
        kind: "matmul", "convolution" or "attention".
        dtype: Of its inputs.
        latency: What :func:`latencies` returns; it is not part of the rates.

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
            points.setdefault(kind, []).append((intensity, 3 * flops / watch.busy(ahead + back, 3 * latency[kind])))
        else:
            again = _BACKWARD[kind] * flops
            moved = 2 * read + written * (2 if kind == "attention" else 1)
            points.setdefault(kind, []).append((intensity, flops / watch.busy(ahead, latency[kind])))
            back_alone = watch.busy(back, latency[f"{kind}_backward"])
            points.setdefault(f"{kind}_backward", []).append((again / moved, again / back_alone))
        if max(ahead, back) > watch.effort.longest:
            break
    return {name: Curve(*zip(*curve)) for name, curve in points.items()}


def _beyond(seconds: float, latency: float) -> float:
    """Return the seconds that depend on the work."""
    return max(seconds - latency, seconds / 10)


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


def bandwidths(watch: Stopwatch, latency: float) -> tuple[Curve, Curve]:
    """Return bytes per second by bytes: of sums and copies, and of activation functions and normalisations.

    Args:
        watch: Of the device.
        latency: Seconds of a call with nothing to do; they are not part of the rates.
    """
    points: tuple[list[tuple[float, float]], ...] = [], []
    for numel in _ELEMENTWISE[: watch.effort.sizes]:
        x = torch.randn(4, 32, numel // 128, device=watch.device).requires_grad_()
        y, weight = x.detach().clone(), torch.ones(32, device=watch.device)
        simple: list[tuple[int, Callable[[], object]]] = [
            (3, partial(torch.add, x.detach(), y)),
            (3, partial(torch.mul, x.detach(), y)),
            (2, y.clone),
            (2, partial(torch.cat, (y[:2], y[2:]))),
        ]
        functions: list[tuple[int, Callable[[], object]]] = []
        for forward in (partial(F.silu, x), partial(F.gelu, x), partial(F.group_norm, x, 32, weight)):
            functions.append((2, forward))
            functions.append((3, partial(torch.autograd.grad, forward(), x, y, retain_graph=True)))
        seconds = 0.0
        for rates, runs in zip(points, (simple, functions)):
            times = [watch.seconds(run) for _, run in runs]
            seconds = max(seconds, *times)
            moved = [tensors * x.nbytes for tensors, _ in runs]
            alone = sum(watch.busy(each, latency) for each in times)
            rates.append((sum(moved) / len(runs), sum(moved) / alone))
        if seconds > watch.effort.longest:
            break
    simple_curve, function_curve = (Curve(*zip(*rates)) for rates in points)
    return simple_curve, function_curve


def launch(watch: Stopwatch, latency: Mapping[str, float]) -> float:
    """Return the seconds per operation of a small network beside its latency: Python, autograd and views.

    Args:
        watch: Of the device.
        latency: What :func:`latencies` returns.
    """
    from diffusers import UNet2DConditionModel

    network: Any = cast(Any, UNet2DConditionModel)(
        sample_size=4,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )

    def step(device: torch.device) -> Tensor:
        count = 16  # as for latencies: oneDNN computes convolutions of small batches in another way
        inputs = torch.ones(count, 4, 4, 4, device=device), torch.ones(count, device=device)
        output: Tensor = network(*inputs, torch.ones(count, 4, 8, device=device)).sample
        return output.mean()

    network.to("meta")
    trace = record(partial(step, torch.device("meta")))
    network.to_empty(device=watch.device)
    counts = dict.fromkeys(latency, 0)
    for (kind, _), indices in trace.alike.items():
        counts[kind] += int((trace.moved.constant[indices] > 0).sum())
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()

    def run() -> None:
        network.zero_grad()
        step(watch.device).backward()

    seconds = watch.seconds(run) - sum(count * latency[kind] for kind, count in counts.items())
    return max(seconds, 0.0) / sum(counts.values())


def fresh(watch: Stopwatch) -> float:
    """Return bytes per second at which a CPU's memory can be taken from the system."""
    kept = torch.empty(_COPIED, dtype=torch.uint8)
    again = watch.seconds(lambda: kept.fill_(1))
    return _COPIED / _beyond(watch.seconds(lambda: torch.empty(_COPIED, dtype=torch.uint8).fill_(1)), again)


def update_bandwidth(watch: Stopwatch) -> float:
    """Return bytes per second of a fused AdamW and clipping on the device."""
    return (BYTES_PER_UPDATE + BYTES_PER_CLIP) * _stepped_per_second(watch, clip=True)


def host_updates(effort: Effort) -> float:
    """Return elements per second that a fused AdamW steps in host memory, on all cores."""
    return _stepped_per_second(Stopwatch(torch.device("cpu"), effort), clip=False)


def _stepped_per_second(watch: Stopwatch, *, clip: bool) -> float:
    """Return elements per second, by what more of them take longer, so that launches and Python do not count."""

    def seconds(numel: int) -> float:
        weights = [nn.Parameter(torch.zeros(numel // _TENSORS, device=watch.device)) for _ in range(_TENSORS)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-9, fused=True)

        def run() -> None:
            if clip:
                nn.utils.clip_grad_norm_(weights, 1e9)
            optimizer.step()

        return watch.seconds(run)

    large, small = watch.effort.stepped, _TENSORS
    if watch.device.type == "cuda":  # it works while Python runs ahead: what a few elements take would be too much
        large, small = 2 * large, large
    return (large - small) / _beyond(seconds(large), seconds(small))


def copies(watch: Stopwatch) -> tuple[float, float]:
    """Return bytes per second from host memory to the device, and back; on a CPU both are copies in memory."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=watch.device.type == "cuda")
    there = torch.empty(_COPIED, dtype=torch.uint8, device=watch.device)
    to_device = watch.seconds(lambda: there.copy_(host, non_blocking=True))
    to_host = watch.seconds(lambda: host.copy_(there, non_blocking=True))
    return _COPIED / to_device, _COPIED / to_host


def measured_links() -> tuple[dict[str, float], float] | None:
    """Return what :func:`links_in_group` finds on all GPUs, or on two processes of a CPU; None with one GPU alone."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if count < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        threads = max(torch.get_num_threads() // count, 1)
        mp.spawn(_measure_links, (count, folder, threads), nprocs=count)  # ends all of them if one fails
        rates, start = json.loads(Path(folder, "links").read_text())
        return rates, start


def _measure_links(rank: int, world_size: int, folder: str, threads: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, whose new names torch 2.11 lacks
    on_cuda = torch.cuda.is_available()
    store = dist.FileStore(f"{folder}/store", world_size)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    torch.set_num_threads(threads)
    if on_cuda:
        torch.cuda.set_device(rank)
    links = links_in_group(torch.device("cuda", rank) if on_cuda else torch.device("cpu"))
    if rank == 0:
        Path(folder, "links").write_text(json.dumps(links))
    dist.destroy_process_group()


def links_in_group(device: torch.device) -> tuple[dict[str, float], float]:
    """Measure the collectives of this process group.

    Returns:
        Bytes per second that a process receives, by collective; and the seconds of a collective of next to nothing.
    """
    world_size = dist.get_world_size()
    whole = torch.ones(_GATHERED // 4 // world_size * world_size, device=device)
    part = torch.ones(len(whole) // world_size, device=device)
    received = (world_size - 1) * part.nbytes
    seconds = partial(_seconds_of_collective, Stopwatch(device, Effort()))
    rates = {
        "all_gather": received / seconds(lambda: dist.all_gather_into_tensor(whole, part), _NUM_LARGE),
        "reduce_scatter": received / seconds(lambda: dist.reduce_scatter_tensor(part, whole), _NUM_LARGE),
        "all_reduce": 2 * received / seconds(lambda: dist.all_reduce(whole), _NUM_LARGE),
    }
    little = torch.ones(world_size, device=device)
    one = little[:1].clone()
    return rates, seconds(lambda: dist.all_gather_into_tensor(little, one), _NUM_SMALL)


def _seconds_of_collective(watch: Stopwatch, run: Callable[[], object], count: int) -> float:
    """Return the seconds of one call among calls in a row, as training has them: one alone wakes up its threads."""
    run()  # connects
    rounds = []
    for _ in range(_ROUNDS_OF_COLLECTIVES):
        dist.barrier()
        rounds.append(watch.round(run, count) / count)
    return statistics.median(rounds)
