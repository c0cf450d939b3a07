"""The hardware of this machine."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner.calibration import device_name, file_of, load
from sd_lightning.planner.devices import GIB, Device, host_bytes, table_of
from sd_lightning.planner.roofline import Speeds
from sd_lightning.planner.search import Cluster

log = logging.getLogger(__name__)


def hardware_here() -> tuple[Device, Speeds]:
    """Return this machine's GPU, or its CPU, and the speeds that were measured or are assumed from its table.

    Raises:
        UsageError: It was not measured, and there is no table of it; or its file is of another device.
    """
    name = device_name()
    file = file_of(name)
    if file.is_file():
        found = load(file)
        if found.device.name != name:
            raise UsageError(
                f"{file} is the calibration of {found.device.name}, and this machine has {name}; delete it, or run "
                "python -m sd_lightning.plan calibrate"
            )
        now = torch.__version__
        if found.versions.get("torch") != now:
            log.warning("%s: calibrated with torch %s, and this is torch %s", file, found.versions.get("torch"), now)
        return found.device, found.speeds
    device = table_of(name)
    if device is None:
        raise UsageError(
            f"the planner has no table for this machine's {name}, and no {file}; run python -m sd_lightning.plan "
            "calibrate here, which takes a minute"
        )
    return device, Speeds.of(device)


def cluster_here(device: Device, count: int, *, on_cpu: bool) -> Cluster:
    """Return this machine's devices for a number of processes, which share the host memory.

    On a CPU, one half of it stands for a GPU's memory, the other for the host's.
    """
    share = host_bytes() // count
    if not on_cpu:
        return Cluster(device, count, share)
    return Cluster(replace(device, memory_gib=share / 2 / GIB), count, share // 2)
