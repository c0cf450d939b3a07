"""The memory that FSDP2 takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sd_lightning.planner.footprint import Footprint, Holding, Traffic, Weight, When, Workload, rounding

if TYPE_CHECKING:
    from sd_lightning.strategies.fsdp import FSDPStrategy


def footprint_of(strategy: FSDPStrategy, workload: Workload) -> Footprint:
    """Count shards of rows, the blocks that are gathered, and gradients on their way.

    An all-gather fills a flat buffer, from which the block's weights are copied; in the forward pass the buffer is kept
    until those of the next block are copied (``FSDPParamGroup.wait_for_unshard`` of torch 2.13). A reduce-scatter reads
    another flat buffer. Offloaded weights and gradients are page-locked one by one (``FSDPParam``, ``foreach_reduce``),
    states are not.
    """
    own, precision = workload.lightning_dtype, strategy.mixed_precision
    gathered = precision.param_dtype or own
    reduced = precision.reduce_dtype or gathered
    parts = workload.world_size // strategy.replicas
    sizes = [weight.rows_of(parts) for weight in workload.trained]
    shards = own.itemsize * sum(weight.rows_of(parts) for weight in workload.weights)
    gradients = own.itemsize * sum(sizes)
    held = [
        Holding("weights", shards),
        Holding("optimizer states", workload.states(sizes, own)),
        Holding("swapped weights", gradients, When.SWAPPED),
    ]
    if workload.accumulates:
        held.append(Holding("gradients", gradients))
    else:
        held += [Holding("gradients", gradients, When.FORWARD), Holding("gradients", gradients, When.AS_READY)]
    if strategy.cpu_offload:
        page_locked = [weight.rows_of(parts) for weight in workload.weights] + sizes
        held.append(rounding(own.itemsize * numel for numel in page_locked))
    blocks: dict[str, list[Weight]] = defaultdict(list)
    for weight in workload.weights:
        blocks[weight.block].append(weight)
    size = {name: gathered.itemsize * sum(w.numel for w in weights) for name, weights in blocks.items()}
    sent = {name: reduced.itemsize * _trained(weights) for name, weights in blocks.items()}
    raw = {name: gathered.itemsize * _trained(weights) for name, weights in blocks.items()}
    names = [name for name in size if name]
    kept = [Holding("gathered weights", size.get("", 0), When.COMPUTE)]
    before = {name: size[last] for name, last in zip(names[1:], names)}
    own_block = dict.fromkeys(names, 0)
    if strategy.reshard_after_forward:
        own_block = {name: size[name] for name in names}
    else:
        kept.append(Holding("gathered weights", sum(size[name] for name in names), When.UNTIL_READY))
    in_forward = {name: own_block[name] + size[name] + before.get(name, 0) for name in names}
    # The block before it is gathered ahead.
    in_backward = {name: own_block[name] + before.get(name, 0) + raw[name] + sent[name] for name in names}
    numel = sum(sizes)
    passes = 2 if strategy.reshard_after_forward else 1
    traffic = Traffic(
        gathered=passes * sum(size.values()),
        reduced=sum(sent.values()),
        collectives=(passes + 1) * len(size),
        hooks=2 * passes * len(workload.weights),
        copied=(passes * sum(size.values()) + sum(sent.values())) * (parts > 1),
        to_device=passes * shards if strategy.cpu_offload else 0,
        to_host=gradients if strategy.cpu_offload else 0,
        stepped=0 if strategy.cpu_offload else numel,
        stepped_on_host=numel if strategy.cpu_offload else 0,
    )
    return Footprint(
        dtype=gathered,
        autocast=workload.half if workload.is_mixed else None,
        device=kept if strategy.cpu_offload else [*held, *kept],
        host=held if strategy.cpu_offload else [],
        in_forward=in_forward,
        in_backward=in_backward,
        traffic=traffic,
        averaged=0 if strategy.cpu_offload else numel,
        averaged_on_host=numel if strategy.cpu_offload else 0,
        master_dtype=own,
    )


def _trained(weights: Sequence[Weight]) -> int:
    return sum(weight.numel for weight in weights if weight.is_trained)
