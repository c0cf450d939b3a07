"""The settings of the Gemini engine, checked before any memory is allocated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sd_lightning._errors import UsageError


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
    chunk_search: tuple[int, int] | None = None
    """Smallest and largest chunk size to search, in elements; by default derived from the model size."""
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
    reduce_dtype: torch.dtype = torch.float32
    """Type in which gradients of narrower types are summed over the ranks; others are summed in their own. A
    half-precision type halves the bytes that nccl sends, and rounds at every addition."""
    reduce_once: bool | Literal["auto"] = False
    """Inside ``no_sync``, keep whole float32 gradients and reduce them once, instead of after each micro-batch;
    ``"auto"``: if there is memory for them. The order of summation differs, so free memory
    can change the last bits under ``"auto"``."""

    def __post_init__(self) -> None:
        for name in _FRACTIONS:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise _refused(f"{name}={value}; expected a fraction in [0, 1], e.g. {name}=0.5")
        self._check_choices()
        self._check_sizes()
        if self.placement == "auto":
            self._check_auto()
        else:
            self._check_static()

    def _check_choices(self) -> None:
        if self.placement not in ("static", "auto"):
            raise _refused(f"placement={self.placement!r}; expected 'static' or 'auto'")
        if not isinstance(self.reduce_once, bool) and self.reduce_once != "auto":
            raise _refused(f"reduce_once={self.reduce_once!r}; expected true, false or 'auto'")
        allowed = (torch.float32, torch.bfloat16, torch.float16)
        if self.compute_dtype not in (None, torch.float64, *allowed):
            raise _refused(f"compute_dtype={self.compute_dtype}; expected float32, bfloat16, float16 or float64")
        if self.reduce_dtype not in allowed:
            expected = "float32, or bfloat16 or float16 to send half as much"
            raise _refused(f"reduce_dtype={self.reduce_dtype}; expected {expected}")

    def _check_sizes(self) -> None:
        for name, least in (("chunk_numel", 16), ("gathered_budget", 0), ("prefetch", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise _refused(f"{name}={value}; expected at least {least}")
        if self.chunk_search is not None and not 16 <= self.chunk_search[0] <= self.chunk_search[1]:
            raise _refused(
                f"chunk_search={self.chunk_search}; expected (smallest, largest) with 16 <= smallest <= largest, in "
                "elements"
            )
        if self.chunk_numel is not None and self.chunk_search is not None:
            raise _refused("both chunk_numel and chunk_search; give one of the two")
        self.memory_cap_bytes(1)
        if self.disk_optim_frac > 0 and self.offload_dir is None:
            raise _refused(
                f"disk_optim_frac={self.disk_optim_frac} without offload_dir; expected a folder on a local disk, e.g. "
                "offload_dir=/scratch/gemini"
            )
        if self.disk_optim_frac == 0 and self.offload_dir is not None:
            raise _refused(f"offload_dir={self.offload_dir} but nothing goes to disk; set disk_optim_frac")

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
            raise _refused(
                f"memory_cap={self.memory_cap!r}; expected a fraction of the device in (0, 1], or a size such as "
                "memory_cap=20GiB"
            )
        if unit is None and number <= 1:
            return int(number * device_bytes)
        return int(number * 2 ** (10 * "BKMGT".index((unit or "B")[0])))

    def _check_auto(self) -> None:
        decided = [
            name for name in (*_FRACTIONS, "gathered_budget") if getattr(self, name) != getattr(type(self), name)
        ]
        if decided:
            remedy = "auto decides these: leave them out, or set placement=static"
            raise _refused(f"placement=auto and {', '.join(decided)}; {remedy}")
        if self.memory_cap is None:
            raise _refused("placement=auto without memory_cap; expected e.g. memory_cap=0.9")

    def _check_static(self) -> None:
        if self.memory_cap is not None:
            raise _refused(
                f"memory_cap={self.memory_cap} with placement=static; set placement=auto, or use the fractions and "
                "gathered_budget"
            )
        if self.offload_param_frac > self.shard_param_frac:
            raise _refused(
                f"offload_param_frac={self.offload_param_frac} and shard_param_frac={self.shard_param_frac}; only "
                "sharded weights are offloaded: expected offload_param_frac <= shard_param_frac"
            )
        if self.disk_optim_frac > self.offload_optim_frac:
            raise _refused(
                f"disk_optim_frac={self.disk_optim_frac} and offload_optim_frac={self.offload_optim_frac}; the disk "
                "holds a part of what is offloaded: expected disk_optim_frac <= offload_optim_frac"
            )


_FRACTIONS = ("shard_param_frac", "offload_optim_frac", "offload_param_frac", "disk_optim_frac")


def _refused(message: str) -> UsageError:
    return UsageError(f"GeminiConfig got {message}")
