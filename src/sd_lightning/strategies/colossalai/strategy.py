"""The real ColossalAI: GeminiDDP and GeminiOptimizer of colossalai 0.5.0 as a Lightning strategy, on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.planner.footprint import Footprint, Workload
from sd_lightning.state.host import host_step
from sd_lightning.state.ranks import failing_together
from sd_lightning.strategies.colossalai import probe
from sd_lightning.strategies.colossalai.engine import IN_CHUNK, ColossalAIEngine, ColossalAIState
from sd_lightning.strategies.colossalai.settings import OURS, WHO, ColossalAIConfig, Policy, config_of, footprint_of
from sd_lightning.strategies.networks import (
    configured_optimizers,
    is_adam,
    sharded_networks,
    take_deferred,
    trained_networks,
    unsupported_option,
)
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
    @classmethod
    def whole_shape_of(cls, parameter: Tensor) -> tuple[int, ...] | None:
        return tuple(parameter.shape) if hasattr(parameter, IN_CHUNK) else None

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().check(trainer, module)
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
            with failing_together():
                if self.local_rank == 0:
                    probe.require_engine(timeout_seconds=self._build_timeout)
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
            if any(self.whole_shape_of(parameter) is not None for parameter in network.parameters()):
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


class ColossalAIPrecision(Precision):
    """Precision plugin: the engine gathers weights around every step, computes gradients, and steps.

    Args:
        precision: "bf16-mixed" or "16-mixed".
    """

    engine: ColossalAIEngine

    def __init__(self, precision: Any) -> None:
        self.precision = precision

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        self.engine = model.trainer.strategy.engine
        return model, optimizers, lr_schedulers

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]  # a generator's there
        return self.engine.training()

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        return self.engine.evaluating()

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.engine.backward(tensor)

    @override
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clips while it steps."""

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if result is None:
            raise UsageError(f"training_step returned None: {WHO} cannot skip a backward pass; return a loss, {OURS}")
        with host_step():
            self.engine.step()
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.engine.scaler_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.load_scaler_state(state_dict)


DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Compute dtype by ``Trainer(precision=)``; master weights are float32."""


def check_run(config: ColossalAIConfig, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if ColossalAI cannot train a run, or trains it incorrectly without an error.

    Raises:
        UsageError: It cannot; gives the reason and what to write instead.
    """
    precision = str(trainer.precision_plugin.precision)
    if precision not in DTYPES:
        raise UsageError(
            f"{WHO} got trainer.precision={precision}: ColossalAI computes in 16 bits over float32 weights; write "
            f"trainer.precision=bf16-mixed or 16-mixed, {OURS}"
        )
    if precision == "bf16-mixed" and config.of_loss_scale() != ColossalAIConfig().of_loss_scale():
        raise UsageError(f"{WHO} got a loss scale, which bf16-mixed has not; leave it out, or write precision=16-mixed")
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UsageError(f"{WHO} clips by norm only; write trainer.gradient_clip_algorithm=norm, {OURS}")
    if trainer.gradient_clip_val and precision == "bf16-mixed" and config.offloads:
        raise UsageError(
            f"{WHO} got trainer.gradient_clip_val={trainer.gradient_clip_val} with bf16-mixed and an optimizer in host "
            "memory, where ColossalAI ignores clipping without a word; write trainer.gradient_clip_val=null, "
            f"trainer.precision=16-mixed, or placement_policy=static with offload_optim_frac=0, {OURS}"
        )
    if trainer.accumulate_grad_batches > 1:
        raise UsageError(
            f"{WHO} got trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: ColossalAI adds gradients "
            f"up in 16 bits; write trainer.accumulate_grad_batches=1 and a smaller data.batch_size, {OURS}"
        )
    if not module.automatic_optimization:
        raise UsageError(f"{WHO} steps by itself; set automatic_optimization = True in {type(module).__name__}, {OURS}")
    for name, network in trained_networks(module).items():
        if any(part._compiled_call_impl is not None for part in network.modules()):
            raise UsageError(
                f"{WHO} got a compiled {name}: torch.compile does not see ColossalAI's hooks on weights, which gather "
                f"them; write speed.compile=false, {OURS}"
            )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise if ColossalAI's Adam cannot replace the optimizers.

    Raises:
        UsageError: They are not exactly one Adam or AdamW, or it uses an option that ColossalAI's lacks.
    """
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if len(optimizers) != 1 or not is_adam(optimizers[0]):
        raise UsageError(
            f"{WHO} got the optimizer {names}: ColossalAI steps its chunks with its own Adam only; choose "
            f"optimizer=adamw, {OURS}"
        )
    option = unsupported_option(optimizers[0])
    if option is not None:
        raise UsageError(f"{WHO}: ColossalAI's Adam has no {option}; write optimizer.{option}=false, {OURS}")
