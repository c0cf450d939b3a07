"""Our training against diffusers' own train_text_to_image.py: steady images per second, and whole processes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from timing import interleaved, medians, spread

BARS = {"speedup": ">= 1.3"}
NEEDS = {"DIFFUSERS_SCRIPT": "the path of examples/text_to_image/train_text_to_image.py in a checkout of diffusers"}

BENCHMARKS = Path(__file__).resolve().parents[1]
BATCH_SIZE = 64
RESOLUTION = 32
STEPS_PER_EPOCH = 28  # 1792 digits: whole batches only, as the one side drops and the other keeps a smaller last one
LEARNING_RATE = 1e-4
THREADS = 2
NUM_WORKERS = 0  # two threads on two cores leave none to a worker


@dataclass(frozen=True)
class Measured:
    """One run of a training process."""

    images_per_second: float
    """From the end of the warm-up steps to the end of the last step, both seen by a hook of torch.optim."""
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


def peer_command(script: str, folder: Path, *, steps: int) -> list[str]:
    """The command line of diffusers' script, without what comes before it to write the stamps."""
    options = {
        "pretrained_model_name_or_path": folder / "pipeline",
        "train_data_dir": folder / "images",
        "output_dir": folder / "diffusers",
        "cache_dir": folder / "cache",
        "resolution": RESOLUTION,
        "train_batch_size": BATCH_SIZE,
        "dataloader_num_workers": NUM_WORKERS,
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
    """The command line of ``sd_lightning.train`` with the same settings."""
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
        "speed.channels_last=true",  # a switch that the peer does not have; the numbers are the same float32
        "~callbacks.samples",
        "callbacks.checkpoint.every_n_steps=0",
        "trainer.accelerator=cpu",
        f"trainer.max_steps={steps}",
        f"output_dir={folder / 'ours'}",
        "overwrite=true",
    ]


def steady_images_per_second(stamps: list[float], *, warm_up: int) -> float:
    """Images per second from the end of step ``warm_up`` to the end of the last one."""
    return (len(stamps) - warm_up) * BATCH_SIZE / (stamps[-1] - stamps[warm_up - 1])


def run_training(launcher: str, command: list[str], folder: Path, *, steps: int, warm_up: int) -> Measured:
    """Run one training in a process of its own."""
    stamps = folder / "stamps.json"
    stamps.unlink(missing_ok=True)
    paths = [str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
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
    times: list[float] = json.loads(stamps.read_text())
    if len(times) != steps:
        raise RuntimeError(f"{command[0]} made {len(times)} optimizer steps; expected {steps}")
    return Measured(steady_images_per_second(times, warm_up=warm_up), seconds)


def measure(rounds: int = 3, steps: int = 3 * STEPS_PER_EPOCH, warm_up: int = STEPS_PER_EPOCH) -> dict[str, float]:
    """Medians over interleaved runs; every ratio is above 1 where ours is faster.

    Args:
        rounds: Runs of each side that count; a short one before them fills the caches of files and of the data set.
        steps: Optimizer steps per run.
        warm_up: Steps at the beginning of each run that the steady rate leaves out, and with them the imports.
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

        def sides(steps: int, warm_up: int) -> dict[str, Callable[[], Measured]]:
            commands = {
                "diffusers": ("diffusers_peer.py", peer_command(script, folder, steps=steps)),
                "ours": ("step_stamps.py", our_command(folder, steps=steps, cached=False)),
                "ours_cached": ("step_stamps.py", our_command(folder, steps=steps, cached=True)),
            }

            def side(launcher: str, command: list[str]) -> Callable[[], Measured]:
                return lambda: run_training(launcher, command, folder, steps=steps, warm_up=warm_up)

            return {key: side(*both) for key, both in commands.items()}

        interleaved(sides(2, 1), rounds=1, warm_up=0)
        taken = interleaved(sides(steps, warm_up), rounds=rounds, warm_up=0)
    return summarize(taken) | {"rounds": rounds, "steps": steps, "warm_up_steps": warm_up}


def summarize(taken: dict[str, list[Measured]]) -> dict[str, float]:
    """Turn the runs of the sides into metrics."""
    rates = {side: [run.images_per_second for run in runs] for side, runs in taken.items()}
    rate = medians(rates)
    seconds = medians({side: [run.seconds for run in runs] for side, runs in taken.items()})
    return {
        "speedup": rate["ours"] / rate["diffusers"],
        "speedup_cached": rate["ours_cached"] / rate["diffusers"],
        "whole_process_ratio": seconds["diffusers"] / seconds["ours"],
        "whole_process_ratio_cached": seconds["diffusers"] / seconds["ours_cached"],
        **{f"{side}_images_per_second": value for side, value in rate.items()},
        **{f"{side}_seconds": value for side, value in seconds.items()},
        "spread": max(spread(figures) for figures in rates.values()) if len(taken["ours"]) > 1 else 0.0,
    }
