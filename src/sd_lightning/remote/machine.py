"""What one machine has for a run, in sections of rows, and what should be changed there."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil
import torch
from torch.backends.cuda import is_flash_attention_available

from sd_lightning.data.workers import READY_BYTES, SHARED_MEMORY
from sd_lightning.planner.devices import GIB, host_bytes
from sd_lightning.state.host import usable_cores
from sd_lightning.storage.atomic import hidden, new_file
from sd_lightning.storage.object_store import open_location

_PACKAGES = ("sd-lightning", "torch", "lightning", "diffusers", "deepspeed", "colossalai", "ray")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version,name,memory.total,compute_cap", "--format=csv,noheader")
_LARGE, _SMALL = 2**24, 2**10
"""Bytes of the files that are written into the shared folder."""
_OPEN_FILES = 4096
"""Files and sockets for the shards, workers and connections of a process; many systems allow 1024."""
_FLASH = (8, 0)
"""Compute capability from which PyTorch has flash attention."""
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


Fact = tuple[str, str] | Change
"""A row (label, text) of a section, or what follows from it."""
Section = Callable[[], Iterator[Fact]]


@dataclass
class Machine:
    """What a machine has."""

    name: str
    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    """Section -> label -> text."""
    changes: list[Change] = field(default_factory=list)


def examine(output_dir: str | None, processes: int, *, seconds: float) -> Machine:
    """Look at this machine.

    Args:
        output_dir: The folder or bucket to try; None for none.
        processes: Processes of a run on this machine.
        seconds: After which a section is given up: a driver or a network disk may never answer.
    """
    machine = Machine(socket.gethostname())
    sections: dict[str, tuple[Section, str]] = {
        "versions": (_versions, "python -m pip check"),
        "GPU": (_gpus, "nvidia-smi"),
        "network": (_network, "ip address"),
        "shared folder": (partial(_folder, output_dir), "output_dir=<a folder that every machine may write to>"),
        "limits": (partial(_limits, processes), "ulimit -a"),
    }
    for title, (section, command) in sections.items():
        facts = _within(seconds, section, f"mend the {title} of {machine.name}", command)
        machine.sections[title] = dict(fact for fact in facts if isinstance(fact, tuple))
        machine.changes += [fact for fact in facts if isinstance(fact, Change)]
    return machine


def _within(seconds: float, section: Section, what: str, command: str) -> list[Fact]:
    """Return the facts of a section; also if it fails or does not end, which is a fact, too."""
    facts: list[Fact] = []
    problems = [f"no answer in {seconds:g} s"]

    def look() -> None:
        try:
            facts.extend(section())
            problems.clear()
        except Exception as error:  # of a driver, a disk or a store: the other sections say more
            problems[:] = [" ".join(str(error).split())]

    thread = threading.Thread(target=look, daemon=True)  # what hangs in the kernel cannot be ended
    thread.start()
    thread.join(seconds)
    for why in problems:
        return [*facts, ("failed", why), Change(what, why, command, stops=True)]
    return facts


def _versions() -> Iterator[Fact]:
    installed = {each.name: each.version for each in metadata.distributions()}
    yield "python", platform.python_version()
    yield from ((name, installed.get(name, "not installed")) for name in _PACKAGES)
    yield "CUDA", str(torch.version.cuda or "none: torch is built for another device")
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"


def _gpus() -> Iterator[Fact]:
    smi = shutil.which(_NVIDIA_SMI[0]) and subprocess.run(_NVIDIA_SMI, capture_output=True, text=True).stdout
    for number, line in enumerate((smi or "").splitlines()):
        driver, _, rest = line.partition(", ")
        yield from {"driver": driver, f"GPU {number}": rest}.items()
    if torch.cuda.is_available():
        has_flash = is_flash_attention_available() and torch.cuda.get_device_capability() >= _FLASH
        yield "used", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"
        yield "bf16", "works" if torch.cuda.is_bf16_supported(including_emulation=False) else "does not work"
        yield "flash attention", "works" if has_flash else "does not work"
        return
    yield "used", "none: runs use the CPU"
    if smi:
        why = f"torch {torch.__version__} cannot use the GPUs of {socket.gethostname()}: it has no CUDA, or a newer one"
        yield Change("install a torch that fits the driver", why, "see docs/install.md", stops=True)


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up."""
    stats, cards = psutil.net_if_stats(), psutil.net_if_addrs().items()
    addresses = {name: each.address for name, all_ in cards for each in all_ if each.family == socket.AF_INET}
    return {name: address for name, address in addresses.items() if name in stats and stats[name].isup}


