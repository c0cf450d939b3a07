"""The base class of strategies whose engines shard a module's weights: what all ranks do at the same places."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.ranks import gathered, rank_and_world_size
from sd_lightning.state.shards import TrainingState
from sd_lightning.storage import checkpoint
from sd_lightning.strategies.base import EngineStrategy
from sd_lightning.strategies.networks import configured_optimizers
from sd_lightning.strategies.processes.group import WatchedProcesses

CPU_AND_CUDA = "cpu:gloo,cuda:nccl"
"""Process group backends; gloo serves checkpoints, object collectives and offloaded gradients on the CPU."""


class ShardingStrategy(EngineStrategy, WatchedProcesses):
    """Base class of strategies whose engine, not the module, holds the trained weights during a run."""

    steps_flat_ranges: bool = True
    """Whether a rank steps flat ranges of weights, so that an optimizer does not know which are matrices."""
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
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for optimizer in configured_optimizers(module):
            self.check_optimizer(optimizer)

    @override
    def check_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if any(map(name.__contains__, _OF_WHOLE)) or (self.steps_flat_ranges and name in _OF_MATRICES):
            raise UsageError(
                f"{type(self).__name__} got {name}, which needs whole weights in each process, and this engine has "
                "them in parts; take strategy=ddp or single, which adapters seldom outgrow, or optimizer=adamw"
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._state = None
        if trainer.state.fn == TrainerFn.FITTING:
            for optimizer in configured_optimizers(self._module):
                self.check_optimizer(optimizer)
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


_OF_WHOLE = ("Adafactor", "Prodigy", "ScheduleFree")
"""What the names of optimizers contain that measure whole weights, or move them between steps."""
_OF_MATRICES = {"LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers that need whole matrices or all weights; some of them step the distributed tensors of FSDP2."""


class BufferBroadcast:
    """Broadcast of the persistent buffers that a forward changes (BatchNorm): ranks take those of rank 0, as under DDP.

    Args:
        module: The module. Buffers outside of its ``state_dict`` are constants.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set
        ]

    @torch.no_grad()
    def from_rank_0(self) -> None:
        """Give every rank the buffers of rank 0; a collective call."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for part, name in self._places:
            buffer = part._buffers.get(name)
            if buffer is not None:  # pruning removes some
                by_device.setdefault(buffer.device, []).append(buffer)
        for buffers in by_device.values() if rank_and_world_size()[1] > 1 else ():
            assert dist.group.WORLD is not None
            dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 * 2**20, 0)


class EvaluationStarts:
    """Calls a function on every rank where a fit validates, and at each ``validate``, ``test`` and ``predict``.

    Lightning calls no hook there on a rank that has no batches, but all ranks set up the loop's data.

    Args:
        trainer: The trainer.
        at_start: Is given the evaluation's loop, whose data are set up; it may make collective calls.
    """

    def __init__(self, trainer: pl.Trainer, at_start: Callable[[Any], None]) -> None:
        loops: Any = trainer
        of_fit = loops.fit_loop.epoch_loop.val_loop
        self._loops = [of_fit, loops.validate_loop, loops.test_loop, loops.predict_loop]
        for loop in self._loops:
            loop.__dict__["setup_data"] = partial(self._set_up_data, loop, at_start)

    @staticmethod
    def _set_up_data(loop: Any, at_start: Callable[[Any], None]) -> None:
        type(loop).setup_data(loop)
        at_start(loop)

    def release(self) -> None:
        """Leave the loops as they were."""
        for loop in self._loops:
            loop.__dict__.pop("setup_data", None)


def refuse_uneven(loop: Any, who: str) -> None:
    """Refuse an evaluation in which ranks have different numbers of batches; a collective call.

    Args:
        loop: The loop of the evaluation, of which loaders without a known length do not count.
        who: The strategy, whose ranks gather weights together in each forward.

    Raises:
        UsageError: The numbers differ; on all ranks alike.
    """
    counts = _batches_by_rank(loop)
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"{who} got an evaluation in which {', '.join(f'rank {n} has {count:.0f}' for n, count in counts.items())} "
            "batches, and all ranks gather weights together in each forward: one with fewer batches would leave the "
            "others waiting; give every rank as many batches (Lightning's own sampler for validation and test does; "
            "for predict, pad the data or set limit_predict_batches to the smallest number), or take strategy=ddp"
        )


def refuse_rank_without_batches(loop: Any, who: str) -> None:
    """Refuse a validation of which some ranks have no batch, so that they swap no averages in; a collective call.

    Args:
        loop: As for :func:`refuse_uneven`.
        who: The strategy, whose ranks exchange weights together.

    Raises:
        UsageError: Some ranks have none; on all ranks alike.
    """
    counts = _batches_by_rank(loop)
    without = [rank for rank, count in counts.items() if count == 0]
    if without and len(without) < len(counts):
        raise UsageError(
            f"{who} got a validation of which rank {without[0]} has no batches, so that Lightning does not start it "
            "there, and all ranks exchange the weights for their EMA together where it starts: the others would wait; "
            "give every rank a batch (Lightning's own sampler does), or train without the callback EMA "
            "(callbacks.ema=null)"
        )


def _batches_by_rank(loop: Any) -> dict[int, float]:
    """Return the batches of each rank with a known number; a collective call."""
    limits = getattr(loop, "_max_batches", None) or loop.max_batches  # the latter is cut for a sanity check
    mode = getattr(loop._combined_loader, "_mode", "sequential")  # None where there is nothing to evaluate
    num_batches: dict[str, Callable[[list[float]], float]] = {"sequential": sum, "min_size": min}  # else the longest
    counts = gathered(num_batches.get(mode, max)(limits or [0]))
    return {rank: count for rank, count in enumerate(counts) if count != math.inf}
