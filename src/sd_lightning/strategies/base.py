"""The interface of strategies for modules, callbacks and programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.planner.footprint import Footprint, Workload, replicated
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SwappableWeights, TrainingState

BytesByTier = dict[str, dict[str, int]]
"""Bytes by memory tier ("fast", "slow", "disk") and kind ("weights", "optimizer", …)."""
UnitObserver = Callable[[str, str], None]
"""(phase: "forward", "backward" or "end", unit): called when an engine has gathered the weights of a unit."""


@dataclass(frozen=True)
class RunSettings:
    """What a strategy can refuse before it is given to a trainer."""

    precision: str
    """Lightning's name: "16-mixed"."""
    devices: int
    """Processes on each machine."""
    num_nodes: int = 1
    channels_last: bool = False
    """Whether convolution weights are to be in the NHWC layout."""
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None


class EngineStrategy:
    """Interface of strategies; the defaults suit those that keep whole weights in every process.

    Our strategies inherit from this class and from one of Lightning's. :func:`engine_of` wraps Lightning's own, so
    code outside of this folder need not test whether a strategy has a member.
    """

    engines: ClassVar[list[type[EngineStrategy]]] = []
    """The classes that are loaded: only they can have sharded a weight."""

    loads_weights: bool = False
    """Whether :meth:`setup` reads deferred weights; if not, the module reads them earlier."""
    owns_precision: bool = False
    """Whether the strategy replaces Lightning's precision plugin by its engine's."""
    moves_weights: bool = False
    """Whether weights move between memory tiers; a reference to one would keep the memory it moved out of."""
    counts_bytes: bool = False
    """Whether the engine keeps an account of its bytes: :meth:`bytes_by_tier` and :meth:`observe_units`."""
    steps_in_backward: bool = False
    """Whether the backward pass changes the weights."""
    swaps_averages: bool = False
    """Whether a callback, which sets this, swaps averages in and out where validations of a fit start and end."""

    keeps_layout: bool = True
    """Whether weights keep their memory format; not if they are in flat tensors or shards."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        EngineStrategy.engines.append(cls)

    @classmethod
    def whole_shape_of(cls, parameter: Tensor) -> tuple[int, ...] | None:
        """Return the shape of the whole parameter if this class's engine holds it in parts; None if it does not."""
        return None

    @classmethod
    def settings_of_file(
        cls, settings: Mapping[str, Any], given: Collection[str], *, num_processes: int, on_cuda: bool
    ) -> Mapping[str, Any]:
        """Return what the engine's own file changes in a run of the programs; called before anything else is built.

        Args:
            settings: The run's settings by section.
            given: Dotted keys and groups that the command line sets; the file cannot change them.
            num_processes: Number of processes on all machines.
            on_cuda: Whether the run computes on CUDA devices.

        Returns:
            Values by dotted key.

        Raises:
            UsageError: The file is wrong, or contradicts the command line.
        """
        return {}

    def check_settings(self, settings: RunSettings) -> None:
        """Raise if a run of the programs cannot have these settings; called before anything else is built.

        Raises:
            UsageError: It cannot.
        """
        if settings.channels_last and not self.keeps_layout:
            raise UsageError(
                f"speed.channels_last=true: {type(self).__name__} keeps weights row by row, in flat tensors or shards; "
                "write speed.channels_last=false or strategy=ddp"
            )

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raise if the run cannot work; called before processes start, and again by :meth:`setup`.

        Configure the optimizers: their constructors check settings, and create no states yet.

        Raises:
            UsageError: The trainer's or module's settings do not fit the strategy.
        """
        module.configure_optimizers()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if the engine cannot step this optimizer; it may be one of a stand-in of the weights.

        Raises:
            UsageError: It cannot.
        """

    def skip_update(self, optimizer: Optimizer) -> None:
        """Drop the gradients of the next step, so that it leaves the weights unchanged.

        Args:
            optimizer: The optimizer of that step.
        """
        if gradient_scaler(self._lightning.precision_plugin) is not None:
            return  # it skips such a step itself
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def skip_update_if(self, optimizer: Optimizer, is_bad: Tensor) -> bool:
        """Have the next step leave weights and states unchanged if a value on the device is 1, without reading it.

        Args:
            optimizer: The optimizer of that step.
            is_bad: 1 or 0, equal on all ranks: a float32 scalar on the root device.

        Returns:
            Whether it will; if not, the caller must read the value, and call :meth:`skip_update` if it is 1.
        """
        if gradient_scaler(self._lightning.precision_plugin) is not None:
            return True  # the gradients of such a loss are not finite either
        if not takes_found_inf(optimizer):
            return False
        give_found_inf(optimizer, is_bad)
        return True

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks; without, collectives are left out."""
        strategy = self._lightning
        return isinstance(strategy, ParallelStrategy) and strategy.world_size > 1

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the largest values over all ranks, without waiting for the device; a collective call.

        Args:
            values: A tensor on the root device; it is overwritten.
        """
        if self.has_peers:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def write_back(self) -> None:
        """Bring what hooks have written to the trained weights of all ranks; a collective call."""

    def training_state(self) -> TrainingState:
        """Return this rank's view of the trained parameters and their optimizers; only during a run.

        Raises:
            UsageError: It is a sharding strategy of Lightning, whose state cannot be read.
        """
        strategy = self._lightning
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise UsageError(
                f"Trainer got strategy={type(strategy).__name__}, whose training state cannot be read; "
                "expected single or ddp (strategy=single, strategy=ddp)"
            )
        assert strategy.lightning_module is not None
        parameters = {n: p for n, p in strategy.lightning_module.named_parameters() if p.requires_grad}
        return ReplicatedState(parameters, strategy.optimizers, rank=strategy.global_rank)

    def swappable_weights(self) -> SwappableWeights:
        """Return the trained weights, to be exchanged during a fit and after it, when the module is whole again."""
        return self.training_state()

    def footprint(self, workload: Workload) -> Footprint | None:
        """Return the memory that one process takes for the trained weights; needs no device and no trainer.

        Returns:
            None if it depends on measurements in the run.
        """
        return replicated(workload)

    def statistics(self) -> dict[str, Any]:
        """Return the engine's counters by name: bytes per memory tier, bytes moved, hits and evictions."""
        return {}

    def bytes_by_tier(self) -> BytesByTier:
        """Return the bytes that the engine holds now."""
        return {}

    def observe_units(self, observer: UnitObserver | None) -> None:
        """Call an observer for each unit from now on; None ends that."""

    @property
    def _lightning(self) -> Strategy:
        """This strategy, or the wrapped one."""
        assert isinstance(self, Strategy)
        return self


