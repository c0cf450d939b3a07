"""The small transformers on the embedded digits: prompted accuracy and seconds of ``fit`` for two seeds each."""

from __future__ import annotations

from collections.abc import Iterator

from cases.digits import trained

MODELS = ("tiny_klein", "tiny_z_image")
BARS = {
    f"{name}_{model}": bar
    for model in MODELS
    for name, bar in {"prompted_accuracy_min": ">= 0.95", "train_seconds_max": "<= 240"}.items()
}
TABLE = {
    f"`model={model}`: `fit`, slower of two seeds; prompted digits that are right, worse of two seeds": (
        f"{{train_seconds_max_{model}}} s; {{prompted_accuracy_min_{model}:.0%}}"
    )
    for model in MODELS
}


def measure() -> Iterator[dict[str, float]]:
    """Train each model with its default settings under seeds 0 and 1."""
    metrics: dict[str, float] = {}
    for model in MODELS:
        runs = [trained(f"model={model}", f"seed={seed}") for seed in (0, 1)]
        metrics[f"prompted_accuracy_min_{model}"] = min(run["prompted_accuracy"] for run in runs)
        metrics[f"caption_gap_min_{model}"] = min(run["caption_gap"] for run in runs)
        metrics[f"train_seconds_max_{model}"] = max(run["train_seconds"] for run in runs)
        yield metrics
