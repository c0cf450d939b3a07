"""The main job on the embedded digits: prompted accuracy and seconds of ``fit`` for two seeds."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BARS = {
    "prompted_accuracy_seed_0": ">= 0.95",
    "prompted_accuracy_seed_1": ">= 0.95",
    "train_seconds_max": "<= 120",
}
TABLE = {
    "the main job's `fit`, slower of two seeds; prompted digits that are right, each seed": (
        "{train_seconds_max} s; {prompted_accuracy_seed_0:.0%}; {prompted_accuracy_seed_1:.0%}"
    ),
}


def trained(*options: str) -> dict[str, float]:
    """Train with the default settings but for ``options``; return the summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sd_lightning.train", f"output_dir={folder}/run", *options]
        subprocess.run(command, check=True, stdout=sys.stderr)
        summary: dict[str, float] = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary


def measure() -> dict[str, float]:
    """Train with the default settings under seeds 0 and 1 and read their summaries."""
    metrics: dict[str, float] = {}
    for seed in (0, 1):
        summary = trained(f"seed={seed}")
        for name in ("prompted_accuracy", "prompted_accuracy_samples", "train_seconds", "caption_gap"):
            metrics[f"{name}_seed_{seed}"] = summary[name]
    metrics["train_seconds_max"] = max(metrics["train_seconds_seed_0"], metrics["train_seconds_seed_1"])
    return metrics
