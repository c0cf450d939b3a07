"""Time of a training step by a roofline: each operation takes as long as its arithmetic or its memory traffic needs.

Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785. Communication, copies between host and device, and
the optimizer are added as the strategies declare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from sd_lightning.planner.devices import Device
from sd_lightning.planner.footprint import Traffic
from sd_lightning.planner.trace import Trace

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
KINDS_OF_PRODUCTS = ("matmul", "convolution", "attention")
_ASSUMED_PEAK = 0.55
"""Part of the peak arithmetic that large operations reach, if the device's table says nothing; assumed."""
_ASSUMED_BANDWIDTH = 0.8
"""Part of the memory's, the links' and PCIe's bandwidth that is reached; assumed."""
_ASSUMED_LAUNCH = 2e-5
"""Seconds that the host needs for an operation, with views, autograd and Python. One H200's host took 3e-5."""
_ASSUMED_COLLECTIVE = 3e-5
"""Seconds of a collective of next to nothing; assumed."""
_ASSUMED_HOOK = 1e-4
"""Seconds of an engine's hook in Python on a CPU; assumed."""
_LAUNCHES_PER_HOOK = 5
"""The same beside a GPU, in launches of operations; assumed. Its work hides them where it is slower than the host."""
_ASSUMED_PROGRAM = 8e-3
"""Seconds of a pass outside of the networks: Lightning, noise, loss; as `vs_diffusers` measured. A GPU hides them."""
_ASSUMED_THREADED = 0.5
"""Part of the time of collectives in threads that the computation on the same cores does not hide; assumed."""
_ASSUMED_SPREAD = 0.05
"""Part by which two speeds that are predicted from a data sheet must differ to be told apart; assumed."""
_ASSUMED_HOST_UPDATES = 1e9
"""Elements per second that Adam updates in host memory; assumed."""
BYTES_PER_UPDATE = 32
"""Adam reads a weight, a gradient and two moments, and writes three of them and the weights to compute with."""
_BYTES_PER_AVERAGE = 12
"""The EMA reads a weight and an average, and writes it."""
BYTES_PER_CLIP = 12
"""Clipping reads gradients for the norm, and reads and writes them to scale."""
_BYTES_PER_HOST_UPDATE = 28
"""In host memory Adam writes no weights to compute with."""
_CLIPPED_HOST_UPDATE = 1 + BYTES_PER_CLIP / _BYTES_PER_HOST_UPDATE


@dataclass(frozen=True)
class Curve:
    """A rate that depends on the size of an operation: small ones reach less."""

    sizes: tuple[float, ...]
    """Ascending."""
    rates: tuple[float, ...]
    """Per second. Between two sizes the logarithm is linear; outside of them the nearest one counts."""

    @classmethod
    def constant(cls, rate: float) -> Curve:
        return cls((1.0,), (rate,))

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """Return the rate for operations of these sizes."""
        if len(self.rates) == 1:
            return np.full(len(sizes), self.rates[0])
        return np.exp(np.interp(np.log(np.maximum(sizes, 1e-9)), np.log(self.sizes), np.log(self.rates)))

    def divided(self, count: int) -> Curve:
        return Curve(self.sizes, tuple(rate / count for rate in self.rates))

    @property
    def best(self) -> float:
        return max(self.rates)


