"""The real ColossalAI: GeminiDDP and GeminiOptimizer of colossalai 0.5.0 as a Lightning strategy, on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.strategies.checkpoint_folders import TakesCheckpointFolders
from sd_lightning.strategies.colossalai import probe
from sd_lightning.strategies.colossalai.engine import ColossalAIEngine
from sd_lightning.strategies.colossalai.settings import (
    DTYPES,
    OURS,
    WHO,
    ColossalAIConfig,
    Policy,
    check_optimizers,
    check_run,
    config_of,
)
from sd_lightning.strategies.colossalai.state import ColossalAIState
from sd_lightning.strategies.networks import sharded_networks, take_deferred
from sd_lightning.strategies.processes.group import WatchedProcesses
from sd_lightning.strategies.taking_apart import TakesWeightsApart

__all__ = ["ColossalAIConfig", "ColossalAIStrategy", "colossalai"]


class ColossalAIStrategy(TakesWeightsApart, WatchedProcesses, TakesCheckpointFolders, LightningDDPStrategy):
    """Train in ColossalAI's chunks: weights, gradients and optimizer states sharded, or in host memory.

    Usage: ``Trainer(strategy=ColossalAIStrategy(), precision="bf16-mixed")`` or ``Trainer(strategy="sd_colossalai")``.
    The line of 2022, ``ColossalAIStrategy(use_chunk=True, enable_distributed_storage=True, placement_policy="auto")``,
    works as it is. ``docs/colossalai.md`` says how to install ColossalAI and what it cannot do.

    Args:
        config: Where weights and optimizer states lie, how they are packed, how the loss is scaled.
        timeout_seconds: A collective that takes longer, or a rank that is silent that long, ends the run.
        build_timeout_seconds: How long compiling one of ColossalAI's extensions may take.
        **settings: Fields of ``ColossalAIConfig`` by name, on top of ``config``, or arguments of 2022.

    Raises:
        UsageError: An argument is wrong, or ColossalAI is not installed; :meth:`check` finds what else is missing.
    """

    loads_weights = True
    """Weights that are still in their files are left to :meth:`setup`: they are read into host memory."""

    def __init__(
        self,
        config: ColossalAIConfig | None = None,
        *,
        timeout_seconds: float = 1800.0,
        build_timeout_seconds: float = 900.0,
        **settings: Any,
    ) -> None:
        for name, value in (("timeout_seconds", timeout_seconds), ("build_timeout_seconds", build_timeout_seconds)):
            if value <= 0:
                raise UsageError(f"{WHO} got {name}={value}; expected a positive number")
        self.config = config_of(config, settings)
        probe.require_installed()
        super().__init__(timeout=timedelta(seconds=timeout_seconds))
        self.engine: ColossalAIEngine | None = None
        self._state: ColossalAIState | None = None
        self._build_timeout = build_timeout_seconds

    def check(self, trainer: pl.Trainer, module: Any) -> None:
        """Find out before processes start whether ColossalAI can train this here.

        Raises:
            UsageError: It cannot; the message holds what the probe has found.
        """
        check_run(self.config, trainer, module)
        configured = module.configure_optimizers()
        check_optimizers([configured["optimizer"] if isinstance(configured, Mapping) else configured])
        if is_first_process():
            probe.require_engine(timeout_seconds=self._build_timeout)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, MixedPrecision):
            plugin = ColossalAIPrecision(plugin.precision)
        self._precision_plugin = plugin

    @override
    def setup_environment(self) -> None:
        with self.joining():
            super().setup_environment()

    # ------------------------------------------------------------------ the engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.engine is None:
            check_run(self.config, trainer, self.lightning_module)
            self._require_engine()
            self.engine = self._build_engine()
            self.model_to_device()  # what is left: parts that are not trained, and the module's own device
        elif not self.engine.is_usable:
            raise UsageError(f"{WHO}: an exception has left a step half done; build the module and the trainer anew")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers)
            max_norm = float(trainer.gradient_clip_val or 0.0)
            adam = self.engine.attach(self.optimizers[0], max_norm=max_norm)
            self.optimizers = [adam]
        self.setup_precision_plugin()

    def _require_engine(self) -> None:
        """Compile the extensions on one process per machine, while the others wait."""
        error: UsageError | None = None
        probe.choose_architecture()
        try:
            if self.local_rank == 0:
                probe.require_engine(timeout_seconds=self._build_timeout)
        except UsageError as caught:
            error = caught
        if not self.reduce_boolean_decision(error is None, all=True):
            raise error or UsageError(f"{WHO} cannot be used on another machine; see its message")

    def _build_engine(self) -> ColossalAIEngine:
        module: Any = self.lightning_module
        networks = sharded_networks(module, WHO)
        for name, network in networks.items():
            if any(hasattr(parameter, "taken_apart") for parameter in network.parameters()):
                raise UsageError(
                    f"{WHO}: {name} is already in the chunks of another trainer's strategy; train with that trainer, "
                    "or build the module anew"
                )
            weights = take_deferred(module, name)
            if weights is not None:
                weights.fill_(network, torch.device("cpu"))
        return ColossalAIEngine(networks, self.config, DTYPES[str(self.precision_plugin.precision)])

    def training_state(self) -> ColossalAIState:
        """Return this rank's ranges of the trained parameters."""
        assert self.engine is not None
        if self._state is None or self._state.optimizer is not self.engine.optimizer:
            self._state = ColossalAIState(self.engine)
        return self._state

    def skip_update(self) -> None:
        """Drop the gradients of the step that is about to be taken: the weights stay as they are."""
        assert self.engine is not None
        self.engine.skips_step = True

    # ------------------------------------------------------------------ Lightning's own checkpoints

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
        if checkpoint["state_dict"]:  # it is empty where PortableCheckpoint restores
            raise UsageError(
                f"{WHO} cannot load Lightning's checkpoints; start from their weights with init_from=, or resume a "
                "checkpoint folder of PortableCheckpoint"
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.engine is not None and self.lightning_module is not None and self.lightning_module.training:
            self.engine.is_usable = False
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # The weights stay in their chunks: Lightning would copy tensors to host memory that hold nothing.
        self.teardown_beside_the_module()


class ColossalAIPrecision(Precision):
    """Lets the engine gather weights around every step, and go backward and step itself.

    Args:
        precision: "bf16-mixed" or "16-mixed".
    """

    def __init__(self, precision: Any) -> None:
        self.precision = precision
        self.engine: ColossalAIEngine | None = None

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        self.engine = model.trainer.strategy.engine
        return model, optimizers, lr_schedulers

    @contextmanager
    @override
    def train_step_context(self) -> Generator[None, None, None]:
        assert self.engine is not None
        with self.engine.training():
            yield

    @contextmanager
    @override
    def forward_context(self) -> Generator[None, None, None]:
        assert self.engine is not None
        with self.engine.evaluating():
            yield

    @override
    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        assert self.engine is not None
        self.engine.backward(tensor)

    @override
    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """The engine clips while it steps."""

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if result is None:
            raise UsageError(f"training_step returned None: {WHO} cannot skip a backward pass; return a loss, {OURS}")
        assert self.engine is not None
        self.engine.step()
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.engine is None else self.engine.scaler_state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.engine is not None
        self.engine.load_scaler_state(state_dict)


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
    config = ColossalAIConfig(
        placement_policy=placement_policy,
        shard_param_frac=shard_param_frac,
        offload_optim_frac=offload_optim_frac,
        offload_param_frac=offload_param_frac,
        min_chunk_size_m=min_chunk_size_m,
        search_range_m=search_range_m,
        max_prefetch=max_prefetch,
        pin_memory=pin_memory,
        initial_scale=initial_scale,
    )
    return ColossalAIStrategy(config, timeout_seconds=timeout_seconds, build_timeout_seconds=build_timeout_seconds)
