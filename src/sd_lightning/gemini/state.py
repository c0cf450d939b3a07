"""Training state of a Gemini engine: this rank's part of every trained parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.gemini.chunk import Chunk
from sd_lightning.gemini.chunked import ChunkedNetworks
from sd_lightning.gemini.layout import Slot
from sd_lightning.gemini.optimizer import GeminiOptimizer
from sd_lightning.state.shards import LazyTensor, ParameterShard, Read, SavedParameter


class EngineState:
    """Access to the training state of an engine.

    Args:
        engine: The engine.
        optimizers: The engine's list, which changes over time.
    """

    def __init__(self, engine: ChunkedNetworks, optimizers: Sequence[GeminiOptimizer]) -> None:
        self._engine = engine
        self._optimizers = optimizers

    def shards(self) -> list[ParameterShard]:
        """Return this rank's shards as live tensors; all ranks together cover everything exactly once."""
        self._engine.access.close()
        self._engine.access.check_forwards()
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

    @torch.no_grad()
    def load(self, read: Read, saved: Mapping[str, SavedParameter] | None = None) -> None:
        """Load weights and, if given, optimizer states; then refresh the compute weights.

        Args:
            read: Reads saved values.
            saved: The checkpoint's record of each parameter; optimizer states stay as they are if not given.

        Raises:
            UsageError: The states belong to another optimizer.
        """
        self._check_not_swapped("load")
        self._engine.synchronize()
        for optimizer in self._optimizers if saved is not None else ():
            optimizer.adopt()  # the groups' settings may have been loaded, too
        for chunk, slot, parameter in self._slots():
            begin, end = chunk.bounds.owned(slot)
            if begin < end:
                read("master", slot.name, chunk.bounds.view_of(slot, chunk.master.tensor), begin, end)
            if saved is not None:
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

    @torch.no_grad()
    def swap_in(self, weights: Mapping[tuple[str, int], Tensor]) -> None:
        """Swap other weights in until :meth:`swap_out`.

        Args:
            weights: By (name, begin), for every shard of :meth:`shards`.
        """
        self._check_not_swapped("swap_in")
        self._engine.release()
        self._engine.synchronize()
        for chunk in self._trained_chunks():
            chunk.master.swap_in(weights)
        self._engine.is_swapped = True

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the trained weights, bit for bit."""
        self._engine.access.close()
        if not self._engine.is_swapped:
            raise RuntimeError("swap_out called without swap_in")
        self._engine.release()
        self._engine.synchronize()
        for chunk in self._trained_chunks():
            chunk.master.swap_out()
        self._engine.is_swapped = False

    def _check_not_swapped(self, what: str) -> None:
        self._engine.access.close()
        if self._engine.is_swapped:
            raise RuntimeError(f"{what} called between swap_in and swap_out")

    def _trained_chunks(self) -> list[Chunk]:
        return [chunk for chunk in self._engine.chunks if chunk.is_trained]

    def _slots(self) -> Iterator[tuple[Chunk, Slot, nn.Parameter]]:
        for chunk in self._trained_chunks():
            for parameter, slot in chunk.slots.items():
                yield chunk, slot, parameter

    def _optimizer_of(self, parameter: nn.Parameter) -> GeminiOptimizer | None:
        return next((optimizer for optimizer in self._optimizers if optimizer.owns(parameter)), None)


def _listed(kinds: Iterable[str], scalars: Iterable[str]) -> str:
    return ", ".join([*kinds, *scalars]) or "no states"
