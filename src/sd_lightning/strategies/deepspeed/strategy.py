"""DeepSpeed ZeRO-1/2/3, on CUDA and, for tests and small experiments, on CPU over gloo."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision as LightningDeepSpeedPrecision
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.planner.footprint import Footprint, Workload
from sd_lightning.state.host import host_step
from sd_lightning.state.ranks import failing_together
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.deepspeed import weights
from sd_lightning.strategies.deepspeed.config import UserConfig
from sd_lightning.strategies.deepspeed.machine import SwapFolder, build, check_swap_path
from sd_lightning.strategies.deepspeed.settings import DeepSpeedSettings, Stage, footprint_of
from sd_lightning.strategies.deepspeed.state import DeepSpeedState, SwappedZero3State, Zero3State, Zero12State
from sd_lightning.strategies.networks import EnginePrecision, replace_adam
from sd_lightning.strategies.processes.group import timeout_of
from sd_lightning.strategies.restoring import RestoringStrategy
from sd_lightning.strategies.whole_tensors import whole_masters

log = logging.getLogger(__name__)


class DeepSpeedStrategy(RestoringStrategy, LightningDeepSpeedStrategy):
    """Strategy that shards optimizer states (stage 1), gradients (2) and weights (3) with DeepSpeed.

    Usage: ``Trainer(strategy=DeepSpeedStrategy(stage=2), devices=2)`` or ``Trainer(strategy="sd_deepspeed_zero2")``.

    Args:
        stage: ZeRO stage 1, 2 or 3; 2 if neither this nor the configuration sets it.
        config: DeepSpeed's own configuration: a JSON file or a dictionary. "auto" is filled in from the run.
        offload_optimizer: Put optimizer states and float32 weights into host memory, or on a disk (stage 3).
        offload_parameters: Keep weights that are not in use at the moment in host memory (stage 3).
        nvme_path: Folder on a fast local disk for ``offload_optimizer="nvme"``.
        cpu_adam: Step offloaded states with DeepSpeed's CPU Adam (compiled once per machine) instead of torch's Adam or
            AdamW, with the same hyper-parameters; true if not given. False keeps the module's optimizer.
        reduce_bucket_size: Elements reduced at once; 200 million if not given.
        allgather_bucket_size: Elements gathered at once (stages 1 and 2); 200 million if not given.
        overlap_comm: Reduce gradients during backward; true if not given.
        stage3_param_persistence_threshold: Parameters with fewer elements stay whole on every rank (stage 3); 100 000
            if not given.
        cpu_checkpointing: Keep the activations of checkpointed blocks in host memory.
        timeout_seconds: Seconds after which a slow collective or a silent rank ends the run.

    Raises:
        UsageError: The configuration is wrong or contradicts an argument, a tool to compile an extension is missing, or
            the swap folder is unusable.
    """

    owns_precision = True
    keeps_layout = False

    def __init__(
        self,
        *,
        stage: Stage | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
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
    ) -> None:
        self.settings = DeepSpeedSettings(config, locals())
        timeout = timeout_of("DeepSpeedStrategy", timeout_seconds)
        self.loads_weights = self.settings.stage == 3
        self._deferred: dict[str, DeferredWeights] = {}
        self._swap_folder: SwapFolder | None = None
        self._skips_update = False
        self._linear = torch.nn.functional.linear
        super().__init__(config=self.settings.config, logging_level=logging.WARNING, timeout=timeout)

    @override
    @classmethod
    def whole_shape_of(cls, parameter: Tensor) -> tuple[int, ...] | None:
        return weights.whole_shape(parameter) if weights.is_partitioned(parameter) else None

    @override
    @classmethod
    def settings_of_file(
        cls, settings: Mapping[str, Any], given: Collection[str], *, num_processes: int, on_cuda: bool
    ) -> Mapping[str, Any]:
        source = settings["strategy"].get("config")
        if source is None:
            return {}
        config = UserConfig.read(source)  # the strategy shows its warnings
        changes = config.settle(settings, given, num_processes=num_processes)
        config.check_precision(str(changes.get("trainer.precision", settings["trainer"]["precision"])), on_cuda=on_cuda)
        for key, value in changes.items():
            log.info("%s sets %s=%s", config.who, key, value)
        return changes

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().check(trainer, module)
        self.settings.check(trainer, module)

    @override
    def footprint(self, workload: Workload) -> Footprint:
        return footprint_of(self.settings, workload)

    @override
    def _engine_precision(self, plugin: Precision) -> Precision:
        if isinstance(plugin, DeepSpeedPrecision) or not isinstance(plugin, LightningDeepSpeedPrecision):
            return plugin
        chosen: Any = plugin.precision
        if chosen == "32-true":  # may be Lightning's default
            chosen = self.settings.user.precision() or chosen
        self.settings.user.check_precision(chosen, on_cuda=self._on_cuda)
        return DeepSpeedPrecision(chosen)

    @property
    @override
    def root_device(self) -> torch.device:
        device = super().root_device
        return torch.device("cpu", 0) if device.type == "cpu" else device  # the index becomes args.device_rank

    @property
    def _on_cuda(self) -> bool:
        return isinstance(self.accelerator, CUDAAccelerator)

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
        # gloo serves all collectives; otherwise DeepSpeed would compile a shared-memory extension.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        ParallelStrategy.setup_environment(self)
        with self.joining():
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.check(trainer, self._module)
            if self.settings.extensions:
                with failing_together():
                    if self.local_rank == 0:
                        build(self.settings.extensions)
        self._linear = torch.nn.functional.linear
        self._state = None
        self.attach(trainer)
        LightningDeepSpeedStrategy.setup(self, trainer)  # the engine takes the module and the optimizer together
        self.record_hooks()
        if self.zero_stage_3:
            weights.register_external_parameters(self._module)
        if self._fits:
            names = {parameter: name for name, parameter in self._module.named_parameters()}
            self._wrap_hooks(trainer, partial(self._in_hook, names))

    def _in_hook(self, names: Mapping[nn.Parameter, str], owner: Any, name: str) -> AbstractContextManager[None]:
        state = self.training_state()
        assert isinstance(state, DeepSpeedState)
        return weights.whole_in_hook(f"{type(owner).__name__}.{name}", names, state.adopt)

    @property
    @override
    def _gathers_in_forward(self) -> bool:
        return bool(self.zero_stage_3)

    @override
    def _remedy_of(self, error: BaseException) -> str | None:
        return weights.remedy_of(error) if self.zero_stage_3 else None

    @override
    def _format_config(self) -> None:
        """Build the engine's configuration, now that the run's sizes are known."""
        if self.settings.offload_device == "nvme":
            self._swap_folder = SwapFolder(check_swap_path(self.settings.nvme_path))
        folder = None if self._swap_folder is None else self._swap_folder.path
        self.config = self.settings.engine_config(self._module.trainer, swap_folder=folder)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        optimizer, scheduler = super()._init_optimizers()
        if self.settings.uses_cpu_adam:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = replace_adam(optimizer, DeepSpeedCPUAdam)
        return optimizer, scheduler

    @override
    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        """Give the engine the model, and restore the float32 weights that the engine's cast has rounded."""
        exact: dict[str, weights.ReadRange] = {}
        if str(self.precision_plugin.precision).endswith("-mixed"):
            exact = weights.exact_weights(model, self._deferred)
        engine, zero = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        self._state = state = self._state_of(zero)
        if exact:
            state.restore_precision(exact)
        return engine, zero

    @override
    def init_deepspeed(self) -> None:
        """Partition deferred weights first, as the engine would need all of them in memory at once."""
        if self.loads_weights:
            assert isinstance(self.config, dict)
            self._deferred = weights.partition_deferred(self._module, self.config, self.root_device)
        super().init_deepspeed()
        for each in self._deferred.values():
            each.close()
        self._deferred = {}

    @override
    def _set_deepspeed_activation_checkpointing(self) -> None:
        if self.settings.get("activation_checkpointing.cpu_checkpointing"):
            for block in weights.checkpointed_blocks(self._module):
                block._gradient_checkpointing_func = weights.checkpoint_on_host

    @override
    def _adopts(self, other: RestoringStrategy) -> bool:
        return isinstance(other, DeepSpeedStrategy) and self.zero_stage_3 and other.zero_stage_3

    @override
    def _has_engine(self) -> bool:
        return self.model is not self.lightning_module

    @override
    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        import deepspeed

        parameters = dict(self._module.named_parameters())
        masters = {}  # an evaluation has none
        if self._fits:
            masters = {n: weights.whole_shape(p) for n, p in parameters.items() if p.requires_grad}
            yield from whole_masters(self.training_state().parameter_shards(), masters)
        for name, parameter in parameters.items():
            if name not in masters:
                with deepspeed.zero.GatheredParameters([parameter]):  # a parameter that is whole stays as it is
                    value = parameter.detach().clone()
                yield name, value

    @override
    def _end_engine(self) -> None:
        engine, self.model = self.deepspeed_engine, self.lightning_module
        engine.destroy()

    @override
    def teardown(self) -> None:
        super().teardown()
        torch.nn.functional.linear = self._linear  # later training in this process would use ZeRO-3's
        if self._swap_folder is not None and self.is_released:
            self._swap_folder.remove()

    @override
    def _make_state(self) -> DeepSpeedState:
        return self._state_of(self.deepspeed_engine.optimizer)

    def _state_of(self, zero: Any) -> DeepSpeedState:
        parameters = self._trained_parameters()
        if not self.zero_stage_3:
            return Zero12State(zero, parameters)
        return (SwappedZero3State if self.settings.offload_device == "nvme" else Zero3State)(zero, parameters)

    @override
    def skip_update(self, optimizer: Optimizer) -> None:
        self._skips_update = True

    def engine_step(self, **options: Any) -> Any:
        """Let the engine step, or drop its gradients if :meth:`skip_update` was called for this step."""
        if not self._skips_update:
            with host_step() if self.settings.offload_device != "none" else nullcontext():
                return self.deepspeed_engine.step(**options)
        self._skips_update = False
        state = self.training_state()
        assert isinstance(state, DeepSpeedState)
        with state.discarding():
            result = self.deepspeed_engine.step(**options)
        if not self.deepspeed_engine.optimizer.overflow:
            raise RuntimeError("DeepSpeedStrategy.skip_update had no effect: this DeepSpeed release steps differently")
        return result


