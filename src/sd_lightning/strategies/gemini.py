"""Gemini: our engine of flat chunks, sharded over processes and placed on several tiers of memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.blocks import execution_position, repeated_blocks
from sd_lightning.deferred_weights import DeferredWeights
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.chunked import Reader
from sd_lightning.strategies.gemini_precision import GeminiPrecision
from sd_lightning.strategies.gemini_state import GeminiState
from sd_lightning.strategies.processes import WatchedProcesses

_engines: WeakKeyDictionary[pl.LightningModule, GeminiEngine] = WeakKeyDictionary()
"""Engines outlive the strategy: after ``fit`` the parameters still live in their chunks."""


class GeminiStrategy(WatchedProcesses, LightningDDPStrategy):
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
        self._state: GeminiState | None = None
        super().__init__(timeout=timedelta(seconds=timeout_seconds))

    @property
    def engine(self) -> GeminiEngine:
        """The engine of the module that is attached."""
        return _engines[self.lightning_module]  # type: ignore[index]

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
        self._take_over(self.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _take_over(self, module: Any) -> None:
        """Put the trained networks into chunks, or go on with the chunks that an earlier fit has made."""
        precision: Any = self.precision_plugin
        parameters = [p for network in module.trained_networks().values() for p in network.parameters()]
        # float64 is narrowed only where compute_dtype says so: Lightning leaves such networks alone.
        implied = None if any(p.dtype == torch.float64 for p in parameters) else precision.compute_dtype
        config = replace(self.config, compute_dtype=self.config.compute_dtype or implied)
        engine = _engines.get(module)
        if engine is not None and engine.is_closed:
            engine = None
        if engine is not None and engine.config != config:
            raise UsageError(
                f"GeminiStrategy got {config}, but the module is in chunks of an earlier fit with {engine.config}; "
                "expected the same settings, or a new module from the pipeline that fit has saved"
            )
        if engine is None:
            networks: dict[str, nn.Module] = module.trained_networks()
            deferred = {name: weights for name in networks if (weights := module.take_deferred(name)) is not None}
            engine = _engines[module] = GeminiEngine(
                networks,
                config,
                blocks=[block for network in networks.values() for block in repeated_blocks(network).values()],
                device=self.root_device,
                order=partial(_position, list(networks)),
                reader=_reader(networks, deferred) if deferred else None,
            )
            for name, weights in deferred.items():
                weights.fill_buffers(networks[name])
        module.to(self.root_device)  # what is not trained; chunks are there, and stay

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
        engine = _engines.get(self.lightning_module) if self.lightning_module is not None else None
        if engine is not None:
            engine.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # Lightning would move module and optimizers to the host: chunks stay where they are, for what comes after fit.
        engine = _engines.get(self.lightning_module) if self.lightning_module is not None else None
        if engine is not None:
            engine.release()
        self.teardown_beside_the_module()
        self._state = None

    # ------------------------------------------------------------------ training state

    def training_state(self) -> GeminiState:
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
        """Return whole weights, gathered one after the other; a collective call."""
        assert self.lightning_module is not None
        whole = dict(self.lightning_module.state_dict())
        for chunk in self.engine.chunks:
            whole |= {name: self.engine.full_parameter(name).cpu() for name in chunk.parameters}
        return whole

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        raise UsageError(
            "Trainer.save_checkpoint: Gemini's optimizer states are sharded, and Lightning's checkpoints are not; use "
            "the callback PortableCheckpoint, or weights_only=True"
        )


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


def _position(networks: Sequence[str], name: str) -> tuple[int, ...]:
    """Return when a part of the trained networks runs: text encoders before the UNet."""
    network, _, part = name.partition(".")
    if network == "unet":
        return len(networks), *execution_position(part)
    return (networks.index(network),)


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