class _LightningAdapter(EngineStrategy):
    """Wrapper of one of Lightning's own strategies, or of the name of one that is not built yet."""

    def __init__(self, strategy: Strategy | str) -> None:
        self._strategy = strategy

    @override
    def check_settings(self, settings: RunSettings) -> None:
        devices, num_nodes = settings.devices, settings.num_nodes
        if self._strategy == "auto" and devices * num_nodes > 1:
            raise UsageError(
                f"strategy=single is one process, but trainer.devices={devices} trainer.num_nodes={num_nodes} ask for "
                f"{devices * num_nodes}; add strategy=ddp"
            )

    @property
    @override
    def _lightning(self) -> Strategy:
        assert isinstance(self._strategy, Strategy)
        return self._strategy


def engine_of(strategy: Strategy | str) -> EngineStrategy:
    """Return a strategy's interface: the strategy itself if it is ours, else a wrapper."""
    return strategy if isinstance(strategy, EngineStrategy) else _LightningAdapter(strategy)


def is_whole(weight: Tensor) -> bool:
    """Return whether a weight is whole in memory, not sharded by an engine of this or an earlier run."""
    in_parts = any(engine.whole_shape_of(weight) is not None for engine in EngineStrategy.engines)
    return (
        not in_parts and not isinstance(weight, DTensor) and weight.untyped_storage().nbytes() >= weight.nbytes
    )  # Gemini leaves one NaN, expanded


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, even if an engine has emptied it."""
    shapes = (engine.whole_shape_of(parameter) for engine in EngineStrategy.engines)
    return next((shape for shape in shapes if shape is not None), tuple(parameter.shape))


def gradient_scaler(plugin: Precision) -> GradScaler | None:
    """Return the gradient scaler of a precision plugin, if it has one."""
    return getattr(plugin, "scaler", None)  # two unrelated plugins of Lightning have one


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return whether a step leaves everything unchanged where ``optimizer.found_inf`` is 1, without reading it.

    Torch's fused Adam, AdamW and Adagrad do. Fused SGD does not: its first step would leave new momentum buffers
    uninitialised.
    """
    skips = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's own mark
    return skips and not isinstance(optimizer, SGD) and all(group.get("fused") for group in optimizer.param_groups)


def give_found_inf(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Have the next step leave everything unchanged if ``found_inf`` is 1: a float32 scalar on the device."""
    attributes: dict[str, Tensor | None] = vars(optimizer)
    if "found_inf" not in attributes:  # it stays, so the hook is registered once
        optimizer.register_step_post_hook(_forget)
    attributes |= {"found_inf": found_inf, "grad_scale": None}


def _forget(optimizer: Optimizer, *_: object) -> None:
    vars(optimizer)["found_inf"] = None
