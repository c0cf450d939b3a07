"""``plan calibrate``: measure this machine, so that plans for it are made with what it reaches."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning.planner.calibration import Calibration, calibrate, file_of
from sd_lightning.planner.roofline import COLLECTIVES, Speeds

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(cfg: DictConfig) -> int:
    """Measure this machine, print the figures, and write them to ``output``."""
    unused = sorted(_conf.overridden_keys() - {"action", "output"})
    if unused:
        raise UsageError(f"plan calibrate got {unused[0]}; it measures this machine, whatever is trained; leave it out")
    output = cfg.output if "output" in _conf.overridden_keys() else None
    if output is not None and not output.endswith(".json"):
        raise UsageError(f"plan calibrate got output={output}; expected a file that ends with .json; leave it out")
    started = time.perf_counter()
    found = calibrate(datetime.date.today().isoformat())
    file = file_of(found.device.name) if output is None else Path(output)
    found.write(file)
    print(*lines(found), sep="\n")
    print(f"written to {file} after {time.perf_counter() - started:.0f} s; plans for this machine use it from here on,")
    print(f"and those made elsewhere with gpu={file}")
    return 0


def lines(found: Calibration) -> list[str]:
    """Return the figures as lines of text; of a GPU with a table, beside what is assumed from it."""
    measured, sheet = found.speeds, None if found.table is None else Speeds.of(found.table)
    rows = [("", "measured", "" if sheet is None else "data sheet", "")]

    def add(label: str, name: str, unit: str, value: Callable[[Speeds], float | None]) -> None:
        told = "not measured" if name in measured.assumed else f"{value(measured):.3g}"
        assumed = None if sheet is None else value(sheet)
        rows.append((label, told, "" if assumed is None else f"{assumed:.3g}", unit))

    for kind, dtype in measured.flops:
        if dtype == "float32" or measured.flops[kind, dtype] != measured.flops[kind, "float32"]:
            add(f"{kind.replace('_', ', ')}, {dtype}", kind, "TFLOP/s", partial(_tflops, kind, dtype))
    add("device memory", "bandwidth", "GB/s", lambda speeds: speeds.bandwidth.best / 1e9)
    add("the same in activation functions", "functions", "GB/s", lambda speeds: speeds.functions.best / 1e9)
    add("optimizer's step", "update_bandwidth", "GB/s", lambda speeds: speeds.update_bandwidth / 1e9)
    add("host to device", "to_device", "GB/s", lambda speeds: speeds.to_device / 1e9)
    add("device to host", "to_host", "GB/s", lambda speeds: speeds.to_host / 1e9)
    for name in COLLECTIVES:
        label = f"{name.replace('_', '-')} between devices"
        add(label, "link", "GB/s", partial(_link, name))
    add("AdamW on the host", "host_updates", "10^9 weights/s", lambda speeds: speeds.host_updates / 1e9)
    add("host's time for an operation", "launch", "µs", lambda speeds: 1e6 * speeds.launch)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    aligned = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)
    return [f"{found.device.name}: the best that was reached", *aligned]


def _link(collective: str, speeds: Speeds) -> float:
    return speeds.link[collective] / 1e9


def _tflops(kind: str, dtype: str, speeds: Speeds) -> float | None:
    curve = speeds.flops.get((kind, dtype))
    return None if curve is None else curve.best / 1e12
