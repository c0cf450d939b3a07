"""Our training against diffusers' own train_text_to_image.py: what each adds to the denoiser, and whole steps."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from step_stamps import PARTS
from timing import fastest, interleaved, ratios

REVISION = 3
BARS = {"outside_vs_diffusers": "<= 0.5", "outside_cached_vs_diffusers": "<= 0.2", "speedup": ">= 1.3"}
TABLE = {
    "milliseconds of a step outside the UNet's forward and backward: ours; with cached latents; diffusers' "
    "`train_text_to_image.py`; ours to theirs, both": (
        "{ours_outside_ms}; {ours_cached_outside_ms}; {diffusers_outside_ms}; {outside_vs_diffusers} ×, "
        "{outside_cached_vs_diffusers} ×"
    ),
    "of those, milliseconds of frozen encoders and optimizer: ours; with cached latents; theirs": (
        "{ours_encoders_ms} + {ours_optimizer_ms}; {ours_cached_encoders_ms} + {ours_cached_optimizer_ms}; "
        "{diffusers_encoders_ms} + {diffusers_optimizer_ms}"
    ),
    "of those, the rest, which the programs add; ours to theirs, both": (
        "{ours_rest_ms}; {ours_cached_rest_ms}; {diffusers_rest_ms}; {rest_vs_diffusers} ×, "
        "{rest_cached_vs_diffusers} ×"
    ),
    "our images per second to theirs; with cached latents": "{speedup} ×; {speedup_cached} ×",
    "milliseconds of the UNet's forward and backward: ours; theirs": "{ours_denoiser_ms}; {diffusers_denoiser_ms}",
}
NEEDS = {"DIFFUSERS_SCRIPT": "the path of examples/text_to_image/train_text_to_image.py in a checkout of diffusers"}

BENCHMARKS = Path(__file__).resolve().parents[1]
BATCH_SIZE = 64
RESOLUTION = 32
STEPS_PER_EPOCH = 28  # 1792 digits: whole batches only, as the one side drops and the other keeps a smaller last one
LEARNING_RATE = 1e-4
THREADS = 2
NUM_WORKERS = 0  # two threads on two cores leave none to a worker
PEER_WORKERS = {"diffusers_alone": NUM_WORKERS, "diffusers_prefetch": 1}
"""Workers of the peer's loader; the faster side counts."""


@dataclass(frozen=True)
class Measured:
    """One run of a training process."""

    step_ms: float
    """Of the steps after the warm-up: their mean, from a hook of torch.optim."""
    denoiser_ms: float
    """Median of what forward and backward of the UNet took of them."""
    encoders_ms: float
    """Median of what the frozen VAE and text encoder took."""
    optimizer_ms: float
    """Median of the optimizer's step."""
    outside_ms: float
    """Median of all but the denoiser: encoders, optimizer and the rest."""
    rest_ms: float
    """Median of the rest: data, noise, clipping, EMA, hooks."""
    seconds: float
    """The whole process, imports and saving included."""


