"""The names by which ``Trainer(strategy="…")`` finds our strategies once ``sd_lightning`` is imported."""

from __future__ import annotations

import pkgutil
from functools import partial
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

_FSDP = "sd_lightning.strategies.fsdp:FSDPStrategy"
_GEMINI = "sd_lightning.strategies.gemini:GeminiStrategy"
_DEEPSPEED = "sd_lightning.strategies.deepspeed:deepspeed"
# Names that Lightning does not use; its own ddp, fsdp and deepspeed are never overridden.
STRATEGIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sd_auto": ("sd_lightning.strategies.auto:AutoStrategy", "The fastest of ours that fits, predicted", {}),
    "sd_ddp": ("sd_lightning.strategies.ddp:DDPStrategy", "DDP with portable checkpoints", {}),
    "sd_fsdp": (_FSDP, "FSDP2, sharded block by block", {}),
    "sd_fsdp_offload": (_FSDP, "FSDP2 in host memory", {"cpu_offload": True}),
    "gemini": (_GEMINI, "Gemini: chunks on tiers of memory", {}),
    "gemini_offload": (
        _GEMINI,
        "Gemini in host memory",
        {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 2**29},
    ),
    "sd_colossalai": ("sd_lightning.strategies.colossalai:ColossalAIStrategy", "The real ColossalAI, on CUDA", {}),
    **{f"sd_deepspeed_zero{stage}": (_DEEPSPEED, f"DeepSpeed ZeRO-{stage}", {"stage": stage}) for stage in (1, 2, 3)},
    **{
        f"sd_deepspeed_zero{stage}_offload": (
            _DEEPSPEED,
            f"DeepSpeed ZeRO-{stage}, optimizer in host memory",
            {"stage": stage, "offload_optimizer": "cpu"},
        )
        for stage in (1, 2)
    },
    "sd_deepspeed_zero3_offload": (
        _DEEPSPEED,
        "DeepSpeed ZeRO-3, optimizer and weights in host memory",
        {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    ),
}


def register_strategies() -> None:
    """Add our strategies to Lightning's registry; their modules are imported when one is chosen."""
    for name, (target, description, options) in STRATEGIES.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, partial(_build, target), description, **options)


def _build(target: str, **options: Any) -> Any:
    return pkgutil.resolve_name(target)(**options)
