"""ColossalAI's chunks as ``ParameterShard``s: float32 masters, bit for bit.

ColossalAI's own ``state_dict`` gathers the float32 weights in 16 bits, and loading rounds the masters as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.state.shards import LazyTensor, OptimizerGroups, ParameterShard, Read, SavedParameter
from sd_lightning.strategies.colossalai.engine import ColossalAIEngine
from sd_lightning.strategies.colossalai.settings import WHO
from sd_lightning.strategies.engine_state import EngineState

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ColossalAIState(EngineState):
    """Training state of an engine: this rank's ranges of the float32 chunks and their Adam moments.

    Args:
        engine: The engine; without an optimizer (validation) there are no moments.
    """

    def __init__(self, engine: ColossalAIEngine) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        """The optimizer that the state belongs to; every fit creates another."""
        self.optimizers = [] if self.optimizer is None else [self.optimizer]

    def parameter_shards(self) -> list[ParameterShard]:
        """Return this rank's ranges, as live tensors."""
        slices = self._slices()
        shards = []
        for name, parameter, master, begin, end in self._ranges():
            states: dict[str, LazyTensor] = {}
            scalars: dict[str, Any] = {}
            state = self.optimizer.optim.state.get(slices[parameter]) if parameter in slices else None
            if state:
                states = {kind: state[kind].detach() for kind in _MOMENTS}
                scalars = {"step": torch.tensor(float(state["step"]))}
            # A chunk that is kept gathered is whole on every rank.
            writes = not self.engine.is_replicated(parameter) or dist.get_rank() == 0
            shape = tuple(parameter.shape)
            shards.append(ParameterShard(name, shape, begin, end, master.detach(), states, scalars, writes))
        return shards

    @override
    def _group_names(self) -> list[list[list[str]]]:
        return [self.engine.group_names for _ in self.optimizers]

    @override
    def _inner(self, optimizer: Any) -> Any:
        return optimizer.optim

    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load the masters and Adam's moments, and refresh the 16-bit weights.

        Raises:
            UsageError: The checkpoint was written by another kind of optimizer, or by one with other groups.
        """
        if groups is not None:
            self._take_groups(groups)
        slices = self._slices()
        for name, parameter, master, begin, end in self._ranges():
            read("master", name, master, begin, end)
            if groups is not None and saved[name].states:
                self.optimizer.optim.state[slices[parameter]] = _moments(saved[name], name, master, begin, end, read)
        self.engine.refresh()

    @torch.no_grad()
    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Compute with other weights; the float32 masters do not change."""
        for name, parameter, _, begin, _ in self._ranges():
            self.engine.compute_range(parameter).copy_(weights[name, begin])
        self.engine.written()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Compute with the trained weights again: the masters, rounded as after a step."""
        self.engine.refresh()

    def _ranges(self) -> Iterator[tuple[str, nn.Parameter, Tensor, int, int]]:
        """Yield name, parameter, float32 weights, begin and end of every range that this rank holds."""
        for name, parameter in self.engine.parameters.items():
            master, begin, end = self.engine.master_range(parameter)
            if begin < end:
                yield name, parameter, master, begin, end

    def _slices(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map each parameter to the optimizer's parameter for this rank's range of it."""
        if self.optimizer is None:
            return {}
        real = self.optimizer.id_to_real_params
        return {real[number]: piece for number, piece in self.optimizer.id_to_fake_params.items()}


def _moments(saved: SavedParameter, name: str, master: Tensor, begin: int, end: int, read: Read) -> dict[str, Any]:
    if set(saved.states) != set(_MOMENTS):
        raise UsageError(
            f"{WHO} cannot resume the optimizer states {', '.join(saved.states)}: it steps with Adam; resume with the "
            "strategy that wrote them, or start a new run from the weights with init_from="
        )
    state: dict[str, Any] = {"step": int(saved.scalars["step"])}
    for kind in _MOMENTS:
        state[kind] = torch.zeros_like(master)
        read(kind, name, state[kind], begin, end)
    return state
