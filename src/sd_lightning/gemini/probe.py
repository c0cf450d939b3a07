"""Measure the memory of the fast tier that is not in chunks, mainly activations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.tiers import Tier


class Probe(Protocol):
    """Measurement of one pass at a time."""

    def begin(self) -> None:
        """Start a measurement."""

    def enter(self) -> None:
        """Note that a network's forward begins, with or without gradients."""
        return None

    def exit(self) -> None:
        """Note that the network's forward has ended."""
        return None

    def note(self) -> int:
        """Return the bytes taken now; called between units."""

    def end(self) -> int:
        """Return the peak bytes since :meth:`begin`."""


_peaks: dict[torch.device, int] = {}
"""By device: the allocator's peak before probes reset it; global, like the allocator's statistics."""


def peak_allocated(device: torch.device) -> int:
    """Return the peak bytes that this process allocated on an accelerator, including before a probe's reset."""
    return max(_peaks.get(device, 0), int(torch.get_device_module(device).max_memory_allocated(device)))


def peak_resident() -> int | None:
    """Return the peak bytes of host memory of this process; None on Windows: the standard library cannot tell."""
    if sys.platform == "win32":
        return None
    status = Path("/proc/self/status")  # ru_maxrss also counts what the process that started this one held
    own = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text() if status.is_file() else "", re.MULTILINE)
    if own is not None:
        return 1024 * int(own[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class AllocatorProbe(Probe):
    """Probe that reads the peak of the accelerator's allocator, and resets it at every note.

    The allocator has one peak only, so a probe must reset it; :func:`peak_allocated` remembers the peak of the whole
    process. The current bytes of chunks are subtracted from the peak since the last note. Chunks that were freed in
    between count as activations, which errs on the safe side.

    Args:
        memory: Counts the bytes of chunks.
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
    """Probe that counts tensors saved for the backward pass; the host has no allocator statistics.

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
