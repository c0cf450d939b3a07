"""Calibration: the speeds that were measured on a machine, kept in a JSON file."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner import measuring
from sd_lightning.planner.devices import DTYPES, GIB, Device, device_of, host_bytes, load_device, table_of
from sd_lightning.planner.links import measured_links
from sd_lightning.planner.roofline import KINDS_OF_PRODUCTS, Curve, Speeds
from sd_lightning.storage.atomic import new_file
from sd_lightning.storage.untrusted import read_json

FORMAT = 4
_ALIKE_ON_CPU = ("tf32", "float16")
"""Dtypes that are not measured on a CPU, where nothing trains in them: float32's figures stand in their place."""
_TORCH = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Calibration:
    """What was measured, where and when."""

    device: Device
    speeds: Speeds
    date: str
    """ISO 8601."""
    versions: Mapping[str, str]
    """Of torch, and of CUDA and its driver if there is a GPU; and the number of torch's threads."""
    table: Device | None = None
    """The table of this device that ships."""

    def write(self, file: Path) -> None:
        """Write it as JSON, atomically."""
        speeds = asdict(self.speeds)
        speeds["flops"] = {"/".join(key): asdict(curve) for key, curve in self.speeds.flops.items()}
        written = {
            "date": self.date,
            "versions": dict(self.versions),
            "format": FORMAT,
            "device": asdict(self.device),
            "speeds": speeds,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as path:
            path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def device_name(*, of_cpu: bool = False) -> str:
    """Return the name of this machine's first GPU as the driver says it, or that of its CPU.

    Args:
        of_cpu: Name the CPU even if there is a GPU.
    """
    if torch.cuda.is_available() and not of_cpu:
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def file_of(name: str) -> Path:
    """Return the file for the calibration of a device, relative to the working directory."""
    return Path("devices", re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def hardware(name: str) -> tuple[Device, Speeds]:
    """Return a device and its speeds.

    Args:
        name: Of a table, whose speeds are assumed; or the path of a YAML file like these, or of a calibration.

    Raises:
        UsageError: There is no such table or file, or it is not valid.
    """
    if name.endswith(".json"):
        found = load(Path(name))
        return found.device, found.speeds
    device = load_device(name)
    return device, Speeds.of(device)


def load(file: Path) -> Calibration:
    """Read a calibration.

    Raises:
        UsageError: The file is missing, or is not one that this version wrote.
    """
    again = "run python -m sd_lightning.plan calibrate on that machine"
    if not file.is_file():
        raise UsageError(f"gpu={file}: there is no such file; {again}, or write gpu=<name of a table>")
    try:
        read = read_json(file)
        if read["format"] != FORMAT:
            raise UsageError(f"gpu={file}: has format {read['format']}, and {FORMAT} is expected; {again} again")
        given = read["speeds"]
        flops = {tuple(key.split("/")): _curve(curve) for key, curve in given["flops"].items()}
        missing = [f"{kind}/{dtype}" for kind in KINDS_OF_PRODUCTS for dtype in DTYPES if (kind, dtype) not in flops]
        if missing:
            raise KeyError(f"flops of {missing[0]}")
        values = {each.name: given[each.name] for each in fields(Speeds)}
        values |= {name: _curve(given[name]) for name in ("bandwidth", "functions")}
        speeds = Speeds(**{**values, "flops": flops, "assumed": tuple(values["assumed"])})
        device = device_of(read["device"], f"gpu={file}")
        return Calibration(device, speeds, read["date"], read["versions"])
    except UsageError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"gpu={file}: is no calibration: {type(error).__name__}: {error}; {again} again") from error


def _curve(given: Mapping[str, Any]) -> Curve:
    curve = Curve(tuple(given["sizes"]), tuple(given["rates"]))
    if not curve.rates or len(curve.sizes) != len(curve.rates) or min(*curve.rates, *curve.sizes) <= 0:
        raise TypeError("a curve has as many sizes as rates, above 0")
    return curve


def calibrate(date: str, effort: measuring.Effort | None = None) -> Calibration:
    """Measure this machine's first GPU, or its CPU.

    What cannot be measured is assumed from the GPU's table, if one ships.

    Args:
        date: Today's, ISO 8601.
        effort: How long it may take; less than a minute by default.
    """
    on_cuda = torch.cuda.is_available()
    watch = measuring.Stopwatch(torch.device("cuda" if on_cuda else "cpu"), effort or measuring.Effort())
    latency = measuring.latencies(watch)
    flops = _flops(watch, latency)
    moved, functions = measuring.bandwidths(watch, latency["elementwise"])
    to_device, to_host = measuring.copies(watch)
    table = table_of(device_name())
    links = measured_links() if watch.effort.links else None
    device = _device(table, flops, moved, min(to_device, to_host))
    assumed = Speeds.of(device)
    speeds = Speeds(
        flops,
        moved,
        functions,
        measuring.update_bandwidth(watch),
        measuring.launch(watch, latency),
        latency,
        to_device,
        to_host,
        links[0] if links else assumed.link,
        measuring.host_updates(watch.effort),
        links[1] if links else assumed.collective,
        f"calibrated on {date}",
        ("link",) * (links is None) + ("hooks", "what threads hide") * (not on_cuda),
        fresh=measuring.fresh(watch),
        overlaps=on_cuda,
        spread=watch.spread,
    )
    versions = {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    versions |= {"cuda": str(torch.version.cuda), "driver": _driver()} if on_cuda else {}
    return Calibration(device, speeds, date, versions, table)


def _driver() -> str:
    """Return the version of the GPU's driver; "unknown" where it has no such file."""
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", file.read_text()) if file.is_file() else None
    return found[1] if found else "unknown"


def _flops(watch: measuring.Stopwatch, latency: Mapping[str, float]) -> dict[tuple[str, str], Curve]:
    on_cuda = watch.device.type == "cuda"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    found: dict[tuple[str, str], Curve] = {}
    try:
        for dtype in DTYPES:
            if not on_cuda and dtype in _ALIKE_ON_CPU:
                continue
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
            for kind in KINDS_OF_PRODUCTS:
                for name, curve in measuring.product_rates(watch, kind, _TORCH[dtype], latency).items():
                    found[name, dtype] = curve
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    if not on_cuda:
        as_float32 = {name: curve for (name, dtype), curve in found.items() if dtype == "float32"}
        found |= {(name, dtype): curve for name, curve in as_float32.items() for dtype in _ALIKE_ON_CPU}
    return found


def _device(table: Device | None, flops: Mapping[tuple[str, str], Curve], moved: Curve, pcie: float) -> Device:
    """Return a table with this machine's memory; with measured figures if none ships."""
    host, on_cuda = host_bytes() / GIB, torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory / GIB if on_cuda else host
    host /= torch.cuda.device_count() if on_cuda else 1
    if table is not None:
        return replace(table, memory_gib=memory, host_memory_gib=host)
    peaks = {dtype: max(flops[kind, dtype].best for kind in KINDS_OF_PRODUCTS) / 1e12 for dtype in DTYPES}
    return Device(device_name(), memory, host, peaks, moved.best / 1e9, pcie / 1e9)
