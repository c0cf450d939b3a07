"""The real ColossalAI: GeminiDDP and GeminiOptimizer of colossalai 0.5.0 as a Lightning strategy, on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.planner.footprint import Footprint, Workload
from sd_lightning.strategies.base import is_in_colossalai_chunk
from sd_lightning.strategies.colossalai import probe
from sd_lightning.strategies.colossalai.engine import ColossalAIEngine
from sd_lightning.strategies.colossalai.footprint import footprint_of
from sd_lightning.strategies.colossalai.precision import ColossalAIPrecision
from sd_lightning.strategies.colossalai.refusals import DTYPES, check_optimizers, check_run
from sd_lightning.strategies.colossalai.settings import WHO, ColossalAIConfig, Policy, config_of
from sd_lightning.strategies.colossalai.state import ColossalAIState
from sd_lightning.strategies.networks import configured_optimizers, sharded_networks, take_deferred
from sd_lightning.strategies.processes.group import timeout_of
from sd_lightning.strategies.sharding import ShardingStrategy

__all__ = ["ColossalAIConfig", "ColossalAIStrategy", "colossalai"]


class ColossalAIStrategy(ShardingStrategy, LightningDDPStrategy):
    """Strategy that puts weights, gradients and optimizer states in ColossalAI's chunks, sharded or in host memory.

    Usage: ``Trainer(strategy=ColossalAIStrategy(), precision="bf16-mixed")`` or ``Trainer(strategy="sd_colossalai")``.
    The call of 2022, ``ColossalAIStrategy(use_chunk=True, enable_distributed_storage=True, placement_policy="auto")``,
    still works. ``docs/colossalai.md`` says how to install ColossalAI and what it cannot do. The weights stay in
    their chunks when a run ends.

    Args:
        config: Placement and packing of weights and optimizer states, and the loss scale.
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.
        build_timeout_seconds: Time limit for compiling one of ColossalAI's extensions.
        **settings: Fields of ``ColossalAIConfig`` by name, on top of ``config``, or arguments of 2022.

    Raises:
        UsageError: An argument is wrong, or ColossalAI is not installed; :meth:`check` finds what else is missing.
    """

    loads_weights = True  # into host memory, where the chunks are made
    keeps_layout = False

    def __init__(
        self,
        config: ColossalAIConfig | None = None,
        *,
        timeout_seconds: float = 1800.0,
        build_timeout_seconds: float = 900.0,
        **settings: Any,
    ) -> None:
        timeout = timeout_of(WHO, timeout_seconds)
        timeout_of(WHO, build_timeout_seconds, name="build_timeout_seconds")
        self.config = config_of(config, settings)
        probe.require([probe.check_version()])
        super().__init__(timeout=timeout)
        self.engine: ColossalAIEngine | None = None
        self._build_timeout = build_timeout_seconds

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        check_run(self.config, trainer, module)
        check_optimizers(configured_optimizers(module))
        if is_first_process():
            probe.require_engine(timeout_seconds=self._build_timeout)

    @override
    def footprint(self, workload: Workload) -> Footprint | None:
        return footprint_of(self.config, workload)

    @property
    @override
    def _gathers_in_forward(self) -> bool:
        return self.config.placement_policy == "auto" or self.config.shard_param_frac > 0

    @override
    def _engine_precision(self, plugin: Precision) -> Precision:
        return ColossalAIPrecision(plugin.precision) if isinstance(plugin, MixedPrecision) else plugin

    @override
    def _set_up_engine(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.engine is None:
            check_run(self.config, trainer, module)
            probe.choose_architecture()
            self._once_per_machine(
                partial(probe.require_engine, timeout_seconds=self._build_timeout),
                f"{WHO} cannot be used on another machine; see its message",
            )
            self.engine = self._build_engine(module)
            self.model_to_device()  # moves untrained parts, and sets the module's own device
        elif not self.engine.is_usable:
            raise UsageError(f"{WHO}: an exception has left a step half done; build the module and the trainer anew")

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        assert self.engine is not None
        self.optimizers = [self.engine.attach(self.optimizers[0], max_norm=float(trainer.gradient_clip_val or 0.0))]

    def _build_engine(self, module: pl.LightningModule) -> ColossalAIEngine:
        networks = sharded_networks(module, WHO)
        for name, network in networks.items():
            if any(is_in_colossalai_chunk(parameter) for parameter in network.parameters()):
                raise UsageError(
                    f"{WHO}: {name} is already in the chunks of another trainer's strategy; train with that trainer, "
                    "or build the module anew"
                )
            weights = take_deferred(module, name)
            if weights is not None:
                weights.fill_(network, torch.device("cpu"))
        return ColossalAIEngine(networks, self.config, DTYPES[str(self.precision_plugin.precision)])

    @override
    def _make_state(self) -> ColossalAIState:
        assert self.engine is not None
        return ColossalAIState(self.engine)

    @override
    def skip_update(self, optimizer: Optimizer) -> None:
        assert self.engine is not None
        self.engine.skips_step = True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        raise UsageError(
            f"{WHO} has no weights for Lightning's checkpoints, which would be rounded to 16 bits; save with the "
            "callback PortableCheckpoint (callbacks.checkpoint), whose folders any strategy resumes"
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # empty if PortableCheckpoint restores them
            raise UsageError(
                f"{WHO} cannot load Lightning's checkpoints; start from their weights with init_from=, or resume a "
                "checkpoint folder of PortableCheckpoint"
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.engine is not None and self.lightning_module is not None and self.lightning_module.training:
            self.engine.is_usable = False
        super().on_exception(exception)


def colossalai(
    *,
    placement_policy: Policy = "static",
    shard_param_frac: float = 1.0,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
    min_chunk_size_m: float = 32.0,
    search_range_m: float = 32.0,
    max_prefetch: int = 0,
    pin_memory: bool = False,
    initial_scale: float = 2.0**16,
    timeout_seconds: float = 1800.0,
    build_timeout_seconds: float = 900.0,
) -> ColossalAIStrategy:
    """Build the strategy from flat command-line keys; see :class:`ColossalAIConfig`."""
    settings = dict(locals())
    timeouts = {name: settings.pop(name) for name in ("timeout_seconds", "build_timeout_seconds")}
    return ColossalAIStrategy(ColossalAIConfig(**settings), **timeouts)
