"""Peak FLOP/s of a device, and peak memory use."""

from __future__ import annotations

import time

import torch

from sd_lightning.gemini.probe import peak_allocated, peak_resident

_DENSE_16BIT_FLOPS = {"h100 nvl": 835.5e12, "h200": 989.5e12}
"""Dense bf16/fp16 tensor-core FLOP/s (NVIDIA datasheets: half of the "with sparsity" figure). Only chips for which
Lightning's table has the sparse figure, or no entry under the driver's name."""


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the largest memory use so far: allocated on a CUDA ``device``, else resident in this process.

    Returns:
        Bytes, or None on Windows without CUDA, where the standard library cannot tell.
    """
    return peak_allocated(device) if device.type == "cuda" else peak_resident()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of one device: the vendor's dense figure, else the best of a few matrix products.

    Args:
        device: The device that computes; a CPU means this process's threads.
        dtype: Dtype of the matrix products.
    """
    from lightning.fabric.utilities.throughput import get_available_flops

    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).lower()
        if dtype in (torch.bfloat16, torch.float16):
            for chip, flops in _DENSE_16BIT_FLOPS.items():
                if all(word in name for word in chip.split()):
                    return flops
        known = get_available_flops(device, dtype)
        if known:
            return float(known)
    return _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    n = 4096 if device.type == "cuda" else 1024
    a = torch.ones(n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def compute_dtype(precision: str) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("16", torch.float16), ("64", torch.float64)):
        if precision.startswith(name):
            return dtype
    return torch.float32
