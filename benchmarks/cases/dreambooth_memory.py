"""Predicted peaks of the DreamBooth presets, of device and host; nothing is measured here."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

PRESETS = {
    **{f"{name}-{model}": gb for name, gb in (("8gb", 8), ("12gb", 12)) for model in ("sd15", "sd21")},
    **{f"{name}-{model}": gb for name, gb in (("16gb", 16), ("24gb", 24)) for model in ("sd15", "sd21")},
    **{f"lora_6gb-{model}": 6 for model in ("sd15", "sd21")},
    "sdxl_lora_12gb-sdxl": 12,
}
"""GB in the name, by preset and model."""
BARS = {f"{preset}_device_gb": f"<= {gb - 1}" for preset, gb in PRESETS.items()}
BARS |= {f"8gb-{model}_host_gb": "<= 16" for model in ("sd15", "sd21")}
TABLE = {
    "predicted peaks of DreamBooth's 8 GB preset, sd15; sd21: GPU; host": (
        "{8gb-sd15_device_gb} GB, {8gb-sd21_device_gb} GB; {8gb-sd15_host_gb} GB, {8gb-sd21_host_gb} GB"
    ),
    "the same with 8-bit AdamW, sd15": "{8gb-sd15-adam8_device_gb} GB; {8gb-sd15-adam8_host_gb} GB",
}


def measure() -> dict[str, float]:
    """Closed forms, and activations traced on the meta device; of pipelines of the published sizes, without weights."""
    from sd_lightning import LatentDiffusion

    metrics = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            name, _, model = preset.rpartition("-")
            pipeline = Path(folder, model)
            if not pipeline.exists():
                built = LatentDiffusion.build(model, device="meta")
                built.save_pretrained(pipeline, skip=list(built.networks))
            options = (f"experiment=dreambooth_{name}", f"model={model}", f"model.pretrained={pipeline}")
            found = {preset: forecast_of(*options)}
            if name == "8gb":
                found[f"{preset}-adam8"] = forecast_of(*options, "optimizer=adamw8bit")  # what use_8bit_adam=true does
            metrics |= {f"{key}_device_gb": each.device / 1e9 for key, each in found.items()}
            metrics |= {f"{key}_host_gb": each.host / 1e9 for key, each in found.items()}
    return metrics


def forecast_of(*options: str) -> Any:
    from sd_lightning import _conf
    from sd_lightning.apps.dreambooth import predict_memory
    from sd_lightning.apps.run_spec import RunSpec
    from sd_lightning.dreambooth import PROGRAM

    received: list[Any] = []
    arguments = sys.argv
    with tempfile.TemporaryDirectory() as photos:
        sys.argv = ["dreambooth", *options, f"instance_data_dir={photos}"]
        try:
            _conf.main(replace(PROGRAM, task=received.append))
        finally:
            sys.argv = arguments
    (cfg,) = received
    return predict_memory(RunSpec.of(cfg))
