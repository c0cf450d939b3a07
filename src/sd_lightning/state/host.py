"""The host's part of a step: threads for what it computes, and pinned memory that the device copies from and to."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


@contextmanager
def host_step() -> Iterator[None]:
    """Compute the body with this process's share of the machine's cores.

    torchrun gives each process one thread, unless ``OMP_NUM_THREADS`` is set: a step over offloaded states would leave
    all other cores idle. Use it for elementwise updates only. The number of threads changes no bit of theirs, but it
    does change float sums.
    """
    before = torch.get_num_threads()
    threads = num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Let all steps of a torch optimizer be host steps, but not the closures that they are given."""
    running = ExitStack()

    def begin(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        running.close()  # still open if the last step raised
        inner = kwargs.get("closure") if len(args) < 2 else args[1]
        if inner is None:
            running.enter_context(host_step())
            return args, kwargs

        def closure() -> Any:
            loss = inner()
            running.enter_context(host_step())
            return loss

        return (args[0], closure), {}

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *_: running.close())


def num_threads() -> int:
    """Return the number of threads of a host step.

    A value of ``OMP_NUM_THREADS`` is the user's choice, except 1 under torchrun, which is its default. Without a
    choice, the processes of this machine share its cores.
    """
    current, setting = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    # LOCAL_SIZE is the name that the deepspeed launcher has for it.
    num_local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    share = max(usable_cores() // max(int(num_local) if num_local.isdecimal() else 1, 1), 1)
    if setting is None:
        return min(current, share)
    is_default = setting == "1" == str(current) and "TORCHELASTIC_RUN_ID" in os.environ
    return share if is_default else current


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its control group's quota.

    At least 1. The quota is read once for each place of its file: it does not change during a run.
    """
    return int(max(min(_affine_cores(), _quota(_CPU_MAX, _CPU_QUOTA)), 1))


def _affine_cores() -> int:
    """Return the cores of the process's affinity; some systems, and some sandboxes, tell none."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def this_machine(otherwise: str) -> str:
    """Return an ID of this boot and this container, the scope of process IDs; ``otherwise`` where it is not Linux."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return otherwise


@cache
def _quota(together: Path, apart: Path) -> float:
    """Return the whole cores that a control group may use; infinity without a limit, or where none can be read.

    Args:
        together: The file of version 2, with quota and period.
        apart: The quota of version 1, beside the file of its period.
    """
    for files in ((together,), (apart, apart.with_name("cpu.cfs_period_us"))):
        try:
            quota, period = (int(text) for file in files for text in file.read_text(encoding="utf-8").split())
            if quota > 0 and period > 0:
                return quota // period
        except (OSError, ValueError):  # another version, no limit ("max"), or not what the kernel writes
            continue
    return math.inf


BLOCK_BYTES = 256 * 2**20
"""Tensors share blocks of this size: torch rounds each pinned allocation up to a power of two."""


def streams_of(device: torch.device) -> Any:
    """Return torch's module of a device with streams, which copies pinned memory beside its work; None for others."""
    return torch.cuda if device.type == "cuda" else None


def page_locked_bytes(nbytes: int) -> int:
    """Return the bytes of a page-locked block: torch rounds it up to a power of two.

    So does ``allocate`` in torch 2.13's ``ATen/core/CachingHostAllocator.h``. What is freed stays page-locked.
    """
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def pinned_bytes(nbytes: int) -> int:
    """Return the host memory that tensors of so many bytes take in pinned blocks of :func:`host_memory`."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if nbytes > BLOCK_BYTES else page_locked_bytes(nbytes)


def host_memory(
    shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return tensors in host memory; ``device`` copies from and to them without waiting, if it is CUDA."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    blocks: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = next((i for i, left in enumerate(room) if left >= sizes[number]), None)
        if fitting is None:
            fitting = len(blocks)
            blocks.append([])
            room.append(max(BLOCK_BYTES // dtype.itemsize, sizes[number]))
        blocks[fitting].append(number)
        room[fitting] -= sizes[number]
    tensors: dict[int, Tensor] = {}
    for block in blocks:
        is_pinned = streams_of(device) is not None
        memory = torch.empty(sum(sizes[i] for i in block), dtype=dtype, pin_memory=is_pinned)
        for number, part in zip(block, memory.split([sizes[i] for i in block])):
            tensors[number] = part.view(tuple(shapes[number]))
    return [tensors[i] for i in range(len(sizes))]
