"""DreamBooth presets on one CUDA GPU: the peak that PyTorch allocated, beside the predicted one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases.dreambooth_memory import forecast_of
from lines import Measured

BARS: dict[str, str] = {}
TABLE = {
    "peak of the DreamBooth presets on a GPU, measured; predicted, GB: 8 GB with sd15": "{8gb-sd15_peak_gb}; "
    "{8gb-sd15_predicted_gb}",
}


DRY: dict[str, Any] = {"presets": ("8gb-tiny",), "steps": 2, "more": ("resolution=32", "trainer.accelerator=cpu")}


def measure(
    *,
    presets: tuple[str, ...] = ("8gb-sd15", "8gb-sd21", "lora_6gb-sd15"),
    steps: int = 4,
    more: tuple[str, ...] = (),
) -> Iterator[Measured]:
    """Train some steps from files of random weights, without prior preservation: it changes data, not memory.

    Args:
        presets: Preset and model.
        steps: Optimizer steps of each run.
        more: Overrides beside the preset.

    Yields:
        After each preset: ``…_peak_gb``, the most that PyTorch allocated in training, ``…_predicted_gb``, the forecast
        for the whole device, and ``…_images_per_second``.
    """
    from sd_lightning import LatentDiffusion

    metrics: dict[str, float | list[float] | str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_photos(folder / "photos")
        for preset in presets:
            preset_name, _, model = preset.rpartition("-")
            weights = folder / f"weights-{model}"
            if not weights.exists():
                LatentDiffusion.build(model).save_pretrained(weights)
            options = (f"experiment=dreambooth_{preset_name}", f"model={model}", f"model.pretrained={weights}", *more)
            command = [sys.executable, "-m", "sd_lightning.dreambooth", *options, "instance_data_dir=photos"]
            command += ["instance_prompt=a photo of sks dog", f"max_train_steps={steps}", f"output_dir={preset}"]
            subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)
            summary = json.loads((folder / preset / "summary.json").read_text())
            shutil.rmtree(folder / preset)
            metrics[f"{preset}_peak_gb"] = summary["peak_memory_gib"] * 2**30 / 1e9
            metrics[f"{preset}_images_per_second"] = summary["images_per_second"]
            forecast = forecast_of(*options)
            if forecast is not None:
                metrics[f"{preset}_predicted_gb"] = forecast.device / 1e9
            print({key: value for key, value in metrics.items() if key.startswith(preset)}, file=sys.stderr, flush=True)
            yield metrics


def _write_photos(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(random.integers(0, 256, (512, 512, 3), dtype=np.uint8)).save(folder / f"{number}.png")
