"""DeepSpeed ZeRO-1/2/3, on CUDA and, for tests and small experiments, on CPU over gloo."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.checkpoint_folders import TakesCheckpointFolders
from sd_lightning.strategies.deepspeed import precedence
from sd_lightning.strategies.deepspeed.builds import build
from sd_lightning.strategies.deepspeed.host_checkpointing import checkpoint_on_host, checkpointed_blocks
from sd_lightning.strategies.deepspeed.load import ReadRange, exact_weights, partition_deferred
from sd_lightning.strategies.deepspeed.nvme import SwapFolder, SwappedZero3State, check_swap_path
from sd_lightning.strategies.deepspeed.optimizer import to_cpu_adam
from sd_lightning.strategies.deepspeed.settings import Buckets, DeepSpeedSettings, Offload, Stage
from sd_lightning.strategies.deepspeed.state import DeepSpeedState, Zero3State, Zero12State
from sd_lightning.strategies.networks import keeps_batches
from sd_lightning.strategies.processes.group import WatchedProcesses
from sd_lightning.strategies.taking_apart import TakesWeightsApart
from sd_lightning.strategies.whole import whole_masters

__all__ = ["Buckets", "DeepSpeedStrategy", "Offload", "deepspeed"]


class DeepSpeedStrategy(TakesWeightsApart, WatchedProcesses, TakesCheckpointFolders, LightningDeepSpeedStrategy):
    """Shard optimizer states (stage 1), gradients (2) and weights (3) over all processes with DeepSpeed.

    Usage: ``Trainer(strategy=DeepSpeedStrategy(stage=2), devices=2)`` or ``Trainer(strategy="sd_deepspeed_zero2")``.

    Args:
        stage: ZeRO stage 1, 2 or 3; 2 if neither this nor the configuration says one.
        config: DeepSpeed's own configuration: a JSON file or a dictionary. "auto" is filled in from the run.
        offload: What leaves the device.
        buckets: Sizes of DeepSpeed's messages.
        cpu_checkpointing: Keep the activations of checkpointed blocks in host memory.
        timeout_seconds: A collective that takes longer, or a rank that is silent that long, ends the run.

    Raises:
        UsageError: The configuration is wrong or contradicts an argument, something to compile an extension with is
            missing, or the swap folder cannot be used.
    """

    owns_precision = True
    """Lightning's precision plugins are replaced by the engine's."""

    def __init__(
        self,
        *,
        stage: Stage | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        offload: Offload | None = None,
        buckets: Buckets | None = None,
        cpu_checkpointing: bool | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if timeout_seconds <= 0:
            raise UsageError(f"DeepSpeedStrategy got timeout_seconds={timeout_seconds}; expected a positive number")
        self.settings = DeepSpeedSettings(
            config,
            stage=stage,
            offload=offload or Offload(),
            buckets=buckets or Buckets(),
            cpu_checkpointing=cpu_checkpointing,
        )
        self._state: DeepSpeedState | None = None
        self._deferred: dict[str, DeferredWeights] = {}
        self._swap_folder: SwapFolder | None = None
        self._skips_update = False
        self._linear = torch.nn.functional.linear
        timeout = timedelta(seconds=timeout_seconds)
        super().__init__(config=self.settings.config, logging_level=logging.WARNING, timeout=timeout)

    def check(self, trainer: pl.Trainer, module: Any) -> None:
        """Compare a run's parts with the configuration; called before processes start, and again when they have.

        Raises:
            UsageError: They cannot go together.
        """
        self.settings.check(trainer, module)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, EnginePrecision):
            chosen: Any = plugin.precision
            if chosen == "32-true":  # Lightning's default as well
                chosen = precedence.precision(self.settings.config) or chosen
            precedence.check_precision(self.settings.config, chosen, self.settings.who, on_cuda=self._on_cuda)
            plugin = EnginePrecision(chosen)
        self._precision_plugin = plugin

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # the index becomes args.device_rank

    @property
    def loads_weights(self) -> bool:
        """Whether weights that are still in their files are left to :meth:`setup`."""
        return self.settings.stage == 3

    @property
    def _on_cuda(self) -> bool:
        return isinstance(self.accelerator, CUDAAccelerator)

    # ------------------------------------------------------------------ processes

    @override
    def setup_environment(self) -> None:
        import deepspeed

        loaded, ours = deepspeed.accelerator.get_accelerator().device_name(), "cuda" if self._on_cuda else "cpu"
        if loaded != ours:
            raise UsageError(
                f"trainer.accelerator is {ours}, but DeepSpeed was loaded for {loaded}; set DS_ACCELERATOR={ours} in "
                "the environment"
            )
        if self._on_cuda:
            super().setup_environment()
            return
        # gloo serves all collectives: without this DeepSpeed compiles a shared-memory extension.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    @override
    def setup_distributed(self) -> None:
        with self.joining():
            if self._on_cuda:
                super().setup_distributed()
                return
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    # ------------------------------------------------------------------ the engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.check(trainer, self.lightning_module)
            self._build_extensions()
        self._linear = torch.nn.functional.linear
        self.take(trainer)
        super().setup(trainer)
        assert self._plain is not None
        self._plain.note_hooks()
        if self.zero_stage_3:
            self._register_external_parameters()

    def _build_extensions(self) -> None:
        """Compile what the run needs on one process per machine, while the others wait."""
        if not self.settings.extensions:
            return
        error: UsageError | None = None
        try:
            if self.local_rank == 0:
                build(self.settings.extensions)
        except UsageError as caught:
            error = caught
        if not self.reduce_boolean_decision(error is None, all=True):
            raise error or UsageError("compiling DeepSpeed's extensions failed on another process; see its message")

    @override
    def _format_config(self) -> None:
        """Make the engine's configuration, now that the run's sizes are known."""
        assert self.lightning_module is not None
        if self.settings.offload_device == "nvme":
            self._swap_folder = SwapFolder(check_swap_path(self.settings.nvme_path))
        folder = None if self._swap_folder is None else self._swap_folder.path
        self.config = self.settings.engine_config(self.lightning_module.trainer, swap_folder=folder)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, scheduler = super()._init_optimizers()
        return (to_cpu_adam(optimizer) if self.settings.uses_cpu_adam else optimizer), scheduler

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        """Give the engine the model, and its float32 weights back what the engine's cast has rounded away."""
        exact: dict[str, ReadRange] = {}
        if str(self.precision_plugin.precision).endswith("-mixed"):
            exact = exact_weights(model, self._deferred)
        engine, zero = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        self._state = self._state_of(zero)
        if exact:
            self._state.restore_precision(exact)
        return engine, zero

    @override
    def init_deepspeed(self) -> None:
        """Partition what is still in its files, which the engine could only do with the whole in memory."""
        if self.loads_weights:
            assert isinstance(self.config, dict)
            self._deferred = partition_deferred(self.lightning_module, self.config, self.root_device)
        super().init_deepspeed()
        for weights in self._deferred.values():
            weights.close()
        self._deferred = {}

    @override
    def _set_deepspeed_activation_checkpointing(self) -> None:
        if self.settings.get("activation_checkpointing.cpu_checkpointing"):
            assert self.lightning_module is not None
            for block in checkpointed_blocks(self.lightning_module):
                block._gradient_checkpointing_func = checkpoint_on_host

    def _register_external_parameters(self) -> None:
        """Tell ZeRO-3 of weights that a module reads from its child: CLIP's embeddings look at a shape in theirs.

        DeepSpeed finds them by itself only inside its engine's forward, and pictures are drawn outside of it.
        """
        from deepspeed.runtime.zero import register_external_parameter

        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            embedding = getattr(module, "position_embedding", None)
            if isinstance(embedding, torch.nn.Embedding):
                register_external_parameter(module, embedding.weight)

    @override
    def _adopts(self, other: TakesWeightsApart) -> bool:
        return isinstance(other, DeepSpeedStrategy) and self.zero_stage_3 and other.zero_stage_3

    @override
    def _has_engine(self) -> bool:
        return self.model is not self.lightning_module

    @override
    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters())
        masters = {}  # an evaluation has none
        if self._fits:
            masters = {n: getattr(p, "ds_shape", p.shape) for n, p in parameters.items() if p.requires_grad}
            yield from whole_masters(self._engine_state().parameter_shards(), masters)
        for name, parameter in parameters.items():
            if name not in masters and hasattr(parameter, "ds_shape"):
                with deepspeed.zero.GatheredParameters([parameter]):
                    value = parameter.detach().clone()
                yield name, value
            elif name not in masters:
                yield name, parameter.detach()

    @override
    def _end_engine(self) -> None:
        engine, self.model = self.deepspeed_engine, self.lightning_module
        engine.destroy()

    @override
    def teardown(self) -> None:
        self.give_back()
        # Lightning would move the module to the host, and parameters would no longer be views of the engine's weights.
        self.teardown_beside_the_module()
        torch.nn.functional.linear = self._linear  # ZeRO-3's would compute whatever this process trains next
        self._state = None
        if self._swap_folder is not None and self.is_together:
            self._swap_folder.remove()

    # ------------------------------------------------------------------ training state

    def _engine_state(self) -> DeepSpeedState:
        """Return this rank's ranges of the trained parameters."""
        zero = self.deepspeed_engine.optimizer
        if self._state is None or self._state.zero is not zero:
            self._state = self._state_of(zero)
        return self._state

    def _state_of(self, zero: Any) -> DeepSpeedState:
        assert self.lightning_module is not None
        parameters = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
        if not self.zero_stage_3:
            return Zero12State(zero, parameters)
        return (SwappedZero3State if self.settings.offload_device == "nvme" else Zero3State)(zero, parameters)

    def skip_update(self) -> None:
        """Drop the gradients of the step that is about to be taken: the weights stay as they are."""
        self._skips_update = True

    def engine_step(self, **options: Any) -> Any:
        """Let the engine step, or drop its gradients if :meth:`skip_update` was called for this step."""
        if not self._skips_update:
            return self.deepspeed_engine.step(**options)
        self._skips_update = False
        with self._engine_state().discarding():
            result = self.deepspeed_engine.step(**options)
        if not self.deepspeed_engine.optimizer.overflow:
            raise RuntimeError("DeepSpeedStrategy.skip_update had no effect: this DeepSpeed release steps differently")
        return result


