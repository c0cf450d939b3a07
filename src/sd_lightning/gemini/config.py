"""The settings of the Gemini engine, checked before any memory is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import torch

from sd_lightning._errors import UsageError


class Master(StrEnum):
    """How the weights that the optimizer steps are kept, beside bfloat16 compute weights."""

    FLOAT32 = "float32"
    """In float32."""
    SPLIT = "split"
    """In float32 whose upper halves are the compute weights, where both are on the host; the same bits of training."""
    BFLOAT16 = "bfloat16"
    """As the compute weights: stepped in float32, and rounded stochastically."""


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """How weights, gradients and optimizer states are sharded, placed and moved.

    The names of the fractions are ColossalAI's. Fractions are rounded up to whole chunks, starting with the first one.

    Raises:
        UsageError: A setting, or a combination of settings, is invalid.
    """

    placement: Literal["static", "auto"] = "static"
    """``static`` uses the fractions below; ``auto`` measures the first step and fills the fast tier up to
    ``memory_cap``."""
    shard_param_frac: float = 1.0
    """Part of the weights that is sharded over the ranks; the rest stays gathered on every rank (ZeRO-2)."""
    offload_optim_frac: float = 0.0
    """Part of the master weights, optimizer states and gradients that lives on the slow tier and is stepped there."""
    offload_param_frac: float = 0.0
    """Part of the weights whose shards live on the slow tier between uses; sharded weights only."""
    disk_optim_frac: float = 0.0
    """Part of the master weights and optimizer states that lives in memory-mapped files under ``offload_dir``."""
    chunk_numel: int | None = None
    """Elements per chunk; by default the size with the least padding."""
    gathered_budget: int | None = None
    """Limit for temporarily gathered weights, in bytes; none by default. One unit is always gathered as a whole."""
    prefetch: int = 2
    """Chunks gathered ahead of their use, in the traced order and within the budget."""
    memory_cap: float | str | None = None
    """For ``auto``: how much of the fast tier may be used, as a fraction of the device in (0, 1] or a size:
    ``"20GiB"``, ``"512MiB"``, a number of bytes. On the CPU, the device is the host memory divided by the ranks on
    that host."""
    offload_dir: str | Path | None = None
    """Folder on a fast local disk for ``disk_optim_frac``."""
    compute_dtype: torch.dtype | None = None
    """Type in which weights are gathered and gradients computed; by default each parameter's own."""
    master: Literal["float32", "split", "bfloat16"] = "float32"
    """How the weights that the optimizer steps are kept; see :class:`Master`. The others than ``float32`` need bfloat16
    as the compute type."""
    rounding_seed: int = 0
    """Seed of the stochastic rounding of ``master="bfloat16"``."""
    reduce_dtype: torch.dtype = torch.float32
    """Type in which gradients of narrower types are summed over the ranks; others are summed in their own. A
    half-precision type halves the bytes that nccl sends, and rounds at every addition."""
    reduce_once: bool | Literal["auto"] = False
    """Inside ``no_sync``, keep whole float32 gradients and reduce them once, instead of after each micro-batch;
    ``"auto"``: if there is memory for them. The order of summation differs, so free memory
    can change the last bits under ``"auto"``."""

    gradient_dtype: torch.dtype = torch.float32
    """Type in which the slow tier gets and keeps the reduced gradients of bfloat16 weights. ``bfloat16`` takes half;
    the host widens them block by block. It is exact on one rank; sums over several ranks are rounded."""
    step_in_backward: bool | Literal["running_norm"] = False
    """Step each chunk in the backward pass, as soon as its gradients are complete, and free them. A step has one
    backward pass and no clipping then. ``"running_norm"`` clips by the larger of two norms: that of the last step's
    gradients, and that of the gradients so far in this pass."""

    def __post_init__(self) -> None:
        for is_wrong, message in self._rules():
            if is_wrong:
                raise UsageError(f"GeminiConfig got {message}")
        self.memory_cap_bytes(1)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield whether each rule is broken, and what was given and what is expected."""
        for name in _FRACTIONS:
            value = getattr(self, name)
            yield not 0 <= value <= 1, f"{name}={value}; expected a fraction in [0, 1], e.g. {name}=0.5"
        for name, least in (("chunk_numel", 16), ("gathered_budget", 0), ("prefetch", 0)):
            value = getattr(self, name)
            yield value is not None and value < least, f"{name}={value}; expected at least {least}"
        for name, choices, expected in _CHOICES:
            value = getattr(self, name)
            is_choice = any(value == choice and isinstance(value, type(choice)) for choice in choices)  # not 1 for true
            yield not is_choice, f"{name}={value}; expected {expected}"
        yield from self._rules_of_master()
        auto, static = self.placement == "auto", self.placement == "static"
        narrow = self.gradient_dtype == torch.bfloat16
        is_wider = narrow and self.compute_dtype not in (None, torch.bfloat16)
        remedy = "which is computed more exactly: leave gradient_dtype out, or train in bfloat16 (precision=bf16-mixed)"
        yield is_wider, f"gradient_dtype=bfloat16 and compute_dtype={self.compute_dtype}, {remedy}"
        remedy = "but no gradient goes to the host; set offload_optim_frac"
        yield narrow and static and not self.offload_optim_frac, f"gradient_dtype=bfloat16, {remedy}"
        early = self.step_in_backward
        late = "only the end of the pass shows whether its gradients overflow; take bfloat16 (precision=bf16-mixed)"
        for is_wrong, other, why in (
            (auto, "placement=auto", "that plans with the gradients of all chunks; write placement=static"),
            (self.reduce_once is not False, f"reduce_once={self.reduce_once}", "a step has one backward pass"),
            (self.compute_dtype == torch.float16, "float16", late),
        ):
            yield bool(early) and is_wrong, f"step_in_backward={early} and {other}: {why}"
        needs_dir, has_dir = self.disk_optim_frac > 0, self.offload_dir is not None
        remedy = "expected a folder on a local disk, e.g. offload_dir=/scratch/gemini"
        yield needs_dir and not has_dir, f"disk_optim_frac={self.disk_optim_frac} without offload_dir; {remedy}"
        remedy = "but nothing goes to disk; set disk_optim_frac"
        yield has_dir and not needs_dir, f"offload_dir={self.offload_dir} {remedy}"
        names = (*_FRACTIONS, "gathered_budget")
        decided = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        remedy = "auto decides these: leave them out, or set placement=static"
        yield auto and bool(decided), f"placement=auto and {', '.join(decided)}; {remedy}"
        yield auto and self.memory_cap is None, "placement=auto without memory_cap; expected e.g. memory_cap=0.9"
        remedy = "set placement=auto, or use the fractions and gathered_budget"
        yield static and self.memory_cap is not None, f"memory_cap={self.memory_cap} with placement=static; {remedy}"
        for part, whole, why in (
            ("offload_param_frac", "shard_param_frac", "only sharded weights are offloaded"),
            ("disk_optim_frac", "offload_optim_frac", "the disk holds a part of what is offloaded"),
        ):
            given = f"{part}={getattr(self, part)} and {whole}={getattr(self, whole)}"
            yield getattr(self, part) > getattr(self, whole), f"{given}; {why}: expected {part} <= {whole}"

    def _rules_of_master(self) -> Iterator[tuple[bool, str]]:
        least = min(self.offload_optim_frac, self.offload_param_frac)
        given = f"offload_optim_frac={self.offload_optim_frac} and offload_param_frac={self.offload_param_frac}"
        remedy = "only chunks are split whose weights and optimizer are on the host: expected both above 0"
        is_whole = self.master == "split" and self.placement == "static" and not least
        yield is_whole, f"master=split, {given}; {remedy}"
        yield not 0 <= self.rounding_seed < 2**64, f"rounding_seed={self.rounding_seed}; expected 0 <= seed < 2**64"
        remedy = "only master=bfloat16 rounds stochastically"
        is_unused = self.rounding_seed != 0 and self.master != "bfloat16"
        yield is_unused, f"rounding_seed={self.rounding_seed} with master={self.master}; {remedy}"

    def memory_cap_bytes(self, device_bytes: int) -> int | None:
        """Return ``memory_cap`` in bytes on a device of this size.

        Raises:
            UsageError: ``memory_cap`` is neither a fraction nor a size.
        """
        if self.memory_cap is None:
            return None
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\d+)? *([KMGT]iB|B)?", str(self.memory_cap))
        number, unit = (float(match[1] + (match[2] or "")), match[3]) if match else (0.0, None)
        if number <= 0 or (unit is None and 1 < number < 2**20):
            raise UsageError(
                f"GeminiConfig got memory_cap={self.memory_cap!r}; expected a fraction of the device in (0, 1], or "
                "a size such as memory_cap=20GiB"
            )
        if unit is None and number <= 1:
            return int(number * device_bytes)
        return int(number * 2 ** (10 * "BKMGT".index((unit or "B")[0])))


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_HALF = "(in Python torch.bfloat16)"
_CHOICES = (
    ("placement", ("static", "auto"), "'static' or 'auto'"),
    ("reduce_once", (True, False, "auto"), "true, false or 'auto'"),
    ("compute_dtype", (None, torch.float64, *_TYPES), "float32, bfloat16, float16 or float64"),
    ("reduce_dtype", _TYPES, f"float32, or bfloat16 or float16 to send half as much {_HALF}"),
    ("gradient_dtype", _TYPES[:2], f"float32, or bfloat16 to keep half as much {_HALF}"),
    ("step_in_backward", (True, False, "running_norm"), "true, false or 'running_norm'"),
    ("master", tuple(map(str, Master)), f"one of {', '.join(Master)}"),
)
"""Settings, their values, and what a message expects."""
_FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac", "disk_optim_frac")