class DeepSpeedPrecision(EnginePrecision, LightningDeepSpeedPrecision):
    """Lightning's plugin with support of ``keeps_batches``, and with the engine's step left to the strategy."""

    _is_by_hand = _has_gradients = False

    @override
    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        self._is_by_hand = not model.automatic_optimization
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Create new tensors in the weights' dtype: the engine uses it for "-mixed", too, without autocast."""
        if self._keeps_batches or self._desired_dtype == torch.float32:
            return nullcontext()
        half = HalfPrecision("bf16-true" if self._desired_dtype == torch.bfloat16 else "16-true")
        return half.tensor_init_context()

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Call the pre-step hooks once per optimizer step: with accumulation, the engine steps for every batch."""
        engine: Any = model.trainer.model
        if engine.is_gradient_accumulation_boundary():
            super()._after_closure(model, optimizer)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Let the engine compute gradients; Lightning has divided the loss by the number of accumulated batches.

        Raises:
            UsageError: Gradients are accumulated by hand where the engine loses those of the first pass.
        """
        strategy: Any = model.trainer.strategy
        if self._is_by_hand and self._has_gradients and not strategy.zero_stage_3:
            raise UsageError(
                "a second manual_backward before optimizer.step(): DeepSpeed at stages 1 and 2 keeps gradients of one "
                "pass; add the losses up, let trainer.accumulate_grad_batches accumulate, or take strategy=fsdp or ddp"
            )
        self._has_gradients = True
        super().backward(tensor, model, optimizer, *args, **({"scale_wrt_gas": False} | kwargs))

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Leave it to the engine, if that has been told to clip.

        Raises:
            UsageError: A module that optimizes by hand clips, which would have no effect.
        """
        if self._is_by_hand:
            raise UsageError(
                "clip_gradients has no effect under DeepSpeed in manual optimization; give DeepSpeed's configuration "
                '"gradient_clipping", or take strategy=fsdp, gemini or ddp'
            )

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Any, **kwargs: Any
    ) -> Any:
        result, self._has_gradients = closure(), False
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise UsageError("training_step returned None: DeepSpeed cannot skip a backward pass; return a loss")
        strategy: Any = model.trainer.strategy  # the one that this plugin belongs to
        return strategy.engine_step(**kwargs)
