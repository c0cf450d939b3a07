"""The base of the training states of engines that shard weights and step them with their own optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from sd_lightning.state.optimizer_change import optimizer_name
from sd_lightning.state.shards import OptimizerGroups, ShardedState, check_same_groups, hyper_parameters


class EngineState(ShardedState):
    """Training state of an engine whose optimizers' ``param_groups`` hold the hyper-parameters."""

    optimizers: Sequence[Any]
    """The engine's optimizers, whose ``param_groups`` are used in a step."""

    def _group_names(self) -> list[list[list[str]]]:
        """Return the names of the parameters by optimizer and group, in the optimizer's order."""
        raise NotImplementedError

    def _inner(self, optimizer: Any) -> Any:
        """Return the torch optimizer inside of an engine's; its class is the optimizer's name."""
        return optimizer

    @override
    def optimizer_groups(self) -> OptimizerGroups:
        return [
            [
                hyper_parameters(group) | {"params": names}
                for group, names in zip(optimizer.param_groups, each, strict=True)
            ]
            for optimizer, each in zip(self.optimizers, self._group_names(), strict=True)
        ]

    @override
    def optimizer_names(self) -> list[str]:
        return [optimizer_name(self._inner(optimizer)) for optimizer in self.optimizers]

    def _take_groups(self, saved: OptimizerGroups) -> None:
        """Load hyper-parameters from a checkpoint.

        Raises:
            UsageError: The optimizers' groups do not hold the same parameters as those saved.
        """
        check_same_groups(self.optimizer_groups(), saved)
        for optimizer, groups in zip(self.optimizers, saved, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(hyper_parameters(values))
