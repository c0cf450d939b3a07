"""DreamBooth's class images: pictures of the subject's class, drawn by the model itself before training.

They are kept, and a run draws only those that are missing. Each is complete or absent; its metadata holds the model,
prompt and seed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sd_lightning._console import start_bar
from sd_lightning._errors import UsageError
from sd_lightning.apps.pictures import settings_of, write_png
from sd_lightning.data.sources.dreambooth import class_folder, find_class_pictures, images_in, num_per_prompt
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.storage import atomic

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1800.0
"""Seconds that other processes wait for a picture: loading a model or drawing on a CPU takes minutes."""


@dataclass(frozen=True)
class MissingPicture:
    """A picture that is still to be drawn."""

    prompt: str
    path: Path
    seed: int


def missing_pictures(folder: str | Path, prompts: Sequence[str], count: int, *, seed: int) -> list[MissingPicture]:
    """Return the missing pictures of ``count`` class images, divided among the prompts.

    Args:
        folder: ``class_data_dir``.
        prompts: Class prompts.
        count: ``num_class_images``.
        seed: Seed of the first picture of each prompt; the next ones count up and skip those of existing pictures.

    Raises:
        UsageError: Existing pictures were drawn for another prompt.
    """
    missing = []
    for prompt, wanted in num_per_prompt(prompts, count).items():
        own = class_folder(folder, prompt, prompts)
        present = images_in(own)
        if present:
            _check_prompt(present[0], prompt, folder)
        if len(present) >= wanted:
            continue
        names, number = {path.name for path in present}, 0
        drawn_with = [settings for settings in map(settings_of, present) if settings.get("prompt") == prompt]
        seeds = {settings.get("seed") for settings in drawn_with}
        for _ in range(wanted - len(present)):
            while (name := f"class-{number:05d}.png") in names:
                number += 1
            free = next(i for i in itertools.count(seed + number) if i not in seeds)
            names.add(name)
            seeds.add(free)
            missing.append(MissingPicture(prompt, own / name, free))
    return missing


def warn_of_other_models(folder: str | Path, prompts: Sequence[str], count: int, *, source: str) -> None:
    """Warn of pictures in use whose metadata names another model than ``source``."""
    pictures = find_class_pictures(folder, prompts, count)
    drawn_by = Counter(settings_of(Path(picture.path)).get("model") for picture in pictures)
    for name, number in drawn_by.items():
        if isinstance(name, str) and Path(name).resolve() != Path(source).resolve():
            log.warning(
                "class images: %d of those in %s were drawn by %s, and this run starts from %s, whose class they do "
                "not keep; choose another class_data_dir=<folder> to have them drawn anew",
                *(number, folder, name, source),
            )


def draw(
    model: LatentDiffusion,
    missing: Sequence[MissingPicture],
    *,
    options: SamplingOptions,
    device: torch.device,
    settings: Mapping[str, Any],
    what: str = "class images",
    setting: str = "class_data_dir",
) -> None:
    """Draw pictures, in batches, behind a bar in a terminal.

    Args:
        model: The model to draw with.
        missing: Pictures to draw.
        options: Sampling options; ``batch_size`` pictures are drawn at a time.
        device: Device to draw on.
        settings: For the metadata, beside prompt and seed.
        what: Name of the pictures.
        setting: Name of the folder's setting.

    Raises:
        UsageError: A folder cannot be written.
    """
    options.check(model)  # before the bar
    bar = start_bar(what, len(missing))
    try:
        for begin in range(0, len(missing), options.batch_size):
            batch = missing[begin : begin + options.batch_size]
            prompts, seeds = [each.prompt for each in batch], [each.seed for each in batch]
            images = generate(model, prompts, seeds=seeds, options=options, device=device)
            for image, each in zip(images, batch, strict=True):
                _write(image, each, {**settings, "prompt": each.prompt, "seed": each.seed}, setting)
            if bar is not None:
                bar.advance(bar.task_ids[0], len(batch))
    finally:
        if bar is not None:
            bar.stop()


def wait_for(folder: str | Path, prompts: Sequence[str], count: int) -> None:
    """Wait until rank 0 has drawn the missing pictures.

    Raises:
        UsageError: Rank 0 has drawn nothing for ``PATIENCE_SECONDS``, or pictures were drawn for another prompt.
    """
    warned = came = time.monotonic()
    last = None
    missing_pictures(folder, prompts, count, seed=0)  # raises if there are some of another prompt
    while missing := _num_missing(folder, prompts, count):
        now = time.monotonic()
        if missing != last:
            last, came = missing, now
        if now - came > PATIENCE_SECONDS:
            raise UsageError(
                f"dreambooth: {missing} class images are missing in {folder}, and rank 0, which draws them, has added "
                f"none for {PATIENCE_SECONDS:.0f} s; see what rank 0 says, and check that {folder} is on a file system "
                "that all nodes share; or draw them first, in a run with trainer.devices=1 trainer.num_nodes=1"
            )
        if now - warned > 60:
            warned = now
            log.warning("waiting for %d class images of rank 0, the last of which came %.0f s ago", missing, now - came)
        time.sleep(1)


def _num_missing(folder: str | Path, prompts: Sequence[str], count: int) -> int:
    shares = num_per_prompt(prompts, count).items()
    return sum(max(wanted - len(images_in(class_folder(folder, prompt, prompts))), 0) for prompt, wanted in shares)


def _check_prompt(picture: Path, prompt: str, folder: str | Path) -> None:
    """Raise if a picture's metadata names another prompt."""
    drawn_for = settings_of(picture).get("prompt")
    if drawn_for not in (None, prompt):
        raise UsageError(
            f"dreambooth got class_data_dir={folder} with pictures of {drawn_for!r}, but the class prompt is "
            f"{prompt!r}; write class_prompt='{drawn_for}', or choose another class_data_dir=<folder>"
        )


def _write(image: Image.Image, picture: MissingPicture, settings: dict[str, Any], setting: str) -> None:
    """Write a PNG under a temporary name, and rename it."""
    try:
        picture.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.new_file(picture.path) as tmp:
            write_png(image, tmp, settings)
    except OSError as error:
        raise UsageError(
            f"{setting}: {picture.path} cannot be written ({error.strerror or error}); free space, or choose another "
            f"{setting}=<folder>; the pictures drawn so far are kept"
        ) from error
