"""A pretended accelerator that checks the order of all accesses of the Gemini engine's memory.

Host, computation, copies in either direction and collectives are five timelines; only what is waited for orders them.
Everything runs on the host at once, and each access of a chunk's memory by one timeline must come after those by
others, by a chain of waits (vector clocks: Fidge 1988).
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sd_lightning.gemini import chunk as chunk_file
from sd_lightning.gemini.collectives import Collectives, Pending
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.page_locked import PageLocked
from sd_lightning.gemini.placement import Kind, Tier, TierBuffer
from sd_lightning.gemini.weights import ChunkStorage


class Race(Exception):
    """Two timelines use memory in no order."""


class Timeline:
    """A stream, or the host: what it has done and what it has waited for."""

    def __init__(self, name: str, host: Timeline | None = None) -> None:
        self.name = name
        self.clock: Counter[str] = Counter()
        self._host = self if host is None else host

    def merge(self, clock: Counter[str]) -> None:
        self.clock |= clock

    def wait_stream(self, other: Timeline) -> None:
        self.merge(other.clock)

    def wait_event(self, event: Event) -> None:
        self.merge(event.clock)

    def synchronize(self) -> None:
        self._host.merge(self.clock)

    def query(self) -> bool:
        is_idle = self._host.clock >= self.clock
        self.synchronize()  # it is when asked again
        return is_idle


class Event:
    """A point of a timeline."""

    def __init__(self, device: Device) -> None:
        self.clock: Counter[str] = Counter()
        self._device, self._host = device, device.host

    def record(self, stream: Timeline) -> None:
        self.clock, self._stream = Counter(stream.clock), stream

    def synchronize(self) -> None:
        if not self.query():
            name = self._stream.name
            self._device.waits.append((name, self._stream.clock[name] - self.clock[name]))
        self._host.merge(self.clock)

    def query(self) -> bool:
        return self._host.clock >= self.clock  # nothing is known to be done before it is waited for


@dataclass
class Accesses:
    """Of one storage: the last write, and the reads since."""

    tier: Tier
    keeps: Tensor
    write: tuple[str, int] = ("", 0)
    reads: dict[str, int] = field(default_factory=dict)


class PageLocks:
    """What CUDA's runtime offers to lock pages, with a record of those that are locked.

    Args:
        device: Nothing may use memory that is unlocked; not checked without.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.sizes: dict[int, int] = {}
        """By address."""
        self.num_locked = 0
        self.limit = float("inf")
        """Bytes that may be locked."""
        self._device = device

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.sizes.values()) + nbytes > self.limit:
            return 2
        end = address + nbytes
        assert nbytes > 0 == address % mmap.PAGESIZE and is_mapped(address, nbytes)
        assert all(end <= begin or address >= begin + size for begin, size in self.sizes.items()), "locked twice"
        self.sizes[address] = nbytes
        self.num_locked += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        nbytes = self.sizes.pop(address)  # raises if it is not locked
        assert is_mapped(address, nbytes), "unlocked after it was freed"
        for accesses in [] if self._device is None else list(self._device.memory.values()):
            if accesses.keeps.data_ptr() == address:
                self._device.use(self._device.host, accesses.keeps, is_write=True)
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory"}[code]


def is_mapped(address: int, nbytes: int) -> bool:
    """Return whether this process has memory at all these addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(text, 16) for text in line.split()[0].split("-"))
        if begin <= address < end:
            if address + nbytes <= end:
                return True
            address, nbytes = end, address + nbytes - end
    return False


class Device:
    """What torch's device modules offer, with a record of who used which memory after whom."""

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.compute, self.network = Timeline("compute", self.host), Timeline("network", self.host)
        self.current = self.compute
        self.is_copying = self.is_leaving = False
        self.timelines = [self.compute, self.network]
        self.page_locks = PageLocks(self)
        self.waits: list[tuple[str, int]] = []
        """Of the host: the stream, and what it had to do after that which is waited for."""
        self.memory: dict[int, Accesses] = {}

    def Event(self) -> Event:
        return Event(self)

    def Stream(self, name: str) -> Timeline:
        self.timelines.append(Timeline(name, self.host))
        return self.timelines[-1]

    def cudart(self) -> PageLocks:
        return self.page_locks

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        for timeline in self.timelines:
            timeline.synchronize()

    def current_stream(self, device: torch.device) -> Timeline:
        return self.current

    @contextmanager
    def stream(self, stream: Timeline) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def know(self, tensor: Tensor, tier: Tier) -> None:
        self.memory.setdefault(tensor.untyped_storage()._cdata, Accesses(tier, tensor))

    def use(self, timeline: Timeline, tensor: Tensor, *, is_write: bool) -> None:
        """Note that a timeline does something, after all that the host has done or waited for."""
        accesses = self.memory.get(tensor.untyped_storage()._cdata)
        if accesses is None:
            return
        timeline.merge(self.host.clock)
        before = [accesses.write, *(accesses.reads.items() if is_write else ())]
        for name, count in before:
            if name != timeline.name and timeline.clock[name] < count:
                raise Race(f"{timeline.name} uses memory of the {accesses.tier} tier while {name} does")
        timeline.clock[timeline.name] += 1
        stamp = timeline.name, timeline.clock[timeline.name]
        if is_write:
            accesses.write, accesses.reads = stamp, {}
        else:
            accesses.reads[stamp[0]] = stamp[1]


