"""The memory that DeepSpeed's ZeRO takes, as its engine allocates it (``deepspeed.runtime.zero``, 0.19)."""

from __future__ import annotations

from dataclasses import replace

import torch

from sd_lightning.models.checkpointing import Kept
from sd_lightning.planner.footprint import (
    Footprint,
    Holding,
    Traffic,
    When,
    Workload,
    page_locked_bytes,
    rounding,
)
from sd_lightning.strategies.deepspeed.settings import DeepSpeedSettings

_FLOAT_BYTES = 4
_SWAP_BUFFERS = 4
"""Buffers of a sub-group's size that NVMe swapping keeps in host memory."""


def footprint_of(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    """Count what the settings' stage keeps."""
    if settings.stage != 3:
        return _of_zero12(settings, workload)
    return replace(_of_zero3(settings, workload), menu=tuple(each for each in Kept if each is not Kept.PRODUCTS))


def _of_zero12(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    size = workload.engine_dtype.itemsize
    numel = sum(weight.numel for weight in workload.trained)
    part = -(-numel // workload.world_size)
    buffers = 2 if settings.get("zero_optimization.overlap_comm", True) else 1
    bucket = buffers * size * int(settings.get("zero_optimization.reduce_bucket_size"))
    device = [
        Holding("weights", size * sum(weight.numel for weight in workload.weights)),
        Holding("buckets", bucket, When.BACKWARD),
    ]
    states = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    if settings.stage == 1:  # reduces when the backward pass has ended
        device.append(Holding("gradients", size * numel, When.UNTIL_UPDATE))
    late = size * numel * (settings.stage == 1)
    traffic = Traffic(
        reduced=size * numel - late,
        exposed=late + size * numel,
        collectives=2 + numel // int(settings.get("zero_optimization.reduce_bucket_size")),
        copied=3 * size * numel + 2 * _FLOAT_BYTES * part,  # in a profile of DeepSpeed 0.19
        hooks=len(workload.trained),  # ``create_gradient_handling_hooks``
        stepped=part,
    )
    if settings.offload_device == "none":
        narrow = size * part if size < _FLOAT_BYTES else 0
        reduced = When.UPDATE if settings.stage == 1 else When.AS_READY
        device += [
            *states,
            Holding("gradients", size * part, reduced),
            Holding("float32 gradients", _FLOAT_BYTES * part + narrow, When.UPDATE),
        ]
        return Footprint(workload.engine_dtype, None, device, traffic=traffic, averaged=part)
    largest = size * max(weight.numel for weight in workload.trained)
    device.append(Holding("buckets", largest))
    accumulated = [size * weight.numel for weight in workload.trained] if workload.accumulates else []
    host = [
        *states,
        Holding("gradients", _FLOAT_BYTES * part + sum(accumulated)),
        Holding("weights", size * part),
        Holding("buckets", largest),
    ]
    if _page_locks(settings, "optimizer"):
        host.append(rounding([_FLOAT_BYTES * part, _FLOAT_BYTES * part, size * part, largest, *accumulated]))
    traffic = replace(traffic, to_host=size * part, refreshed=size * part, stepped=0, stepped_on_host=part)
    return Footprint(workload.engine_dtype, None, device, host, traffic=traffic, averaged_on_host=part)


def _page_locks(settings: DeepSpeedSettings, what: str) -> bool:
    """Return whether what is offloaded of the "optimizer" or "param" is page-locked, as it is by default."""
    return bool(settings.get(f"zero_optimization.offload_{what}.pin_memory", True))


def _of_zero3(settings: DeepSpeedSettings, workload: Workload) -> Footprint:
    def key(name: str) -> int:
        return int(settings.get(f"zero_optimization.{name}"))

    size, world_size = workload.engine_dtype.itemsize, workload.world_size
    threshold = key("stage3_param_persistence_threshold")
    persistent = sum(weight.numel for weight in workload.weights if weight.numel <= threshold)
    whole = sum(weight.numel for weight in workload.weights)
    shard = sum(-(-weight.numel // world_size) for weight in workload.weights)
    part = sum(-(-weight.numel // world_size) for weight in workload.trained)
    live = min(int(settings.get("zero_optimization.stage3_max_live_parameters", 1e9)), whole)
    ahead = min(int(settings.get("zero_optimization.stage3_prefetch_bucket_size", 5e7)), whole)
    device = [
        Holding("gathered weights", size * persistent),
        Holding("gathered weights", size * max(live - persistent, 0), When.UNTIL_READY),
        Holding("gathered weights", size * ahead, When.FORWARD),
        Holding("buckets", size * key("reduce_bucket_size")),
    ]
    weights = Holding("weights", size * shard)
    states = [
        Holding("master weights", _FLOAT_BYTES * part),
        Holding("optimizer states", workload.states([part], torch.float32)),
    ]
    gradients = Holding("gradients", size * part)
    stepped = min(int(settings.get("zero_optimization.sub_group_size", 1e9)), part)
    host: list[Holding] = []
    disk = 0
    if settings.offload_device == "none":
        narrow = size * stepped if size < _FLOAT_BYTES else 0
        device += [*states, gradients, Holding("float32 gradients", _FLOAT_BYTES * stepped + narrow, When.UPDATE)]
    elif settings.offload_device == "cpu":
        host += [*states, gradients, Holding("float32 gradients", _FLOAT_BYTES * part)]
        if _page_locks(settings, "optimizer"):
            whole_groups, rest = divmod(part, max(stepped, 1))
            groups = [_FLOAT_BYTES * stepped] * whole_groups + [_FLOAT_BYTES * rest]
            host.append(rounding([size * part, *groups]))
    else:
        disk = sum(state.nbytes for state in states) + _FLOAT_BYTES * part
        swapped = min(int(settings.get("zero_optimization.sub_group_size", 1e8)), part)
        # libaio's buffers are its own (``new_cpu_locked_tensor``), and not rounded.
        host += [gradients, Holding("swap buffers", _SWAP_BUFFERS * _FLOAT_BYTES * swapped)]
        host += [rounding([size * part])] * _page_locks(settings, "optimizer")
    is_offloaded = settings.get("zero_optimization.offload_param.device", "none") != "none"
    (host if is_offloaded else device).append(weights)
    if is_offloaded:
        host.append(_page_locked_weights(settings, workload))
    on_device = settings.offload_device == "none"
    # Modules are gathered one at a time; weights below the threshold once per step, one at a time.
    modules = {weight.name.rpartition(".")[0] for weight in workload.weights if weight.numel > threshold}
    passes = 1 if live == whole else 2  # released after the forward pass if they are too many
    traffic = Traffic(
        gathered=passes * size * whole,
        reduced=size * sum(weight.numel for weight in workload.trained),
        collectives=passes * len(modules) + sum(weight.numel <= threshold for weight in workload.weights),
        copied=3 * size * (passes * whole + sum(weight.numel for weight in workload.trained)),  # as above
        hooks=10 * len({weight.name.rpartition(".")[0] for weight in workload.weights}) + 2 * len(workload.trained),
        to_device=passes * size * shard * is_offloaded,
        to_host=size * part * (not on_device),
        stepped=part * on_device,
        stepped_on_host=part * (not on_device),
    )
    return Footprint(
        workload.engine_dtype,
        None,
        device,
        host,
        disk,
        traffic=traffic,
        averaged=part if on_device else 0,
        averaged_on_host=0 if on_device else part,
    )


def _page_locked_weights(settings: DeepSpeedSettings, workload: Workload) -> Holding:
    """Return what ZeRO-3's offloaded weights take beside what they hold.

    ``Init`` page-locks each partition (``partition_parameters.py``). The engine then copies those of trained weights
    into one page-locked block (``_create_param_groups_fp16_flat_cpu_memory``), and torch keeps what that frees.
    """
    size, world_size = workload.engine_dtype.itemsize, workload.world_size
    shards = [(-(-weight.numel // world_size) * size, weight.is_trained) for weight in workload.weights]
    flat = rounding([sum(nbytes for nbytes, is_trained in shards if is_trained)])
    if not _page_locks(settings, "param"):
        return flat
    frozen = rounding(nbytes for nbytes, is_trained in shards if not is_trained)
    freed = sum(page_locked_bytes(nbytes) for nbytes, is_trained in shards if is_trained)
    return replace(flat, nbytes=flat.nbytes + frozen.nbytes + freed)
