"""int8 against fp32: accuracy on 1000 prompted digits, what the VAE decodes, the output of an sd21-shaped UNet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BARS = {"accuracy_drop_points": "<= 1", "unet_error": "<= 1.5e-2"}
SAMPLES = 1000


def measure() -> dict[str, float]:
    """Train the digits once, or take the run that SD_LIGHTNING_TRAINED_RUN names, and draw with and without int8."""
    from int8_unet import relative_error, sd21_blocks, step
    from sd_lightning.quantization import quantize_

    unet, call = sd21_blocks(), step(side=32)
    expected = call(unet)
    metrics = {"unet_error": relative_error(call(quantize_(unet)), expected)}
    del unet
    with tempfile.TemporaryDirectory() as folder:
        run_dir = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
        if not run_dir:
            run_dir = f"{folder}/run"
            command = [sys.executable, "-m", "sd_lightning.train", f"output_dir={run_dir}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return metrics | _digits(Path(run_dir) / "pipeline")


def _digits(pipeline: Path) -> dict[str, float]:
    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.data.digits import Digits
    from sd_lightning.generation import generate
    from sd_lightning.quantization import quantize_

    judge = Digits("val").judge
    prompts, labels = judge.prompts(SAMPLES)
    options = SamplingOptions(batch_size=100)
    plain, int8 = LatentDiffusion.from_pretrained(pipeline), quantize_(LatentDiffusion.from_pretrained(pipeline))
    accuracy: dict[str, float] = {}
    for name, model in (("fp32", plain), ("int8", int8)):
        accuracy[name] = judge.accuracy(generate(model, prompts, seeds=range(SAMPLES), options=options), labels)
    return {
        "accuracy_drop_points": 100 * (accuracy["fp32"] - accuracy["int8"]),
        "accuracy_fp32": accuracy["fp32"],
        "accuracy_int8": accuracy["int8"],
        **_vae(plain.vae, int8.vae),
    }


def _vae(plain: Any, int8: Any) -> dict[str, float]:
    """Encode and decode the held-out digits by both VAEs; differences of pixels in 1/255."""
    import numpy as np
    import torch

    from sd_lightning.data.digits import Digits

    digits = Digits("val")
    pixels = torch.stack([torch.from_numpy(np.array(digits.image(i))) for i in range(len(digits))])
    pixels = pixels.permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        ours, theirs = (vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1) for vae in (int8, plain))
    difference = (ours - theirs).abs() * 127.5
    return {"vae_pixel_error_mean": float(difference.mean()), "vae_pixel_error_max": float(difference.max())}
