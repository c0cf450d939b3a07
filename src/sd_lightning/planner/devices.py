"""Device tables: the memory, speed and price of GPUs; and the devices of a run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import psutil

from sd_lightning._conf import config_dir
from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import read_yaml

GIB = 2**30
USABLE = 0.97
"""Part of a GPU's nominal memory that can be used; assumed."""
DTYPES = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class Device:
    """A kind of GPU; the figures of the tables that ship are the makers', not measurements."""

    name: str
    """As the driver calls it: "NVIDIA H100 80GB HBM3"."""
    memory_gib: float
    host_memory_gib: float
    """Host memory per GPU."""
    peak_tflops: Mapping[str, float]
    """By name of :data:`DTYPES`: 10**12 floating-point operations per second."""
    memory_gb_per_s: float
    pcie_gb_per_s: float
    """To and from host memory, each way."""
    link_gb_per_s: float | None = None
    """Between GPUs of a machine, each way; None: over PCIe."""
    price_per_hour: float | None = None
    """Dollars per GPU."""
    price_source: str | None = None
    """Whose price, and when."""
    reached: Mapping[str, float] = field(default_factory=dict)
    """By name of :data:`DTYPES`: part of the peak arithmetic that large operations reach; 0.55 if not given."""

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.memory_gib * GIB)

    @property
    def usable_memory(self) -> int:
        """Bytes; the driver takes the rest."""
        return int(USABLE * self.memory)

    @property
    def host_memory(self) -> int:
        """Bytes."""
        return int(self.host_memory_gib * GIB)


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run, of one kind, in one machine."""

    device: Device
    count: int = 1
    host_memory: int | None = None
    """Bytes per GPU; the device table's if not given."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"plan got gpus={self.count}; expected at least 1")
        if self.host_memory is not None and self.host_memory <= 0:
            raise UsageError(f"plan got host_gb={self.host_memory / 1e9}; expected gigabytes per GPU, above 0")

    @classmethod
    def here(cls, device: Device, count: int, *, on_cpu: bool) -> Cluster:
        """Return this machine's devices for a number of processes, which share the host memory.

        On a CPU, one half of it stands for a GPU's memory, the other for the host's.
        """
        share = host_bytes() // count
        if not on_cpu:
            return cls(device, count, share)
        return cls(replace(device, memory_gib=share / 2 / GIB), count, share // 2)

    @property
    def memory(self) -> int:
        """Usable bytes of a GPU."""
        return self.device.usable_memory

    @property
    def host(self) -> int:
        """Bytes of host memory per GPU."""
        return self.device.host_memory if self.host_memory is None else self.host_memory


def tables() -> dict[str, Device]:
    """Return the tables that ship, by name; in the order of memory, then of bandwidth."""
    devices = {path.stem: load_device(path.stem) for path in sorted(_folder().glob("*.yaml"))}
    return dict(sorted(devices.items(), key=lambda each: (each[1].memory_gib, each[1].memory_gb_per_s)))


def table_of(device_name: str) -> Device | None:
    """Return the table that ships of a device, by its driver's name for it."""
    return next((device for device in tables().values() if device.name == device_name), None)


def load_device(name: str, key: str = "gpu") -> Device:
    """Return a device by the name of its table, or from a YAML file of the user's own.

    Args:
        name: "rtx-3060", or the path of a file.
        key: Setting that names it, for messages.

    Raises:
        UsageError: There is no such table, or it lacks a value.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else Path(_folder(), f"{name.lower()}.yaml")
    if not file.is_file():
        known = sorted(path.stem for path in _folder().glob("*.yaml"))
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4) or known
        raise UsageError(
            f"{key}={name}: no such GPU; the nearest are {', '.join(near)}. For another one, copy "
            f"conf/devices/{near[0]}.yaml, change its figures, and write {key}=<that file>"
        )
    try:
        read = read_yaml(file)
    except ValueError as error:
        raise UsageError(f"{key}={name}: {file} is not YAML: {error}; mend the file") from error
    return device_of(read, f"{key}={name}")


def _folder() -> Path:
    return Path(config_dir(), "devices")


def device_of(values: Any, who: str) -> Device:
    """Return a device from the values of a table.

    Raises:
        UsageError: A value is missing, unknown or not positive.
    """
    known = [each.name for each in fields(Device)]
    if not isinstance(values, dict):
        raise UsageError(f"{who}: holds a {type(values).__name__}; expected the keys {', '.join(known)}")
    unknown = [str(key) for key in values if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1) or ["one of " + ", ".join(known)]
        raise UsageError(f"{who}: {unknown[0]} is no key of a device table; expected {near[0]}")
    required = [each.name for each in fields(Device) if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise UsageError(f"{who}: {missing[0]} is missing; copy it from a table of conf/devices")
    peaks, reached = values["peak_tflops"], values.get("reached") or {}
    if not isinstance(peaks, dict) or not set(DTYPES) <= set(peaks):
        raise UsageError(f"{who}: peak_tflops={peaks}; expected a number for each of {', '.join(DTYPES)}")
    if not isinstance(reached, dict) or not set(reached) <= set(DTYPES):
        raise UsageError(f"{who}: reached={reached}; expected parts of the peak for {', '.join(DTYPES)}")
    texts = ("name", "price_source", "peak_tflops", "reached")
    numbers = {key: value for key, value in values.items() if key not in texts} | peaks
    for key, value in (numbers | {f"reached.{dtype}": part for dtype, part in reached.items()}).items():
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise UsageError(f"{who}: {key}={value}; expected a number above 0")
    return Device(**values | {"reached": reached})


def host_bytes() -> int:
    """Return the host memory of this machine, or of its control group if that has less."""
    limit, total = Path("/sys/fs/cgroup/memory.max"), psutil.virtual_memory().total
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
