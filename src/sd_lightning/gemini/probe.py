"""How much of the fast tier is taken by what is not in chunks: activations above all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sd_lightning.gemini.tiers import Memory, Tier


class Probe(Protocol):
    """Measures one step after another."""

    def enter(self) -> None:
        """A unit begins to run forward, with gradients, outside of other units."""
        ...

    def exit(self) -> None:
        """That unit has run."""
        ...

    def current_bytes(self) -> int:
        """Return what is taken now."""
        ...

    def end_step(self) -> int:
        """Return the most that was taken since the last call."""
        ...


class AllocatorProbe:
    """Ask the accelerator's allocator: exact, and free of charge.

    Args:
        memory: Knows what chunks take.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._module = torch.get_device_module(memory.device)
        self._module.reset_peak_memory_stats(memory.device)
        self._peak = 0

    def enter(self) -> None:
        self._note()

    def exit(self) -> None:
        self._note()

    def current_bytes(self) -> int:
        return max(self._module.memory_allocated(self._memory.device) - self._memory.ledger.current[Tier.FAST], 0)

    def end_step(self) -> int:
        self._note()
        peak, self._peak = self._peak, 0
        return peak

    def _note(self) -> None:
        """Within a unit chunks stay what they are, so the allocator's peak is that of activations."""
        peak = self._module.max_memory_allocated(self._memory.device) - self._memory.ledger.current[Tier.FAST]
        self._peak = max(self._peak, peak)
        self._module.reset_peak_memory_stats(self._memory.device)


class SavedTensorsProbe:
    """Count what units save for the backward pass, where no allocator tells: on the host.

    Args:
        is_weight: Tells whether a tensor lies in a chunk.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._is_weight = is_weight
        self._seen: set[int] = set()
        self._bytes = 0
        self._hooks: AbstractContextManager[None] | None = None

    def enter(self) -> None:
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def exit(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def current_bytes(self) -> int:
        return self._bytes

    def end_step(self) -> int:
        taken, self._bytes = self._bytes, 0
        self._seen.clear()
        return taken

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and not self._is_weight(tensor):
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