def nccl_interface(cards: Mapping[str, str]) -> str:
    """Return the interface that NCCL takes by itself: InfiniBand's, else any, else Docker's, else the loopback."""
    return min(cards, key=lambda name: {"ib": 0, "do": 2, "lo": 3}.get(name[:2], 1), default="none")


def _network() -> Iterator[Fact]:
    host, cards = socket.gethostname(), interfaces()
    address = "nothing"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    yield "host name", f"{host} resolves to {address}"
    yield from cards.items()
    best, of_host = nccl_interface(cards), next((name for name in cards if cards[name] == address), "lo")
    for library, default in (("NCCL", best), ("GLOO", of_host)):
        card = os.environ.get(f"{library}_SOCKET_IFNAME")
        yield f"{library} uses", f"{card} by {library}_SOCKET_IFNAME" if card else default
    if card is not None and card not in cards:
        why = f"{host} has no interface {card}; those with an address are {', '.join(cards)}"
        yield Change("name another interface for gloo", why, f"export GLOO_SOCKET_IFNAME={best}", stops=True)
    elif card is None and of_host == "lo":
        why = f"{host} resolves to {address}, where other machines do not reach it; a machine alone needs no change"
        yield Change("name the interface for gloo", why, f"export GLOO_SOCKET_IFNAME={best}")
    for device in sorted(FABRIC.iterdir()) if FABRIC.is_dir() else ():
        rates = [rate.read_text().strip() for rate in device.glob("ports/*/rate")]
        yield f"fabric {device.name}", f"{Path(device, 'device/driver').resolve().name}, {', '.join(rates)}"


def existing(folder: str) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    path = Path(folder).expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def _folder(output_dir: str | None) -> Iterator[Fact]:
    yield "output_dir", output_dir or "not tried: write output_dir=<the folder of all machines>"
    if output_dir is None or "://" in output_dir:
        if output_dir is not None:
            open_location(output_dir, key="output_dir").check_writable()
        return
    folder = existing(output_dir)
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    yield "file system", max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown"
    yield "free", f"{shutil.disk_usage(folder).free / 1e9:.0f} GB"
    path, link, seconds = hidden(folder / "doctor"), hidden(folder / "doctor"), []
    try:
        for size in (_LARGE, _SMALL):
            data, begin = os.urandom(size), time.perf_counter()
            with new_file(path) as unfinished:
                unfinished.write_bytes(data)
            seconds.append(time.perf_counter() - begin)
            if path.read_bytes() != data:
                raise OSError(f"{output_dir}: a file reads back otherwise than it was written")
        with suppress(OSError):
            link.hardlink_to(path)
        yield "hard links", "work" if link.exists() else "do not work: files are copied"
    finally:
        path.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    yield "write, fsync, rename", f"{_LARGE / seconds[0] / 1e6:.0f} MB/s; {1000 * seconds[1]:.1f} ms for a small file"


def _limits(processes: int) -> Iterator[Fact]:
    processes = max(processes, 1)
    need, soft = 2 * processes * READY_BYTES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else need
    threads, cores = os.environ.get("OMP_NUM_THREADS", "not set"), usable_cores()
    yield "/dev/shm", f"{free / GIB:.1f} GiB free; loaders use up to {need / GIB:.0f} GiB"
    yield "host memory", f"{host_bytes() / GIB:.0f} GiB"
    yield "open files", f"{soft}"
    yield "cores, threads", f"{cores} of {os.cpu_count()} cores may be used; OMP_NUM_THREADS is {threads}"
    if free < need:
        why = "data.num_workers=auto starts fewer workers there, and a fixed number may end with a bus error"
        yield Change(f"enlarge {SHARED_MEMORY}", why, f"docker run --shm-size={need // GIB}g")
    if soft < _OPEN_FILES:
        yield Change("raise the limit on open files", f"{soft} are too few for many shards", "ulimit -n 65536")
    if threads.isdecimal() and int(threads) > max(cores // processes, 1):
        why = f"{processes} processes of {threads} threads share {cores} cores"
        yield Change("take fewer threads", why, f"export OMP_NUM_THREADS={max(cores // processes, 1)}")
