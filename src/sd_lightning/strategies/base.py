"""The contract of strategies: everything that the module, callbacks and programs may ask of one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import TrainingState


class EngineStrategy:
    """Declare what others may ask of a strategy; the defaults hold where every process has whole weights.

    Our strategies inherit from this class and from one of Lightning's. :func:`engine_of` answers for Lightning's own,
    so that nobody outside of this folder asks a strategy whether it has a member.
    """

    @property
    def loads_weights(self) -> bool:
        """Whether :meth:`setup` reads deferred weights; otherwise the module reads them before."""
        return False

    @property
    def owns_precision(self) -> bool:
        """Whether the strategy replaces Lightning's precision plugins by its engine's."""
        return False

    @property
    def moves_weights(self) -> bool:
        """Whether weights move between tiers of memory: a live tensor would keep the memory that they leave."""
        return False

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse a run that cannot work; called before processes start, and again by :meth:`setup`.

        Optimizers are configured, which makes no states yet: their own constructors refuse settings.

        Raises:
            UsageError: The parts of the run and the strategy cannot go together.
        """
        module.configure_optimizers()

    def skip_update(self, optimizer: Optimizer) -> None:
        """Drop the gradients of the step that is about to be taken: the weights stay as they are.

        Args:
            optimizer: Whose step it is.
        """
        # Two unrelated plugins of Lightning's have gradient scalers, which skip such a step themselves.
        if getattr(self._lightning.precision_plugin, "scaler", None) is not None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def training_state(self) -> TrainingState:
        """Return this rank's view of the trained parameters, with which ``swap_in`` and ``swap_out`` exchange weights.

        After a fit of an engine that took weights apart, it is a
        :class:`~sd_lightning.strategies.plain_module.PlainState`, which exchanges weights only.

        Raises:
            UsageError: Lightning's strategy of that name has no view of its sharded state.
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

    def statistics(self) -> dict[str, Any]:
        """Return the engine's counters by name: bytes on each tier of memory, bytes moved, hits and evictions."""
        return {}

    @property
    def _lightning(self) -> Strategy:
        """The strategy that Lightning drives."""
        assert isinstance(self, Strategy)
        return self


class _LightningsOwn(EngineStrategy):
    """A strategy of Lightning's own, or the name of one that is yet to be built."""

    def __init__(self, strategy: Strategy | str) -> None:
        self._strategy = strategy

    @property
    @override
    def _lightning(self) -> Strategy:
        assert isinstance(self._strategy, Strategy)
        return self._strategy


def engine_of(strategy: Strategy | str) -> EngineStrategy:
    """Return the contract of a strategy: our own itself, or the answers for one of Lightning's."""
    return strategy if isinstance(strategy, EngineStrategy) else _LightningsOwn(strategy)


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter: DeepSpeed leaves an empty one with this mark."""
    return hasattr(parameter, "ds_shape")


def is_whole(weight: Tensor) -> bool:
    """Return whether a weight is whole in memory, and not in the shards of an engine of this run or an earlier one."""
    from torch.distributed.tensor import DTensor  # slow to import, and the module imports this file

    if isinstance(weight, DTensor) or is_partitioned(weight) or is_in_colossalai_chunk(weight):
        return False
    return weight.untyped_storage().nbytes() >= weight.nbytes  # Gemini leaves one NaN for all values


def is_in_colossalai_chunk(parameter: Tensor) -> bool:
    """Return whether ColossalAI's engine holds a parameter: ``ColossalAIEngine`` marks them."""
    return hasattr(parameter, "taken_apart")


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, also of one that ZeRO-3 has partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
