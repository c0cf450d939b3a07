"""What one machine has for a run, and what should be changed there."""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch

from sd_lightning.data.workers import READY_BYTES, SHARED_MEMORY
from sd_lightning.planner.devices import GIB

_PACKAGES = ("sd-lightning", "torch", "lightning", "diffusers", "deepspeed", "colossalai", "ray")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
FABRIC = Path("/sys/class/infiniband")
"""Where Linux lists InfiniBand, RoCE and EFA devices."""


@dataclass(frozen=True)
class Change:
    """Something to change before a run."""

    what: str
    why: str
    command: str
    stops: bool = False
    """Whether a run would not start, or not go on, without it."""


Fact = tuple[str, str, str] | Change
"""A row (section, label, text), or what follows from it."""


def examine() -> Iterator[Fact]:
    """Look at this machine, on which a run has a process for each GPU, or one."""
    installed = {each.name: each.version for each in metadata.distributions()}
    yield "versions", "python", platform.python_version()
    yield from (("versions", name, installed.get(name, "not installed")) for name in _PACKAGES)
    yield from _gpus()
    yield from _network()
    if SHARED_MEMORY.is_dir():
        need = 2 * max(torch.cuda.device_count(), 1) * READY_BYTES
        free = shutil.disk_usage(SHARED_MEMORY).free
        yield "memory", str(SHARED_MEMORY), f"{free / GIB:.1f} GiB free; loaders use up to {need / GIB:.0f} GiB"
        if free < need:
            why = "data.num_workers=auto starts fewer workers there, and a fixed number may end with a bus error"
            yield Change(f"enlarge {SHARED_MEMORY}", why, f"docker run --shm-size={need // GIB}g")


def _gpus() -> Iterator[Fact]:
    has_driver = shutil.which(_NVIDIA_SMI[0]) is not None
    if has_driver:
        lines = Counter(subprocess.run(_NVIDIA_SMI, capture_output=True, text=True).stdout.splitlines())
        yield "GPU", "nvidia-smi", ", ".join(f"{count} × {line}" for line, count in lines.items())
    if torch.cuda.is_available():
        yield "GPU", "used", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
        return
    yield "GPU", "used", "none: runs use the CPU"
    if has_driver:
        why = f"torch {torch.__version__} cannot use the GPUs of {socket.gethostname()}: it has no CUDA, or a newer one"
        yield Change("install a torch that fits the driver", why, "see docs/install.md", stops=True)


def _network() -> Iterator[Fact]:
    host, families = socket.gethostname(), (socket.AF_INET, socket.AF_INET6)
    cards = {
        name: [each.address for each in addresses if each.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        address = "no address"
    card = next((name for name, addresses in cards.items() if address in addresses), "no interface")
    yield "network", "host name", f"{host} resolves to {address} of {card}"
    yield from (("network", name, ", ".join(addresses)) for name, addresses in cards.items() if addresses)
    devices = FABRIC.iterdir() if FABRIC.is_dir() else ()
    drivers = Counter(Path(device, "device/driver").resolve().name for device in devices)
    yield "network", "fabric", ", ".join(f"{count} × {driver}" for driver, count in drivers.items()) or "none"
