"""Nothing races beside the computation: the engine on a pretended accelerator that checks the order of all accesses.

Host, computation, copies in either direction and collectives are five timelines; only what is waited for orders them.
Everything runs on the host at once, and each access of a chunk's memory by one timeline must come after those by
others, by a chain of waits (vector clocks: Fidge 1988).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini_jobs import Blocks, Job, _Fails, inputs, loss_of
from sd_lightning.gemini import GeminiConfig, GeminiEngine, chunked
from sd_lightning.gemini.collectives import Collectives, Pending
from sd_lightning.gemini.compute_weights import ChunkStorage
from sd_lightning.gemini.memory import Arrival, Memory
from sd_lightning.gemini.placement import plan_static
from sd_lightning.gemini.tiers import Buffer, Kind, Tier

SETTINGS: dict[str, dict[str, Any]] = {
    "fast": {},
    "all_slow": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": 16_000},
    "optimizer_slow": {"offload_optim_frac": 1.0},
    "optimizer_slow_whole": {"offload_optim_frac": 0.6, "shard_param_frac": 0.0},
    "weights_slow": {"offload_param_frac": 1.0, "prefetch": 8},
    "half_slow": {"offload_optim_frac": 0.5, "offload_param_frac": 0.5, "gathered_budget": 20_000},
}


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


class Device:
    """What torch's device modules offer, with a record of who used which memory after whom."""

    def __init__(self) -> None:
        self.host = Timeline("host")
        self.compute, self.network = Timeline("compute", self.host), Timeline("network", self.host)
        self.current = self.compute
        self.is_copying = self.is_leaving = False
        self.waits: list[tuple[str, int]] = []
        """Of the host: the stream, and what it had to do after that which is waited for."""
        self.memory: dict[int, Accesses] = {}

    def Event(self) -> Event:
        return Event(self)

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
            if len(tiers) == 2 and func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
                if device.is_copying and not device.is_leaving:
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
            self._to_fast, self._to_slow = Timeline("to fast", device.host), Timeline("to slow", device.host)

        def allocate(self, tier: Tier, kind: Kind, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Buffer:
            buffer = super().allocate(tier, kind, numel, dtype)
            device.know(buffer.tensor, tier)
            if zero:
                buffer.tensor.zero_()
            return buffer

        def copy(self, target: Tensor, source: Tensor, source_tier: Tier, target_tier: Tier) -> None:
            device.is_copying, device.is_leaving = Tier.FAST in (source_tier, target_tier), source_tier is Tier.FAST
            super().copy(target, source, source_tier, target_tier)
            device.is_copying = device.is_leaving = False

        def free(self, buffer: Buffer, last_use: Arrival | None = None) -> None:
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

    with pytest.MonkeyPatch.context() as patch, Watch(device):
        patch.setattr(chunked, "Memory", WatchedMemory)
        patch.setattr(torch, "empty", lambda *args, pin_memory=False, **settings: empty(*args, **settings))
        patch.setattr(ChunkStorage, "__init__", create_known)
        patch.setattr(ChunkStorage, "resize", resize)
        patch.setattr(Collectives, "reduce_scatter", reduce)
        patch.setattr(Collectives, "all_gather", gather)
        if with_network:  # as nccl does
            patch.setattr(Collectives, "sent_dtype", lambda self, dtype: torch.promote_types(dtype, torch.float32))
        yield device


def train(name: str, act: str, *, with_network: bool) -> Device:
    """Train a few steps, in float32 or bfloat16, with something else between them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if with_network else torch.float32
    network, job = Blocks(3 if act == "fail" else 2), Job("streams")
    with pretended_accelerator(with_network=with_network) as device:
        config = GeminiConfig(chunk_numel=1500, compute_dtype=dtype, **SETTINGS[name])
        made = GeminiEngine({"": network}, config)
        parameters = list(network.parameters())
        parts = [parameters[::2], parameters[1::2]] if act == "two optimizers" else [parameters]
        optimizers = [made.optimizer(torch.optim.AdamW(part, lr=1e-2)) for part in parts]

        def backward(index: int) -> None:
            loss_of(network, inputs(index, job), dtype).backward()

        for step in range(3):
            if step == 0:
                with made.no_sync():
                    backward(10)
            backward(step)
            for optimizer in optimizers:
                if step == 1:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
            _act(made, act, step, backward)
        made.full_parameter("gain")
        kept = sum(nbytes * len(buffers) for nbytes, buffers in made.memory._pinned.items())
        assert made.ledger.by_kind[Tier.SLOW, Kind.KEPT] == kept
        made.close()
        assert made.ledger.by_kind[Tier.SLOW, Kind.KEPT] == 0 == len(made.memory._pinned)
    return device


def _act(made: GeminiEngine, act: str, step: int, backward: Callable[[int], None]) -> None:
    if act == "move":
        optim, param = [(0, 0), (1, 0), (1, 1)][step]
        made.move(plan_static(made.layouts, GeminiConfig(offload_optim_frac=optim, offload_param_frac=param)))
    if act == "swap":
        with torch.no_grad() if step else torch.inference_mode():  # as Lightning validates on accelerators
            made.state.swap_in({(s.name, s.begin): torch.zeros(s.end - s.begin) for s in made.state.shards()})
            made.networks[""](inputs(0, Job("streams"))[0].to(made.config.compute_dtype))
            assert all(float(shard.master.abs().sum()) >= 0 for shard in made.state.shards())
            made.state.swap_out()
    if act == "load":
        made.state.load(_read_zeros)
    if act == "fail":
        handle = made.networks[""].blocks[0].register_forward_hook(lambda _, __, output: _Fails.apply(output))
        with pytest.raises(ZeroDivisionError):
            backward(20)
        handle.remove()
    if act in ("drop", "two optimizers"):
        backward(20)
        made.optimizers[0].zero_grad()


def _read_zeros(kind: str, name: str, out: Tensor, begin: int, end: int) -> None:
    out.zero_()


@pytest.mark.parametrize("act", ["", "move", "swap", "load", "fail", "drop", "two optimizers"])
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_races_beside_the_computation(name: str, act: str) -> None:
    for with_network in (False, True):
        clock = train(name, act, with_network=with_network).compute.clock
        assert ("to slow" in clock) == (name != "fast" or act == "move"), "nothing was offloaded"


def test_copies_in_both_directions_go_on_beside_the_computation() -> None:
    ahead: dict[str, list[int]] = {"to fast": [], "to slow": []}
    with pretended_accelerator(with_network=True) as device:
        network = Blocks()
        config = GeminiConfig(chunk_numel=1500, offload_optim_frac=1.0, offload_param_frac=1.0)
        made = GeminiEngine({"": network}, config)
        optimizer = made.optimizer(torch.optim.AdamW(network.parameters()))

        def observe(phase: str, unit: int) -> None:
            for stream in (made.memory._to_fast, made.memory._to_slow):
                ahead[stream.name].append(stream.clock[stream.name] - device.compute.clock[stream.name])

        for step in range(3):
            made.runtime.observer = observe if step == 2 else None  # the order is known
            loss_of(network, inputs(step, Job("streams")), torch.float32).backward()
            optimizer.step()
    assert sum(count > 0 for count in ahead["to fast"]) >= 4, "weights that come later are waited for"
    assert sum(count > 0 for count in ahead["to slow"]) >= 3, "gradients that leave are waited for"


def test_the_host_waits_for_nothing_that_has_just_been_sent() -> None:
    """Neither for gradients that are added to those of a micro-batch before, nor for all to step the first."""
    with pretended_accelerator(with_network=True) as device:
        network = Blocks()
        made = GeminiEngine({"": network}, GeminiConfig(chunk_numel=1500, offload_optim_frac=1.0))
        optimizer = made.optimizer(torch.optim.AdamW(network.parameters()))
        under_way: list[int] = []
        apply = optimizer.stepper.update.apply

        def watched(*args: Any) -> Any:
            stream = made.memory._to_slow
            under_way.append(stream.clock[stream.name] - device.host.clock[stream.name])
            return apply(*args)

        optimizer.stepper.update.apply = watched  # type: ignore[method-assign]
        for micro in range(3):
            with made.no_sync():
                loss_of(network, inputs(micro, Job("streams")), torch.float32).backward()
        in_backward, num_chunks = list(device.waits), len(made.chunks)
        optimizer.step()
    assert num_chunks > 6
    assert len(in_backward) >= num_chunks, "nothing was added up on the host"
    assert all(later >= 4 for _, later in in_backward), "gradients were waited for as soon as they were sent"
    assert under_way[0] > 0 == under_way[-1], "all gradients were waited for before the first was stepped"


def test_host_memory_is_used_again_only_after_copies_to_it() -> None:
    with pretended_accelerator(with_network=False):
        memory = chunked.Memory(torch.device("cpu"))
        target, source = (memory.allocate(tier, Kind.WEIGHTS, 8, torch.float32) for tier in (Tier.SLOW, Tier.FAST))
        with memory.copying(Tier.SLOW):
            memory.copy(target.tensor, source.tensor, Tier.FAST, Tier.SLOW)
        with pytest.raises(Race, match="host uses memory of the slow tier while to slow does"):
            target.tensor.zero_()
        other = memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.float32)
        addresses = [buffer.tensor.data_ptr() for buffer in (target, other)]
        memory.free(target)
        fresh = memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.float32, zero=True)
        assert fresh.tensor.data_ptr() not in addresses, "waits though there is other memory"
        memory.free(other)
        assert memory.allocate(Tier.SLOW, Kind.WEIGHTS, 8, torch.int32, zero=True).tensor.data_ptr() == addresses[0]
