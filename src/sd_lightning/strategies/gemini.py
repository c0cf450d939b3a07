"""Gemini: our engine of flat chunks, sharded over processes and placed on several tiers of memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.chunked import Reader
from sd_lightning.models.families.blocks import execution_position
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.gemini_precision import GeminiPrecision
from sd_lightning.strategies.gemini_state import GeminiState
from sd_lightning.strategies.networks import (
    blocks_of,
    keeps_batches,
    place_rest,
    sharded_networks,
    take_deferred,
    trained_networks,
)
from sd_lightning.strategies.processes.group import WatchedProcesses
from sd_lightning.strategies.taking_apart import TakesWeightsApart
from sd_lightning.strategies.whole import load_torch_optimizer_states, torch_optimizer_state


class GeminiStrategy(TakesWeightsApart, WatchedProcesses, LightningDDPStrategy):
    """Shard weights, gradients and optimizer states in chunks, and keep a part of them off the device.

    Usage: ``Trainer(strategy=GeminiStrategy(offload_optim_frac=0.5))`` or ``Trainer(strategy="gemini")``. The
    engine is in :mod:`sd_lightning.gemini`; ``docs/gemini.md`` explains it.

    Args:
        config: Settings of the engine.
        timeout_seconds: A collective that takes longer, or a rank that is silent that long, ends the run.
        **settings: Fields of ``GeminiConfig`` by name, instead of or on top of ``config``.

    Raises:
        UsageError: A setting is unknown or cannot work.
    """

    owns_precision = True
    """Lightning's precision plugins are replaced by the engine's."""
    loads_weights = True
    """Weights that are still in their files are left to the engine: each rank reads what it owns of the chunks."""

    def __init__(self, config: GeminiConfig | None = None, *, timeout_seconds: float = 1800.0, **settings: Any) -> None:
        if timeout_seconds <= 0:
            raise UsageError(f"GeminiStrategy got timeout_seconds={timeout_seconds}; expected a positive number")
        known = [field.name for field in fields(GeminiConfig)]
        for name in settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1) or ["one of " + ", ".join(known)]
                raise UsageError(f"GeminiStrategy got {name}={settings[name]!r}; expected {near[0]}")
        self.config = GeminiConfig(**settings) if config is None else replace(config, **settings)
        self._engine: GeminiEngine | None = None
        self._state: GeminiState | None = None
        super().__init__(timeout=timedelta(seconds=timeout_seconds))

    @property
    def engine(self) -> GeminiEngine:
        """The engine of the present or the last run."""
        assert self._engine is not None
        return self._engine

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, GeminiPrecision):
            plugin = GeminiPrecision(plugin.precision, lambda: self.engine)
        self._precision_plugin = plugin

    @override
    def setup_environment(self) -> None:
        # Checkpoints and object collectives go over the host.
        self._process_group_backend = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
        with self.joining():
            super().setup_environment()

    # ------------------------------------------------------------------ the engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._take_over(trainer, self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _take_over(self, trainer: pl.Trainer, module: Any) -> None:
        """Put the trained networks into chunks, or go on with those that could not be given back."""
        precision: Any = self.precision_plugin
        rest_dtype = precision.compute_dtype if precision.precision == "bf16-true" else None
        networks = sharded_networks(module, type(self).__name__)
        if not self.take(trainer):
            deferred = {name: weights for name in networks if (weights := take_deferred(module, name)) is not None}
            self._engine = GeminiEngine(
                networks,
                self._engine_config,
                blocks=blocks_of(module, networks),
                device=self.root_device,
                order=partial(_position, list(networks)),
                reader=_reader(networks, deferred) if deferred else None,
            )
            for name, weights in deferred.items():
                weights.fill_buffers(networks[name])
            if rest_dtype is not None and not keeps_batches(module):
                for network in networks.values():
                    _convert_buffers(network, rest_dtype)
            assert self._plain is not None
            self._plain.note_hooks()
        module.to(self.root_device)  # what is not trained; chunks are there, and stay
        place_rest(module, networks, self.root_device, rest_dtype)

    @property
    def _engine_config(self) -> GeminiConfig:
        precision: Any = self.precision_plugin
        assert self.lightning_module is not None
        networks = trained_networks(self.lightning_module)
        parameters = [parameter for network in networks.values() for parameter in network.parameters()]
        # float64 is narrowed only where compute_dtype says so: Lightning leaves such networks alone.
        implied = None if any(p.dtype == torch.float64 for p in parameters) else precision.compute_dtype
        return replace(self.config, compute_dtype=self.config.compute_dtype or implied)

    @override
    def _adopts(self, other: TakesWeightsApart) -> bool:
        if not isinstance(other, GeminiStrategy) or other.engine.config != self._engine_config:
            return False
        self._engine = other.engine
        return True

    @override
    def _has_engine(self) -> bool:
        return self._engine is not None and not self._engine.is_closed

    @override
    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        self.engine.restore()
        assert self.lightning_module is not None
        for name, parameter in list(self.lightning_module.named_parameters()):
            yield name, parameter.detach()

    @override
    def _end_engine(self) -> None:
        if not self.engine.is_closed:
            self.engine.end()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self.engine.drop_optimizers()
        self.optimizers = [self.engine.optimizer(optimizer) for optimizer in self.optimizers]

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    def skip_update(self) -> None:
        """Drop the gradients of the step that is about to be taken: the weights stay as they are."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._engine is not None and not self._engine.is_closed:
            self._engine.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._engine is not None and not self._engine.is_closed:
            self._engine.release()
        self.give_back()
        # Where it could not be given back, the chunks stay where they are: Lightning would move the module to the host.
        self.teardown_beside_the_module()
        self._state = None

    # ------------------------------------------------------------------ training state

    def _engine_state(self) -> GeminiState:
        """Return this rank's ranges of the trained parameters."""
        if self._state is None or self._state.optimizers != self.optimizers:
            self._state = GeminiState(self.engine, self.optimizers)
        return self._state

    def statistics(self) -> dict[str, float]:
        """Return the engine's counters: bytes on each tier, bytes moved, hits and evictions of gathering."""
        return self.engine.statistics()

    # ------------------------------------------------------------------ Lightning's own checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole weights on rank 0, gathered one after the other, and nothing on others; a collective call."""
        assert self.lightning_module is not None
        if self.is_together:
            return super().lightning_module_state_dict()
        kept = self.lightning_module.state_dict() if self.is_global_zero else {}
        for name, weight in self.engine.whole_weights():
            if name in kept:
                kept[name] = weight
        return kept

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load before the weights go into chunks; those that are still in their files would not take any."""
        module: Any = self.lightning_module
        for name, network in trained_networks(module).items():
            weights = take_deferred(module, name) if checkpoint["state_dict"] else None
            if weights is not None:
                weights.fill_(network, torch.device("cpu"))
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return on rank 0 what the user's own optimizer would save, gathered tensor by tensor; a collective call."""
        ours: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        groups = ours.inner.state_dict()["param_groups"]
        number = self.optimizers.index(ours)
        return torch_optimizer_state(self._engine_state(), number, groups, keep=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:  # there are none where PortableCheckpoint restores
            load_torch_optimizer_states(self._engine_state(), checkpoint["optimizer_states"])


def _reader(networks: Mapping[str, nn.Module], deferred: Mapping[str, DeferredWeights]) -> Reader:
    """Return what gives the engine initial values: from the files, or of parameters that are in memory already."""
    present = {
        f"{prefix}.{name}": parameter
        for prefix, network in networks.items()
        for name, parameter in network.named_parameters()
        if not parameter.is_meta
    }

    def read(name: str, begin: int, end: int) -> Tensor:
        if name in present:
            return present[name].detach().reshape(-1)[begin:end]
        prefix, _, key = name.partition(".")
        values = torch.empty(end - begin)
        deferred[prefix].read(key, values, begin, end)
        return values

    return read


def _convert_buffers(network: nn.Module, dtype: torch.dtype) -> None:
    """Do to buffers what Lightning's plugin for weights of 16 bits does to a whole module."""
    for part in network.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def _position(networks: Sequence[str], name: str) -> tuple[int, ...]:
    """Return when a part of the trained networks runs: text encoders before the UNet."""
    network, _, part = name.partition(".")
    if network == "unet":
        return len(networks), *execution_position(part)
    return (next(i for i, prefix in enumerate(networks) if f"{name}.".startswith(f"{prefix}.")),)


def gemini(
    *,
    placement: Literal["static", "auto"] = "static",
    shard_param_frac: float = 1.0,
    offload_optim_frac: float = 0.0,
    offload_param_frac: float = 0.0,
    disk_optim_frac: float = 0.0,
    offload_dir: str | None = None,
    chunk_numel: int | None = None,
    gathered_budget: int | None = None,
    prefetch: int = 2,
    memory_cap: float | str | None = None,
    reduce_once: bool | Literal["auto"] = False,
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    timeout_seconds: float = 1800.0,
) -> GeminiStrategy:
    """Build the strategy from flat command-line keys; see :class:`sd_lightning.gemini.GeminiConfig`."""
    config = GeminiConfig(
        placement=placement,
        shard_param_frac=shard_param_frac,
        offload_optim_frac=offload_optim_frac,
        offload_param_frac=offload_param_frac,
        disk_optim_frac=disk_optim_frac,
        offload_dir=offload_dir,
        chunk_numel=chunk_numel,
        gathered_budget=gathered_budget,
        prefetch=prefetch,
        memory_cap=memory_cap,
        reduce_once=reduce_once,
        reduce_dtype=getattr(torch, str(reduce_dtype), reduce_dtype),  # type: ignore[arg-type]
    )
    return GeminiStrategy(config, timeout_seconds=timeout_seconds)


__all__ = ["GeminiConfig", "GeminiStrategy", "gemini"]
