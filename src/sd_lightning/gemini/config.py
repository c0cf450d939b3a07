"""The settings of the Gemini engine, checked before any memory is spent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sd_lightning._errors import UsageError


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """How weights, gradients and optimizer states are cut, placed and moved.

    The names of the fractions are ColossalAI's. Fractions are reached in whole chunks, from the first one on.

    Raises:
        UsageError: A setting, or a combination of settings, cannot work.
    """

    placement: Literal["static", "auto"] = "static"
    """``static`` takes the fractions below; ``auto`` measures the first step and fills the fast tier up to
    ``memory_cap``."""
    shard_param_frac: float = 1.0
    """Part of the weights that is cut over the ranks; what is not stays gathered on every rank (ZeRO-2)."""
    offload_optim_frac: float = 0.0
    """Part of the optimizer's float32 weights, states and gradients that lives on the slow tier and steps there."""
    offload_param_frac: float = 0.0
    """Part of the weights whose shards live on the slow tier between uses; sharded weights only."""
    disk_optim_frac: float = 0.0
    """Part of the optimizer's float32 weights and states that lives in mapped files under ``offload_dir``."""
    chunk_numel: int | None = None
    """Elements of a chunk; the size with the least padding if not given."""
    chunk_search: tuple[int, int] | None = None
    """Smallest and largest size to search, in elements; from the size of the model if not given."""
    gathered_budget: int | None = None
    """Bytes of temporarily gathered weights; no limit if not given. One unit is always gathered as a whole."""
    prefetch: int = 2
    """Chunks gathered ahead of their use, in the traced order and inside the budget."""
    memory_cap: float | str | None = None
    """For ``auto``: what may be used of the fast tier, as a fraction of the device in (0, 1] or a size: ``"20GiB"``,
    ``"512MiB"``, a number of bytes. On the CPU the device is the host's memory, divided by the processes on it."""
    offload_dir: str | Path | None = None
    """Folder on a fast local disk for ``disk_optim_frac``."""
    compute_dtype: torch.dtype | None = None
    """Weights are gathered and gradients computed in this type; each parameter's own type if not given."""
    reduce_dtype: torch.dtype = torch.float32
    """Gradients of a narrower type are summed over the ranks in this one, others in their own. The compute type halves
    what nccl sends, and rounds at every addition."""
    reduce_once: bool | Literal["auto"] = False
    """Inside ``no_sync``, keep whole float32 gradients and reduce them once, instead of after each micro-batch;
    ``"auto"``: if there is memory for them. The order of summation is another one, so that what fits changes bits."""

    def __post_init__(self) -> None:
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac", "disk_optim_frac"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UsageError(f"GeminiConfig got {name}={value}; expected a fraction in [0, 1], e.g. {name}=0.5")
        self._check_choices()
        self._check_sizes()
        self._check_combinations()

    def _check_choices(self) -> None:
        if self.placement not in ("static", "auto"):
            raise UsageError(f"GeminiConfig got placement={self.placement!r}; expected 'static' or 'auto'")
        if not isinstance(self.reduce_once, bool) and self.reduce_once != "auto":
            raise UsageError(f"GeminiConfig got reduce_once={self.reduce_once!r}; expected true, false or 'auto'")
        allowed = (torch.float32, torch.bfloat16, torch.float16)
        if self.compute_dtype not in (None, torch.float64, *allowed):
            raise UsageError(
                f"GeminiConfig got compute_dtype={self.compute_dtype}; expected float32, bfloat16, float16 or float64"
            )
        if self.reduce_dtype not in allowed:
            raise UsageError(
                f"GeminiConfig got reduce_dtype={self.reduce_dtype}; expected float32, or bfloat16 or float16 to send "
                "half as much"
            )

    def _check_sizes(self) -> None:
        for name, least in (("chunk_numel", 16), ("gathered_budget", 0), ("prefetch", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"GeminiConfig got {name}={value}; expected at least {least}")
        if self.chunk_search is not None and not 16 <= self.chunk_search[0] <= self.chunk_search[1]:
            raise UsageError(
                f"GeminiConfig got chunk_search={self.chunk_search}; expected (smallest, largest) with 16 <= smallest "
                "<= largest, in elements"
            )
        self.memory_cap_bytes(1)

    def memory_cap_bytes(self, device_bytes: int) -> int | None:
        """Return ``memory_cap`` on a device of this size.

        Raises:
            UsageError: It is neither a fraction nor a size.
        """
        cap = self.memory_cap
        try:
            match = re.fullmatch(r"([\d.]+(?:e\d+)?) *([KMGT]iB|B)?", str(cap))
            number = 1.0 if cap is None or match is None else float(match[1])
        except ValueError:
            match, number = None, 1.0
        if cap is None:
            return None
        is_plain = match is not None and match[2] is None
        if match is None or number <= 0 or (is_plain and 1 < number < 2**20):
            raise UsageError(
                f"GeminiConfig got memory_cap={cap!r}; expected a fraction of the device in (0, 1], or a size such as "
                "memory_cap=20GiB"
            )
        if is_plain and number <= 1:
            return int(number * device_bytes)
        return int(number * 2 ** (10 * "BKMGT".index((match[2] or "B")[0])))

    def _check_combinations(self) -> None:
        if self.chunk_numel is not None and self.chunk_search is not None:
            raise UsageError("GeminiConfig got both chunk_numel and chunk_search; give one of the two")
        if self.disk_optim_frac > 0 and self.offload_dir is None:
            raise UsageError(
                f"GeminiConfig got disk_optim_frac={self.disk_optim_frac} without offload_dir; expected a folder on a "
                "local disk, e.g. offload_dir=/scratch/gemini"
            )
        if self.offload_dir is not None and self.disk_optim_frac == 0:
            raise UsageError(
                f"GeminiConfig got offload_dir={self.offload_dir} but nothing goes to disk; set disk_optim_frac"
            )
        if self.placement == "auto":
            fixed = {
                "shard_param_frac": self.shard_param_frac != 1.0,
                "offload_optim_frac": self.offload_optim_frac != 0.0,
                "offload_param_frac": self.offload_param_frac != 0.0,
                "disk_optim_frac": self.disk_optim_frac != 0.0,
                "gathered_budget": self.gathered_budget is not None,
            }
            given = [name for name, is_given in fixed.items() if is_given]
            if given:
                raise UsageError(
                    f"GeminiConfig got placement=auto and {', '.join(given)}; auto decides these: leave them out, or "
                    "set placement=static"
                )
            if self.memory_cap is None:
                raise UsageError("GeminiConfig got placement=auto without memory_cap; expected e.g. memory_cap=0.9")
            return
        if self.memory_cap is not None:
            raise UsageError(
                f"GeminiConfig got memory_cap={self.memory_cap} with placement=static; set placement=auto, or use the "
                "fractions and gathered_budget"
            )
        if self.offload_param_frac > self.shard_param_frac:
            raise UsageError(
                f"GeminiConfig got offload_param_frac={self.offload_param_frac} and shard_param_frac="
                f"{self.shard_param_frac}; only sharded weights are offloaded: expected offload_param_frac <= "
                "shard_param_frac"
            )
        if self.disk_optim_frac > self.offload_optim_frac:
            raise UsageError(
                f"GeminiConfig got disk_optim_frac={self.disk_optim_frac} and offload_optim_frac="
                f"{self.offload_optim_frac}; the disk holds a part of what is offloaded: expected disk_optim_frac <= "
                "offload_optim_frac"
            )
