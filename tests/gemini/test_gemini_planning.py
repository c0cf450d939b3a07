"""Layout and placement of Gemini's chunks: pure functions, checked for random networks and up to 64 ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gemini_jobs import Blocks, weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.layout import ALIGNMENT, ChunkLayout, ParameterSpec, Shard, align, best_chunk_numel, pack
from sd_lightning.gemini.passes import Route, merged
from sd_lightning.gemini.placement import (
    ChunkPlan,
    Demand,
    Tier,
    fast_bytes,
    plan_auto,
    plan_static,
    plan_trace,
    whole_gradient_bytes,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 5000))
SPECS = st.lists(st.tuples(SIZES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=40).map(
    lambda rows: [ParameterSpec(f"p{i}", *row) for i, row in enumerate(rows)]
)
CHUNK_NUMEL, WORLD = st.integers(16, 20_000), st.integers(1, 64)
QUICK = settings(max_examples=150, deadline=None)


@QUICK
@given(SPECS, CHUNK_NUMEL, WORLD)
def test_every_parameter_lies_in_one_chunk_of_its_kind_in_order(
    specs: list[ParameterSpec], chunk_numel: int, world_size: int
) -> None:
    chunks = pack(specs, chunk_numel, world_size)
    by_name = {spec.name: spec for spec in specs}
    assert sorted(slot.name for chunk in chunks for slot in chunk.slots) == sorted(by_name)
    largest = align(chunk_numel, ALIGNMENT * world_size)
    for chunk in chunks:
        kinds = {(by_name[s.name].dtype, by_name[s.name].is_trained) for s in chunk.slots}
        assert kinds == {(chunk.dtype, chunk.is_trained)}
        assert all(slot.numel == by_name[slot.name].numel and slot.begin % ALIGNMENT == 0 for slot in chunk.slots)
        assert chunk.numel % (ALIGNMENT * world_size) == 0
        assert chunk.numel <= largest or len(chunk.slots) == 1
        covered = sorted([(s.begin, s.end) for s in chunk.slots if s.numel] + chunk.gaps())
        ends = [0, *(end for _, end in covered)]
        assert [begin for begin, _ in covered] == ends[:-1] and ends[-1] == chunk.numel
    order = [int(slot.name[1:]) for chunk in chunks for slot in chunk.slots if chunk.numel <= largest]
    for kind in {(chunk.dtype, chunk.is_trained) for chunk in chunks}:
        own = [i for i in order if (specs[i].dtype, specs[i].is_trained) == kind and align(specs[i].numel) <= largest]
        assert own == sorted(own)


@QUICK
@given(SPECS, CHUNK_NUMEL, WORLD)
def test_the_shards_of_all_ranks_are_every_parameter_once(
    specs: list[ParameterSpec], chunk_numel: int, world_size: int
) -> None:
    for chunk in pack(specs, chunk_numel, world_size):
        for slot in chunk.slots:
            owned = [Shard(chunk, rank, world_size).owned(slot) for rank in range(world_size)]
            parts = [(begin, end) for begin, end in owned if begin < end]
            ends = [0, *(end for _, end in parts)]
            assert [begin for begin, _ in parts] == ends[:-1] and ends[-1] == slot.numel


@QUICK
@given(SPECS, WORLD)
def test_the_searched_chunk_size_wastes_the_least(specs: list[ParameterSpec], world_size: int) -> None:
    unit = ALIGNMENT * world_size
    specs = [replace(spec, numel=7 * spec.numel) for spec in specs]  # some chunks, of the smallest size of 2**14
    found = best_chunk_numel(tuple(specs), world_size)

    def waste(size: int) -> int:
        return sum(chunk.padding for chunk in pack(specs, size, world_size))

    least, most = align(2**14, unit), align(2**17, unit)
    sizes = range(least, most + 1, align((most - least) // 255, unit))
    assert found in sizes and waste(found) == min(map(waste, sizes))


FRACTION = st.sampled_from((0.0, 0.25, 0.5, 0.9, 1.0))


@QUICK
@given(SPECS, CHUNK_NUMEL, FRACTION, FRACTION, FRACTION)
def test_static_fractions_are_reached_in_whole_chunks(
    specs: list[ParameterSpec], chunk_numel: int, shard: float, param: float, optim: float
) -> None:
    layouts = pack(specs, chunk_numel, 2)
    config = GeminiConfig(shard_param_frac=shard, offload_param_frac=min(param, shard), offload_optim_frac=optim)
    plan = plan_static(layouts, config)
    pairs = list(zip(layouts, plan.chunks, strict=True))
    trained = [(layout, place) for layout, place in pairs if layout.is_trained]
    _is_just_reached([(layout, place.optim_tier is Tier.SLOW) for layout, place in trained], optim)
    _is_just_reached([(layout, place.param_tier is Tier.SLOW) for layout, place in pairs], min(param, shard))
    _is_just_reached([(layout, place.is_sharded) for layout, place in pairs], shard)
    assert all(place.is_sharded or place.param_tier is Tier.FAST for place in plan.chunks)
    assert all(place.optim_tier is Tier.FAST for layout, place in pairs if not layout.is_trained)


def _is_just_reached(chosen: list[tuple[ChunkLayout, bool]], fraction: float) -> None:
    sizes = [layout.numel for layout, is_chosen in chosen if is_chosen]
    wanted = fraction * sum(layout.numel for layout, _ in chosen)
    assert sum(sizes) >= wanted * (1 - 1e-9)
    assert sum(sizes[:-1]) < wanted or not sizes


@st.composite
def demands(draw: st.DrawFn) -> tuple[list[ChunkLayout], Demand]:
    world_size = draw(WORLD)
    layouts = pack(draw(SPECS), draw(CHUNK_NUMEL), world_size)
    indices = st.lists(st.integers(0, len(layouts) - 1), min_size=1, max_size=4)
    units = tuple(tuple(unit) for unit in draw(st.lists(indices, min_size=1, max_size=6)))
    states = tuple(draw(st.sampled_from((0, 2, 8))) * layout.numel // world_size for layout in layouts)
    cap, activations = draw(st.integers(1, 2_000_000)), draw(st.integers(0, 500_000))
    return layouts, Demand(
        cap, activations, states, units, world_size, keeps_gradients=draw(st.sampled_from((False, True, None)))
    )


@QUICK
@given(demands())
def test_an_automatic_plan_fits_and_offloads_optimizers_before_weights(
    case: tuple[list[ChunkLayout], Demand],
) -> None:
    layouts, demand = case
    available = demand.cap_bytes - demand.non_model_bytes
    lowest = fast_bytes(layouts, plan_trace(layouts).chunks, demand)
    try:
        plan = plan_auto(layouts, demand)
    except UsageError as error:
        assert lowest > available
        needed = int(str(error).split("set memory_cap=")[1].split("B")[0])
        assert plan_auto(layouts, replace(demand, cap_bytes=needed)) is not None, "the remedy does not help"
        return
    assert fast_bytes(layouts, plan.chunks, replace(demand, keeps_gradients=plan.keeps_gradients)) <= available
    if demand.keeps_gradients is None:
        without = plan_auto(layouts, replace(demand, keeps_gradients=False))
        assert plan.chunks == without.chunks, "whole gradients push something out"
        spare = available - fast_bytes(layouts, plan.chunks, demand)
        assert plan.keeps_gradients == (whole_gradient_bytes(layouts) <= spare)
        if plan.gathered_budget is not None and without.gathered_budget is not None:
            taken = without.gathered_budget - plan.gathered_budget
            assert taken == plan.keeps_gradients * whole_gradient_bytes(layouts)
    else:
        assert plan.keeps_gradients == demand.keeps_gradients
    trained = [place for layout, place in zip(layouts, plan.chunks, strict=True) if layout.is_trained]
    if any(place.param_tier is Tier.SLOW for place in plan.chunks):
        assert all(place.optim_tier is Tier.SLOW for place in trained)
    if any(place.optim_tier is Tier.SLOW for place in trained) and demand.world_size > 1:
        assert all(place.is_sharded for place in plan.chunks)
    more = plan_auto(layouts, replace(demand, cap_bytes=demand.cap_bytes + 100_000))
    assert _num_slow(more) <= _num_slow(plan), "more memory offloads more"


def _num_slow(plan: ChunkPlan) -> int:
    return sum((place.optim_tier is Tier.SLOW) + (place.param_tier is Tier.SLOW) for place in plan.chunks)


@pytest.mark.parametrize("world_size", [7, 64])
def test_engines_of_all_ranks_own_every_element_once(world_size: int) -> None:
    counts = {name: torch.zeros(p.numel(), dtype=torch.int64) for name, p in Blocks().named_parameters()}
    values = {name: torch.zeros(p.numel()) for name, p in Blocks().named_parameters()}
    torch.manual_seed(0)
    expected = {name: p.detach().clone() for name, p in Blocks().named_parameters()}
    for rank in range(world_size):
        if dist.is_initialized():  # a training in this process, by another file's test
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            torch.manual_seed(0)
            engine = GeminiEngine({"": Blocks()}, GeminiConfig(chunk_numel=1500))
            for owned in engine.state.parameter_shards():
                counts[owned.name][owned.begin : owned.end] += 1
                values[owned.name][owned.begin : owned.end] = owned.master
        finally:
            dist.destroy_process_group()
    assert all(bool((count == 1).all()) for count in counts.values())
    assert all(torch.equal(values[name], expected[name].flatten()) for name in expected)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 33), min_size=2, max_size=5),
    st.integers(16, 2000),
    st.sampled_from((torch.float32, torch.bfloat16)),
    FRACTION,
    FRACTION,
    st.sampled_from((None, 0, 3000)),
    st.integers(0, 4),
)
def test_random_networks_train_the_same_wherever_their_chunks_are(
    widths: list[int],
    chunk_numel: int,
    dtype: torch.dtype,
    optim: float,
    param: float,
    budget: int | None,
    prefetch: int,
) -> None:
    def trained(**fields: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))
        config = GeminiConfig(chunk_numel=chunk_numel, compute_dtype=dtype, **fields)
        engine = GeminiEngine({"": network}, config)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-2))
        for step in range(3):
            x = torch.randn(4, widths[0], generator=torch.Generator().manual_seed(step)).to(dtype)
            network(x).float().square().mean().backward()
            optimizer.step()
        weights = list(weights_of(engine).values())
        engine.close()
        return weights

    fast = trained()
    moved = trained(offload_optim_frac=optim, offload_param_frac=param, gathered_budget=budget, prefetch=prefetch)
    assert all(torch.equal(a, b) for a, b in zip(fast, moved, strict=True))


@pytest.mark.parametrize(
    ("one", "other"), [("abcd", "acd"), ("abcd", ""), ("abc", "cba"), ("aabb", "abab"), ("abcd", "wxyz")]
)
def test_merged_calls_have_those_of_both_ranks_in_their_order(one: str, other: str) -> None:
    both = merged([(ord(c),) for c in one], [(ord(c),) for c in other])
    for calls in (one, other):
        rest = iter(both)
        assert all((ord(c),) in rest for c in calls), both
    assert len(both) < len(one) + len(other) or not set(one) & set(other)


def test_a_rank_takes_part_in_what_it_leaves_out_until_no_rank_has_called_it_for_long() -> None:
    def forward(*called: int) -> list[list[int]]:
        route.position, route.called = 0, list(called)
        return [route.skipped_before(unit) for unit in (*called, None)]

    route = Route(torch.nn.Identity(), [0, 1, 2, 3])
    assert forward(0, 1, 2, 3) == [[], [], [], [], []]
    assert forward(0, 2) == [[], [1], [3]]
    assert forward(0, 2, 1) == [[], [1], [], [3]], "units in another order are not waited for"
    for _ in range(15):
        forward(0, 3, 1)
        route.learn()
    assert route.units == [0, 3, 1, 2]
    assert forward(0, 3, 1) == [[], [], [], [2]]
    route.learn()
    assert route.units == [0, 3, 1]
