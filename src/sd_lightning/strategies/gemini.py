"""Gemini: our engine of flat chunks, sharded over processes and placed on several memory tiers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.layout import Reader, check_master
from sd_lightning.models.families.blocks import execution_position
from sd_lightning.planner.footprint import Footprint, Workload
from sd_lightning.state.shards import TrainingState
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.base import BytesByTier, RunSettings, UnitObserver
from sd_lightning.strategies.gemini_checks import refuse_late_gradients
from sd_lightning.strategies.gemini_footprint import footprint_of
from sd_lightning.strategies.gemini_precision import COMPUTE_DTYPES, GeminiPrecision, engine_optimizer
from sd_lightning.strategies.networks import (
    blocks_of,
    keeps_batches,
    place_rest,
    refuse_sparse_gradients,
    sharded_networks,
    take_deferred,
    trained_networks,
    unfrozen_later,
)
from sd_lightning.strategies.processes.group import timeout_of
from sd_lightning.strategies.restoring import RestoringStrategy
from sd_lightning.strategies.sharding import CPU_AND_CUDA
from sd_lightning.strategies.whole_tensors import load_torch_optimizer_states, torch_optimizer_state


class GeminiStrategy(RestoringStrategy, LightningDDPStrategy):
    """Strategy that shards weights, gradients and optimizer states in chunks, and can offload them.

    Usage: ``Trainer(strategy=GeminiStrategy(offload_optim_frac=0.5))`` or ``Trainer(strategy="gemini")``. The
    engine is in :mod:`sd_lightning.gemini`; ``docs/gemini.md`` explains it.

    Args:
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.
        **settings: Fields of :class:`sd_lightning.gemini.GeminiConfig` by name.

    Raises:
        UsageError: A setting is unknown or invalid.
    """

    counts_bytes = True
    owns_precision = True
    keeps_layout = False
    loads_weights = True  # each rank reads its shards of the chunks

    def __init__(self, *, timeout_seconds: float = 1800.0, **settings: Any) -> None:
        timeout = timeout_of("GeminiStrategy", timeout_seconds)
        known = [field.name for field in fields(GeminiConfig)]
        for name in settings.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1) or ["one of " + ", ".join(known)]
            raise UsageError(f"GeminiStrategy got {name}={settings[name]!r}; expected {near[0]}")
        self.config = GeminiConfig(**settings)
        self.moves_weights = self.config.placement == "auto"
        self._engine: GeminiEngine | None = None
        super().__init__(timeout=timeout)

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        return bool(self.config.step_in_backward)

    @property
    def engine(self) -> GeminiEngine:
        """The engine of the current or the last run."""
        assert self._engine is not None
        return self._engine

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().check(trainer, module)
        refuse_sparse_gradients(module, type(self).__name__)
        sharded_networks(module, type(self).__name__)
        refuse_late_gradients(self.config, trainer)

    @override
    def check_settings(self, settings: RunSettings) -> None:
        super().check_settings(settings)
        compute_dtype = self.config.compute_dtype or COMPUTE_DTYPES.get(settings.precision, torch.float32)
        check_master(replace(self.config, compute_dtype=compute_dtype), {compute_dtype})
        refuse_late_gradients(self.config, settings)

    @override
    def footprint(self, workload: Workload) -> Footprint | None:
        if workload.accumulates:
            refuse_late_gradients(self.config, RunSettings(workload.precision, 1, accumulate_grad_batches=2))
        networks = list(dict.fromkeys(weight.name.partition(".")[0] for weight in workload.weights))
        return footprint_of(self.config, workload, partial(_position, networks))

    @override
    def _engine_precision(self, plugin: Precision) -> Precision:
        return plugin if isinstance(plugin, GeminiPrecision) else GeminiPrecision(plugin.precision, lambda: self.engine)

    @override
    def setup_environment(self) -> None:
        self._process_group_backend = CPU_AND_CUDA if self.root_device.type == "cuda" else "gloo"
        super().setup_environment()

    @override
    def _set_up_engine(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Put the trained networks into chunks, or continue with the chunks of an earlier run."""
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_late_gradients(self.config, trainer)
        rest_dtype = torch.bfloat16 if self.precision_plugin.precision == "bf16-true" else None
        self._known = {name for name, _ in module.named_parameters()}
        if not self.attach(trainer):
            with _as_trained(_frozen_at_first(trainer, module)):
                self._make_engine(module, rest_dtype)
            self.record_hooks()
        self.engine.access.dtype = rest_dtype
        with self.engine.access.hidden():
            module.to(self.root_device)  # moves what is not trained; chunks are already placed
        place_rest(module, self.engine.networks, self.root_device, rest_dtype)

    def _make_engine(self, module: pl.LightningModule, rest_dtype: torch.dtype | None) -> None:
        if self._fits:
            refuse_sparse_gradients(module, type(self).__name__)
        networks = sharded_networks(module, type(self).__name__)
        deferred = {name: weights for name in networks if (weights := take_deferred(module, name)) is not None}
        self._engine = GeminiEngine(
            networks,
            self._engine_config,
            blocks=blocks_of(module, networks),
            device=self.root_device,
            order=partial(_position, list(networks)),
            reader=_reader(networks, deferred) if deferred else None,
        )
        if self._timeout is not None:  # the watchdog gives up at four fifths of it
            self._engine.collectives.patience_seconds = self._timeout.total_seconds() / 2
        for name, weights in deferred.items():
            weights.fill_buffers(networks[name])
        if rest_dtype is not None and not keeps_batches(module):  # as Lightning's plugin for 16-bit weights does
            for part in (part for network in networks.values() for part in network.modules()):
                for name, buffer in part._buffers.items():
                    if buffer is not None and buffer.is_floating_point():
                        part._buffers[name] = buffer.to(rest_dtype)

    @property
    @override
    def _gathers_in_forward(self) -> bool:
        return self.config.placement == "auto" or self.config.shard_param_frac > 0

    @property
    def _engine_config(self) -> GeminiConfig:
        networks = trained_networks(self._module).values()
        is_double = any(p.dtype == torch.float64 for network in networks for p in network.parameters())
        # float64 is narrowed only if compute_dtype says so: Lightning does not convert such networks.
        implied = None if is_double else COMPUTE_DTYPES[self.precision_plugin.precision]
        return replace(self.config, compute_dtype=self.config.compute_dtype or implied)

    @override
    def _adopts(self, other: RestoringStrategy) -> bool:
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
        for name, parameter in list(self._module.named_parameters()):
            if name in self._known:  # pruning gives others, which stay what they are
                yield name, parameter.detach()

    @override
    def _end_engine(self) -> None:
        if self._has_engine():
            self.engine.close()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self.engine.drop_optimizers()
        self.optimizers = [self.engine.optimizer(optimizer) for optimizer in self.optimizers]
        for wrapper in self.optimizers if self.config.step_in_backward == "running_norm" else ():
            engine_optimizer(wrapper).early.max_norm = float(trainer.gradient_clip_val or 0.0)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    @override
    def write_back(self) -> None:
        self.engine.access.close()

    @override
    def skip_update_if(self, optimizer: Optimizer, is_bad: Tensor) -> bool:
        return engine_optimizer(optimizer).skip_if(is_bad)

    @override
    def skip_update(self, optimizer: Optimizer) -> None:
        for each in self.optimizers:
            each.zero_grad()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._has_engine():
            self.engine.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._has_engine():
            self.engine.release()
        super().teardown()

    @override
    def _make_state(self) -> TrainingState:
        return self.engine.state

    @override
    def statistics(self) -> dict[str, Any]:
        return self.engine.statistics()

    @override
    def bytes_by_tier(self) -> BytesByTier:
        return self.engine.ledger.bytes_by_tier()

    @override
    def observe_units(self, observer: UnitObserver | None) -> None:
        self.engine.runtime.observer = observer

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather whole weights one at a time; return them on rank 0, nothing on other ranks; a collective call."""
        if self.is_released:
            return super().lightning_module_state_dict()
        with self.engine.access.hidden():
            kept = self._module.state_dict() if self.is_global_zero else {}
        # Names may have changed since the engine was made: pruning does that.
        places: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, []).append(name)
        for parameter, weight in self.engine.whole_weights():
            for name in places.get(parameter, ()):
                if name in kept:
                    kept[name] = weight
        return kept

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load before the weights go into chunks; deferred weights are read first, as meta tensors take no values."""
        for name, network in trained_networks(self._module).items():
            weights = take_deferred(self._module, name) if checkpoint["state_dict"] else None
            if weights is not None:
                weights.fill_(network, torch.device("cpu"))
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Gather the state that the user's own optimizer would save, tensor by tensor, to rank 0; a collective call."""
        wrapper = engine_optimizer(optimizer)
        groups = wrapper.inner.state_dict()["param_groups"]
        number = self.optimizers.index(wrapper)
        return torch_optimizer_state(self.training_state(), number, groups, keep=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:  # empty if PortableCheckpoint restores them
            load_torch_optimizer_states(self.training_state(), checkpoint["optimizer_states"])


def _frozen_at_first(trainer: pl.Trainer, module: pl.LightningModule) -> list[nn.Parameter]:
    """Return the networks' frozen parameters that a fit may train later."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    later = unfrozen_later(trainer, module)
    inside = dict.fromkeys(parameter for child in module.children() for parameter in child.parameters())
    return [parameter for parameter in inside if parameter in later and parameter.is_floating_point()]


@contextmanager
def _as_trained(frozen: Sequence[nn.Parameter]) -> Iterator[None]:
    """Have an engine that is made in the body train frozen parameters, once they get gradients."""
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _reader(networks: Mapping[str, nn.Module], deferred: Mapping[str, DeferredWeights]) -> Reader:
    """Return a function that reads initial values for the engine, from files or from parameters in memory."""
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
    """Return a sort key for the execution order of the trained networks' parts; ``networks`` is in that order."""
    index, prefix = next((i, each) for i, each in enumerate(networks) if f"{name}.".startswith(f"{each}."))
    return index, *execution_position(name.removeprefix(prefix).removeprefix("."))


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
    master: Literal["float32", "split", "bfloat16"] = "float32",
    rounding_seed: int = 0,
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    gradient_dtype: Literal["float32", "bfloat16"] = "float32",
    step_in_backward: bool | Literal["running_norm"] = False,
    timeout_seconds: float = 1800.0,
) -> GeminiStrategy:
    """Build the strategy from flat command-line keys; see :class:`sd_lightning.gemini.GeminiConfig`."""
    settings: dict[str, Any] = dict(locals())
    for name in ("reduce_dtype", "gradient_dtype"):
        settings[name] = getattr(torch, str(settings[name]), settings[name])
    return GeminiStrategy(**settings)


__all__ = ["GeminiConfig", "GeminiStrategy", "gemini"]
