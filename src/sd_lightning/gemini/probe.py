"""Measure how much of the fast tier is taken by what is not in chunks: activations above all."""

from __future__ import annotations

from collections.abc import Callable
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

    def enter(self) -> None:
        """Note that a network begins to run forward, with or without gradients."""
        return None

    def exit(self) -> None:
        """Note that the network has run."""
        return None

    def note(self) -> int:
        """Return what is taken now, in bytes; called between units."""

    def end(self) -> int:
        """Return the most that was taken since :meth:`begin`, in bytes."""


_peaks: dict[torch.device, int] = {}
"""By device: the allocator's peak before probes reset its statistics; of the process, as those are."""


def peak_allocated(device: torch.device) -> int:
    """Return the peak that this process has allocated on an accelerator, also before a probe measured there."""
    return max(_peaks.get(device, 0), int(torch.get_device_module(device).max_memory_allocated(device)))


class AllocatorProbe(Probe):
    """Ask the accelerator's allocator for its peak, and reset the peak at every note.

    The allocator has one peak, and no other way to tell what a part of a pass takes: :func:`peak_allocated` remembers
    that of the whole process. What chunks take now is subtracted from the peak since the last note; chunks that were
    freed in between count as activations, which errs on the safe side.

    Args:
        memory: Counts what chunks take.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._module = torch.get_device_module(memory.device)
        self._peak = 0

    def begin(self) -> None:
        self._reset()
        self._peak = 0

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


class SavedTensorsProbe(Probe):
    """Count the tensors that networks save for the backward pass: on the host no allocator tells.

    Inputs of checkpointed blocks are kept by the blocks themselves and are not counted.

    Args:
        is_weight: Tells whether a tensor lies in a chunk.
    """

    def __init__(self, is_weight: Callable[[Tensor], bool]) -> None:
        self._is_weight = is_weight
        self._seen: set[int] = set()
        self._bytes = 0
        self._hooks: saved_tensors_hooks | None = None
        self._measures = False

    def begin(self) -> None:
        self._measures, self._bytes = True, 0
        self._seen.clear()

    def enter(self) -> None:
        if self._measures:
            self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._hooks.__enter__()

    def exit(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
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
