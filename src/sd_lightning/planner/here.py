"""The hardware of this machine, as far as it is known without a measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner.devices import DTYPES, GIB, Device, device_names, load_device
from sd_lightning.planner.roofline import BYTES_PER_CLIP, BYTES_PER_UPDATE, Speeds

_CORE_TFLOPS = 0.08
"""Of a CPU's core: two units that multiply and add eight float32 values at 2.5 GHz; assumed."""
_GB_PER_S = 20.0
"""Bandwidth of a CPU's memory; assumed."""


def host_bytes() -> int:
    """Return the host memory of this machine, or of its control group if that has less."""
    limit, total = Path("/sys/fs/cgroup/memory.max"), psutil.virtual_memory().total
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def gpu_here(folder: str | Path) -> Device:
    """Return the table of this machine's first GPU, with the memory that it has.

    Args:
        folder: The tables that ship.

    Raises:
        UsageError: There is no table of it.
    """
    name = torch.cuda.get_device_name()
    for each in device_names(folder):
        device = load_device(each, folder)
        if device.name == name:
            return replace(device, memory_gib=torch.cuda.get_device_properties(0).total_memory / GIB)
    raise UsageError(
        f"the planner has no table for this machine's {name}; name the most similar one of "
        f"{', '.join(device_names(folder))}, or a YAML file of your own"
    )


def cpu_here(num_processes: int) -> tuple[Device, Speeds]:
    """Return a process's share of this machine's CPU: its memory, and speeds that are assumed for its threads.

    What a GPU would hold may take one half of the memory, and what host memory would hold takes the other.
    """
    share = host_bytes() / num_processes / GIB
    tflops, rate = _CORE_TFLOPS * torch.get_num_threads(), _GB_PER_S / num_processes
    device = Device("CPU", share / 2, share / 2, dict.fromkeys(DTYPES, tflops), rate, rate)
    speeds = Speeds.of(device)
    updates = speeds.bandwidth / (BYTES_PER_UPDATE + BYTES_PER_CLIP)  # there is no faster memory
    return device, replace(speeds, host_updates=updates)
