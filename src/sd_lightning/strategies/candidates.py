"""The strategies that the planner compares, the simplest first."""

from __future__ import annotations

import pkgutil
from functools import partial
from typing import Any

from sd_lightning.planner.candidates import CANDIDATES, Candidate
from sd_lightning.strategies.base import engine_of

_GEMINI = "sd_lightning.strategies.gemini:gemini"
_FSDP = "sd_lightning.strategies.fsdp:FSDPStrategy"
_DEEPSPEED = "sd_lightning.strategies.deepspeed:deepspeed"
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_ALL_OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 2**29}


def _build(target: str, defaults: dict[str, Any], **settings: Any) -> Any:
    return engine_of(pkgutil.resolve_name(target)(**{**defaults, **settings}))


def _candidate(name: str, target: str, least: int = 1, most: int | None = None, /, **settings: Any) -> Candidate:
    """Return a strategy with the settings of its configuration."""
    return Candidate(name, partial(_build, target, settings), processes=(least, most))


def _zero(stage: int, offloads: bool) -> Candidate:
    settings: dict[str, Any] = {"stage": stage}
    if offloads:
        settings |= {"offload_optimizer": "cpu", **({"offload_parameters": "cpu"} if stage == 3 else {})}
    name = f"deepspeed_zero{stage}" + ("_offload" if offloads else "")
    return _candidate(name, _DEEPSPEED, 1 if offloads else 2, **settings)


def register_candidates() -> None:
    """Tell the planner which strategies there are; their modules are imported when it compares them."""
    if CANDIDATES:
        return
    gemini = _candidate("gemini", _GEMINI, 1)
    CANDIDATES.extend(
        [
            _candidate("single", "sd_lightning.strategies:single", 1, 1),
            _candidate("ddp", "sd_lightning.strategies.ddp:DDPStrategy", 2),
            _candidate("gemini_gathered", _GEMINI, 2, shard_param_frac=0.0),
            gemini,
            *(Candidate("gemini", gemini.build, {"offload_optim_frac": fraction}) for fraction in _FRACTIONS),
            _candidate("gemini_offload", _GEMINI, 1, **_ALL_OFFLOADED),
            _candidate("fsdp", _FSDP, 2),
            Candidate("fsdp", partial(_build, _FSDP, {}), {"reshard_after_forward": False}, (2, None)),
            _candidate("fsdp_offload", _FSDP, 1, cpu_offload=True),
            *(_zero(stage, offloads) for stage in (1, 2, 3) for offloads in (False, True)),
        ]
    )
