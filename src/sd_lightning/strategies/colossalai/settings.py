"""Arguments of ColossalAI's engine, answers to those of 2022, and the memory that it takes with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner.footprint import Footprint, Holding, Traffic, When, Workload

WHO = "ColossalAIStrategy"
OURS = "or choose strategy=gemini, the engine of this package"
Policy = Literal["static", "auto"]


@dataclass(frozen=True, kw_only=True)
class ColossalAIConfig:
    """Arguments of ``GeminiDDP`` and ``GeminiOptimizer`` of ColossalAI 0.5.0, by the same names.

    The three fractions are of a sum in which ColossalAI counts a chunk once for every parameter in it, so all values
    but 0 and 1 act as larger ones. The log says how many chunks are offloaded.

    Raises:
        UsageError: A value is invalid, or ColossalAI would ignore it.
    """

    placement_policy: Policy = "static"
    """``static``: place by the three fractions; ``auto``: weights by the memory measured in the first step, the
    optimizer in host memory."""
    shard_param_frac: float = 1.0
    """Fraction of weights resharded after use: 1 is ZeRO-3, 0 is ZeRO-2. For ``static``."""
    offload_optim_frac: float = 0.0
    """Fraction of optimizer states in host memory. For ``static``."""
    offload_param_frac: float = 0.0
    """Fraction of weights in host memory; needs the other two fractions to be 1. For ``static``."""
    warmup_non_model_data_ratio: float = 0.8
    """Fraction of the device's memory left to activations in the first step. For ``auto``."""
    steady_cuda_cap_ratio: float = 0.9
    """Fraction of the device's memory used from the second step on. For ``auto``."""
    min_chunk_size_m: float = 32.0
    """Minimum size of a chunk, in 2**20 elements. A smaller model is replicated, not sharded."""
    search_range_m: float = 32.0
    """Range above the minimum that is searched for the size with the least waste, in 2**20 elements."""
    hidden_dim: int = 1024
    """Elements between two chunk sizes that are tried."""
    max_prefetch: int = 0
    """Chunks gathered ahead of their use."""
    pin_memory: bool = False
    """Keep a page-locked copy of every chunk in host memory: faster moves, more memory."""
    initial_scale: float = 2.0**16
    """Initial loss scale. This and the six fields below are for ``precision=16-mixed``."""
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    """Steps without overflow before the scale grows."""
    hysteresis: int = 2
    """Overflows in a row before the scale is lowered."""
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        if self.placement_policy not in ("static", "auto"):
            raise UsageError(
                f"{WHO} got placement_policy={self.placement_policy!r}; expected static or auto (in place of cuda and "
                "cpu of 2022: static, and for cpu also offload_optim_frac=1 and offload_param_frac=1)"
            )
        for name in (*_STATIC_ONLY, *_AUTO_ONLY):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{WHO} got {name}={getattr(self, name)}; expected a fraction in [0, 1]")
        for name, least in (("min_chunk_size_m", 0), ("search_range_m", 0), ("hidden_dim", 1), ("max_prefetch", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{WHO} got {name}={getattr(self, name)}; expected at least {least}")
        other = "static" if self.placement_policy == "auto" else "auto"
        for name in _AUTO_ONLY if other == "auto" else _STATIC_ONLY:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(
                    f"{WHO} got {name}={getattr(self, name)} with placement_policy={self.placement_policy}, which does "
                    f"not use it; leave it out, or set placement_policy={other}"
                )
        if self.offload_param_frac > 0 and (self.shard_param_frac, self.offload_optim_frac) != (1.0, 1.0):
            raise UsageError(
                f"{WHO} got offload_param_frac={self.offload_param_frac}, which ColossalAI ignores unless "
                "shard_param_frac=1 and offload_optim_frac=1; set those as well"
            )

    @property
    def offloads(self) -> bool:
        """Whether optimizer states may be in host memory."""
        return self.placement_policy == "auto" or self.offload_optim_frac > 0

    def of_engine(self) -> dict[str, Any]:
        """Return the arguments of ``GeminiDDP``."""
        return {name: value for name, value in vars(self).items() if name not in _LOSS_SCALE}

    def of_loss_scale(self) -> dict[str, Any]:
        """Return the arguments of ``GeminiOptimizer``."""
        return {name: getattr(self, name) for name in _LOSS_SCALE}


_STATIC_ONLY = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
_AUTO_ONLY = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio")
_FIELDS = tuple(field.name for field in fields(ColossalAIConfig))
_LOSS_SCALE = _FIELDS[_FIELDS.index("initial_scale") :]
_OF_2022: dict[str, tuple[Any, str]] = {
    "use_chunk": (True, "ColossalAI's engine has nothing but chunks; leave it out, or choose strategy=fsdp"),
    "enable_distributed_storage": (True, "write shard_param_frac=0 (ZeRO-2)"),
    "chunk_size": (
        None,
        "it was stored and never used; write min_chunk_size_m (in 2**20 elements) and search_range_m=0",
    ),
    "min_chunk_size": (None, "write min_chunk_size_m, in 2**20 elements"),
    "chunk_search_range": (None, "write search_range_m, in 2**20 elements"),
    "chunk_search_n_grids": (None, "write hidden_dim: the elements of the search range, divided by it"),
    "force_outputs_fp32": (False, "the loss is computed in float32 here whatever a network returns; leave it out"),
    "gpu_margin_mem_ratio": (
        0,
        "by it every process moves weights as its own free memory says: their places would differ, and averages and "
        "checkpoints lose them; leave it out, or set placement_policy=static and offload_optim_frac below 1",
    ),
}
"""Argument of ``lightning-colossalai`` 0.1.0 and Lightning 1.8-1.9 -> the value that says what is so anyway, and the
remedy for others."""


def config_of(config: ColossalAIConfig | None, given: Mapping[str, Any]) -> ColossalAIConfig:
    """Return a configuration changed by arguments.

    Raises:
        UsageError: An argument is unknown, or of 2022 and has another name or no meaning now.
    """
    for name, value in given.items():
        if name in _OF_2022 and value != _OF_2022[name][0]:
            raise UsageError(f"{WHO} got {name}={value!r}, an argument of 2022: {_OF_2022[name][1]}")
        if name not in _OF_2022 and name not in _FIELDS:
            known = ["timeout_seconds", "build_timeout_seconds", *_FIELDS]
            near = difflib.get_close_matches(name, known, n=1) or ["one of " + ", ".join(known)]
            raise UsageError(f"{WHO} got {name}={value!r}; expected {near[0]}")
    return replace(config or ColossalAIConfig(), **{n: v for n, v in given.items() if n in _FIELDS})


_FLOAT_BYTES = 4
_CHUNKS_IN_USE = 2
"""Chunks that are gathered at a time: a block's weights may be in two."""


def footprint_of(config: ColossalAIConfig, workload: Workload) -> Footprint | None:
    """Count chunks; gradients overwrite the weights in them.

    Returns:
        None for ``placement_policy="auto"``, which places by measurements.
    """
    if config.placement_policy == "auto":
        return None
    size, numel = workload.half.itemsize, sum(weight.numel for weight in workload.weights)
    chunk = max(int(config.min_chunk_size_m * 2**20), 1)
    is_sharded = numel > chunk and config.shard_param_frac > 0
    padded = -(-numel // chunk) * chunk if is_sharded else numel
    part = padded // workload.world_size
    weights = Holding("weights", size * (part if is_sharded else padded))
    stepped = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    on_host = config.offload_optim_frac
    device = [Holding(each.kind, int(each.nbytes * (1 - on_host))) for each in stepped]
    host = [Holding(each.kind, int(each.nbytes * on_host)) for each in stepped]
    device.append(Holding(weights.kind, int(weights.nbytes * (1 - config.offload_param_frac))))
    host.append(Holding(weights.kind, int(weights.nbytes * config.offload_param_frac)))
    if is_sharded:
        device.append(Holding("gathered weights", size * chunk * _CHUNKS_IN_USE, When.COMPUTE))
    moved = int(size * part * on_host)
    return Footprint(
        dtype=workload.half,
        autocast=workload.half,
        device=[each for each in device if each.nbytes],
        host=[each for each in host if each.nbytes],
        traffic=Traffic(
            gathered=2 * size * padded if is_sharded else 0,
            reduced=size * padded,
            collectives=(2 * is_sharded + 1) * -(-padded // chunk),
            copied=size * padded * (workload.world_size > 1),
            to_device=2 * int(size * part * config.offload_param_frac),
            to_host=moved,
            refreshed=moved,
            stepped=int(part * (1 - on_host)),
            stepped_on_host=int(part * on_host),
        ),
        averaged=int(part * (1 - on_host)),
        averaged_on_host=int(part * on_host),
    )
