"""Measurement of collectives between the devices of a machine, in processes of their own."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_GATHERED = 8 * 2**20
"""Bytes of a collective's whole tensor."""
_ROUNDS = 5
_NUM_LARGE, _NUM_SMALL = 10, 200
"""Calls in a round: of collectives of many bytes, and of next to nothing."""
_PATIENCE = timedelta(seconds=120)


def measured_links() -> tuple[dict[str, float], float] | None:
    """Return what :func:`rates_in_group` and :func:`start_in_group` find on all GPUs, or on two processes of a CPU.

    None on a machine with one GPU.
    """
    on_cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if on_cuda else 2
    if count < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (count, folder, torch.get_num_threads()), nprocs=count)
        rates, start = json.loads(Path(folder, "found").read_text())
        return rates, start


def _run(rank: int, world_size: int, folder: str, threads: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of torch 2.13, whose new names torch 2.11 lacks
    on_cuda = torch.cuda.is_available()
    store = dist.FileStore(f"{folder}/store", world_size)
    backend = "nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    torch.set_num_threads(max(threads // world_size, 1))
    if on_cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    found = rates_in_group(device), start_in_group(device)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def rates_in_group(device: torch.device) -> dict[str, float]:
    """Return bytes per second that a process of this process group receives, by collective."""
    world_size = dist.get_world_size()
    whole = torch.ones(_GATHERED // 4 // world_size * world_size, device=device)
    part = torch.ones(len(whole) // world_size, device=device)
    received = (world_size - 1) * part.nbytes
    return {
        "all_gather": received / _seconds(lambda: dist.all_gather_into_tensor(whole, part), _NUM_LARGE, device),
        "reduce_scatter": received / _seconds(lambda: dist.reduce_scatter_tensor(part, whole), _NUM_LARGE, device),
        "all_reduce": 2 * received / _seconds(lambda: dist.all_reduce(whole), _NUM_LARGE, device),
    }


def start_in_group(device: torch.device) -> float:
    """Return the seconds of a collective of next to nothing."""
    whole = torch.ones(dist.get_world_size(), device=device)
    part = whole[:1].clone()
    return _seconds(lambda: dist.all_gather_into_tensor(whole, part), _NUM_SMALL, device)


def _seconds(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of one call among calls in a row, as training has them: one alone wakes up its threads."""
    run()  # connects
    seconds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / count)
    return statistics.median(seconds)
