"""Train with encoding done in one of several places, a block of steps whenever told to; for `cases/online_encoders.py`.

    python benchmarks/encoder_turns.py SIDE FOLDER STEPS

SIDE is `offline`, from the latent store FOLDER/store; `on_the_fly`, in the trainer's steps; `ray_N`, by N encoders on
the Ray cluster of RAY_ADDRESS; or `waiting_N`, by such encoders that wait FOLDER/seconds a batch instead of computing.
The answer to each line of the standard input, and the first without one, is a line with the seconds of STEPS steps.
Before these, steps are made that only empty what was encoded while the side was idle.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from sd_lightning._console import quiet_libraries
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families.conditioning import Conditioning, map_conditioning

BATCH = 32
AHEAD = 2  # batches in flight for each encoder
OFFLINE, ON_THE_FLY, RAY, WAITING = "offline", "on_the_fly", "ray", "waiting"


class WaitingEncoder(LatentEncoder):
    """Takes as long as a file says for a batch, reading included; moments and embeddings are those of one sample."""

    file: Path
    due = 0.0
    moments: Tensor
    embeddings: Conditioning

    @classmethod
    def of(cls, encoder: LatentEncoder, file: Path, pixels: Tensor, input_ids: Mapping[str, Tensor]) -> WaitingEncoder:
        """Return one that takes the place of another.

        Args:
            encoder: The other.
            file: Holds the seconds of a batch.
            pixels: (1, 3, H, W).
            input_ids: (1, L) by text encoder.
        """
        waiting = cls.__new__(cls)
        vars(waiting).update(vars(encoder))
        waiting.file = file
        waiting.moments, waiting.embeddings = encoder.encode_moments(pixels), encoder.embed(input_ids)
        return waiting

    def portable(self) -> WaitingEncoder:
        """Return one for another process."""
        waiting = type(self).__new__(type(self))
        vars(waiting).update(vars(self) | vars(super().portable()))
        return waiting

    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        """Wait until a batch is due behind the one before; one after a pause has at most a tenth of it behind it."""
        now, seconds = time.monotonic(), float(self.file.read_text())
        self.due = max(self.due, now - seconds / 10) + seconds
        time.sleep(self.due - now)
        return self.moments.expand(len(pixel_values), *self.moments.shape[1:])

    def embed(self, input_ids: Mapping[str, Tensor]) -> Conditioning:
        """Return the same for every caption."""
        count = len(next(iter(input_ids.values())))
        return map_conditioning(self.embeddings, lambda tensor: tensor.expand(count, *tensor.shape[1:]))


class Turns(Callback):
    """Answers each request with the seconds of a block of steps, and stops when there are no more.

    Args:
        ask: Returns whether another block is wanted; it waits until that is known.
        answer: Is told the seconds of a block.
        steps: Of a block.
        first: Steps before those.
    """

    def __init__(
        self,
        ask: Callable[[], bool],
        answer: Callable[[float], object],
        *,
        steps: int,
        first: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ask, self.answer, self.steps, self.first, self.now = ask, answer, steps, first, now
        self._left = first + steps
        self._began = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._left -= 1
        if self._left == self.steps:
            self._began = self.now()
        if self._left == 0:
            self.answer(self.now() - self._began)
            self._left = self.first + self.steps
            trainer.should_stop = not self.ask()


def overrides(side: str, folder: Path) -> list[str]:
    """Return the settings of `train` of a side: the main job without validation, pictures and checkpoints."""
    count = encoders_of(side)
    data = {
        OFFLINE: ["data=latents", f"data.store={folder / 'store'}", "data.num_workers=0"],
        ON_THE_FLY: ["data=digits", "data.cache_latents=false", "data.num_workers=0"],
    }.get(side, ["data=digits", "data.cache_latents=false", "data.encoders=ray", f"data.num_encoders={count}"])
    return [
        *data,
        f"name={side}",
        f"output_dir={folder / side}",
        f"data.batch_size={BATCH}",
        "model=tiny",
        "logger=csv",
        "trainer.accelerator=cpu",
        "trainer.max_steps=1000000",
        "trainer.limit_val_batches=0",
        "~callbacks.samples",
        "~callbacks.checkpoint",
        "+trainer.enable_checkpointing=false",
    ]


def encoders_of(side: str) -> int:
    """Return the number of encoders on the cluster."""
    kind, _, count = side.rpartition("_")
    return int(count) if kind in (RAY, WAITING) else 0


def train(side: str, folder: Path, turns: Turns) -> None:
    """Train, a block of steps per turn."""
    import hydra
    from omegaconf import OmegaConf

    from sd_lightning import _conf
    from sd_lightning.apps import train
    from sd_lightning.apps.run_spec import RunSpec

    with hydra.initialize_config_dir(_conf.config_dir(), version_base="1.3"):
        cfg = hydra.compose("train", overrides(side, folder))
    OmegaConf.resolve(cfg)
    spec = RunSpec.of(cfg)
    trainer, module = train.build_trainer(spec), train.build_module(spec)
    data = train.build_data(spec) if encoders_of(side) else spec.build("data")
    if side.startswith(WAITING):
        ids, size = module.latent_diffusion.tokenize([""]), data.images.resolution
        module.encoder = WaitingEncoder.of(module.encoder, folder / "seconds", torch.zeros(1, 3, size, size), ids)
    trainer.callbacks.append(turns)
    trainer.fit(module, data)


def main() -> None:
    """The command line."""
    side, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    quiet_libraries()
    requests, answers = sys.stdin, sys.stdout

    def ask() -> bool:
        return bool(requests.readline())

    def answer(seconds: float) -> None:
        print(seconds, file=answers, flush=True)

    with contextlib.redirect_stdout(sys.stderr):  # what a run prints is for people
        train(side, folder, Turns(ask, answer, steps=steps, first=AHEAD * encoders_of(side) + 2))


if __name__ == "__main__":
    main()
