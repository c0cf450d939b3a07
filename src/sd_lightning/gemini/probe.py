"""How much of the fast tier is taken by what is not in chunks: activations above all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.tiers import Tier


class Probe(Protocol):
    """Measures one pass after another."""

    def begin(self) -> None:
        """Measure from now on."""
        ...

    def enter(self) -> None:
        """A network begins to run forward, with or without gradients."""
        ...

    def exit(self) -> None:
        """That network has run."""
        ...

    def note(self) -> int:
        """Return what is taken now, in bytes; called between units."""
        ...

    def end(self) -> int:
        """Return the most that was taken since :meth:`begin`, in bytes."""
        ...


_peaks: dict[torch.device, int] = {}
"""What allocators had taken at most before probes reset their statistics."""


def peak_allocated(device: torch.device) -> int:
    """Return the most that this process has allocated on an accelerator, also before a probe measured there."""
    return max(_peaks.get(device, 0), int(torch.get_device_module(device).max_memory_allocated(device)))


class AllocatorProbe:
    """Ask the accelerator's allocator, whose peak statistics are reset again and again while this measures.

    There is one peak for everybody, and no other way to see what a part of a pass takes: :func:`peak_allocated` keeps
    the one of the whole process.

    What chunks take now is subtracted from the peak since the last note. Chunks that were freed in between are counted
    as activations: too much rather than too little.

    Args:
        memory: Knows what chunks take.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._module = torch.get_device_module(memory.device)
        self._peak = 0

    def begin(self) -> None:
        self._reset()
        self._peak = 0

    def enter(self) -> None:
        pass

    def exit(self) -> None:
        pass

    def note(self) -> int:
        in_chunks = self._memory.ledger.current[Tier.FAST]
        peak = self._module.max_memory_allocated(self._memory.device) - in_chunks
        self._peak = max(self._peak, peak)
        self._reset()
        return max(self._module.memory_allocated(self._memory.device) - in_chunks, 0)

    def end(self) -> int:
        self.note()
        return self._peak

    def _reset(self) -> None:
        device = self._memory.device
        _peaks[device] = peak_allocated(device)
        self._module.reset_peak_memory_stats(device)


class SavedTensorsProbe:
    """Count what networks save for the backward pass, where no allocator tells: on the host.

    Inputs of checkpointed blocks are kept by the blocks themselves and not counted.

    Args:
        is_weight: Tells whether a tensor lies in a chunk.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._is_weight = is_weight
        self._seen: set[int] = set()
        self._bytes = 0
        self._hooks: AbstractContextManager[None] | None = None
        self._measures = False

    def begin(self) -> None:
        self._measures, self._bytes = True, 0
        self._seen.clear()

    def enter(self) -> None:
        if self._measures:
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def exit(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def note(self) -> int:
        return self._bytes

    def end(self) -> int:
        self._measures = False
        return self._bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and not self._is_weight(tensor):
            self._seen.add(storage.data_ptr())
            self._bytes += storage.nbytes()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
