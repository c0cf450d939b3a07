"""int8 against fp32: prompted digits that a small model draws, in other batches too; sd21's UNet and VAE."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

REVISION = 2
BARS = {
    "accuracy_drop_points": "<= 1",
    "accuracy_fp32": ">= 0.9",  # between these two a drop can be seen; tune max_steps and widths
    "errors_fp32": ">= 0.03",
    "unet_error": "<= 1.5e-2",
    "unet_error_gaussian": "<= 3.5e-2",
    "batches_weight_only_max": "<= 1",
}
TABLE = {
    "prompted digits of a small model, points lower in int8 than in fp32; share that is right in fp32": (
        "{accuracy_drop_points}; {accuracy_fp32}"
    ),
    "error of sd21's UNet in int8, the rest in fp16, to fp32: uniform weights; Gaussian": (
        "{unet_error:.2e}; {unet_error_gaussian:.2e}"
    ),
    "the same by bitsandbytes' kernels": "{unet_error_bitsandbytes:.2e}; {unet_error_gaussian_bitsandbytes:.2e}",
    "error of sd21's VAE in int8, the rest in fp16, to fp32: uniform weights; Gaussian": (
        "{vae_error:.2e}; {vae_error_gaussian:.2e}"
    ),
    "pixels that the digits' VAE reconstructs in int8, difference in 1/255: mean; largest": (
        "{vae_pixel_error_mean}; {vae_pixel_error_max}"
    ),
    "pixels of the same pictures in other batches, largest difference in 1/255: fp32; int8; bitsandbytes": (
        "{batches_fp32_max}; {batches_weight_only_max}; {batches_bitsandbytes_max}"
    ),
}
BATCHES = (1, 2, 6)
PICTURES = 36
VAE_SIDE = 8
"""Side of the latents that sd21's VAE decodes: convolutions in float16 are slow on a CPU."""
KERNELS = {"": "weight_only", "_bitsandbytes": "bitsandbytes"}


def peers() -> dict[str, dict[str, Any]]:
    """Return bitsandbytes, and torch without int8."""
    return {"bitsandbytes": {"threshold": 6.0}, "torch": {"dtype": "float32"}}


def measure(
    *,
    max_steps: int = 225,
    widths: Sequence[int] = (24, 48),
    seeds: Sequence[int] = (0, 1, 2),
    samples: int = 1000,
    unet_side: int = 16,
    rest: str = "float16",
) -> dict[str, float | list[float]]:
    """Train models that are not perfect, and draw with and without int8; call sd21's networks with random weights.

    Args:
        max_steps: Optimizer steps of a training; the main job takes 360.
        widths: Channels of its UNet, multiples of 8; the main job has 32 and 64.
        seeds: A training each.
        samples: Pictures per model.
        unet_side: Side of the latents of sd21's UNet.
        rest: What is not in int8 is kept and computed in: the type in which the memory of int8 is claimed.
    """
    metrics: dict[str, float | list[float]] = {}
    for kind in ("", "_gaussian"):
        for suffix, kernel in KERNELS.items():
            metrics[f"unet_error{kind}{suffix}"] = _error("unet", kernel, rest, unet_side, gaussian=bool(kind))
        metrics[f"vae_error{kind}"] = _error("vae", "weight_only", rest, VAE_SIDE, gaussian=bool(kind))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            pipeline = _train(Path(folder), seed, max_steps, widths)
            found.append(_accuracy(pipeline, samples))
            print(f"seed {seed}: {found[-1]}", file=sys.stderr, flush=True)
        metrics |= _digits_vae(pipeline) | _batches(pipeline)
    fp32, int8 = ([each[name] for each in found] for name in ("fp32", "int8"))
    return metrics | {
        "accuracy_drop_points": [100 * (a - b) for a, b in zip(fp32, int8, strict=True)],
        "accuracy_fp32": fp32,
        "accuracy_int8": int8,
        "errors_fp32": [1 - each for each in fp32],
    }


def _error(name: str, kernel: Any, rest: Any, side: int, *, gaussian: bool) -> float:
    """Return the relative error of a whole network of sd21 with random weights."""
    import torch

    from int8_networks import network, relative_error, unet_call
    from sd_lightning.quantization import Int8, quantize_

    built = network(name, gaussian=gaussian)
    if name == "unet":
        call: Callable[[Any], Any] = unet_call(side=side)
    else:
        latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0))

        @torch.inference_mode()
        def call(vae: Any) -> Any:
            return vae.decode(latents.to(vae.decoder.conv_out.bias)).sample

    expected = call(built)
    return relative_error(call(quantize_(built, Int8(linear=kernel, dtype=rest))), expected)


