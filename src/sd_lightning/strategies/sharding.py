"""The base class of strategies whose engines shard a module's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import TrainingState
from sd_lightning.storage import checkpoint
from sd_lightning.strategies.base import EngineStrategy
from sd_lightning.strategies.buffers import BufferBroadcast
from sd_lightning.strategies.evaluation_starts import EvaluationStarts, refuse_rank_without_batches, refuse_uneven
from sd_lightning.strategies.processes.group import WatchedProcesses

CPU_AND_CUDA = "cpu:gloo,cuda:nccl"
"""Process group backends; gloo serves checkpoints, object collectives and offloaded gradients on the CPU."""


class ShardingStrategy(EngineStrategy, WatchedProcesses):
    """Base class of strategies whose engine, not the module, holds the trained weights during a run."""

    _state: TrainingState | None = None
    _buffers: BufferBroadcast | None = None
    _has_trained = False
    """Whether a training step has come since the last broadcast of buffers."""
    _evaluations: EvaluationStarts | None = None

    @override
    def connect(self, model: pl.LightningModule) -> None:
        trainer: Any = model.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            for callback in trainer.callbacks:
                if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                    raise UsageError(
                        f"{type(self).__name__} got the callback {type(callback).__name__}, which averages the "
                        "module's own parameters, and those are not what this engine trains; take "
                        "sd_lightning.callbacks.EMA in its place, or strategy=ddp"
                    )
                if isinstance(callback, ModelPruning):
                    raise UsageError(
                        f"{type(self).__name__} got the callback {type(callback).__name__}, which replaces weights, "
                        "and this engine holds them in parts; prune before or after fit, or take strategy=ddp"
                    )
        super().connect(model)
        self.swaps_averages = False  # of an earlier fit with other callbacks
        self._release_evaluations()
        self._evaluations = EvaluationStarts(trainer, self._start_evaluation)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._state = None
        self._set_up_engine(trainer, self._module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._broadcast_buffers()
        self._has_trained = True
        return super().training_step(*args, **kwargs)

    @property
    def _gathers_in_forward(self) -> bool:
        """Whether a network's forward is a collective call."""
        return True

    def _start_evaluation(self, loop: Any) -> None:
        if self._gathers_in_forward:
            refuse_uneven(loop, type(self).__name__)
        elif self.swaps_averages and self._module.trainer.state.fn == TrainerFn.FITTING:
            refuse_rank_without_batches(loop, type(self).__name__)
        if self._has_trained:  # an evaluation changes none
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        if self._buffers is None:
            self._buffers = BufferBroadcast(self._module)
        self._buffers.from_rank_0()
        self._has_trained = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        remedy = self._remedy_of(exception)
        if remedy is not None:
            exception.args = (remedy,)
        super().on_exception(exception)

    def _remedy_of(self, error: BaseException) -> str | None:
        """Return what to do about an error of torch that comes of weights in parts; None for other errors."""
        return None

    def _set_up_engine(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Give the trained networks to the engine."""
        raise NotImplementedError

    @override
    def skip_update_if(self, optimizer: Optimizer, is_bad: Tensor) -> bool:
        return False  # the engine steps in its own way

    @override
    def training_state(self) -> TrainingState:
        if self._state is None:
            self._state = self._make_state()
        return self._state

    def _make_state(self) -> TrainingState:
        """Return a view of this rank's ranges of the trained parameters."""
        raise NotImplementedError

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._module.named_parameters() if p.requires_grad}

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else self._engine_precision(plugin)

    def _engine_precision(self, plugin: Precision) -> Precision:
        """Return the engine's plugin for the same precision as Lightning's ``plugin``."""
        return plugin

    def _once_per_machine(self, act: Callable[[], None], otherwise: str) -> None:
        """Call a function on each machine's local rank 0 while the other ranks wait; a collective call.

        Args:
            act: The function.
            otherwise: The error message of the other ranks.

        Raises:
            UsageError: The function failed on any machine.
        """
        error: UsageError | None = None
        try:
            if self.local_rank == 0:
                act()
        except UsageError as caught:
            error = caught
        if not self.reduce_boolean_decision(error is None, all=True):
            raise error or UsageError(otherwise)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Route portable checkpoints to ``PortableCheckpoint``, which has set the ``checkpoint_io``."""
        if checkpoint.is_portable(checkpoint_path):
            return self.checkpoint_io.load_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def teardown(self) -> None:
        """Tear down as Lightning does, but do not move the module: the engine may hold its weights."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._release_evaluations()
        self._state = self._buffers = None
        self._has_trained = False

    def _release_evaluations(self) -> None:
        if self._evaluations is not None:
            self._evaluations.release()
            self._evaluations = None
