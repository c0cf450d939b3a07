"""Training state of a Gemini engine: this rank's part of every trained parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.optimizer import GeminiOptimizer
from sd_lightning.state.shards import (
    LazyTensor,
    OptimizerGroups,
    ParameterShard,
    Read,
    SavedParameter,
    ShardedState,
    load_groups,
    named_groups,
    optimizer_name,
)

if TYPE_CHECKING:
    from sd_lightning.gemini.engine import GeminiEngine


class ChunkedState(ShardedState):
    """Training state of an engine: the parameter ranges in this rank's shards of all chunks.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: GeminiEngine) -> None:
        self._engine = engine

    @override
    def parameter_shards(self) -> list[ParameterShard]:
        self._engine.access.close()
        self._engine.access.forwards.check_all()
        owned = []
        for chunk, slot, parameter in self._slots():
            begin, end = chunk.bounds.owned(slot)
            if begin == end and slot.numel > 0:
                continue
            optimizer = self._optimizer_of(parameter)
            states: dict[str, LazyTensor] = {}
            scalars: dict[str, Any] = {}
            if optimizer is not None and (progress := optimizer.stepper.progress.get(parameter)) is not None:
                update = optimizer.stepper.update
                for kind in optimizer.stepper.state_kinds(parameter):
                    part = update.part(chunk.bounds, slot, chunk.states[kind].tensor)
                    states[kind] = update.values(kind, part, end - begin)
                scalars = update.scalars(progress)
            master = chunk.bounds.view_of(slot, chunk.master.tensor)
            owned.append(ParameterShard(slot.name, tuple(parameter.shape), begin, end, master, states, scalars))
        return owned

    @override
    def optimizer_groups(self) -> OptimizerGroups:
        return named_groups(self._engine.optimizers, self._names())

    @override
    def optimizer_names(self) -> list[str]:
        return [optimizer_name(optimizer.inner) for optimizer in self._engine.optimizers]

    @override
    @torch.no_grad()
    def load(self, saved: Mapping[str, SavedParameter], groups: OptimizerGroups | None, read: Read) -> None:
        """Load weights, optimizer states and hyper-parameters; then refresh the compute weights.

        Raises:
            UsageError: The states belong to another optimizer, or to other groups.
        """
        self._check_not_swapped("load")
        if groups is not None:
            load_groups(self._engine.optimizers, self._names(), groups)
        self._engine.synchronize()
        for optimizer in self._engine.optimizers if groups is not None else ():
            optimizer.adopt()  # the groups' settings have been loaded
        for chunk, slot, parameter in self._slots():
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                read("master", slot.name, chunk.bounds.view_of(slot, chunk.master.tensor), begin, end)
            if groups is not None:
                self._load_states(chunk, slot, parameter, saved[slot.name], read)
        for chunk in self._trained_chunks():
            chunk.master.refresh()

    def _load_states(
        self, chunk: Chunk, slot: Slot, parameter: nn.Parameter, saved: SavedParameter, read: Read
    ) -> None:
        optimizer = self._optimizer_of(parameter)
        if optimizer is None:
            return
        stepper, update = optimizer.stepper, optimizer.stepper.update
        kinds = stepper.state_kinds(parameter)
        has_states = bool(saved.states or saved.scalars)
        progress = update.progress(saved.scalars) if has_states else None
        if has_states and (set(kinds) != set(saved.states) or progress is None):
            raise UsageError(
                f"resume: the checkpoint holds {_listed(saved.states, saved.scalars)} of {slot.name}, and "
                f"{type(optimizer.inner).__name__} keeps {_listed(kinds, update.scalar_names)}; resume with the "
                "optimizer of the checkpoint, or start a new run from its weights with init_from="
            )
        stepper.progress.pop(parameter, None)
        if progress is not None:
            stepper.progress[parameter] = progress
        begin, end = chunk.bounds.owned(slot)
        for kind in kinds:
            part = update.part(chunk.bounds, slot, chunk.states[kind].tensor)
            if not has_states or begin == end:
                part.zero_()
                continue
            values = part if update.joins_parameters else torch.empty(end - begin, device=part.device)
            read(kind, slot.name, values, begin, end)
            update.store(kind, part, values)

    @override
    def _exchange(self, weights: Mapping[tuple[str, int], Tensor]) -> bool:
        self._engine.access.close()
        self._settle()
        for chunk in self._trained_chunks():
            chunk.master.swap_in(weights)
        self._engine.is_swapped = True
        return True

    @override
    def _restore(self, trained: bool) -> None:
        self._engine.access.close()
        self._settle()
        for chunk in self._trained_chunks():
            chunk.master.swap_out()
        self._engine.is_swapped = False

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._engine.trained.items()}

    def _check_not_swapped(self, action: str) -> None:
        self._engine.access.close()
        if self._engine.is_swapped:
            raise RuntimeError(f"{action} called between swap_in and swap_out")

    def _settle(self) -> None:
        self._engine.release()
        self._engine.synchronize()

    def _trained_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self._engine.chunks if chunk.is_trained]

    def _slots(self) -> Iterator[tuple[Chunk, Slot, nn.Parameter]]:
        for chunk in self._trained_chunks():
            for parameter, slot in chunk.slots.items():
                yield chunk, slot, parameter

    def _optimizer_of(self, parameter: nn.Parameter) -> GeminiOptimizer | None:
        return next((optimizer for optimizer in self._engine.optimizers if optimizer.owns(parameter)), None)


def _listed(kinds: Iterable[str], scalars: Iterable[str]) -> str:
    return ", ".join([*kinds, *scalars]) or "no states"
