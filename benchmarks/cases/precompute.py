"""Images per second of `precompute` to those of a plain loop: PIL, a batch to the VAE, a safetensors file per batch.

Both read the same JPEG photos and encode 16 at a time at 256 x 256 pixels, with the VAE of the tiny model, which is so
small that reading and decoding count. One worker is compared with the loop on one thread, all cores with the loop on
all threads. What precompute does besides, hashing images, tokenizing captions and committing, is in its time.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from sd_lightning.apps.encoding import StageProgress
from sd_lightning.data.store.encoding import STAGES
from timing import interleaved, ratios

BARS: dict[str, str] = {}
TABLE = {
    "images per second of `precompute` to a plain loop's: one worker, one thread; all cores": (
        "{one_worker_ratio} ×; {ratio} ×"
    ),
    "images per second on all cores: `precompute`; the plain loop": "{images_per_second}; {plain_images_per_second}",
    "images per second of each stage alone, one worker: read; decode; encode; write": (
        "{read_images_per_second}; {decode_images_per_second}; {encode_images_per_second}; {write_images_per_second}"
    ),
}

RESOLUTION = 256
BATCH = 16  # as precompute has it at 256 x 256


class Recorded(StageProgress):
    """The progress of a job, kept for its seconds by stage."""

    last: "Recorded"

    def __init__(self, total: int) -> None:
        """Keep it."""
        super().__init__(total)
        Recorded.last = self


def measure(images: int = 128, rounds: int = 5) -> dict[str, float | list[float]]:
    """Encode some photos with both, in turns.

    Args:
        images: Photos.
        rounds: Times that each side encodes them; once more comes before.
    """
    from sd_lightning import LatentDiffusion

    vae = LatentDiffusion.build("tiny").vae.eval()
    cores = len(os.sched_getaffinity(0))
    stages: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        write_photos(here / "photos", images)

        def precompute(workers: int) -> float:
            with tempfile.TemporaryDirectory() as store:
                return images / timed(lambda: job(here / "photos", Path(store), workers=workers))

        def one_worker() -> float:
            rate = precompute(1)
            stages.append({stage: images / Recorded.last.seconds[stage] for stage in STAGES})
            return rate

        def plain(threads: int) -> float:
            with tempfile.TemporaryDirectory() as out, threads_of_torch(threads):
                return images / timed(lambda: plain_loop(here / "photos", vae, Path(out)))

        taken = interleaved(
            {
                "one_worker": one_worker,
                "all_cores": lambda: precompute(cores),
                "plain_one_thread": lambda: plain(1),
                "plain": lambda: plain(cores),
            },
            rounds=rounds,
        )
    return {
        "ratio": ratios(taken["all_cores"], taken["plain"]),
        "one_worker_ratio": ratios(taken["one_worker"], taken["plain_one_thread"]),
        "images_per_second": taken["all_cores"],
        "one_worker_images_per_second": taken["one_worker"],
        "plain_images_per_second": taken["plain"],
        "plain_one_thread_images_per_second": taken["plain_one_thread"],
        **{f"{stage}_images_per_second": [each[stage] for each in stages[-rounds:]] for stage in STAGES},
        "workers": cores,
    }


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Give torch some threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files of 512 x 384 pixels, a gradient with noise each, and captions."""
    folder.mkdir()
    across, down = np.meshgrid(np.linspace(0, 1, 512), np.linspace(0, 1, 384))
    for i in range(count):
        random = np.random.default_rng(i)
        slopes, noise = random.uniform(-80, 80, (2, 3)), random.normal(0, 12, (384, 512, 3))
        pixels = 128 + across[..., None] * slopes[0] + down[..., None] * slopes[1] + noise
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:05}.jpg", quality=90)
        (folder / f"{i:05}.txt").write_text(f"the caption of photo {i}")


def job(photos: Path, store: Path, *, workers: int) -> None:
    """Run the program in this process."""
    from sd_lightning.apps import precompute

    cfg = configuration(
        "data=images",
        f"data.train_data_dir={photos}",
        f"data.resolution={RESOLUTION}",
        "data.center_crop=true",
        "data.num_val_samples=0",
        f"store={store}",
        f"workers={workers}",
        "shard_mb=1.05",  # 16 photos: a file for every worker, although there are few photos
    )
    with (
        threads_of_torch(1),
        mock.patch.object(precompute, "StageProgress", Recorded),
        contextlib.redirect_stdout(sys.stderr),
    ):
        precompute.run(cfg)


def configuration(*overrides: str) -> Any:
    """Return the settings of the program."""
    import hydra
    from omegaconf import OmegaConf

    from sd_lightning import _conf

    with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        cfg = hydra.compose("precompute", list(overrides))
    OmegaConf.resolve(cfg)
    return cfg


def plain_loop(photos: Path, vae: Any, out: Path) -> None:
    """Encode a folder as one would write it down at once."""
    from safetensors.torch import save_file

    out.mkdir(exist_ok=True)
    paths = sorted(photos.glob("*.jpg"))
    for begin in range(0, len(paths), BATCH):
        pixels = []
        for path in paths[begin : begin + BATCH]:
            image = Image.open(path).convert("RGB")
            scale = RESOLUTION / min(image.size)
            width, height = (round(side * scale) for side in image.size)
            image = image.resize((width, height), Image.Resampling.LANCZOS)
            left, top = (width - RESOLUTION) // 2, (height - RESOLUTION) // 2
            image = image.crop((left, top, left + RESOLUTION, top + RESOLUTION))
            pixels.append(torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1)
        with torch.no_grad():
            moments = vae.encode(torch.stack(pixels)).latent_dist.parameters
        save_file({"latents": moments.half().contiguous()}, out / f"{begin:05}.safetensors")
