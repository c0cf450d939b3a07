"""Write the table of docs/planner.md: what trains and draws on GPUs of 8 to 24 GB, predicted.

    python benchmarks/consumer_cards.py

Settings are those of `experiment=consumer_gpu`. Of the strategies that fit, with at most 64 GB of host memory if one
does, the fastest by the speeds of an RTX 3090 stands in the table, with the largest batch of 1, 2, 4 and 8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PAGE = Path(__file__).parent.parent / "docs" / "planner.md"
MODELS = ("klein_4b", "klein_9b", "z_image", "sd35_medium", "sd35_large", "flux1_dev", "krea2")
MODELS += ("qwen_image_21", "qwen_image")
KINDS = ("lora", "full")
CARDS = (8, 12, 16, 24)
"""GB of nominal memory."""
BATCHES = (1, 2, 4, 8)
SIZE = 512
HOST_GB = 64
GB = 1e9


@cache
def _model(name: str) -> Any:
    from sd_lightning import LatentDiffusion

    return LatentDiffusion.build(name, device="meta")


@cache
def _searched(model: str, kind: str) -> Any:
    """Return a search for a GPU with the speeds of an RTX 3090."""
    from bitsandbytes.optim import AdamW8bit

    from sd_lightning.models.lora import Lora
    from sd_lightning.planner.devices import Cluster, load_device
    from sd_lightning.planner.run import TrainingRun
    from sd_lightning.planner.search import Search
    from sd_lightning.strategies.presets import candidates

    run = TrainingRun(
        1,
        SIZE,
        "bf16-true",
        encodes=False,
        lora=Lora() if kind == "lora" else None,
        optimizer=partial(AdamW8bit, lr=1e-5),
    )
    chosen = [each for each in candidates() if each.name.startswith(("single", "gemini"))]
    cluster = Cluster(load_device("rtx-3090"), host_memory=2**50)
    return Search(_model(model), run, cluster, chosen, micro_batches=BATCHES, checkpointing=True)


def best(model: str, kind: str, card: int) -> Any:
    """Return the plan for a card, the smallest if none fits."""
    search = _searched(model, kind)
    device = replace(search.cluster.device, memory_gib=card * GB / 2**30)
    found = replace(search, cluster=replace(search.cluster, device=device)).plans()
    fitting = [plan for plan in found.considered if plan.memory.host <= HOST_GB * GB]
    least = min((plan.memory.host for plan in found.considered), default=0)
    fitting = fitting or [plan for plan in found.considered if plan.memory.host <= 1.05 * least]
    return max(fitting, key=lambda plan: plan.images_per_second, default=None) or found.too_large[0]


def row(model: str, kind: str, card: int) -> list[str]:
    """Return a line of the table."""
    plan = best(model, kind, card)
    if not plan.fits:
        return [model, kind, f"{card}", f"does not fit: {plan.lacks} more", "", "", ""]
    cells = [f"{plan.run.batch_size}", f"{plan.memory.device / GB:.1f}", f"{plan.memory.host / GB:.0f}"]
    return [model, kind, f"{card}", f"`{' '.join(plan.candidate.options)}`", *cells]


def drawing(model: str) -> list[str]:
    """Return a line of the table of pictures: GB of the weights, and the peak, in bfloat16."""
    import torch

    from sd_lightning.planner.passes import inference_bytes

    weights, peak = inference_bytes(_model(model), height=1024, width=1024, dtype=torch.bfloat16)
    fitting = [f"{card} GB" for card in CARDS if peak + 0.6 * GB <= 0.97 * card * GB]
    return [model, f"{weights / GB:.1f}", f"{peak / GB:.1f}", next(iter(fitting), "none of these")]


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def tables() -> dict[str, str]:
    """Return the tables by the names of their markers."""
    head = ["model", "`trainable=`", "card, GB", "strategy", "batch", "GPU, GB", "host, GB"]
    rows = (row(model, kind, card) for model in MODELS for kind in KINDS for card in CARDS)
    drawn = _table(["model", "weights, GB", "peak, GB", "smallest card"], (drawing(model) for model in MODELS))
    return {"consumer cards": _table(head, rows), "consumer drawing": drawn}


def main() -> None:
    """The command line."""
    from report import with_tables

    found = tables()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), found, who=PAGE.name), encoding="utf-8")


if __name__ == "__main__":
    main()
