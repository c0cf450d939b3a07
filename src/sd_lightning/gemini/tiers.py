"""The places where bytes live, and an account of every byte."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from sd_lightning._errors import UsageError


class Tier(StrEnum):
    """Where a buffer lives."""

    FAST = "fast"
    """The accelerator's memory; host memory where the host computes."""
    SLOW = "slow"
    """Host memory, pinned beside an accelerator."""
    DISK = "disk"
    """Files mapped into memory."""


class Kind(StrEnum):
    """What a buffer is for."""

    WEIGHTS = "weights"
    """Resident weights in the compute type, or shards of them."""
    GATHERED = "gathered"
    """Temporarily gathered weights, and the gradients that take their place."""
    GRADIENTS = "gradients"
    """Whole gradients before they are reduced, where they have memory of their own."""
    ACCUMULATED = "accumulated"
    """This rank's part of the reduced float32 gradients."""
    OPTIMIZER = "optimizer"
    """Float32 weights where they are not the compute weights themselves, and optimizer states."""
    SWAPPED = "swapped"
    """The trained weights while others are computed with."""


class Ledger:
    """Bytes on each tier now and at most, and bytes moved between tiers."""

    def __init__(self) -> None:
        self.current: Counter[Tier] = Counter()
        self.peak: Counter[Tier] = Counter()
        self.by_kind: Counter[tuple[Tier, Kind]] = Counter()
        self.kind_peak: Counter[tuple[Tier, Kind]] = Counter()
        self.moved: Counter[tuple[Tier, Tier]] = Counter()

    def add(self, tier: Tier, kind: Kind, nbytes: int) -> None:
        """Account for bytes that were allocated, or freed if negative."""
        self.current[tier] += nbytes
        self.by_kind[tier, kind] += nbytes
        if self.by_kind[tier, kind] < 0:
            raise RuntimeError(f"{-self.by_kind[tier, kind]} bytes of {kind} freed twice on the {tier} tier")
        self.peak[tier] = max(self.peak[tier], self.current[tier])
        self.kind_peak[tier, kind] = max(self.kind_peak[tier, kind], self.by_kind[tier, kind])

    def move(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Account for bytes that were copied from tier to tier."""
        if source != target:
            self.moved[source, target] += nbytes

    def reset_peak(self) -> None:
        """Measure peaks from now on."""
        self.peak = Counter(self.current)
        self.kind_peak = Counter(self.by_kind)


@dataclass(eq=False)
class Buffer:
    """A flat tensor on a tier, accounted for until it is freed."""

    tensor: Tensor
    tier: Tier
    kind: Kind

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Memory:
    """Allocate, move and free flat buffers on the tiers of one rank.

    Args:
        device: The fast tier.
        offload_dir: Where the disk tier keeps its files. They have no names, so that nothing is left behind when the
            process ends, however it ends.

    Raises:
        UsageError: No files can be made in ``offload_dir``, or later: it is full.
    """

    def __init__(self, device: torch.device, offload_dir: str | Path | None = None) -> None:
        self.device = device
        self.ledger = Ledger()
        self.on_accelerator = device.type != "cpu"
        self._offload_dir = offload_dir
        self._pinned: dict[int, list[Tensor]] = {}
        if offload_dir is not None:
            try:
                Path(offload_dir).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=offload_dir):
                    pass
            except OSError as error:
                raise UsageError(
                    f"GeminiConfig got offload_dir={offload_dir}, which cannot be written to ({error}); give another "
                    "folder"
                ) from error
        self._copy_stream = torch.get_device_module(device).Stream(device) if self.on_accelerator else None

    def device_of(self, tier: Tier) -> torch.device:
        """Return the device that computes on a tier's buffers."""
        return self.device if tier is Tier.FAST else torch.device("cpu")

    def allocate(self, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Buffer:
        """Return a new flat buffer."""
        self.ledger.add(tier, kind, numel * dtype.itemsize)
        if tier is Tier.FAST:
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        elif tier is Tier.SLOW:
            tensor = self._host(numel, dtype)
        else:
            tensor = self._mapped(numel, dtype)
        if zero:
            tensor.zero_()
        return Buffer(tensor, tier, kind)

    def free(self, buffer: Buffer) -> None:
        """Give a buffer's memory back; the buffer must not be used again."""
        self.ledger.add(buffer.tier, buffer.kind, -buffer.nbytes)
        if buffer.tier is Tier.SLOW and self.on_accelerator:
            self._pinned.setdefault(buffer.nbytes, []).append(buffer.tensor)
        buffer.tensor = torch.empty(0)

    def copy(self, target: Tensor, source: Tensor, source_tier: Tier, target_tier: Tier) -> None:
        """Copy values, converting their type, and account for the bytes that cross tiers.

        What crosses is in the narrower of the two types: widening happens after the journey, narrowing before it.
        """
        if self.on_accelerator and target.device != source.device and target.dtype != source.dtype:
            narrow = min(target.dtype, source.dtype, key=lambda dtype: dtype.itemsize)
            source = source.to(narrow)
        target.copy_(source, non_blocking=self.on_accelerator)
        width = min(target.element_size(), source.element_size())
        self.ledger.move(source_tier, target_tier, target.numel() * width)

    def moved(self, buffer: Buffer, tier: Tier) -> Buffer:
        """Return a buffer with the same values on another tier; the old one is freed."""
        if buffer.tier == tier:
            return buffer
        new = self.allocate(tier, buffer.kind, buffer.tensor.numel(), buffer.tensor.dtype)
        self.copy(new.tensor, buffer.tensor, buffer.tier, tier)
        self.wait_for_copies()
        self.free(buffer)
        return new

    def copying(self) -> AbstractContextManager[object]:
        """Run what is inside beside the computation, after what has been submitted so far."""
        if self._copy_stream is None:
            return nullcontext()
        module = torch.get_device_module(self.device)
        self._copy_stream.wait_stream(module.current_stream(self.device))
        return module.stream(self._copy_stream)

    def join_copies(self) -> None:
        """Let the computation that is submitted next see what was copied; the host does not wait."""
        if self._copy_stream is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_stream(self._copy_stream)

    def mark(self) -> Callable[[], None]:
        """Return what lets the host wait for all that was submitted before this call, and for nothing after it."""
        if self._copy_stream is None:
            return _nothing
        module = torch.get_device_module(self.device)
        events = []
        for stream in (self._copy_stream, module.current_stream(self.device)):
            event = module.Event()
            event.record(stream)
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def wait_for_copies(self) -> None:
        """Let the host see what was copied."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
            torch.get_device_module(self.device).current_stream(self.device).synchronize()

    def _host(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not self.on_accelerator:
            return torch.empty(numel, dtype=dtype)
        pool = self._pinned.get(numel * dtype.itemsize, [])
        for position, tensor in enumerate(pool):
            if tensor.dtype == dtype:
                return pool.pop(position)
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def _mapped(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._offload_dir is not None
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)  # there are no empty files to map
        with tempfile.NamedTemporaryFile(prefix="gemini-", dir=self._offload_dir) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # writing to a mapped hole of a full disk would be fatal
            except OSError as error:
                raise UsageError(
                    f"GeminiConfig got offload_dir={self._offload_dir}, which has no room for {nbytes} bytes more "
                    f"({error}); give a folder on a larger disk, or a smaller disk_optim_frac"
                ) from error
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)


def _nothing() -> None:
    pass