def _train(folder: Path, seed: int, max_steps: int, widths: Sequence[int]) -> Path:
    """Train the digits with a narrower UNet; return the pipeline's folder."""
    from sd_lightning import LatentDiffusion
    from sd_lightning.models.families import architecture

    tiny, model = architecture("tiny"), LatentDiffusion.build("tiny", seed=seed)
    name = model.family.denoiser
    unet = tiny.networks[name]
    narrow = replace(unet, config={**unet.config, "block_out_channels": list(widths), "norm_num_groups": 8})
    narrower = LatentDiffusion.build(replace(tiny, networks={**tiny.networks, name: narrow}), seed=seed)
    model.networks[name], model.components[name] = narrower.networks[name], narrower.components[name]
    model.save_pretrained(folder / f"start-{seed}")
    options = [f"model.pretrained={folder / f'start-{seed}'}", f"seed={seed}", f"trainer.max_steps={max_steps}"]
    options += ["~callbacks.samples", "trainer.limit_val_batches=0", "callbacks.checkpoint.every_n_steps=0"]
    run_dir = folder / f"run-{seed}"
    command = [sys.executable, "-m", "sd_lightning.train", *options, f"output_dir={run_dir}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return run_dir / "pipeline"


def _accuracy(pipeline: Path, samples: int) -> dict[str, float]:
    """Return the share of pictures in which the classifier reads what was asked for."""
    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.data.sources.digits import Digits
    from sd_lightning.models.generation import generate
    from sd_lightning.quantization import quantize_

    classifier = Digits("val").classifier
    prompts, labels = classifier.prompts(samples)
    options = SamplingOptions(num_inference_steps=12, guidance_scale=3.0, batch_size=100)
    plain, int8 = LatentDiffusion.from_pretrained(pipeline), quantize_(LatentDiffusion.from_pretrained(pipeline))
    return {
        name: classifier.accuracy(generate(model, prompts, seeds=range(samples), options=options), labels)
        for name, model in (("fp32", plain), ("int8", int8))
    }


def _batches(pipeline: Path) -> dict[str, float]:
    """Draw the same pictures in batches of 1 and of more; return the differences of pixels in 1/255."""
    import numpy as np

    from sd_lightning import LatentDiffusion, SamplingOptions
    from sd_lightning.models.generation import generate
    from sd_lightning.quantization import Int8, quantize_

    prompts = [f"a handwritten {word}" for word in ("three", "nine", "zero")] * (PICTURES // 3)
    found: dict[str, float] = {}
    kinds = {
        "fp32": None,
        "weight_only": Int8(),
        "bitsandbytes": Int8(linear="bitsandbytes"),
        "bitsandbytes_no_outliers": Int8(linear="bitsandbytes", threshold=0.0),
    }
    for kind, config in kinds.items():
        model = LatentDiffusion.from_pretrained(pipeline)
        if config is not None:
            quantize_(model, config)
        drawn = []
        for batch_size in BATCHES:
            options = SamplingOptions(batch_size=batch_size)
            pictures = generate(model, prompts, seeds=range(PICTURES), options=options)
            drawn.append(np.stack([np.asarray(picture, dtype=int) for picture in pictures]))
        difference = np.abs(np.stack(drawn[1:]) - drawn[0])
        name = f"batches_{kind}"
        found |= {f"{name}_max": float(difference.max()), f"{name}_mean": float(difference.mean())}
        found[f"{name}_share"] = float((difference > 0).mean())
    return found


def _digits_vae(pipeline: Path) -> dict[str, float]:
    """Encode and decode the held-out digits in fp32 and int8; return the differences of pixels in 1/255."""
    import numpy as np
    import torch

    from sd_lightning import LatentDiffusion
    from sd_lightning.data.sources.digits import Digits
    from sd_lightning.quantization import quantize_

    plain, int8 = LatentDiffusion.from_pretrained(pipeline), quantize_(LatentDiffusion.from_pretrained(pipeline))
    digits = Digits("val")
    pixels = torch.stack([torch.from_numpy(np.array(digits.image(i))) for i in range(len(digits))])
    pixels = pixels.permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        ours, theirs = (
            model.vae.decode(model.vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1) for model in (int8, plain)
        )
    difference = (ours - theirs).abs() * 127.5
    return {"vae_pixel_error_mean": float(difference.mean()), "vae_pixel_error_max": float(difference.max())}
