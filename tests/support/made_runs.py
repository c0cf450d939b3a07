"""Folders as runs leave them, with the figures that a test wants."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from places import REPO

NEW = ("hardware", "devices", "batch_size", "strategy", "precision", "date", "torch")
"""What summaries hold since runs can be compared."""


def config(strategy: str = "single", *, devices: int = 1, batch_size: int = 64, **sections: Any) -> dict[str, Any]:
    """A resolved configuration, short; `sections` replace those of their names, or change single keys of them."""
    made: dict[str, Any] = {
        "name": "made",
        "output_dir": "runs/made",
        "seed": 0,
        "model": {
            "_target_": "sd_lightning.models.latent_diffusion.load_model",
            "architecture": "tiny",
            "pretrained": None,
            "seed": 0,
        },
        "data": {
            "_target_": "sd_lightning.data.builders.digits_data",
            "resolution": 32,
            "batch_size": batch_size,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3},
        "strategy": yaml.safe_load((REPO / f"conf/strategy/{strategy}.yaml").read_text(encoding="utf-8")),
        "trainer": {"devices": devices, "num_nodes": 1, "precision": "32-true", "accumulate_grad_batches": 1},
        "callbacks": {"checkpoint": {"run_dir": "runs/made"}},
        "lora": None,
    }
    for name, section in sections.items():
        made[name] = {**made[name], **section} if isinstance(section, Mapping) and made.get(name) else section
    return made


def make_run(
    folder: Path,
    *,
    rates: Sequence[float] = (50.0, 100.0, 100.0, 100.0),
    losses: Sequence[float] | None = None,
    peak: float = 2.0,
    config: Mapping[str, Any] | None,
    summary: Mapping[str, Any] | None,
) -> Path:
    """Write a run's folder; without a summary it is one that was killed.

    Args:
        folder: A new folder.
        rates: Images per second, logged at steps 10, 20, …; without any there is no `metrics.csv`.
        losses: As many; falling by default.
        peak: GiB.
        config: See `config`; the folder's name is its `name`.
        summary: Is added to what each summary holds.
    """
    folder.mkdir(parents=True)
    (folder / ".sd_lightning").write_text('{"format": 1}')
    if config is not None:
        own = {**config, "name": folder.name, "output_dir": str(folder)}
        own["callbacks"] = {"checkpoint": {"run_dir": str(folder)}}
        (folder / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    losses = [math.exp(-i / 5) for i in range(len(rates))] if losses is None else losses
    if rates:
        (folder / "logs/csv/version_0").mkdir(parents=True)
        rows = [f"{10 * (i + 1) - 1},{loss},{rate},{peak}" for i, (rate, loss) in enumerate(zip(rates, losses))]
        header = "step,train/loss,perf/images_per_second,perf/peak_memory_gib"
        (folder / "logs/csv/version_0/metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    if summary is not None:
        known = {
            "steps": 40,
            "images_per_second": 90.0,
            "peak_memory_gib": peak,
            "final_loss": losses[-1] if rates else None,
        }
        (folder / "summary.json").write_text(json.dumps({**known, **summary}))
    return folder


def facts(hardware: str = "NVIDIA L4", **others: Any) -> dict[str, Any]:
    """What a summary says of a run's circumstances; the configuration has the rest."""
    return {"hardware": hardware, "date": "2026-11-25", "torch": "2.9.0", **others}
