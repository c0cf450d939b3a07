"""The update of averages: its numbers, its memory, and the order of what it does beside the computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from host_waits import DEVICE, HostWaits
from sd_lightning.planner.recording import record
from sd_lightning.state import averaging, host
from sd_lightning.state.averaging import Averaging, room_bytes
from sd_lightning.state.host import host_memory, pinned_bytes

FRACTIONS = (1.0, 0.75, 0.1, 1e-4)


def some_weights(dtype: torch.dtype) -> list[Tensor]:
    """Weights of many shapes: one larger than a group, one in another memory format, a number, and nothing."""
    torch.manual_seed(0)
    shapes = [(7,), (40, 13), (8, 3, 3, 3), (), (0, 4), (100, 9), (5, 5)]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    weights[2] = weights[2].to(memory_format=torch.channels_last)
    return weights


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "GROUP_BYTES", 4 * 96)
    monkeypatch.setattr(host, "BLOCK_BYTES", 4 * 1000)


def reference(start: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Move averages one after the other, with all weights cast at once."""
    averages = [average.clone() for average in start]
    for number, fraction in enumerate(FRACTIONS):
        for average, weight in zip(averages, weights):
            average.lerp_((weight * (number + 1)).float(), fraction)
    return averages


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_apart", [False, True])
def test_groups_change_no_bit_and_the_host_never_waits(dtype: torch.dtype, is_apart: bool) -> None:
    start = [weight.float() * 3 for weight in some_weights(dtype)]
    waits = HostWaits()
    with waits.counting():
        with waits.paused():
            weights = [weight.to(DEVICE, copy=True) for weight in some_weights(dtype)]
            there = [torch.empty_like(average, device=DEVICE) for average in start]
            averages = host_memory([w.shape for w in weights], DEVICE) if is_apart else there
            for average, value in zip(averages, start):
                average.copy_(value)
        update = Averaging()
        update.follow(averages, weights)
        for number, fraction in enumerate(FRACTIONS):
            now = [weight * (number + 1) for weight in weights]
            torch._foreach_copy_(keep := [weight.clone() for weight in weights], weights)
            torch._foreach_copy_(weights, now)
            update.update(fraction)
            torch._foreach_copy_(weights, keep)
    assert waits.count == 0, waits.places
    for average, expected in zip(averages, reference(start, some_weights(dtype)), strict=True):
        assert torch.equal(average, expected)
    most = room_bytes(sum(w.numel() for w in weights), is_apart=is_apart, is_cast=dtype != torch.float32)
    assert sum(room.nbytes for room in update._room.values()) <= most
    assert bool(update._room) == (most > 0)


def touching(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors that lie one behind the other, and yet are separate: one cannot be reached from another."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    memory, begins = bytearray(4 * sum(sizes)), accumulate(sizes, initial=0)
    parts = [torch.frombuffer(memory, dtype=torch.float32, count=n, offset=4 * b) for n, b in zip(sizes, begins)]
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes)]


def test_separate_averages_that_touch_are_updated_apart() -> None:
    one, other = touching([(6,), (2, 4)])
    assert other.data_ptr() == one.data_ptr() + one.nbytes
    assert other.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()
    with HostWaits().counting() as waits:
        with waits.paused():
            weights = [torch.ones(each.shape).to(DEVICE, copy=True) for each in (one, other)]
        update = Averaging()
        update.follow([one, other], weights)
        assert [group.is_apart for group in update._groups] == [True, True]
        update.update(0.25)
    assert one.tolist() == [0.25] * 6 and other.tolist() == [[0.25] * 4] * 2


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.ndim > 1 else t,
    "every other": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}
PLACES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "pinned": lambda averages: host_memory([each.shape for each in averages], DEVICE),
    "separate": lambda averages: [torch.empty(each.shape) for each in averages],
    "touching": lambda averages: touching([each.shape for each in averages if each.numel()]),
}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.lists(st.integers(0, 6), max_size=4), st.sampled_from([*LAYOUTS]), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    place=st.sampled_from(["with the weights", *PLACES]),
    group_bytes=st.sampled_from([1, 4, 40, 400, 4000]),
)
@example(kinds=[([], "contiguous", True), ([0], "contiguous", True)], place="pinned", group_bytes=1)
@example(kinds=[([6, 6, 6, 6], "channels_last", True)] * 2, place="with the weights", group_bytes=400)
@example(kinds=[([2, 6, 6, 6], "channels_last", True)] * 2, place="pinned", group_bytes=40)
def test_averages_of_any_shape_and_layout_move_as_one_by_one(
    kinds: list[tuple[list[int], str, bool]], place: str, group_bytes: int
) -> None:
    """Also rows that are larger than a group, numbers, and averages of nothing."""
    generator = torch.Generator().manual_seed(0)
    if place == "touching":
        kinds = [kind for kind in kinds if torch.Size(kind[0]).numel()]
    start = [LAYOUTS[layout](torch.randn(shape, generator=generator)) for shape, layout, _ in kinds]
    values = [LAYOUTS[layout](torch.randn(shape, generator=generator)) for shape, layout, _ in kinds]
    cast = [value.to(torch.bfloat16 if is_half else torch.float32) for value, (_, _, is_half) in zip(values, kinds)]
    averages = [each.clone(memory_format=torch.preserve_format) for each in start]
    with mock.patch.object(averaging, "GROUP_BYTES", group_bytes), HostWaits().counting() as waits:
        with waits.paused():
            weights = [each.to(DEVICE, copy=True) for each in cast]
            if place in PLACES:
                averages = PLACES[place](averages)
            else:
                averages = [each.to(DEVICE, copy=True) for each in averages]
            for average, before in zip(averages, start, strict=True):
                average.copy_(before)
        update = Averaging()
        update.follow(averages, weights)
        sizes = [group.numel for group in update._groups]
        assert sum(sizes) == sum(each.numel() for each in averages)
        for fraction in (0.25, 1e-3):
            update.update(fraction)
    for average, before, weight in zip(averages, start, cast, strict=True):
        assert torch.equal(average, before.clone().lerp_(weight.float(), 0.25).lerp_(weight.float(), 1e-3))