class EnginePrecision(DeepSpeedPrecision):
    """DeepSpeed's precision, except that a module may keep its batches; then nothing but its networks is converted."""

    def __init__(self, precision: Any) -> None:
        super().__init__(precision)
        self._keeps_batches = False

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> tuple[Any, Any, Any]:
        self._keeps_batches = keeps_batches(model)
        return model, optimizers, lr_schedulers

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self._keeps_batches else super().convert_input(data)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Make new tensors in the type of the weights: the engine has that type for "-mixed", too, and no autocast."""
        if self._keeps_batches or self._desired_dtype == torch.float32:
            return nullcontext()
        half = HalfPrecision("bf16-true" if self._desired_dtype == torch.bfloat16 else "16-true")
        return half.tensor_init_context()

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Call the hooks before a step once per step: with accumulation the engine is asked for every batch."""
        engine: Any = model.trainer.model
        if engine.is_gradient_accumulation_boundary():
            super()._after_closure(model, optimizer)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise UsageError("training_step returned None: DeepSpeed cannot skip a backward pass; return a loss")
        strategy: Any = model.trainer.strategy
        return strategy.engine_step(**kwargs)


def deepspeed(
    *,
    stage: Stage | None = None,
    config: str | dict[str, Any] | None = None,
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = None,
    offload_parameters: Literal["none", "cpu"] | None = None,
    nvme_path: str | None = None,
    cpu_adam: bool | None = None,
    reduce_bucket_size: int | None = None,
    allgather_bucket_size: int | None = None,
    overlap_comm: bool | None = None,
    stage3_param_persistence_threshold: int | None = None,
    cpu_checkpointing: bool | None = None,
    timeout_seconds: float = 1800.0,
) -> DeepSpeedStrategy:
    """Build the strategy from flat command-line keys; see :class:`DeepSpeedStrategy`, ``Offload`` and ``Buckets``."""
    return DeepSpeedStrategy(
        stage=stage,
        config=config,
        offload=Offload(offload_optimizer, offload_parameters, nvme_path, cpu_adam),
        buckets=Buckets(reduce_bucket_size, allgather_bucket_size, overlap_comm, stage3_param_persistence_threshold),
        cpu_checkpointing=cpu_checkpointing,
        timeout_seconds=timeout_seconds,
    )