def write_images(folder: Path) -> None:
    """Write the digits as PNG files with ``metadata.jsonl``."""
    from sd_lightning.data.sources.digits import Digits

    folder.mkdir(parents=True)
    sources = [(digits, i) for digits in (Digits("train"), Digits("val")) for i in range(len(digits))]
    lines = []
    for number, (digits, i) in enumerate(sources[: STEPS_PER_EPOCH * BATCH_SIZE]):
        digits.image(i).save(folder / f"{number:04}.png")
        lines.append(json.dumps({"file_name": f"{number:04}.png", "text": digits.captions(i)[0]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def peer_command(script: str, folder: Path, *, steps: int, workers: int = NUM_WORKERS) -> list[str]:
    """Return the command line of diffusers' script, without what comes before it to write the stamps."""
    options = {
        "pretrained_model_name_or_path": folder / "pipeline",
        "train_data_dir": folder / "images",
        "output_dir": folder / "diffusers",
        "cache_dir": folder / "cache",
        "resolution": RESOLUTION,
        "train_batch_size": BATCH_SIZE,
        "dataloader_num_workers": workers,
        "max_train_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "max_grad_norm": 1.0,
        "mixed_precision": "no",
        "checkpointing_steps": steps + 1,
        "seed": 0,
    }
    flags = ["--center_crop", "--use_ema", "--foreach_ema"]
    return [script, *[f"--{name}={value}" for name, value in options.items()], *flags]


def our_command(folder: Path, *, steps: int, cached: bool) -> list[str]:
    """Return the command line of ``sd_lightning.train`` with the same settings."""
    return [
        "sd_lightning.train",
        "model=tiny_frozen",
        f"model.pretrained={folder / 'pipeline'}",
        "data=images",
        f"data.train_data_dir={folder / 'images'}",
        "data.num_val_samples=0",
        f"data.resolution={RESOLUTION}",
        "data.center_crop=true",
        "data.proportion_empty_prompts=0",
        f"data.batch_size={BATCH_SIZE}",
        f"data.num_workers={NUM_WORKERS}",
        f"data.cache_latents={str(cached).lower()}",
        f"optimizer.lr={LEARNING_RATE}",
        "optimizer.betas=[0.9,0.999]",
        "lr_scheduler=none",
        "callbacks.ema.decay=0.9999",
        "speed.channels_last=true",
        "~callbacks.samples",
        "callbacks.checkpoint.every_n_steps=0",
        "trainer.accelerator=cpu",
        f"trainer.max_steps={steps}",
        f"output_dir={folder / 'ours'}",
        "overwrite=true",
    ]


def peers() -> dict[str, dict[str, Any]]:
    """Return the script, by its commit or else its contents, and what it is run with."""
    script = Path(os.environ["DIFFUSERS_SCRIPT"])
    git = ["git", "-C", str(script.parent), "log", "-1", "--format=%H", "--", script.name]
    found = subprocess.run(git, capture_output=True, text=True).stdout.strip() if script.is_file() else ""
    if script.is_file() and not found:
        found = f"sha256 {hashlib.sha256(script.read_bytes()).hexdigest()[:16]}"
    settings = {"optimizer": "AdamW(fused=True)", "memory_format": "channels_last", "threads": THREADS}
    command = " ".join(peer_command("", Path(), steps=0)[1:])
    return {"train_text_to_image.py": {"version": found, "command": command, "workers": PEER_WORKERS, **settings}}


def of_stamps(stamps: dict[str, list[float]], *, warm_up: int, seconds: float) -> Measured:
    """Take a run apart, without its first steps."""
    steps = stamps["steps"]
    periods = [1e3 * (end - begin) for begin, end in zip(steps, steps[1:])][warm_up - 1 :]
    denoiser, encoders, optimizer = ([1e3 * each for each in stamps[part]][warm_up:] for part in PARTS)
    outside = [period - inside for period, inside in zip(periods, denoiser, strict=True)]
    rest = [each - encoding - stepping for each, encoding, stepping in zip(outside, encoders, optimizer, strict=True)]
    return Measured(sum(periods) / len(periods), *map(median, (denoiser, encoders, optimizer, outside, rest)), seconds)


def run_training(launcher: str, command: list[str], folder: Path, *, steps: int, warm_up: int) -> Measured:
    """Run one training in a process of its own."""
    stamps = folder / "stamps.json"
    stamps.unlink(missing_ok=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(THREADS),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / launcher), str(stamps), *command],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {last}")
    found = json.loads(stamps.read_text())
    if len(found["steps"]) != steps:
        raise RuntimeError(f"{command[0]} made {len(found['steps'])} optimizer steps; expected {steps}")
    return of_stamps(found, warm_up=warm_up, seconds=seconds)


def measure(
    rounds: int = 3, steps: int = 3 * STEPS_PER_EPOCH, warm_up: int = STEPS_PER_EPOCH
) -> dict[str, float | list[float]]:
    """Interleaved runs of whole processes.

    Args:
        rounds: Runs of each side that count; a short one before them fills the caches of files and of the data set.
        steps: Optimizer steps per run.
        warm_up: Steps at the beginning of each run that do not count, and with them the imports.
    """
    from sd_lightning import LatentDiffusion

    script = str(Path(os.environ["DIFFUSERS_SCRIPT"]).resolve())
    if not Path(script).is_file():
        meaning = NEEDS["DIFFUSERS_SCRIPT"]
        raise SystemExit(f"vs_diffusers: DIFFUSERS_SCRIPT={script}: there is no such file; expected {meaning}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LatentDiffusion.build("tiny").save_pretrained(folder / "pipeline")
        write_images(folder / "images")

        def side(name: str, steps: int, warm_up: int) -> Measured:
            if name in PEER_WORKERS:
                command = peer_command(script, folder, steps=steps, workers=PEER_WORKERS[name])
                return run_training("diffusers_peer.py", command, folder, steps=steps, warm_up=warm_up)
            command = our_command(folder, steps=steps, cached=name == "ours_cached")
            return run_training("step_stamps.py", command, folder, steps=steps, warm_up=warm_up)

        names = ("ours", "ours_cached", *PEER_WORKERS)
        interleaved({name: partial(side, name, 2, 1) for name in names}, rounds=1, warm_up=0)
        taken = interleaved({name: partial(side, name, steps, warm_up) for name in names}, rounds=rounds, warm_up=0)
    return summarize(taken) | {"steps": steps, "warm_up_steps": warm_up}


def summarize(taken: dict[str, list[Measured]]) -> dict[str, float | list[float]]:
    """Turn the runs of the sides into metrics; every speed-up is above 1 where ours is faster."""
    step_ms = {side: [run.step_ms for run in runs] for side, runs in taken.items()}
    best = fastest(step_ms, PEER_WORKERS)
    sides = {"ours": taken["ours"], "ours_cached": taken["ours_cached"], "diffusers": taken[best]}
    metrics: dict[str, float | list[float]] = {"peer_workers": PEER_WORKERS[best]}
    for name, runs in sides.items():
        metrics |= {
            f"{name}_images_per_second": [1e3 * BATCH_SIZE / run.step_ms for run in runs],
            f"{name}_seconds": [run.seconds for run in runs],
        }
        for part in (*PARTS, "outside", "rest"):
            metrics[f"{name}_{part}_ms"] = [getattr(run, f"{part}_ms") for run in runs]

    def ratio(ours: str, theirs: str, field: str) -> list[float]:
        return ratios(*([getattr(run, field) for run in sides[name]] for name in (ours, theirs)))

    return metrics | {
        "outside_vs_diffusers": ratio("ours", "diffusers", "outside_ms"),
        "outside_cached_vs_diffusers": ratio("ours_cached", "diffusers", "outside_ms"),
        "rest_vs_diffusers": ratio("ours", "diffusers", "rest_ms"),
        "rest_cached_vs_diffusers": ratio("ours_cached", "diffusers", "rest_ms"),
        "speedup": ratio("diffusers", "ours", "step_ms"),
        "speedup_cached": ratio("diffusers", "ours_cached", "step_ms"),
        "whole_process_ratio": ratio("diffusers", "ours", "seconds"),
        "whole_process_ratio_cached": ratio("diffusers", "ours_cached", "seconds"),
    }