@pytest.mark.usefixtures("small_groups")
def test_weights_swapped_to_disk_are_read_one_at_a_time() -> None:
    alive: Counter[str] = Counter()
    weights = some_weights(torch.float32)

    def read(number: int) -> Tensor:
        alive["reads"] += 1
        return weights[number]

    averages = [torch.zeros_like(weight) for weight in weights]
    update = Averaging()
    update.follow(averages, [lambda i=i: read(i) for i in range(len(weights))])  # type: ignore[misc]
    assert len(update._groups) == len(weights) and not alive
    update.update(0.5)
    assert alive["reads"] == len(weights)
    assert all(torch.equal(average, 0.5 * weight) for average, weight in zip(averages, weights))


def test_half_precision_weights_are_cast_in_groups_of_bounded_memory() -> None:
    """Traced on the meta device: the weights of an SD 1.5 would take 3.4 GB as float32 copies."""
    shapes = [(1280, 2560, 3, 3), (49408, 768), *[(1280, 1280)] * 50, *[(1280,)] * 50]
    weights = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    averages = [torch.empty(shape, device="meta") for shape in shapes]
    update = Averaging()
    update.follow(averages, weights)
    peak = record(lambda: update.update(0.1)).peak()
    numel = sum(weight.numel() for weight in weights)
    assert 0 < peak <= room_bytes(numel, is_apart=False, is_cast=True) == averaging.GROUP_BYTES < 4 * numel / 5


def test_pinned_blocks_waste_little() -> None:
    """Torch rounds each pinned allocation up to a power of two: seen here as the sizes that are asked for."""
    asked: list[int] = []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.empty.memory_format:
                asked.append(4 * torch.Size(args[0]).numel())
                return func(*args, **{**(kwargs or {}), "device": "meta"})
            return func(*args, **(kwargs or {}))

    shapes = [(1280, 2560, 3, 3), (49408, 768), (1280, 1280, 3, 3), *[(1280, 10240)] * 20, *[(1280,)] * 700]
    shapes += [(320, 320, 3, 3)] * 60
    with Note():
        tensors = host_memory(shapes, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    needed = sum(4 * tensor.numel() for tensor in tensors)
    assert sum(asked) == needed
    rounded = sum(1 << (size - 1).bit_length() for size in asked)
    assert needed <= rounded <= pinned_bytes(needed) < 1.2 * needed


class Stream:
    """A timeline that knows what it has waited for."""

    def __init__(self, device: Any = None) -> None:
        self.known: Counter[Stream] = Counter()
        self.was_awaited = False

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known

    def synchronize(self) -> None:
        self.was_awaited = True

    def act(self) -> None:
        self.known[self] += 1


class Streams(TorchDispatchMode):
    """What ``torch.cuda`` offers; every operation is noted on the stream that is current."""

    Stream = Stream

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.now = Stream()
        self.used: dict[int, set[Stream]] = {}
        """By address of the memory that copies write: on which streams."""

    def current_stream(self, device: Any) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now.act()
        if func is torch.ops.aten.copy_.default:
            self.used.setdefault(args[0].data_ptr(), set()).add(self.now)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_groups")
def test_updates_come_after_the_optimizer_and_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, empty = Streams(), torch.empty
    are_pinned: list[bool] = []

    def noting(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        are_pinned.append(pin_memory)
        return empty(*args, **options)

    for module in (averaging, host):
        monkeypatch.setattr(module, "streams_of", lambda device: streams)
    monkeypatch.setattr(torch, "empty", noting)
    weights = some_weights(torch.bfloat16)
    with HostWaits().counting(), streams:
        weights = [weight.to(DEVICE, copy=True) for weight in weights]
        averages = host_memory([weight.shape for weight in weights], DEVICE)
        assert are_pinned and all(are_pinned)
        update = Averaging()
        update.follow(averages, weights)
        beside = update._streams
        for _ in range(2):
            optimizer_steps = streams.compute.known[streams.compute]
            streams.compute.act()
            update.update(0.5)
            for stream in beside:
                assert stream.known[stream] > 0, "both streams work"
                assert stream.known[streams.compute] > optimizer_steps, "it reads the weights that the step has made"
                assert streams.compute.known[stream] < stream.known[stream], "the computation does not wait yet"
            update.join()
            assert all(streams.compute.known[stream] == stream.known[stream] for stream in beside)
        assert not any(stream.was_awaited for stream in beside)
        update.settle()
    assert all(stream.was_awaited for stream in beside), "the host reads averages next"
    assert all(len(where) == 1 for where in streams.used.values()), "one stream's room is never used by another"
