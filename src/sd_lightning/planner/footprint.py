"""The memory that a strategy takes for trained weights: declared by each strategy, read by the planner.

A :class:`Candidate` is a strategy that the planner compares; ours are in
:mod:`sd_lightning.strategies.presets`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import nn

from sd_lightning._errors import UsageError
from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.state.host import page_locked_bytes

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Weight:
    """A parameter of a trained network."""

    name: str
    """With the network's name: "unet.conv_in.weight"."""
    shape: tuple[int, ...]
    is_trained: bool
    block: str
    """Its repeated block, which engines gather at once; "" outside of blocks."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows_of(self, parts: int) -> int:
        """Return the elements of one of several parts, cut between rows and padded to whole rows."""
        rows = self.shape[0] if self.shape else 1
        return -(-rows // parts) * (self.numel // max(rows, 1))


@dataclass(frozen=True)
class Workload:
    """What a strategy is given to train."""

    weights: Sequence[Weight]
    """Of all trained networks, also frozen ones beside LoRA's adapters."""
    precision: str
    """Lightning's name: "32-true", "bf16-mixed", "bf16-true", "16-mixed"."""
    optimizer: OptimizerFactory
    world_size: int = 1
    accumulates: bool = False
    """Whether several micro-batches make a step."""
    _stepped: dict[tuple[torch.dtype, bool], float] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def trained(self) -> list[Weight]:
        return [weight for weight in self.weights if weight.is_trained]

    @property
    def is_mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def half(self) -> torch.dtype:
        """The 16-bit dtype of the precision."""
        return torch.float16 if self.precision.startswith("16") else torch.bfloat16

    @property
    def lightning_dtype(self) -> torch.dtype:
        """Dtype of weights where Lightning's own plugins set the precision."""
        return torch.float32 if self.is_mixed or self.precision == "32-true" else self.half

    @property
    def engine_dtype(self) -> torch.dtype:
        """Dtype of weights in engines that keep float32 master weights."""
        return torch.float32 if self.precision == "32-true" else self.half

    def states(self, sizes: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the optimizer's states of tensors with these numbers of elements."""
        return sum(int(size * self._states_per_element(dtype, size < _SMALL)) for size in sizes)

    def _states_per_element(self, dtype: torch.dtype, is_small: bool) -> float:
        """Step a tensor of its own, once per kind: any optimizer is then counted as it is."""
        key = dtype, is_small
        if key not in self._stepped:
            parameter = nn.Parameter(torch.zeros(64 if is_small else 2 * _SMALL, dtype=dtype))
            optimizer = self.optimizer([parameter])
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                raise UsageError(
                    f"the planner got {type(optimizer).__name__}, which computes the loss several times in a step, so "
                    "its time and memory cannot be predicted; expected an optimizer whose step needs no closure, such "
                    "as torch.optim.AdamW; write a strategy yourself to train with this one"
                )
            parameter.grad = torch.zeros_like(parameter)
            if hasattr(optimizer, "train"):  # schedule-free
                optimizer.train()
            optimizer.step()
            tensors = (t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor) and t.numel() > 1)
            # bitsandbytes keeps a table of 256 values per tensor beside its states, shared by all.
            counted = (t.nbytes for t in tensors if t.numel() != 256 or t.dtype != torch.float32)
            self._stepped[key] = sum(counted) / parameter.numel()
        return self._stepped[key]


_SMALL = 4096
"""Elements below which bitsandbytes keeps states in 32 bits."""


class When(StrEnum):
    """The part of a training step in which memory is taken."""

    ALWAYS = "always"
    FORWARD = "forward"
    """Until the backward pass begins."""
    COMPUTE = "compute"
    """In the forward and the backward pass, not while the optimizer steps; also while images are drawn."""
    BACKWARD = "backward"
    AS_READY = "as ready"
    """Grows with the gradients that are ready; whole while the optimizer steps."""
    UNTIL_UPDATE = "until update"
    """Grows with the gradients that are ready; freed before the optimizer steps."""
    UNTIL_READY = "until ready"
    """Whole in the forward pass; shrinks with the gradients that are ready."""
    UPDATE = "update"
    """While the optimizer steps."""
    SWAPPED = "swapped"
    """While the EMA is in the trained weights' place, to draw images."""
    SWAPPED_APART = "swapped apart"
    """The same, only if the EMA is not beside the master weights."""


@dataclass(frozen=True)
class Holding:
    """Memory for one purpose."""

    kind: str
    """For tables: "weights", "gradients", "optimizer states", …"""
    nbytes: int
    when: When = When.ALWAYS


PAGE_LOCKED_ROUNDING = "rounding of page-locked memory"
"""What page-locked blocks take beside what they hold; only with CUDA."""


def rounding(blocks: Iterable[int]) -> Holding:
    """Return what torch's page-locked blocks, of these bytes, take in host memory beside what they hold."""
    return Holding(PAGE_LOCKED_ROUNDING, sum(page_locked_bytes(nbytes) - nbytes for nbytes in blocks))


