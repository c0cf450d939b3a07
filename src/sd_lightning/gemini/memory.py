"""Memory of one rank: flat buffers on the tiers, page-locked host memory, and copies that overlap the computation."""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.page_locked import PageLocked, whole_pages
from sd_lightning.gemini.placement import Kind, Ledger, Tier, TierBuffer

log = logging.getLogger(__name__)


_MAX_LANDING = 4
"""Pending copies to the host before the host waits for one; as many as reductions."""
_MAX_WAITING = 2
"""Kept buffers of one size, all still in use by copies, before the host waits for one of them."""


class Arrival:
    """Events that mark the end of asynchronous copies; none on devices without streams.

    Args:
        module: The device module, such as ``torch.cuda``.
        device: Its current stream waits in :meth:`join`.
    """

    def __init__(self, module: Any = None, device: torch.device | None = None) -> None:
        self._module = module
        self._device = device
        self._events: list[Any] = []

    def after(self, streams: Sequence[Any]) -> Arrival:
        """Include the work submitted to these streams so far."""
        for stream in streams:
            self._events.append(self._module.Event())
            self._events[-1].record(stream)
        return self

    def join(self) -> None:
        """Order the current stream after the copies; the host does not wait."""
        for event in self._events:
            self._module.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Block the host until the copies are done."""
        for event in self._events:
            event.synchronize()

    @property
    def is_past(self) -> bool:
        """Whether the copies are done."""
        return all(event.query() for event in self._events)


class Memory:
    """Allocation, copies and freeing of flat buffers on the tiers of one rank.

    On an accelerator, copies to the fast tier and copies from it have one stream each, so that both directions overlap
    each other and the computation. Only the arrivals from :meth:`copying` order the streams.

    Args:
        device: The fast tier.
        offload_dir: Folder for the files of the disk tier. They are unlinked at once, so no file remains even if the
            process crashes.

    Raises:
        UsageError: ``offload_dir`` cannot be written to, or is full at a later allocation.
    """

    def __init__(self, device: torch.device, offload_dir: str | Path | None = None) -> None:
        self.device = device
        self.ledger = Ledger()
        self.on_accelerator = device.type != "cpu"
        self._offload_dir = offload_dir
        self._pinned: dict[int, list[tuple[Tensor, Arrival]]] = {}
        """Kept host memory by size in bytes, oldest first, with the copies that may still need it."""
        self._landing: deque[tuple[Arrival, Callable[[], None]]] = deque()
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
        self._module: Any = None
        self._to_fast: Any = None
        self._to_slow: Any = None
        self._page_locked: PageLocked | None = None
        if self.on_accelerator:
            self._module = torch.get_device_module(device)
            self._to_fast, self._to_slow = self._module.Stream(device), self._module.Stream(device)
            streams = [self._to_fast, self._to_slow, self._module.current_stream(device)]
            self._page_locked = PageLocked(self._module, device, streams)

    @torch.inference_mode(False)  # memory allocated in validation may be reused in training
    @torch.no_grad()
    def allocate(self, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype, *, zero: bool = False) -> TierBuffer:
        """Return a new flat buffer."""
        if tier is Tier.FAST:
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        elif tier is Tier.SLOW:
            tensor = self._host(numel, dtype)
        else:
            tensor = self._mapped(numel, dtype)
        self.ledger.add(tier, kind, self._taken(tier, tensor.nbytes))
        if zero:
            tensor.zero_()
        return TierBuffer(tensor, tier, kind)

    def free(self, buffer: TierBuffer, last_use: Arrival | None = None) -> None:
        """Free a buffer, which must not be used again.

        Args:
            buffer: A buffer on any tier.
            last_use: Arrival after which its memory may be reused; by default that of all copies so far.
        """
        taken = self._taken(buffer.tier, buffer.nbytes)
        self.ledger.add(buffer.tier, buffer.kind, -taken)
        if buffer.tier is Tier.SLOW and self.on_accelerator:
            self.ledger.add(Tier.SLOW, Kind.KEPT, taken)
            if last_use is None:
                last_use = Arrival(self._module, self.device).after([self._to_fast, self._to_slow])
            self._pinned.setdefault(buffer.nbytes, []).append((buffer.tensor, last_use))
        buffer.tensor = torch.empty(0)

    def copy(self, target: Tensor, source: Tensor, source_tier: Tier, target_tier: Tier) -> None:
        """Copy values, converting their type, and count the bytes that cross tiers.

        Values cross in the narrower of the two types. Exception: torch widens before a copy from an accelerator to the
        host, since the host does not wait to widen afterwards.
        """
        staged: TierBuffer | None = None
        if self.on_accelerator and source_tier is not target_tier and target.dtype.itemsize < source.dtype.itemsize:
            if target_tier is Tier.FAST:
                # torch would convert into pageable memory, and copies from that block the host.
                staged = self.allocate(Tier.SLOW, Kind.STAGED, source.numel(), target.dtype)
                source = staged.tensor.copy_(source)
            else:
                source = source.to(target.dtype)
        target.copy_(source, non_blocking=self.on_accelerator)
        if staged is not None:
            stream = self._module.current_stream(self.device)
            self.free(staged, Arrival(self._module, self.device).after([stream]))
        is_widened = self.on_accelerator and target_tier is not Tier.FAST
        width = target.element_size() if is_widened else min(target.element_size(), source.element_size())
        self.ledger.move(source_tier, target_tier, target.numel() * width)

    def moved(self, buffer: TierBuffer, tier: Tier) -> TierBuffer:
        """Move a buffer to another tier: return the new buffer and free the old one."""
        if buffer.tier == tier:
            return buffer
        new = self.allocate(tier, buffer.kind, buffer.tensor.numel(), buffer.tensor.dtype)
        self.copy(new.tensor, buffer.tensor, buffer.tier, tier)
        self.wait_for_copies()
        self.free(buffer)
        return new

    @contextmanager
    def copying(self, target: Tier) -> Iterator[Arrival]:
        """Run the body on a copy stream, after the work submitted so far.

        Args:
            target: The tier to copy to.

        Yields:
            The arrival of the body's copies; use it after the body.
        """
        arrival = Arrival(self._module, self.device)
        if self._module is None:
            yield arrival
            return
        stream = self._to_fast if target is Tier.FAST else self._to_slow
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream):
            yield arrival
        arrival.after([stream])

    def copy_to_host(self, value: Tensor) -> tuple[Tensor, Arrival]:
        """Begin to copy a value from the fast tier; the host may read it after its arrival."""
        copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.on_accelerator)
        copy.copy_(value, non_blocking=True)
        arrival = Arrival(self._module, self.device)
        return copy, arrival.after([self._module.current_stream(self.device)] if self.on_accelerator else [])

    def land(self, arrival: Arrival, receive: Callable[[], None]) -> None:
        """Call ``receive`` on the host without waiting: now if the copies have arrived, otherwise later.

        At most ``_MAX_LANDING`` calls are outstanding; beyond that, the host waits for the oldest. To read the result
        of ``receive`` earlier, call it first.

        Args:
            arrival: The arrival of the copies.
            receive: Waits for the copies; does nothing when called again.
        """
        self._landing.append((arrival, receive))
        while self._landing and (len(self._landing) > _MAX_LANDING or self._landing[0][0].is_past):
            self._landing.popleft()[1]()

    def wait_for_copies(self) -> None:
        """Block the host until all copies and the computation submitted so far are done."""
        if self._module is not None:
            for stream in (self._to_fast, self._to_slow, self._module.current_stream(self.device)):
                stream.synchronize()

    def release_unused(self) -> None:
        """Unlock and free the host memory that is kept for reuse."""
        if self._page_locked is None:
            return
        self._module.synchronize(self.device)  # also streams of others, which may have read what was freed
        for nbytes, kept in self._pinned.items():
            for memory, _ in kept:
                self.ledger.add(Tier.SLOW, Kind.KEPT, -whole_pages(nbytes))
                self._page_locked.unlock(memory)
        self._pinned.clear()

    def _taken(self, tier: Tier, nbytes: int) -> int:
        return whole_pages(nbytes) if tier is Tier.SLOW and self.on_accelerator else nbytes

    def _host(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        kept = self._pinned.get(nbytes, [])
        position = next((i for i, (_, last_use) in enumerate(kept) if last_use.is_past), 0)
        if len(kept) > position and (len(kept) >= _MAX_WAITING or kept[position][1].is_past):
            memory, last_use = kept.pop(position)
            last_use.wait()
            self.ledger.add(Tier.SLOW, Kind.KEPT, -whole_pages(nbytes))
            return memory.view(dtype)
        if self._page_locked is None or not nbytes:  # no pages hold nothing
            return torch.empty(numel, dtype=dtype)
        return self._page_locked.allocate(nbytes).view(dtype)

    def _mapped(self, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._offload_dir is not None
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)  # an empty file cannot be mapped
        with tempfile.NamedTemporaryFile(prefix="gemini-", dir=self._offload_dir) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # writing to a mapped hole of a full disk is fatal
            except OSError as error:
                raise UsageError(
                    f"GeminiConfig got offload_dir={self._offload_dir}, which has no room for {nbytes} bytes more "
                    f"({error}); give a folder on a larger disk, or a smaller disk_optim_frac"
                ) from error
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype)


_USABLE = 0.9
"""Usable part of the fast tier. The rest is for fragmentation and collective buffers, as with ``memory_cap=0.9``."""
_peaks: dict[torch.device, int] = {}
"""By device: the allocator's peak before probes reset it; global, like the allocator's statistics."""


def peak_allocated(device: torch.device) -> int:
    """Return the peak bytes that this process allocated on an accelerator, including before a probe's reset."""
    return max(_peaks.get(device, 0), int(torch.get_device_module(device).max_memory_allocated(device)))


def reset_peak_allocated(device: torch.device) -> None:
    """Reset the allocator's peak, and remember it."""
    _peaks[device] = peak_allocated(device)
    torch.get_device_module(device).reset_peak_memory_stats(device)


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


def fast_tier_bytes(device: torch.device, world_size: int) -> int:
    """Return the bytes of a rank's fast tier: its accelerator's memory, or its share of the host memory."""
    if device.type == "cpu":
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def spare_bytes(memory: Memory, world_size: int) -> int:
    """Return the bytes that this process can still take of its fast tier, beyond its peak so far."""
    if not memory.on_accelerator:
        peak = peak_resident()
        return 0 if peak is None else int(_USABLE * fast_tier_bytes(memory.device, world_size)) - peak
    module = torch.get_device_module(memory.device)
    free, _ = module.mem_get_info(memory.device)
    reachable = free + module.memory_reserved(memory.device)
    return int(_USABLE * reachable) - peak_allocated(memory.device)
