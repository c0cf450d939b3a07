"""The small transformers on the embedded digits with default settings: prompted accuracy and seconds of ``fit``."""

from __future__ import annotations

from collections.abc import Iterator

from cases.digits import trained

MODELS = (
    *("tiny_klein", "tiny_z_image", "tiny_sd3", "tiny_flux", "tiny_qwen_image", "tiny_qwen_image_21"),
    "tiny_krea2",
)
BARS = {
    f"{name}_{model}": bar
    for model in MODELS
    for name, bar in {"prompted_accuracy_min": ">= 0.95", "train_seconds_max": "<= 240"}.items()
}
TABLE = {
    f"`model={model}`: `fit`; prompted digits that are right": (
        f"{{train_seconds_max_{model}}} s; {{prompted_accuracy_min_{model}:.0%}}"
    )
    for model in MODELS
}


def measure(seeds: tuple[int, ...] = (0,)) -> Iterator[dict[str, float]]:
    """Train each model.

    Args:
        seeds: Of its runs; the slowest and the worst count.
    """
    metrics: dict[str, float] = {}
    for model in MODELS:
        runs = [trained(f"model={model}", f"seed={seed}") for seed in seeds]
        metrics[f"prompted_accuracy_min_{model}"] = min(run["prompted_accuracy"] for run in runs)
        metrics[f"caption_gap_min_{model}"] = min(run["caption_gap"] for run in runs)
        metrics[f"train_seconds_max_{model}"] = max(run["train_seconds"] for run in runs)
        yield metrics
