"""int8 against fp32: 1000 prompted digits, the same ones in other batches, what the VAE decodes, sd21's UNet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BARS = {"accuracy_drop_points": "<= 1", "unet_error": "<= 1.5e-2", "batches_weight_only_max": "<= 1"}
SAMPLES = 1000
BATCHES = (1, 2, 6)
PICTURES = 36


def measure() -> dict[str, float]:
    """Train the digits once, or take the run that SD_LIGHTNING_TRAINED_RUN names, and draw with and without int8."""
    metrics = {
        "unet_error": _unet("weight_only"),
        "unet_error_bitsandbytes": _unet("bitsandbytes"),
        "unet_error_gaussian": _unet("weight_only", gaussian=True),
        "unet_error_gaussian_bitsandbytes": _unet("bitsandbytes", gaussian=True),
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir = os.environ.get("SD_LIGHTNING_TRAINED_RUN")
        if not run_dir:
            run_dir = f"{folder}/run"
            command = [sys.executable, "-m", "sd_lightning.train", f"output_dir={run_dir}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return metrics | _digits(Path(run_dir) / "pipeline") | _batches(Path(run_dir) / "pipeline")


def _unet(linear: Any, *, gaussian: bool = False) -> float:
    """Return the relative error of sd21's UNet with random weights: as layers start, or Gaussian of the same size."""
    import torch

    from int8_unet import relative_error, sd21_blocks, step
    from sd_lightning.quantization import Int8, quantize_

    unet, call = sd21_blocks(), step(side=32)
    if gaussian:
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in (p for p in unet.parameters() if p.dim() > 1):
                weight.normal_(0, float(weight.std()))
    expected = call(unet)
    return relative_error(call(quantize_(unet, Int8(linear=linear))), expected)


def _digits(pipeline: Path) -> dict[str, float]:
    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.data.sources.digits import Digits
    from sd_lightning.models.generation import generate
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


def _batches(pipeline: Path) -> dict[str, float]:
    """Draw the same pictures in batches of 1 and of more; return the differences of pixels in 1/255."""
    import numpy as np

    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.models.generation import generate
    from sd_lightning.quantization import Int8, quantize_

    prompts = [f"a handwritten {word}" for word in ("three", "nine", "zero")] * (PICTURES // 3)
    found: dict[str, float] = {}
    for linear in (None, "weight_only", "bitsandbytes"):
        model = LatentDiffusion.from_pretrained(pipeline)
        if linear is not None:
            quantize_(model, Int8(linear=linear))  # type: ignore[arg-type]
        drawn = []
        for batch_size in BATCHES:
            options = SamplingOptions(batch_size=batch_size)
            pictures = generate(model, prompts, seeds=range(PICTURES), options=options)
            drawn.append(np.stack([np.asarray(picture, dtype=int) for picture in pictures]))
        difference = np.abs(np.stack(drawn[1:]) - drawn[0])
        name = f"batches_{linear or 'fp32'}"
        found |= {f"{name}_max": float(difference.max()), f"{name}_mean": float(difference.mean())}
        found[f"{name}_share"] = float((difference > 0).mean())
    return found


def _vae(plain: Any, int8: Any) -> dict[str, float]:
    """Encode and decode the held-out digits by both VAEs; differences of pixels in 1/255."""
    import numpy as np
    import torch

    from sd_lightning.data.sources.digits import Digits

    digits = Digits("val")
    pixels = torch.stack([torch.from_numpy(np.array(digits.image(i))) for i in range(len(digits))])
    pixels = pixels.permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        ours, theirs = (vae.decode(vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1) for vae in (int8, plain))
    difference = (ours - theirs).abs() * 127.5
    return {"vae_pixel_error_mean": float(difference.mean()), "vae_pixel_error_max": float(difference.max())}
