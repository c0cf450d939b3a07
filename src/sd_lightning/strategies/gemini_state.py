"""The training state of the Gemini engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from sd_lightning.gemini import GeminiEngine
from sd_lightning.state.shards import OptimizerGroups, ParameterShard, Read, SavedParameter
from sd_lightning.strategies.whole_tensors import FlatOptimizerState


class GeminiState(FlatOptimizerState):
    """Training state of Gemini: the parameter ranges in this rank's shards of all chunks.

    Args:
        engine: The engine that owns the chunks.
        optimizers: The engine's optimizers, which step them.
    """

    def __init__(self, engine: GeminiEngine, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        self._engine = engine
        self._names = {parameter: name for name, parameter in engine.trained.items()}

    @override
    def _group_names(self) -> list[list[list[str]]]:
        return [[[self._names[p] for p in g["params"]] for g in o.param_groups] for o in self.optimizers]

    @override
    def _inner(self, optimizer: Any) -> Any:
        return optimizer.inner

    def parameter_shards(self) -> list[ParameterShard]:
        """Return this rank's ranges, as live tensors."""
        return self._engine.state.shards()

    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load weights, optimizer states and hyper-parameters from a checkpoint.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        if groups is None:
            self._engine.state.load(read)
            return
        self._take_groups(groups)
        self._engine.state.load(read, saved)

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Compute with other weights until :meth:`swap_out`."""
        self._engine.state.swap_in(weights)

    def swap_out(self) -> None:
        """Compute with the trained weights again, bit for bit."""
        self._engine.state.swap_out()
