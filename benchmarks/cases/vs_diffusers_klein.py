"""Our LoRA training of Flux.2-klein and Z-Image against diffusers' own scripts: losses, images per second, memory."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from timing import interleaved, ratios

FAMILIES = {
    "tiny_klein": "train_dreambooth_lora_flux2_klein.py",
    "tiny_z_image": "train_dreambooth_lora_z_image.py",
}
"""Model -> its script."""
BARS = {f"{name}_loss_error": "<= 1e-5" for name in FAMILIES}
TABLE = {
    f"LoRA on `{name}`: {text}": figures.replace("NAME", name)
    for name in FAMILIES
    for text, figures in {
        "our images per second; diffusers' script; ours to theirs": (
            "{NAME_images_per_second}; {NAME_diffusers_images_per_second}; {NAME_speedup} ×"
        ),
        "peak MB of the process, libraries included: ours; theirs; ours to theirs": (
            "{NAME_peak_mb}; {NAME_diffusers_peak_mb}; {NAME_memory_ratio} ×"
        ),
        "largest difference of a step's loss, on the same batches, noise and timesteps": "{NAME_loss_error}",
    }.items()
}
NEEDS = {"DIFFUSERS_DREAMBOOTH": "the folder examples/dreambooth of a checkout of diffusers, of May 2026 or newer"}
OLDEST = (0, 39)
"""Release of diffusers for which a script is written; older ones mix up prompts of class pictures (#13415)."""

BENCHMARKS = Path(__file__).resolve().parents[1]
BATCH_SIZE, NUM_IMAGES, RESOLUTION, MAX_LENGTH, LEARNING_RATE, RANK = 8, 64, 32, 16, 1e-3, 4
COMPARED_STEPS = 12


@dataclass(frozen=True)
class Measured:
    """One run of a training process."""

    step_ms: float
    """Of the steps after the warm-up, their mean."""
    peak_mb: float
    """The most memory of the process."""


def script_of(name: str) -> Path:
    """Return a model's script.

    Raises:
        SystemExit: There is none, or it is too old.
    """
    script = Path(os.environ["DIFFUSERS_DREAMBOOTH"]).resolve() / FAMILIES[name]
    who, meaning = f"vs_diffusers_klein: {script}", NEEDS["DIFFUSERS_DREAMBOOTH"]
    if not script.is_file():
        raise SystemExit(f"{who}: there is no such file; set DIFFUSERS_DREAMBOOTH to {meaning}")
    found = re.search(r'check_min_version\("(\d+)\.(\d+)', script.read_text(encoding="utf-8"))
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        version = ".".join(map(str, OLDEST))
        raise SystemExit(f"{who}: not a script for diffusers {version} or newer; set DIFFUSERS_DREAMBOOTH to {meaning}")
    return script


def peers() -> dict[str, dict[str, Any]]:
    """Return the scripts, each with its contents' hash, and what they are run with."""
    return {
        script: {
            "version": f"sha256 {hashlib.sha256(script_of(name).read_bytes()).hexdigest()[:16]}",
            "command": " ".join(peer_command(name, Path(), steps=0)[1:]),
            "optimizer": "AdamW(fused=True)",
            "threads": 1,
        }
        for name, script in FAMILIES.items()
    }


def write_images(folder: Path) -> None:
    """Write digits with their captions: ``ours`` with a text beside each, ``theirs`` with a table."""
    from sd_lightning.data.sources.digits import Digits

    digits, lines = Digits("train"), []
    for side in ("ours", "theirs"):
        (folder / side).mkdir(parents=True)
        for i in range(NUM_IMAGES):
            digits.image(i).save(folder / side / f"{i:04}.png")
    for i in range(NUM_IMAGES):
        (folder / "ours" / f"{i:04}.txt").write_text(digits.captions(i)[0])
        lines.append(json.dumps({"file_name": f"{i:04}.png", "text": digits.captions(i)[0]}))
    (folder / "theirs" / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def peer_command(name: str, folder: Path, *, steps: int) -> list[str]:
    """Return the command line of diffusers' script.

    Captions are given for each image: with one for all, the script of Z-Image repeats it more often at every step.
    """
    from sd_lightning.models.families.flux2 import HIDDEN_STATES

    options = {
        "pretrained_model_name_or_path": folder / name,
        "dataset_name": folder / "images" / "theirs",
        "caption_column": "text",
        "cache_dir": folder / "cache",
        "instance_prompt": "unused",
        "output_dir": folder / "diffusers",
        "resolution": RESOLUTION,
        "max_sequence_length": MAX_LENGTH,
        "train_batch_size": BATCH_SIZE,
        "max_train_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "rank": RANK,
        "mixed_precision": "no",
        "seed": 0,
    }
    arguments = [*(f"--{key}={value}" for key, value in options.items()), "--center_crop"]
    if name == "tiny_klein":
        arguments += ["--text_encoder_out_layers", *map(str, HIDDEN_STATES)]
    return [FAMILIES[name], *arguments]


def our_command(name: str, folder: Path, *, steps: int) -> list[str]:
    """Return the command line of ``sd_lightning.dreambooth`` with the same settings."""
    return [
        "sd_lightning.dreambooth",
        f"model={name}",
        f"model.pretrained={folder / name}",
        "trainable=lora",
        f"lora.rank={RANK}",
        f"instance_data_dir={folder / 'images' / 'ours'}",
        f"resolution={RESOLUTION}",
        f"data.batch_size={BATCH_SIZE}",
        "data.num_workers=0",
        "objective=flow",
        "objective.weighting_scheme=none",
        f"learning_rate={LEARNING_RATE}",
        "optimizer.betas=[0.9,0.999]",
        "optimizer.weight_decay=1e-4",
        "~callbacks.ema",
        "~callbacks.samples",
        "callbacks.checkpoint.every_n_steps=0",
        "trainer.accelerator=cpu",
        f"max_train_steps={steps}",
        f"output_dir={folder / 'ours'}",
        "overwrite=true",
    ]


def run_training(side: str, name: str, folder: Path, *, steps: int, warm_up: int) -> Measured:
    """Run one training in a process of its own; "ours" or "diffusers", with latents that are encoded once."""
    stamps = folder / "stamps.json"
    if side == "ours":
        command = ["step_stamps.py", str(stamps), *our_command(name, folder, steps=steps)]
    else:
        script, *arguments = peer_command(name, folder, steps=steps)
        command = ["lora_peer.py", "times", str(stamps), str(script_of(name)), *arguments, "--cache_latents"]
    start(command, folder)
    found = json.loads(stamps.read_text())
    times = found["steps"]
    if len(times) != steps:
        raise RuntimeError(f"{side} made {len(times)} optimizer steps; expected {steps}")
    return Measured(1e3 * (times[-1] - times[warm_up - 1]) / (steps - warm_up), found["peak_bytes"] / 1e6)


def start(command: list[str], folder: Path) -> None:
    """Run a program of this folder to its end."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    words = [sys.executable, "-W", "ignore", str(BENCHMARKS / command[0]), *command[1:]]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {last}")


def loss_error(name: str, folder: Path) -> float:
    """Train both sides on the same batches, noise and timesteps; return the largest difference of a step's losses."""
    script, *arguments = peer_command(name, folder, steps=COMPARED_STEPS)
    start(["lora_peer.py", "inputs", str(folder / "inputs.pt"), str(script_of(name)), *arguments], folder)
    given = torch.load(folder / "inputs.pt", weights_only=True)
    ours = our_losses(folder / name, given)
    if len(ours) != COMPARED_STEPS:
        raise RuntimeError(f"{script} made {len(ours)} steps; expected {COMPARED_STEPS}")
    return max(abs(a - b) for a, b in zip(ours, given["losses"], strict=True))


def our_losses(pipeline: Path, given: dict[str, Any]) -> list[float]:
    """Return our losses of the steps that a script has made.

    Args:
        pipeline: The model that both train.
        given: From ``lora_peer.py``. Batches are recognised by their encoded images, which ours have to equal.
    """
    from sd_lightning import LatentDiffusion, SDLightningModule
    from sd_lightning.data.sources.digits import Digits
    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.lora import Lora

    model = LatentDiffusion.from_pretrained(pipeline)
    module = SDLightningModule(
        model, lora=Lora(rank=RANK), objective=Objective(prediction_type="flow", weighting_scheme="none")
    )
    trained = {key: p for key, p in module.denoiser.named_parameters() if p.requires_grad}
    if trained.keys() != given["adapters"].keys():
        raise RuntimeError(f"other layers have adapters: {sorted(trained.keys() ^ given['adapters'].keys())}")
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, weight_decay=1e-4, fused=True)
    digits, numbers = Digits("train"), range(NUM_IMAGES)
    pixels = torch.stack([torch.from_numpy(np.array(digits.image(i))) for i in numbers]).permute(0, 3, 1, 2)
    with torch.no_grad():
        for key, parameter in trained.items():
            parameter.copy_(given["adapters"][key])
        moments = model.family.encode(model.vae, pixels.float() / 127.5 - 1)
        captions = model.tokenize([digits.captions(i)[0] for i in numbers])
        conditioning = model.condition(model.text_encoders, {"input_ids": captions})
    means = moments.chunk(2, dim=1)[0] if model.latent_space.is_sampled else moments
    losses = []
    for latents, noise, u in zip(given["latents"], given["noise"], given["u"], strict=True):
        distance = (latents[:, None] - means).flatten(2).abs().amax(2)
        index = distance.argmin(1)
        if (error := float(distance.amin(1).max())) > 1e-5:
            raise RuntimeError(f"encoded images differ by {error:.2g}")
        batch = {
            "latents": model.latent_space.latents(moments[index], lambda shape: torch.zeros(BATCH_SIZE, *shape)),
            "conditioning": {key: each[index] for key, each in conditioning.items()},
            "index": index,
            "epoch": torch.zeros_like(index),
        }
        with drawing(noise, u):
            loss = module.training_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def drawing(noise: torch.Tensor, u: torch.Tensor) -> Iterator[None]:
    """Let the objective draw given noise, and the noise levels that diffusers' scripts look up for ``u``."""
    levels = (1000 - (u * 1000).long()) / 1000
    where = "sd_lightning.diffusion.objective"
    with patch(f"{where}.normal", lambda *_: noise), patch(f"{where}.uniform", lambda *_: levels):
        yield


def measure(rounds: int = 5, steps: int = 60, warm_up: int = 20) -> Iterator[dict[str, float | list[float]]]:
    """Losses of the same inputs, then interleaved runs of whole processes.

    Args:
        rounds: Runs of each side that count; a short one before them fills the caches of files and of the data set.
        steps: Optimizer steps per run.
        warm_up: Steps at the beginning of each run that do not count, and with them the imports.
    """
    from sd_lightning import LatentDiffusion

    metrics: dict[str, float | list[float]] = {"steps": steps, "warm_up_steps": warm_up, "batch_size": BATCH_SIZE}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_images(folder / "images")
        for name in FAMILIES:
            LatentDiffusion.build(name).save_pretrained(folder / name)
            metrics[f"{name}_loss_error"] = loss_error(name, folder)
            sides = ("ours", "diffusers")
            run = partial(run_training, name=name, folder=folder)
            interleaved({side: partial(run, side, steps=2, warm_up=1) for side in sides}, rounds=1, warm_up=0)
            full = {side: partial(run, side, steps=steps, warm_up=warm_up) for side in sides}
            metrics |= summarize(name, interleaved(full, rounds=rounds, warm_up=0))
            yield metrics


def summarize(name: str, taken: dict[str, list[Measured]]) -> dict[str, float | list[float]]:
    """Turn the runs of both sides into metrics; the speed-up is above 1 where ours is faster."""
    step_ms, peak_mb = ({side: [getattr(run, key) for run in runs] for side, runs in taken.items()} for key in _KEYS)
    prefix = {"ours": name, "diffusers": f"{name}_diffusers"}
    return {
        **{f"{prefix[side]}_images_per_second": [1e3 * BATCH_SIZE / ms for ms in step_ms[side]] for side in taken},
        **{f"{prefix[side]}_peak_mb": peak_mb[side] for side in taken},
        f"{name}_speedup": ratios(step_ms["diffusers"], step_ms["ours"]),
        f"{name}_memory_ratio": ratios(peak_mb["ours"], peak_mb["diffusers"]),
    }


_KEYS = ("step_ms", "peak_mb")