@dataclass(frozen=True)
class Speeds:
    """What a device reaches."""

    flops: Mapping[tuple[str, str], Curve]
    """(kind of operation, dtype) -> floating-point operations per second, by those per byte. "convolution_backward" and
    "attention_backward" are kinds, too; without them, backward is as fast as forward."""
    bandwidth: Curve
    """Of its memory, bytes per second, by bytes."""
    functions: Curve
    """The same in activation functions and normalisations."""
    update_bandwidth: float
    """The same in the optimizer's step."""
    launch: float
    """Seconds that the host needs per operation of a network, beside those of ``latency``."""
    latency: Mapping[str, float]
    """Kind of operation -> seconds of a call with next to nothing to do; 0 if not given."""
    to_device: float
    """From host memory, bytes per second."""
    to_host: float
    link: Mapping[str, float]
    """Between devices, by name of :data:`COLLECTIVES`: bytes per second that a process receives."""
    host_updates: float
    """Elements per second that Adam updates in host memory: of a machine if it was measured, assumed for each GPU."""
    collective: float = _ASSUMED_COLLECTIVE
    """Seconds of a collective of next to nothing."""
    source: str = "assumed"
    """Where the figures are from: "assumed", from a data sheet; or "calibrated on <date>"."""
    assumed: tuple[str, ...] = ()
    """Names of figures that a calibration could not measure."""
    fresh: float | None = None
    """Bytes per second at which new memory is taken from the system, to which a CPU's allocator gives it back in each
    step; None if it is kept."""
    overlaps: bool = True
    """Whether collectives and copies run beside the computation; on a CPU they take its cores."""
    spread: float = _ASSUMED_SPREAD
    """Part by which measurements of the same differed: of plans whose speeds differ by less, the simpler is better."""

    @classmethod
    def of(cls, device: Device) -> Speeds:
        """Return what a device is assumed to reach of its data sheet."""
        peaks = {
            dtype: Curve.constant(1e12 * peak * device.reached.get(dtype, _ASSUMED_PEAK))
            for dtype, peak in device.peak_tflops.items()
        }
        flops = {(kind, dtype): curve for kind in KINDS_OF_PRODUCTS for dtype, curve in peaks.items()}
        pcie = _ASSUMED_BANDWIDTH * 1e9 * device.pcie_gb_per_s
        link = pcie if device.link_gb_per_s is None else _ASSUMED_BANDWIDTH * 1e9 * device.link_gb_per_s
        bandwidth = _ASSUMED_BANDWIDTH * 1e9 * device.memory_gb_per_s
        moved = Curve.constant(bandwidth)
        links = dict.fromkeys(COLLECTIVES, link)
        return cls(flops, moved, moved, bandwidth, _ASSUMED_LAUNCH, {}, pcie, pcie, links, _ASSUMED_HOST_UPDATES)

    @property
    def provenance(self) -> str:
        """Where the figures are from, as text."""
        if self.source == "assumed":
            return "assumed, from the data sheet"
        return self.source + f" ({', '.join(self.assumed)} assumed)" * bool(self.assumed)

    def shared_by(self, count: int) -> Speeds:
        """Return what each of several processes on a machine reaches; links were measured so.

        They share the cores: on a CPU for all that they do, with GPUs for updates in host memory. What is assumed from
        a table is that of one GPU among several.
        """
        if self.source == "assumed":
            return self
        if self.overlaps:
            return replace(self, host_updates=self.host_updates / count)
        curves = {key: curve.divided(count) for key, curve in self.flops.items()}
        names = ("update_bandwidth", "to_device", "to_host", "host_updates")
        rates = {name: getattr(self, name) / count for name in names}
        curves_of_bytes = {name: getattr(self, name).divided(count) for name in ("bandwidth", "functions")}
        return replace(self, flops=curves, **curves_of_bytes, **rates)

    def with_tf32(self) -> Speeds:
        """Return the speeds if products of float32 matrices use TensorFloat-32."""
        in_tf32 = {(kind, "float32"): curve for (kind, dtype), curve in self.flops.items() if dtype == "tf32"}
        return replace(self, flops={**self.flops, **in_tf32})

    def seconds(self, trace: Trace, batch_size: int) -> np.ndarray:
        """Return the seconds of each operation of a trace.

        On a GPU the host starts operations ahead, so the slower of the two counts; on a CPU both add up.

        Args:
            trace: The operations.
            batch_size: Samples.
        """
        flops, moved = trace.flops.at(batch_size), trace.moved.at(batch_size)
        busy, host = moved / self.bandwidth.at(moved), self.launching(trace, batch_size)
        for (kind, dtype), indices in trace.alike.items():
            if kind == "function":
                busy[indices] = moved[indices] / self.functions.at(moved[indices])
            elif kind != "elementwise":
                curve = self.product_rate(kind, _DTYPES.get(dtype, "float32"))
                rates = curve.at(flops[indices] / np.maximum(moved[indices], 1))
                busy[indices] = np.maximum(busy[indices], flops[indices] / rates)
        return np.where(moved > 0, np.maximum(busy, host) if self.overlaps else busy + host, 0.0)

    def product_rate(self, kind: str, dtype: str) -> Curve:
        """Return the floating-point operations per second of a kind of operation; see ``flops``."""
        return self.flops.get((kind, dtype)) or self.flops[kind.removesuffix("_backward"), dtype]

    def launching(self, trace: Trace, batch_size: int) -> np.ndarray:
        """Return the seconds that the host needs to start each operation of a trace."""
        host = np.full(len(trace.operations), self.launch)
        for (kind, _), indices in trace.alike.items():
            host[indices] += self.latency.get(kind, 0.0)
        # Views move nothing, and take no time of their own.
        return np.where(trace.moved.at(batch_size) > 0, host, 0.0)


