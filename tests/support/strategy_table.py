"""Strategies by the names that tests call them: the one factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_lightning.strategies.auto import AutoStrategy
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed.strategy import DeepSpeedStrategy
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy

SHARD_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}
SETTINGS: dict[type, dict[str, dict[str, Any]]] = {
    AutoStrategy: {"auto": {"device": "rtx-3060"}},
    DDPStrategy: {
        "ddp": {},
        "ddp_unused": {"find_unused_parameters": True},
        "ddp_static": {"static_graph": True, "gradient_as_bucket_view": False, "bucket_cap_mb": 1},
        "ddp_bf16": {"compression": "bf16"},
        "ddp_fp16": {"compression": "fp16"},
    },
    FSDPStrategy: {
        "fsdp": {},
        "fsdp_offload": {"cpu_offload": True},
        "fsdp_grad_op": {"reshard_after_forward": False, "forward_prefetch": 1},
        "fsdp_bf16": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        "hsdp": {"replicas": 2},
    },
    # All but ``zero3_default`` shard even the smallest parameter at stage 3.
    DeepSpeedStrategy: {
        "zero1": {"stage": 1},
        "zero2": {"stage": 2},
        "zero2_offload": {"stage": 2, "offload_optimizer": "cpu", "cpu_adam": False},
        "zero2_cpu_adam": {"stage": 2, "offload_optimizer": "cpu"},
        "zero3": SHARD_ALL,
        "zero3_default": {"stage": 3},
        "zero3_offload": SHARD_ALL | {"offload_optimizer": "cpu", "offload_parameters": "cpu", "cpu_adam": False},
    },
    GeminiStrategy: {
        "gemini": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "gathered_budget": 2**20},
        "gemini_default": {},
        "gemini_small_chunks": {"chunk_numel": 5000, "offload_optim_frac": 1.0},
        "gemini_kept": {"shard_param_frac": 0.0},
        "gemini_mixed": {"shard_param_frac": 0.5, "offload_optim_frac": 0.5, "offload_param_frac": 0.5},
        "gemini_offload": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 0},
        "gemini_auto": {"placement": "auto", "memory_cap": "12MiB"},
        # On CUDA 64 MiB are cuBLAS's: a workspace for the forward's thread, and one for the backward's.
        "gemini_auto_gpu": {"placement": "auto", "memory_cap": "160MiB"},
    },
}
STRATEGIES = (
    "ddp",
    "fsdp",
    "fsdp_offload",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_default",
    "zero3_offload",
    "gemini",
    "gemini_offload",
)
"""What two processes train with; a new strategy joins by a line here."""


def strategy_of(name: str, *, replaced: Mapping[type, type] | None = None, **more: Any) -> Any:
    """Return a fresh strategy, or "auto" for ``single``.

    Args:
        name: In :data:`SETTINGS`.
        replaced: Classes that stand in for ours.
        **more: More arguments.
    """
    if name == "single":
        return "auto"
    cls = next(cls for cls, named in SETTINGS.items() if name in named)
    return (replaced or {}).get(cls, cls)(**SETTINGS[cls][name] | more)