@dataclass(frozen=True)
class Traffic:
    """What one process moves and updates, and when.

    Bytes of a collective are those of its whole result or input; the planner divides them among the processes.
    """

    gathered: int = 0
    """Bytes of weights that are all-gathered in each pass, while blocks compute."""
    reduced: int = 0
    """Bytes of gradients that are reduce-scattered in each pass, while blocks compute."""
    all_reduced: int = 0
    """Bytes that are all-reduced once per step, in the last backward pass."""
    exposed: int = 0
    """Bytes that are reduce-scattered or all-gathered once per step, while nothing computes."""
    to_device: int = 0
    """Bytes copied from host memory in each pass, while blocks compute."""
    to_host: int = 0
    """Bytes copied to host memory in each pass, while blocks compute."""
    refreshed: int = 0
    """Bytes copied from host memory once per step, after the update."""
    collectives: int = 0
    """Collectives in each pass."""
    copied: int = 0
    """Bytes copied in each pass to and from the buffers of collectives, within the device's memory."""
    hooks: int = 0
    """Times that the engine runs Python code for a weight or a module in each pass."""
    threaded: bool = False
    """Whether collectives run in threads: beside the computation also on a CPU, where there are no streams."""
    stepped: int = 0
    """Elements that the optimizer updates on the device."""
    stepped_on_host: int = 0
    """Elements that it updates in host memory; of a slower update, those that AdamW would update in its time."""


@dataclass(frozen=True, eq=False)
class Footprint:
    """What one process holds for the trained weights under a strategy."""

    dtype: torch.dtype
    """Of the weights that the networks compute with."""
    autocast: torch.dtype | None
    """Dtype of autocast around the forward pass."""
    device: Sequence[Holding]
    host: Sequence[Holding] = ()
    disk: int = 0
    """Bytes of files."""
    in_forward: Mapping[str, int] = field(default_factory=dict)
    """Bytes of gathered weights while a block computes forward, by block; "" for what is outside of blocks."""
    in_backward: Mapping[str, int] = field(default_factory=dict)
    """Bytes of gathered weights and of gradients on their way while a block computes backward, by block."""
    traffic: Traffic = Traffic()
    averaged: int = 0
    """Trained elements whose master weights are on the device; their EMA is kept beside them."""
    averaged_on_host: int = 0
    """The same for host memory and disk."""
    master_dtype: torch.dtype = torch.float32
    """Of the weights that the optimizer updates; the EMA, in float32, casts others in each update."""
    menu: tuple[SavedActivations, ...] = tuple(SavedActivations)
    """What blocks may keep for backward."""

    @property
    def drawing(self) -> int:
        """Bytes on the device while images are drawn, beside what is always held."""
        return sum(held.nbytes for held in self.device if held.when in (When.COMPUTE, When.UNTIL_READY)) + max(
            self.in_forward.values(), default=0
        )


def replicated(workload: Workload, *, buckets: bool = False) -> Footprint:
    """Return the footprint of whole weights in every process.

    Lightning frees gradients between the forward and the backward pass of the next step.

    Args:
        workload: What is trained.
        buckets: Gradients are views of buckets that are never freed.
    """
    dtype = workload.lightning_dtype
    weights = dtype.itemsize * sum(weight.numel for weight in workload.weights)
    sizes = [weight.numel for weight in workload.trained]
    gradients = dtype.itemsize * sum(sizes)
    kept = [Holding("gradients", gradients, When.FORWARD), Holding("gradients", gradients, When.AS_READY)]
    return Footprint(
        dtype=dtype,
        autocast=workload.half if workload.is_mixed else None,
        device=[
            Holding("weights", weights),
            Holding("optimizer states", workload.states(sizes, dtype)),
            *([Holding("gradients", gradients)] if buckets or workload.accumulates else kept),
            Holding("swapped weights", gradients, When.SWAPPED_APART if dtype == torch.float32 else When.SWAPPED),
        ],
        traffic=Traffic(all_reduced=gradients if buckets else 0, stepped=sum(sizes)),
        averaged=sum(sizes),
        master_dtype=dtype,
    )


@dataclass(frozen=True)
class Candidate:
    """A strategy with settings."""

    strategy: str
    """Its name on the command line: ``strategy=<name>``; "" if the command line says it already."""
    build: Callable[..., Any]
    """Settings -> strategy, which has a ``footprint``; raises UsageError if a package is missing."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the name's defaults."""
    processes: tuple[int, int | None] = (1, None)
    """Least number of processes with which it divides anything, and the largest."""

    @property
    def options(self) -> tuple[str, ...]:
        """Return the command line that chooses it."""
        settings = (f"strategy.{name}={value}" for name, value in self.settings.items())
        return (*[f"strategy={self.strategy}"] * bool(self.strategy), *settings)

    @property
    def name(self) -> str:
        """Its name and settings in tables: "gemini offload_optim_frac=0.5"."""
        settings = (f"{name}={value}" for name, value in self.settings.items())
        return " ".join([self.strategy or "as given", *settings])

    def suits(self, count: int) -> bool:
        """Return whether it is for this number of processes."""
        least, most = self.processes
        return least <= count and (most is None or count <= most)

    def footprint(self, workload: Workload) -> Footprint | None:
        """Return what it holds; see :meth:`sd_lightning.strategies.EngineStrategy.footprint`.

        Raises:
            UsageError: A package is missing, or it cannot step the optimizer.
        """
        engine = self.build(**self.settings)
        engine.check_optimizer(workload.optimizer([nn.Parameter(torch.zeros(2, 2))]))
        return engine.footprint(workload)
