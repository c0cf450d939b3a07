"""Training state of the Gemini engine, as checkpoints and the average see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sd_lightning.gemini import GeminiEngine, SavedStates
from sd_lightning.state.optimizer_change import optimizer_name
from sd_lightning.state.shards import ParameterShard, Read, SavedParameter, check_same_groups, hyper_parameters


class GeminiState:
    """The ranges of parameters in this rank's shards of all chunks.

    Args:
        engine: Owns the chunks.
        optimizers: What steps them.
    """

    def __init__(self, engine: GeminiEngine, optimizers: Sequence[Any]) -> None:
        self.optimizers = list(optimizers)
        self._engine = engine
        self._names = {parameter: name for name, parameter in engine.trained.items()}

    @property
    def moves(self) -> bool:
        """Whether chunks may move to other tiers: who keeps live tensors would keep the memory that they leave."""
        return self._engine.auto is not None

    def parameter_shards(self) -> list[ParameterShard]:
        """Return what this rank owns, as live tensors."""
        return [ParameterShard(**vars(owned)) for owned in self._engine.state.shards()]

    def optimizer_groups(self) -> list[list[dict[str, Any]]]:
        """Return hyper-parameters and parameter names of every group."""
        return [
            [
                hyper_parameters(group) | {"params": [self._names[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]

    def optimizer_names(self) -> list[str]:
        """Return the class of each of the user's optimizers."""
        return [optimizer_name(optimizer.inner) for optimizer in self.optimizers]

    def load(self, saved: Mapping[str, SavedParameter], groups: list[list[dict[str, Any]]] | None, read: Read) -> None:
        """Take weights, optimizer states and hyper-parameters from a checkpoint.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        if groups is None:
            self._engine.state.load(read)
            return
        check_same_groups(self.optimizer_groups(), groups)
        for optimizer, saved_groups in zip(self.optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, saved_groups, strict=True):
                group.update(hyper_parameters(values))
        self._engine.state.load(
            read, {name: SavedStates(tuple(entry.states), entry.scalars) for name, entry in saved.items()}
        )

    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Compute with other weights until :meth:`swap_out`."""
        self._engine.state.swap_in(weights)

    def swap_out(self) -> None:
        """Compute with the trained weights again, bit for bit."""
        self._engine.state.swap_out()
