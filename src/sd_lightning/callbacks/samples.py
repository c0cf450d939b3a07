"""Sample grids drawn during training, and the share of pictures that show their prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from PIL.PngImagePlugin import PngInfo

from sd_lightning._errors import check_at_least
from sd_lightning.callbacks.ema import inference_weights
from sd_lightning.callbacks.guards import stopped_by_signal
from sd_lightning.callbacks.steps import StepCallback, paused
from sd_lightning.data.source import BadSample, ImageClassifier, Source
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.planner.run import TakesMemory, TrainingRun
from sd_lightning.report import image_grid
from sd_lightning.report.grid import TILES

if TYPE_CHECKING:
    from PIL import Image

    from sd_lightning.data.datamodule import SDDataModule
    from sd_lightning.training.module import SDLightningModule

log = logging.getLogger(__name__)


class SampleGrid(StepCallback, TakesMemory):
    """Callback that draws a grid of pictures with the exported weights, at an interval and when training ends.

    Grids go to ``<run_dir>/samples/step-<n>.png`` and to loggers that take images. If the data has a classifier (the
    digits), it reads pictures drawn at the end: the *prompted accuracy* is the share that shows its prompt. Drawing is
    collective: every rank draws its share of the prompts.

    Args:
        run_dir: Directory of the run.
        prompts: Captions to draw; by default taken from the data (held-out captions).
        every_n_steps: Optimizer steps between grids; 0 draws only when training ends.
        columns: Pictures per row.
        accuracy_samples: Number of pictures for the prompted accuracy; 0 turns it off.
        options: Steps, guidance, scheduler, …
        seed: The first picture's seed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        prompts: list[str] | None = None,
        every_n_steps: int = 0,
        columns: int = 10,
        accuracy_samples: int = 0,
        options: SamplingOptions | None = None,
        seed: int = 0,
    ) -> None:
        check_at_least("SampleGrid", 0, every_n_steps=every_n_steps, accuracy_samples=accuracy_samples)
        check_at_least("SampleGrid", 1, columns=columns)
        self.folder = Path(run_dir) / "samples"
        self.prompts = prompts
        self.every_n_steps = every_n_steps
        self.columns = columns
        self.accuracy_samples = accuracy_samples
        self.options = options or SamplingOptions()
        self.seed = seed
        self.prompted_accuracy: float | None = None
        self._drawn_step = -1

    def add_memory(self, run: TrainingRun) -> TrainingRun:
        count = -(-len(self.prompts or range(2 * self.columns)) // run.world_size)
        options = self.options
        size, count = (options.height, options.width), min(options.batch_size, count)
        return replace(run, sample_batch_size=count, drawn_size=size, vae_tiling=options.vae_tiling)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check before the first step that the model can be sampled with these options."""
        self.options.check(cast("SDLightningModule", pl_module).latent_diffusion)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._drawn_step = -1

    def on_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any) -> None:
        step = trainer.global_step
        at_end = step == trainer.max_steps or trainer.should_stop
        if self.every_n_steps and step % self.every_n_steps == 0 and not at_end:
            self.draw(trainer, cast("SDLightningModule", pl_module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if stopped_by_signal(trainer):
            return  # save and exit
        if self._drawn_step != trainer.global_step:
            self.draw(trainer, cast("SDLightningModule", pl_module))
        classifier = _classifier(trainer)
        if classifier is None or not self.accuracy_samples:
            return
        prompts, labels = classifier.prompts(self.accuracy_samples)
        images = self._sample(trainer, cast("SDLightningModule", pl_module), prompts)
        self.prompted_accuracy = classifier.accuracy(images, labels)
        for logger in trainer.loggers:
            logger.log_metrics({"samples/prompted_accuracy": self.prompted_accuracy}, step=trainer.global_step)

    def draw(self, trainer: pl.Trainer, pl_module: SDLightningModule) -> Path:
        """Draw the grid of the current step and return its path; a collective call."""
        prompts = self.prompts or _suggested_prompts(trainer, 2 * self.columns)
        images = self._sample(trainer, pl_module, prompts)
        path = self.folder / f"step-{trainer.global_step:08d}.png"
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            grid = image_grid(images, min(self.columns, len(images)), captions=prompts)
            info = PngInfo()
            info.add_text(TILES, grid.info[TILES])
            grid.save(path, pnginfo=info)
            for logger in trainer.loggers:
                _log_image(logger, grid, trainer.global_step)
        self._drawn_step = trainer.global_step
        return path

    def _sample(self, trainer: pl.Trainer, pl_module: SDLightningModule, prompts: Sequence[str]) -> list[Image.Image]:
        with paused(trainer, "sampling"), inference_weights(trainer):
            return sample_collectively(trainer, pl_module, prompts, options=self.options, seed=self.seed)


def sample_collectively(
    trainer: pl.Trainer, pl_module: SDLightningModule, prompts: Sequence[str], *, options: SamplingOptions, seed: int
) -> list[Image.Image]:
    """Draw one picture per prompt, split over the ranks; all ranks make the same number of network calls.

    Returns:
        All pictures, in the order of the prompts, on every rank.
    """
    from PIL import Image

    world, rank = trainer.world_size, trainer.global_rank
    each = -(-len(prompts) // world)
    mine = [i % len(prompts) for i in range(rank * each, (rank + 1) * each)]
    images = pl_module.sample_seeded([prompts[i] for i in mine], [seed + i for i in mine], options)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).to(pl_module.device)
    gathered = trainer.strategy.all_gather(pixels).reshape(-1, *pixels.shape[1:]).cpu().numpy()
    return [Image.fromarray(array) for array in gathered[: len(prompts)]]


def _classifier(trainer: pl.Trainer) -> ImageClassifier | None:
    """Return the data's classifier, which tells whether a picture shows its prompt, if there is one."""
    data: SDDataModule = trainer.datamodule  # type: ignore[attr-defined]
    return data.source_train.classifier


def _suggested_prompts(trainer: pl.Trainer, count: int) -> list[str]:
    """Return prompts of the classifier, else the first held-out captions, else the first training captions."""
    classifier = _classifier(trainer)
    if classifier is not None:
        return classifier.prompts(count)[0]
    data: SDDataModule = trainer.datamodule  # type: ignore[attr-defined]
    sources = (data.source_val, data.source_train)
    found = (list(islice(first_captions(each, data.images.written), count)) for each in sources if each is not None)
    return next(filter(None, found), [])


def first_captions(source: Source, written: Callable[[str], str]) -> Iterator[str]:
    """Yield the caption of each sample that has one, as the model reads it."""
    for i in range(len(source)):
        with suppress(BadSample):
            caption = source.captions(i)[0]
            yield caption if source.is_prior is not None and source.is_prior[i] else written(caption)


def _log_image(logger: Any, grid: Image.Image, step: int) -> None:
    # By method, not by class: importing the packages of these loggers takes seconds.
    if hasattr(logger, "log_image"):  # Weights & Biases
        logger.log_image("samples", [grid], step=step)
    elif hasattr(logger.experiment, "add_image"):  # TensorBoard
        logger.experiment.add_image("samples", np.asarray(grid), step, dataformats="HWC")
