"""Memory that loading sd21 takes, to the part that a process keeps: per strategy on two processes, and in int8."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The bars that the tests hold, which allow one whole tensor more.
BARS = {
    "fsdp_over_part": "<= 1.4",
    "gemini_over_part": "<= 1.4",
    "int8_from_float16": "<= 1.3",
    "int8_from_int8": "<= 1.3",
}
TABLE = {
    "peak of loading sd21 on two processes to the part that each keeps: FSDP2; Gemini": (
        "{fsdp_over_part} ×; {gemini_over_part} ×"
    ),
    "the same of 150 million of sd21's weights under ZeRO-3: partitioned; with DeepSpeed's engine": (
        "{zero3_partitioned_over_part} ×; {zero3_over_part} ×"
    ),
    "peak of loading sd21 to its weights in int8: from float16 files; from int8 files": (
        "{int8_from_float16} ×; {int8_from_int8} ×"
    ),
}
SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
JOBS = {"fsdp": "sd21", "gemini": "sd21", "zero3": "part"}
"""Strategy -> what is loaded: DeepSpeed takes too long with all of sd21."""


def peers() -> dict[str, dict[str, Any]]:
    """Return DeepSpeed, as it is but that no weight stays whole."""
    return {"deepspeed": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def measure() -> dict[str, float]:
    """Run the jobs of the tests that measure it: the kernel's count of pages, the worse of both ranks."""
    sys.path.insert(0, str(SUPPORT))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return _under_strategies(folder) | _in_int8(SUPPORT / "int8_driver.py", folder)


def _under_strategies(folder: Path) -> dict[str, float]:
    from loading_driver import PART, torchrun, write_pipeline

    write_pipeline(folder / "sd21", sample_size=8)
    write_pipeline(folder / "part", **PART)
    jobs: list[dict[str, Any]] = [
        {"do": "measure", "strategy": name, "folder": str(folder / model), "run_dir": str(folder / name), "save": False}
        for name, model in JOBS.items()
    ]
    found = dict(zip(JOBS, torchrun(jobs, folder, timeout=1800), strict=True))
    metrics = {
        f"{name}_over_part": max(rank["peak"] / rank["shard"] for rank in ranks) for name, ranks in found.items()
    }
    return metrics | {
        "zero3_partitioned_over_part": max(rank["before_engine"] / rank["own"] for rank in found["zero3"]),
        "zero3_weights": sum(rank["own"] for rank in found["zero3"]) / 4,
    }


def _in_int8(driver: Path, folder: Path) -> dict[str, float]:
    results = folder / "int8.json"
    subprocess.run([sys.executable, str(driver), str(folder / "int8"), str(results)], check=True, stdout=sys.stderr)
    found = json.loads(results.read_text())
    return {
        "int8_from_float16": found["quantize_peak"] / found["weights"],
        "int8_from_int8": found["load_peak"] / found["weights"],
    }
