"""The settings of FSDP2, and the memory that it takes with them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner.footprint import Footprint, Holding, Traffic, Weight, When, Workload, rounding

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of FSDP2; ``FSDPStrategy`` explains them.

    Raises:
        UsageError: A number is too small.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    replicas: int = 1
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    forward_prefetch: int = 0

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("forward_prefetch", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"FSDPStrategy got {name}={getattr(self, name)}; expected at least {least}")

    def dtype(self, name: Literal["param_dtype", "reduce_dtype"]) -> torch.dtype | None:
        """Return one of the two dtypes as torch's."""
        value: str | None = getattr(self, name)
        return None if value is None else getattr(torch, value)


def footprint_of(config: FSDPConfig, workload: Workload) -> Footprint:
    """Count shards of rows, the blocks that are gathered, and gradients on their way.

    An all-gather fills a flat buffer, from which the block's weights are copied; in the forward pass the buffer is kept
    until those of the next block are copied (``FSDPParamGroup.wait_for_unshard`` of torch 2.13). A reduce-scatter reads
    another flat buffer. Offloaded weights and gradients are page-locked one by one (``FSDPParam``, ``foreach_reduce``),
    states are not.
    """
    own = workload.lightning_dtype
    gathered = config.dtype("param_dtype") or own
    reduced = config.dtype("reduce_dtype") or gathered
    parts = workload.world_size // config.replicas
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
    if config.cpu_offload:
        page_locked = [weight.rows_of(parts) for weight in workload.weights] + sizes
        held.append(rounding(own.itemsize * numel for numel in page_locked))
    blocks: dict[str, list[Weight]] = defaultdict(list)
    for weight in workload.weights:
        blocks[weight.block].append(weight)
    size = {name: gathered.itemsize * sum(w.numel for w in weights) for name, weights in blocks.items()}
    trained = {name: sum(w.numel for w in weights if w.is_trained) for name, weights in blocks.items()}
    sent = {name: reduced.itemsize * numel for name, numel in trained.items()}
    names = [name for name in size if name]
    kept = [Holding("gathered weights", size.get("", 0), When.COMPUTE)]
    before = {name: size[last] for name, last in zip(names[1:], names)}
    own_block = dict.fromkeys(names, 0)
    if config.reshard_after_forward:
        own_block = {name: size[name] for name in names}
    else:
        kept.append(Holding("gathered weights", sum(size[name] for name in names), When.UNTIL_READY))
    in_forward = {name: own_block[name] + size[name] + before.get(name, 0) for name in names}
    # The block before it is gathered ahead.
    in_backward = {
        name: own_block[name] + before.get(name, 0) + gathered.itemsize * trained[name] + sent[name] for name in names
    }
    numel = sum(sizes)
    passes = 2 if config.reshard_after_forward else 1
    traffic = Traffic(
        gathered=passes * sum(size.values()),
        reduced=sum(sent.values()),
        collectives=(passes + 1) * len(size),
        hooks=2 * passes * len(workload.weights),
        copied=(passes * sum(size.values()) + sum(sent.values())) * (parts > 1),
        to_device=passes * shards if config.cpu_offload else 0,
        to_host=gradients if config.cpu_offload else 0,
        stepped=0 if config.cpu_offload else numel,
        stepped_on_host=numel if config.cpu_offload else 0,
    )
    return Footprint(
        dtype=gathered,
        autocast=workload.half if workload.is_mixed else None,
        device=kept if config.cpu_offload else [*held, *kept],
        host=held if config.cpu_offload else [],
        in_forward=in_forward,
        in_backward=in_backward,
        traffic=traffic,
        averaged=0 if config.cpu_offload else numel,
        averaged_on_host=numel if config.cpu_offload else 0,
        master_dtype=own,
    )
