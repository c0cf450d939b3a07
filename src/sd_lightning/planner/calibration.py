"""Calibration: the speeds that were measured on a machine, kept in a JSON file; and the hardware that plans are for."""

from __future__ import annotations

import json
import logging
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.planner.devices import DTYPES, Device, device_of, load_device, table_of
from sd_lightning.planner.roofline import KINDS_OF_PRODUCTS, Curve, Speeds
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.untrusted import read_json

log = logging.getLogger(__name__)

FORMAT = 5


@dataclass(frozen=True)
class Calibration:
    """What was measured, where and when."""

    device: Device
    speeds: Speeds
    date: str
    """ISO 8601."""
    torch_version: str

    def write(self, file: Path) -> None:
        """Write it as JSON, atomically."""
        values = {"format": FORMAT, **asdict(self)}
        values["speeds"]["flops"] = {"/".join(key): asdict(curve) for key, curve in self.speeds.flops.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(values, indent=1) + "\n")


def device_name(*, of_cpu: bool = False) -> str:
    """Return the name of this machine's first GPU as the driver says it, or that of its CPU.

    Args:
        of_cpu: Name the CPU even if there is a GPU.
    """
    if torch.cuda.is_available() and not of_cpu:
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return name[1].strip() if name else platform.processor() or platform.machine()


def file_of(name: str) -> Path:
    """Return the file for the calibration of a device, relative to the working directory."""
    return Path("devices", re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def hardware(name: str, key: str = "gpu") -> tuple[Device, Speeds]:
    """Return a device and its speeds.

    Args:
        name: Of a table, whose speeds are assumed; or the path of a YAML file like these, or of a calibration.
        key: Setting that names it, for messages.

    Raises:
        UsageError: There is no such table or file, or it is not valid.
    """
    if name.endswith(".json"):
        calibration = load(Path(name), key)
        return calibration.device, calibration.speeds
    device = load_device(name, key)
    return device, Speeds.of(device)


def hardware_here() -> tuple[Device, Speeds]:
    """Return this machine's GPU, or its CPU, and the speeds that were measured or are assumed from its table.

    Raises:
        UsageError: It was not measured, and there is no table of it; or its file is of another device.
    """
    name = device_name()
    file = file_of(name)
    if file.is_file():
        calibration = load(file)
        if calibration.device.name != name:
            raise UsageError(
                f"{file} is the calibration of {calibration.device.name}, and this machine has {name}; delete it, or "
                "run python -m sd_lightning.plan calibrate"
            )
        before, now = calibration.torch_version, torch.__version__
        if before != now:
            log.warning("%s: calibrated with torch %s, and this is torch %s", file, before, now)
        return calibration.device, calibration.speeds
    device = table_of(name)
    if device is None:
        raise UsageError(
            f"the planner has no table for this machine's {name}, and no {file}; run python -m sd_lightning.plan "
            "calibrate here, which takes a minute"
        )
    return device, Speeds.of(device)


def load(file: Path, key: str = "gpu") -> Calibration:
    """Read a calibration, which a setting names.

    Raises:
        UsageError: The file is missing, or is not one that this version wrote.
    """
    again = "run python -m sd_lightning.plan calibrate on that machine"
    if not file.is_file():
        raise UsageError(f"{key}={file}: there is no such file; {again}, or write {key}=<name of a table>")
    try:
        values = read_json(file)
        if values["format"] != FORMAT:
            raise UsageError(
                f"{key}={file}: has format {values['format']}, and this version reads format {FORMAT}; {again} again"
            )
        speeds = {each.name: values["speeds"][each.name] for each in fields(Speeds)}
        speeds |= {name: _curve(speeds[name]) for name in ("bandwidth", "functions")}
        flops = {tuple(key.split("/")): _curve(curve) for key, curve in speeds["flops"].items()}
        missing = [f"{kind}/{dtype}" for kind in KINDS_OF_PRODUCTS for dtype in DTYPES if (kind, dtype) not in flops]
        if missing:
            raise ValueError(f"no flops of {missing[0]}")
        speeds |= {"flops": flops, "assumed": tuple(speeds["assumed"])}
        device = device_of(values["device"], f"{key}={file}")
        return Calibration(device, Speeds(**speeds), values["date"], values["torch_version"])
    except UsageError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{key}={file}: is no calibration: {type(error).__name__}: {error}; {again} again") from error


def _curve(values: Mapping[str, Any]) -> Curve:
    curve = Curve(tuple(values["sizes"]), tuple(values["rates"]))
    if not curve.rates or len(curve.sizes) != len(curve.rates) or min(*curve.rates, *curve.sizes) <= 0:
        raise TypeError("a curve has as many sizes as rates, above 0")
    return curve
