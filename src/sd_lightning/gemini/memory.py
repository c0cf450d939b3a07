"""Memory of one rank: flat buffers on the tiers, page-locked host memory, and copies that overlap the computation."""

from __future__ import annotations

import logging
import mmap
import os
import re
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.placement import Kind, Ledger, Tier, TierBuffer, mib

log = logging.getLogger(__name__)


_PORTABLE = 1
"""``cudaHostRegisterPortable``."""
_LAST_COPIES_S = 5.0
"""Seconds that the end of the process waits for copies; the device may hang."""

_left: list[Tensor] = []
"""Memory that could not be unlocked: it is never freed, since the device may still use it."""


def whole_pages(nbytes: int) -> int:
    """Return the bytes that page-locked memory of this engine takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PageLocked:
    """Blocks of whole pages that are locked when allocated, and unlocked before they are freed.

    torch's own allocator of page-locked memory is left alone: it rounds sizes up to powers of two, which takes up to
    twice the memory. Its setting against that, which holds for the whole process, may hand out blocks that are too
    small. It also keeps what is freed until the process ends.

    torch knows nothing of this memory: whoever unlocks it, or uses it again, waits for the copies before.

    Args:
        module: The device module, ``torch.cuda``.
        device: Copies from and to the memory.
        streams: Streams of these copies; they are waited for if the owner is lost, or the process ends.
    """

    def __init__(self, module: Any, device: torch.device, streams: Sequence[Any]) -> None:
        self._module = module
        self._device = device
        self._locked: dict[int, Tensor] = {}
        """By address."""
        weakref.finalize(self, _unlock_rest, self._locked, module, device, streams, os.getpid())

    @property
    def nbytes(self) -> int:
        """Bytes that are locked."""
        return sum(memory.nbytes for memory in self._locked.values())

    def allocate(self, nbytes: int) -> Tensor:
        """Return locked memory.

        Args:
            nbytes: At least 1; whole pages are locked.

        Raises:
            UsageError: There is not enough memory, or the system does not let the process lock more.
        """
        try:
            pages = mmap.mmap(-1, whole_pages(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._refusal(nbytes, str(error)) from error
        # A forked process, such as a worker of a data loader, would copy all locked pages.
        pages.madvise(mmap.MADV_DONTFORK)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        cudart = self._module.cudart()
        with self._module.device(self._device):
            code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        if int(code) != 0:
            raise self._refusal(nbytes, str(cudart.cudaGetErrorString(code)))
        self._locked[memory.data_ptr()] = memory
        return memory[:nbytes]

    def unlock(self, memory: Tensor) -> None:
        """Unlock memory, or a view of all of it, that no copy uses any more; it is freed with its last view."""
        if memory.nbytes:
            address = memory.data_ptr()
            _unlock(self._module, self._device, self._locked.pop(address))

    def _refusal(self, nbytes: int, reason: str) -> UsageError:
        return UsageError(
            f"Gemini could not page-lock {mib(nbytes)} of host memory beside the {mib(self.nbytes)} it has ({reason}); "
            "expected room for all that is offloaded; lower offload_optim_frac and offload_param_frac, free host "
            "memory, or raise the system's limit (ulimit -l; docker run --ulimit memlock=-1)"
        )


def _unlock(module: Any, device: torch.device, memory: Tensor) -> None:
    with module.device(device):  # another thread, such as the garbage collector's, may be on another device
        code = module.cudart().cudaHostUnregister(memory.data_ptr())
    if int(code) != 0:
        _leave([memory], f"CUDA error {int(code)}")


def _unlock_rest(
    locked: dict[int, Tensor], module: Any, device: torch.device, streams: Sequence[Any], process: int
) -> None:
    """Unlock what is still locked when its owner is gone or the process ends; do nothing in a forked process."""
    if os.getpid() != process:
        _left.extend(locked.values())  # its addresses may be in use for something else
        return
    if locked and not _are_idle(streams):
        _leave(list(locked.values()), f"its copies did not end within {_LAST_COPIES_S:g} s, or failed")
        return
    while locked:
        _unlock(module, device, locked.popitem()[1])


def _leave(memory: list[Tensor], reason: str) -> None:
    _left.extend(memory)
    log.warning("Gemini leaves %s of host memory page-locked: %s", mib(sum(m.nbytes for m in memory)), reason)


def _are_idle(streams: Sequence[Any]) -> bool:
    """Return whether copies are done, or will be in a moment."""
    until = time.monotonic() + _LAST_COPIES_S
    try:
        while not all(stream.query() for stream in streams):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    except RuntimeError:  # the device has failed
        return False
    return True


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
