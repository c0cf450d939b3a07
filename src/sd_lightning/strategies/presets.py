"""The strategies by name: ``strategy=<name>``, ``Trainer(strategy="<name>")``, and what the planner compares.

``conf/strategy/<name>.yaml`` has the same target and settings, and a comment for each that a user may want to change.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sd_lightning.planner.footprint import Candidate

_FSDP = "sd_lightning.strategies.fsdp:FSDPStrategy"
_GEMINI = "sd_lightning.strategies.gemini:gemini"
_DEEPSPEED = "sd_lightning.strategies.deepspeed:deepspeed"
_OFFLOADED = {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 2**29}
_ALONE = (1, 1)
_ANY = (1, None)
_SEVERAL = (2, None)


@dataclass(frozen=True)
class Preset:
    """A strategy with settings."""

    name: str
    """Of its file in ``conf/strategy``."""
    target: str
    """``module:name`` of its class or function."""
    description: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that differ from the target's defaults."""
    registered_as: str | None = None
    """Its name for ``Trainer(strategy=…)``. Names that Lightning uses are never overridden."""
    processes: tuple[int, int | None] | None = None
    """Least number of processes with which it divides anything, and the largest; None: the planner leaves it out."""
    variants: Sequence[Mapping[str, Any]] = ({},)
    """Settings with which the planner compares it."""

    def build(self, **settings: Any) -> Any:
        """Build the strategy; settings override those of the preset."""
        return pkgutil.resolve_name(self.target)(**{**self.settings, **settings})

    def candidates(self) -> list[Candidate]:
        """Return what the planner compares."""
        from sd_lightning.planner.footprint import Candidate

        if self.processes is None:
            return []
        return [Candidate(self.name, self._engine, variant, self.processes) for variant in self.variants]

    def _engine(self, **settings: Any) -> Any:
        from sd_lightning.strategies.base import engine_of

        return engine_of(self.build(**settings))


def _zero(stage: int) -> list[Preset]:
    offloads = {"offload_optimizer": "cpu", **({"offload_parameters": "cpu"} if stage == 3 else {})}
    what = "optimizer and weights" if stage == 3 else "optimizer"
    name, description = f"deepspeed_zero{stage}", f"DeepSpeed ZeRO-{stage}"
    return [
        Preset(name, _DEEPSPEED, description, {"stage": stage}, f"sd_{name}", _SEVERAL),
        Preset(
            *(f"{name}_offload", _DEEPSPEED, f"{description}, {what} in host memory"),
            *({"stage": stage, **offloads}, f"sd_{name}_offload", _ANY),
        ),
    ]


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("single", "sd_lightning.strategies:single", "One process on one device", processes=_ALONE),
        Preset(
            *("ddp", "sd_lightning.strategies.ddp:DDPStrategy", "DDP with portable checkpoints"),
            registered_as="sd_ddp",
            processes=_SEVERAL,
        ),
        Preset(
            *("gemini_gathered", _GEMINI, "Gemini with whole weights on every process", {"shard_param_frac": 0.0}),
            processes=_SEVERAL,
        ),
        Preset(
            *("gemini", _GEMINI, "Gemini: chunks on tiers of memory"),
            registered_as="gemini",
            processes=_ANY,
            variants=({}, *({"offload_optim_frac": fraction} for fraction in (0.25, 0.5, 0.75, 1.0))),
        ),
        Preset("gemini_offload", _GEMINI, "Gemini in host memory", _OFFLOADED, "gemini_offload", _ANY),
        Preset(
            *("gemini_auto", _GEMINI, "Gemini that measures the first step"),
            {"placement": "auto", "memory_cap": 0.9},
        ),
        Preset(
            *("fsdp", _FSDP, "FSDP2, sharded block by block"),
            registered_as="sd_fsdp",
            processes=_SEVERAL,
            variants=({}, {"reshard_after_forward": False}),
        ),
        Preset("fsdp_offload", _FSDP, "FSDP2 in host memory", {"cpu_offload": True}, "sd_fsdp_offload", _ANY),
        *(preset for stage in (1, 2, 3) for preset in _zero(stage)),
        Preset(
            *("deepspeed_zero3_nvme", _DEEPSPEED, "DeepSpeed ZeRO-3, optimizer on a disk"),
            {
                "stage": 3,
                "offload_optimizer": "nvme",
                "nvme_path": "/local_nvme",
                "offload_parameters": "cpu",
            },
        ),
        Preset(
            *("colossalai", "sd_lightning.strategies.colossalai:colossalai", "The real ColossalAI, on CUDA"),
            registered_as="sd_colossalai",
        ),
        Preset(
            *("auto", "sd_lightning.strategies.auto:AutoStrategy", "The fastest of ours that fits, predicted"),
            registered_as="sd_auto",
        ),
    )
}
"""The simplest first: of two that are equally fast, the planner takes the first."""


def register_strategies() -> None:
    """Add our strategies to Lightning's registry; their modules are imported when one is chosen."""
    from lightning.pytorch.strategies import StrategyRegistry

    for preset in PRESETS.values():
        if preset.registered_as is not None and preset.registered_as not in StrategyRegistry:
            StrategyRegistry.register(preset.registered_as, preset.build, preset.description)


def candidates() -> list[Candidate]:
    """Return what the planner compares, the simplest first."""
    return [candidate for preset in PRESETS.values() for candidate in preset.candidates()]
