"""The memory that our Gemini engine takes, in its own layout and placement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

import torch
from torch import nn

from sd_lightning.gemini.config import GeminiConfig
from sd_lightning.gemini.elementwise import Update
from sd_lightning.gemini.layout import ChunkLayout, ParameterSpec, Shard, pack_as_set
from sd_lightning.gemini.page_locked import whole_pages
from sd_lightning.gemini.placement import (
    EARLY_GRADIENTS,
    SENT_GRADIENTS,
    STEP_BLOCK,
    ChunkPlacement,
    Tier,
    held_bytes,
    plan_static,
    separate_gradients,
    slow_gradient_dtype,
    whole_gradient_bytes,
)
from sd_lightning.gemini.updates import update_of
from sd_lightning.planner.footprint import PAGE_LOCKED_ROUNDING, Footprint, Holding, Traffic, Weight, When, Workload

Sizes = dict[tuple[Tier, str], int]

_SCRATCH = "scratch of the step"
_CODED_STATES = 1.3
"""What 8-bit states add to the time of AdamW's update on the host, in parts of it; the case `gemini_host`."""
_COPIED_WEIGHTS = 0.25
"""The same of weights that are split, or rounded stochastically."""


def footprint_of(config: GeminiConfig, workload: Workload, order: Callable[[str], tuple[int, ...]]) -> Footprint | None:
    """Count chunks as the engine packs and places them.

    Args:
        config: Settings of the engine.
        workload: What is trained.
        order: Name of a weight -> key that sorts by execution order.

    Returns:
        None for ``placement="auto"``, which measures a step and fills the memory that there is.
    """
    if config.placement == "auto":
        return None
    world_size, dtype = workload.world_size, config.compute_dtype or workload.engine_dtype
    weights = sorted(workload.weights, key=lambda weight: order(weight.name))
    specs = [ParameterSpec(weight.name, weight.numel, dtype, weight.is_trained) for weight in weights]
    layouts = pack_as_set(specs, config, world_size)
    places = plan_static(layouts, config).chunks
    held = _held(config, layouts, places, workload)
    temporary = {
        a.index: a.nbytes for a, place in zip(layouts, places) if not place.is_resident(is_alone=world_size == 1)
    }
    gathered, when = sum(temporary.values()), When.UNTIL_READY
    if config.gathered_budget is not None:  # it fills, as chunks are only released for others
        gathered, when = min(config.gathered_budget, gathered), When.COMPUTE
    units = _units(layouts, weights)
    # One unit is always gathered as a whole, whatever the budget.
    above = {name: max(sum(temporary.get(i, 0) for i in unit) - gathered, 0) for name, unit in units.items()}
    moving = _moving(*separate_gradients(layouts, places, world_size, config.reduce_dtype if world_size > 1 else None))
    ready = When.ALWAYS if workload.accumulates else When.BACKWARD if config.step_in_backward else When.AS_READY
    times = {"gradients": ready, _SCRATCH: When.BACKWARD if config.step_in_backward else When.UPDATE}
    whole = whole_gradient_bytes(layouts) if workload.accumulates and config.reduce_once is True else 0
    beside = Holding("gathered weights", gathered, when), Holding("gradients", whole)
    trained = [(a.numel // world_size, place.optim_tier) for a, place in zip(layouts, places) if a.is_trained]
    swapped = sum(
        a.numel // world_size * a.dtype.itemsize
        for a, place in zip(layouts, places)
        if a.is_trained and (place.aliases_master(a) or place.splits_master(a))
    )
    staged = _staged(layouts, places, world_size)
    beside_on_host = Holding("swapped weights", swapped, When.SWAPPED), Holding("staged weights", staged)
    return Footprint(
        dtype=dtype,
        autocast=workload.half if workload.is_mixed else None,
        device=_holdings(held, Tier.FAST, times, beside),
        host=_holdings(held, Tier.SLOW, {"gradients": When.AS_READY}, beside_on_host),
        disk=sum(size for (tier, _), size in held.items() if tier is Tier.DISK),
        in_forward=above,
        in_backward={name: size + max(moving[i] for i in units[name]) for name, size in above.items() if name},
        traffic=_traffic(config, layouts, places, workload),
        averaged=sum(numel for numel, tier in trained if tier is Tier.FAST),
        averaged_on_host=sum(numel for numel, tier in trained if tier is not Tier.FAST),
        master_dtype=next((a.kept_dtype for a in layouts if a.is_trained), torch.float32),
    )


def _holdings(held: Sizes, tier: Tier, times: Mapping[str, When], beside: Iterable[Holding]) -> list[Holding]:
    """Return what a tier holds, and when: always, unless ``times`` says otherwise of a kind."""
    own = [Holding(kind, size, times.get(kind, When.ALWAYS)) for (where, kind), size in held.items() if where is tier]
    return [each for each in (*own, *beside) if each.nbytes]


def _held(
    config: GeminiConfig, layouts: Sequence[ChunkLayout], places: Sequence[ChunkPlacement], workload: Workload
) -> Sizes:
    """Return the bytes of this process's weights, gradients, states and scratch by tier and kind.

    On the host also what page-locked memory takes beside: whole pages, and free blocks that await a chunk of their
    size.
    """
    update, count = _update(workload)
    held: Sizes = defaultdict(int)
    locked: list[int] = []
    """Blocks of page-locked memory."""
    gradients: dict[Tier, list[int]] = defaultdict(list)
    scratch: set[tuple[Tier, int]] = set()
    """Tiers, and the numbers of float32 tensors that their chunks need while they are stepped."""
    for layout, place in zip(layouts, places, strict=True):
        size, dtype = update.size(Shard(layout, 0, workload.world_size))
        state = size * dtype.itemsize
        for tier, kind, nbytes in held_bytes(layout, place, count * state, workload.world_size):
            held[tier, kind] += nbytes
            if tier is Tier.SLOW and kind != "gradients":
                locked += [state] * count if kind == "optimizer states" else [nbytes]
        if layout.is_trained:
            # Micro-batches are added up in the wider type.
            is_kept = place.step_tier is Tier.FAST or workload.accumulates
            dtype = layout.master_dtype if is_kept else slow_gradient_dtype(layout, config)
            gradients[place.step_tier].append(layout.numel // workload.world_size * dtype.itemsize)
            device = torch.device("cuda" if place.step_tier is Tier.FAST else "cpu")
            num_scratch = place.steps_copies(layout) + (dtype != layout.master_dtype) + update.num_scratch(device)
            scratch.add((place.step_tier, num_scratch))
    for tier, sizes in gradients.items():
        number = EARLY_GRADIENTS[tier] if config.step_in_backward else len(sizes)
        held[tier, "gradients"] = sum(sorted(sizes)[-number:])
        locked += _most_alike(sizes, number) if tier is Tier.SLOW else ()
    largest = max((layout.numel // workload.world_size for layout in layouts if layout.is_trained), default=0)
    for tier, num_scratch in scratch:
        nbytes = 4 * num_scratch * min(STEP_BLOCK[tier], largest)
        held[tier, _SCRATCH] += nbytes
        locked += [nbytes] if tier is Tier.SLOW else ()
    beside = sum(map(whole_pages, locked)) - sum(nbytes for (tier, _), nbytes in held.items() if tier is Tier.SLOW)
    held[Tier.SLOW, PAGE_LOCKED_ROUNDING] = max(beside, 0)
    return held


def _most_alike(sizes: Sequence[int], count: int) -> Iterator[int]:
    """Yield each size as often as it is among ``count`` in a row: a free block is for another one of its size."""
    rows = (Counter(sizes[begin : begin + count]) for begin in range(max(len(sizes) - count, 0) + 1))
    yield from reduce(or_, rows).elements()


def _staged(layouts: Sequence[ChunkLayout], places: Sequence[ChunkPlacement], world_size: int) -> int:
    """Return the page-locked bytes through which narrower weights go to the device: two of each size, and kept."""
    sizes = Counter(
        layout.nbytes // world_size
        for layout, place in zip(layouts, places, strict=True)
        if layout.is_trained and place.param_tier is Tier.FAST and place.step_tier is Tier.SLOW
        if layout.dtype.itemsize < layout.kept_dtype.itemsize
    )
    return sum(whole_pages(nbytes) * min(count, 2) for nbytes, count in sizes.items())


def _update(workload: Workload) -> tuple[Update, int]:
    """Return the optimizer's update, and the number of its states."""
    optimizer = workload.optimizer([nn.Parameter(torch.empty(1))])
    update = update_of(optimizer)
    return update, len(update.states(optimizer.param_groups[0]))


def _traffic(
    config: GeminiConfig, layouts: Sequence[ChunkLayout], places: Sequence[ChunkPlacement], workload: Workload
) -> Traffic:
    """Return what moves; weights that are gathered within a budget are gathered again for the backward pass."""
    world_size, passes = workload.world_size, 1 if config.gathered_budget is None else 2
    coded = _CODED_STATES * (_update(workload)[0].num_scratch(torch.device("cpu")) > 0)
    moved: Counter[str] = Counter()
    for layout, place in zip(layouts, places, strict=True):
        shard = layout.numel // world_size
        narrow, wide = layout.dtype.itemsize, layout.master_dtype.itemsize
        times = passes * (not place.is_resident(is_alone=world_size == 1))
        moved["gathered"] += times * layout.nbytes
        moved["collectives"] += times + layout.is_trained
        moved["to_device"] += passes * narrow * shard * (place.param_tier is Tier.SLOW)
        if not layout.is_trained:
            continue
        moved["exposed"] += layout.nbytes * (not place.is_sharded)
        moved["reduced"] += layout.numel * max(narrow, config.reduce_dtype.itemsize)
        if place.optim_tier is Tier.FAST:
            moved["stepped"] += shard
            continue
        moved["stepped_on_host"] += round(shard * (1 + coded + _COPIED_WEIGHTS * place.steps_copies(layout)))
        sent = slow_gradient_dtype(layout, config).itemsize
        moved["to_host"] += shard * min(sent, narrow if world_size == 1 else wide)
        moved["refreshed"] += narrow * shard * (place.param_tier is Tier.FAST)
    hooks = 2 * sum(len(layout.slots) for layout in layouts)
    return Traffic(**moved, hooks=hooks, threaded=True, copied=moved["reduced"] * (world_size > 1))


def _moving(whole: Sequence[int], sent: Sequence[int]) -> list[int]:
    """Return the bytes of whole gradients in separate memory while each chunk is filled: its own and later chunks'."""
    return [
        sum(whole[index : index + 1 + SENT_GRADIENTS]) + sum(sent[index + 1 : index + 1 + SENT_GRADIENTS])
        for index in range(len(whole))
    ]


def _units(layouts: Sequence[ChunkLayout], weights: Sequence[Weight]) -> dict[str, set[int]]:
    """Return the chunks that each block needs, and for "" those of the largest module outside of blocks."""
    chunk_of = {slot.name: layout.index for layout in layouts for slot in layout.slots}
    blocks: dict[str, set[int]] = defaultdict(set)
    others: dict[str, set[int]] = defaultdict(set)
    for weight in weights:
        units, key = (blocks, weight.block) if weight.block else (others, weight.name.rpartition(".")[0])
        units[key].add(chunk_of[weight.name])
    largest = max(others.values(), key=lambda unit: sum(layouts[index].nbytes for index in unit), default=set())
    return {**blocks, "": largest}
