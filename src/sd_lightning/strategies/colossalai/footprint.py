"""The memory that ColossalAI's Gemini takes, by the sizes of its chunks; not measured here."""

from __future__ import annotations

import torch

from sd_lightning.planner.footprint import Footprint, Holding, Traffic, When, Workload
from sd_lightning.strategies.colossalai.settings import ColossalAIConfig

_FLOAT_BYTES = 4
_CHUNKS_IN_USE = 2
"""Chunks that are gathered at a time: a block's weights may be in two."""


def footprint_of(config: ColossalAIConfig, workload: Workload) -> Footprint | None:
    """Count chunks; gradients overwrite the weights in them.

    Returns:
        None for ``placement_policy="auto"``, which places by measurements.
    """
    if config.placement_policy == "auto":
        return None
    size, numel = workload.half.itemsize, sum(weight.numel for weight in workload.weights)
    chunk = max(int(config.min_chunk_size_m * 2**20), 1)
    is_sharded = numel > chunk and config.shard_param_frac > 0
    padded = -(-numel // chunk) * chunk if is_sharded else numel
    part = padded // workload.world_size
    weights = Holding("weights", size * (part if is_sharded else padded))
    stepped = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    on_host = config.offload_optim_frac
    device = [Holding(each.kind, int(each.nbytes * (1 - on_host))) for each in stepped]
    host = [Holding(each.kind, int(each.nbytes * on_host)) for each in stepped]
    device.append(Holding(weights.kind, int(weights.nbytes * (1 - config.offload_param_frac))))
    host.append(Holding(weights.kind, int(weights.nbytes * config.offload_param_frac)))
    if is_sharded:
        device.append(Holding("gathered weights", size * chunk * _CHUNKS_IN_USE, When.COMPUTE))
    moved = int(size * part * on_host)
    return Footprint(
        dtype=workload.half,
        autocast=workload.half,
        device=[each for each in device if each.nbytes],
        host=[each for each in host if each.nbytes],
        traffic=Traffic(
            gathered=2 * size * padded if is_sharded else 0,
            reduced=size * padded,
            collectives=(2 * is_sharded + 1) * -(-padded // chunk),
            copied=size * padded * (workload.world_size > 1),
            to_device=2 * int(size * part * config.offload_param_frac),
            to_host=moved,
            refreshed=moved,
            stepped=int(part * (1 - on_host)),
            stepped_on_host=int(part * on_host),
        ),
        averaged=int(part * (1 - on_host)),
        averaged_on_host=int(part * on_host),
    )