class Watch(TorchDispatchMode):
    """Note every operation on memory of the engine: slow memory is the host's, fast memory the current stream's."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, device = func._schema, self._device
        kwargs = kwargs or {}
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):  # not of views
            given = [*zip(schema.arguments, args), *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)]
            used: list[tuple[Tensor, bool]] = []
            for argument, value in given:
                is_write = argument.alias_info is not None and argument.alias_info.is_write
                tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                used += [(tensor, is_write) for tensor in tensors]
            tiers = {device.memory[key].tier for t, _ in used if (key := t.untyped_storage()._cdata) in device.memory}
            is_on_host = tiers == {Tier.SLOW} and not device.is_leaving  # what leaves may be cast on the device first
            for tensor, is_write in used:
                device.use(device.host if is_on_host else device.current, tensor, is_write=is_write)
            converts = func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype
            if len(tiers) == 2 and converts and device.is_copying and not device.is_leaving:
                raise Race("the host converts into pageable memory and waits for the copy from it")
            if len(tiers) == 2 and not device.is_copying:
                device.host.merge(device.current.clock)  # a copy that the host waits for
        return func(*args, **kwargs)


@contextmanager
def pretended_accelerator(*, with_network: bool) -> Iterator[Device]:
    """Give engines made inside streams, and check the order of what they do.

    Args:
        with_network: Collectives take time, as between several ranks; they change no values.
    """
    device, empty, create = Device(), torch.empty, ChunkStorage.__init__

    class WatchedMemory(Memory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.on_accelerator, self._module = True, device
            self._to_fast, self._to_slow = device.Stream("to fast"), device.Stream("to slow")
            self._page_locked = PageLocked(device, self.device, device.timelines)

        def allocate(self, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype, *, zero: bool = False) -> TierBuffer:
            buffer = super().allocate(tier, kind, numel, dtype)
            device.know(buffer.tensor, tier)
            if zero:
                buffer.tensor.zero_()
            return buffer

        def copy(self, target: Tensor, source: Tensor, source_tier: Tier, target_tier: Tier) -> None:
            device.is_copying, device.is_leaving = Tier.FAST in (source_tier, target_tier), source_tier is Tier.FAST
            super().copy(target, source, source_tier, target_tier)
            device.is_copying = device.is_leaving = False

        def free(self, buffer: TierBuffer, last_use: Arrival | None = None) -> None:
            if buffer.tier is Tier.FAST:  # the allocator gives it to the computation again
                device.use(device.compute, buffer.tensor, is_write=True)
            super().free(buffer, last_use)

    class Work:
        """A collective on a stream of its own, after what was current when it was called."""

        def __init__(self, buffer: Tensor) -> None:
            device.network.merge(device.current.clock)
            device.use(device.network, buffer, is_write=True)
            self.clock = Counter(device.network.clock)

        def wait(self) -> None:
            device.current.merge(self.clock)

    def create_known(storage: ChunkStorage, *args: Any) -> None:
        create(storage, *args)
        device.know(storage.full, Tier.FAST)

    def resize(storage: ChunkStorage, nbytes: int) -> None:
        device.use(device.compute, storage.full, is_write=True)
        storage.full.untyped_storage().resize_(nbytes)

    def gather(collectives: Collectives, buffer: Tensor, chunk: int) -> Pending:
        return Pending([Work(buffer)] if with_network else [])  # type: ignore[list-item]

    def reduce(collectives: Collectives, buffer: Tensor, chunk: int) -> tuple[Pending, Tensor]:
        return gather(collectives, buffer, chunk), collectives.shard(buffer)

    def allocate_small(*args: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        made = empty(*args, **settings)
        assert not pin_memory or made.nbytes <= 64, "torch's own pinned memory is rounded up, and kept"
        return made

    with pytest.MonkeyPatch.context() as patch, Watch(device):
        patch.setattr(chunk_file, "Memory", WatchedMemory)
        patch.setattr(torch, "empty", allocate_small)
        patch.setattr(ChunkStorage, "__init__", create_known)
        patch.setattr(ChunkStorage, "resize", resize)
        patch.setattr(Collectives, "reduce_scatter", reduce)
        patch.setattr(Collectives, "all_gather", gather)
        if with_network:  # as nccl does
            patch.setattr(Collectives, "sent_dtype", lambda self, dtype: torch.promote_types(dtype, torch.float32))
        yield device