_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of an optimizer step, by part; parts do not overlap."""

    forward: float
    """Of all micro-batches, as are the next three."""
    backward: float
    encoding: float
    waiting: float
    """For collectives, copies, hooks and data that take longer than what hides them; on a CPU nothing does."""
    update: float
    """Clipping, the optimizer's step, EMA, and copying updated weights."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.encoding + self.waiting + self.update


@dataclass(frozen=True)
class Work:
    """What a step does beside forward and backward."""

    world_size: int
    accumulate: int
    encoding: float
    """Seconds to encode one micro-batch."""
    averaged: int = 0
    """Elements whose EMA is updated on the device."""
    recomputation: float = 0.0
    """Seconds to recompute activations in one pass, unless the trace does it."""
    loading: float = 0.0
    """Seconds in which the data loader delivers one micro-batch, beside the computation."""
    averaged_on_host: int = 0
    """Elements whose EMA is updated in host memory."""
    fetched: int = 0
    """Bytes of weights that are copied to host memory for that."""


def step_time(trace: Trace, batch_size: int, traffic: Traffic, speeds: Speeds, work: Work) -> StepTime:
    """Predict the time of an optimizer step.

    Collectives and copies run beside the computation, on their own links; the longest of the three counts. On a CPU
    nothing runs beside.

    Args:
        trace: Of a forward and backward pass.
        batch_size: Samples per pass and process.
        traffic: What the strategy moves.
        speeds: Of the device.
        work: The rest of the step.
    """
    seconds = speeds.seconds(trace, batch_size)
    backward = float(seconds[trace.is_backward].sum())
    forward = float(seconds.sum()) - backward
    backward += work.recomputation
    if speeds.fresh is not None:
        held = trace.live(batch_size)
        forward_held = float(held[~trace.is_backward].max(initial=0))
        forward += forward_held / speeds.fresh
        backward += (float((held + trace.ready() * trace.gradient_bytes).max()) - forward_held) / speeds.fresh
    others = (work.world_size - 1) / work.world_size
    gather, reduce, all_reduce = (speeds.link[name] for name in COLLECTIVES)
    passing = others * (traffic.gathered / gather + traffic.reduced / reduce)
    if work.world_size > 1:
        passing += traffic.collectives * speeds.collective
    size = np.array([traffic.copied / max(traffic.collectives, 1)])
    backward += 2 * traffic.copied / float(speeds.bandwidth.at(size)[0])
    copying = max(traffic.to_device / speeds.to_device, traffic.to_host / speeds.to_host)
    reducing = others * 2 * traffic.all_reduced / all_reduce
    if speeds.overlaps:
        waiting = work.accumulate * max(passing - forward - backward, copying - forward - backward, 0.0)
        waiting += max(reducing - backward, 0.0)
        hidden = float((seconds - speeds.launching(trace, batch_size)).sum())
        waiting += work.accumulate * max(_LAUNCHES_PER_HOOK * speeds.launch * traffic.hooks - hidden, 0.0)
    else:
        shown = _ASSUMED_THREADED if traffic.threaded else 1.0
        hooks = _ASSUMED_HOOK * traffic.hooks + _ASSUMED_PROGRAM
        waiting = work.accumulate * (shown * passing + copying + hooks) + shown * reducing
    waiting += others * traffic.exposed / gather
    update = traffic.stepped * (BYTES_PER_UPDATE + BYTES_PER_CLIP) / speeds.update_bandwidth
    update += _CLIPPED_HOST_UPDATE * traffic.stepped_on_host / speeds.host_updates
    update += traffic.refreshed / speeds.to_device
    update += work.averaged * _BYTES_PER_AVERAGE / speeds.update_bandwidth
    update += _BYTES_PER_AVERAGE / _BYTES_PER_HOST_UPDATE * work.averaged_on_host / speeds.host_updates
    update += work.fetched / speeds.to_host
    passes = work.accumulate
    time = StepTime(passes * forward, passes * backward, passes * work.encoding, waiting, update)
    return replace(time, waiting=waiting + max(passes * work.loading - time.total, 0.0))
