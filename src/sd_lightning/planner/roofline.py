"""Time of a training step by a roofline: each operation takes as long as its arithmetic or its memory traffic needs.

Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785. Communication, copies between host and device, and
the optimizer are added as the strategies declare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sd_lightning.models.checkpointing import KINDS
from sd_lightning.planner.devices import Device
from sd_lightning.planner.footprint import Traffic
from sd_lightning.planner.recording import Operation
from sd_lightning.planner.trace import Trace

_ASSUMED_PEAK = 0.55
"""Part of the peak arithmetic that large operations reach; assumed."""
_ASSUMED_BANDWIDTH = 0.8
"""Part of the memory's, the links' and PCIe's bandwidth that is reached; assumed."""
_ASSUMED_LAUNCH = 6e-6
"""Seconds that the host needs to start an operation; assumed."""
_ASSUMED_HOST_UPDATES = 1e9
"""Elements per second that Adam updates in host memory; assumed."""
BYTES_PER_UPDATE = 32
"""Adam reads a weight, a gradient and two moments, and writes three of them and the weights to compute with."""
_BYTES_PER_AVERAGE = 12
"""The EMA reads a weight and an average, and writes it."""
BYTES_PER_CLIP = 12
"""Clipping reads gradients for the norm, and reads and writes them to scale."""


@dataclass(frozen=True)
class Speeds:
    """What a device reaches."""

    flops: Mapping[tuple[str, str], float]
    """(kind of operation, dtype) -> floating-point operations per second."""
    bandwidth: float
    """Of its memory, bytes per second."""
    launch: float
    """Seconds per operation that the host needs, at least."""
    to_device: float
    """From host memory, bytes per second."""
    to_host: float
    link: float
    """Between devices, bytes per second each way."""
    host_updates: float
    """Elements per second that Adam updates in host memory."""
    source: str = "assumed"
    """Where the figures are from: "assumed", from a data sheet; or "calibrated"."""

    @classmethod
    def of(cls, device: Device) -> Speeds:
        """Return what a device is assumed to reach of its data sheet."""
        kinds = ("matmul", "convolution", "attention")
        flops = {(k, dtype): _ASSUMED_PEAK * 1e12 * peak for k in kinds for dtype, peak in device.peak_tflops.items()}
        pcie = _ASSUMED_BANDWIDTH * 1e9 * device.pcie_gb_per_s
        link = pcie if device.link_gb_per_s is None else _ASSUMED_BANDWIDTH * 1e9 * device.link_gb_per_s
        bandwidth = _ASSUMED_BANDWIDTH * 1e9 * device.memory_gb_per_s
        return cls(flops, bandwidth, _ASSUMED_LAUNCH, pcie, pcie, link, _ASSUMED_HOST_UPDATES)

    def seconds(
        self, operations: Sequence[Operation], flops: np.ndarray, moved: np.ndarray, *, tf32: bool = False
    ) -> np.ndarray:
        """Return the seconds of each operation.

        Args:
            operations: Their kinds and dtypes.
            flops: Floating-point operations of each.
            moved: Bytes that each reads and writes; 0 for views, which take no time.
            tf32: Products of float32 matrices use TensorFloat-32.
        """
        known: dict[tuple[str, torch.dtype], float] = {}
        rates = np.empty(len(operations))
        for index, operation in enumerate(operations):
            key = operation.cost.name, operation.cost.dtype
            if key not in known:
                known[key] = self._rate(*key, tf32)
            rates[index] = known[key]
        busy = np.maximum(flops / rates, moved / self.bandwidth)
        return np.where(moved > 0, np.maximum(busy, self.launch), 0.0)

    def _rate(self, name: str, computed_in: torch.dtype, tf32: bool) -> float:
        dtype = _DTYPES.get(computed_in, "float32")
        kind = KINDS.get(name, "matmul")
        return self.flops[kind, "tf32" if tf32 and dtype == "float32" else dtype]


_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of an optimizer step, by part; parts do not overlap."""

    forward: float
    """Of all micro-batches, as are the next three."""
    backward: float
    encoding: float
    waiting: float
    """For collectives and copies that take longer than the computation that hides them."""
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
    averaged: int
    """Elements whose EMA is updated."""
    recomputation: float = 0.0
    """Seconds to recompute activations in one pass, unless the trace does it."""
    tf32: bool = False


def step_time(trace: Trace, batch_size: int, traffic: Traffic, speeds: Speeds, work: Work) -> StepTime:
    """Predict the time of an optimizer step.

    Collectives and copies run beside the computation, on their own links; the longest of the three counts.

    Args:
        trace: Of a forward and backward pass.
        batch_size: Samples per pass and process.
        traffic: What the strategy moves.
        speeds: Of the device.
        work: The rest of the step.
    """
    flops, moved = trace.flops.at(batch_size), trace.moved.at(batch_size)
    seconds = speeds.seconds(trace.operations, flops, moved, tf32=work.tf32)
    backward = float(seconds[trace.is_backward].sum())
    forward = float(seconds.sum()) - backward
    backward += work.recomputation
    others = (work.world_size - 1) / work.world_size
    passing = others * (traffic.gathered + traffic.reduced) / speeds.link
    copying = max(traffic.to_device / speeds.to_device, traffic.to_host / speeds.to_host)
    waiting = work.accumulate * max(passing - forward - backward, copying - forward - backward, 0.0)
    waiting += max(others * traffic.reduced_once / speeds.link - backward, 0.0)
    waiting += others * traffic.exposed / speeds.link
    update = traffic.stepped * (BYTES_PER_UPDATE + BYTES_PER_CLIP) / speeds.bandwidth
    update += traffic.stepped_on_host / speeds.host_updates + traffic.refreshed / speeds.to_device
    update += work.averaged * _BYTES_PER_AVERAGE / speeds.bandwidth
    passes = work.accumulate
    return StepTime(passes * forward, passes * backward, passes * work.encoding, waiting, update)
