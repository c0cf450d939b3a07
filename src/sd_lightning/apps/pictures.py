"""Pictures as PNG files with their settings as metadata, and a grid of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd_lightning.storage.untrusted import parse_json

_KEY = "sd_lightning"
"""Text chunk of a PNG with the settings of its generation."""
_GRID = "a grid of pictures"
"""Mark of grids in their metadata."""


def write_pictures(
    images: Sequence[Image.Image],
    prompts: Sequence[str],
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    folder: Path,
    columns: int | None,
) -> str:
    """Write pictures and their grid; return what is written where.

    Args:
        images: The pictures.
        prompts: Of each.
        seeds: Of each.
        settings: Of all.
        folder: Exists.
        columns: Of the grid; None makes it nearly square.
    """
    for image, prompt, seed in zip(images, prompts, seeds, strict=True):
        each = {"prompt": prompt, "seed": seed, **settings}
        write_png(image, picture_path(folder, each), each)
    grid = _write_grid(images, prompts, folder, columns)
    count = "1 picture" if len(images) == 1 else f"{len(images)} pictures"
    return f"{count} in {folder}/, all in {grid}"


def file_name(prompt: str, seed: int) -> str:
    """Return a file name such as "a-handwritten-three-seed-0.png"."""
    slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"
    return f"{slug}-seed-{seed}.png"


def picture_path(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Return a picture's path: :func:`file_name`, plus a hash if a picture with other settings has that name."""
    path, text = folder / file_name(settings["prompt"], settings["seed"]), json.dumps(settings)
    if not path.exists() or mark_of(path) == text:
        return path
    return path.with_stem(f"{path.stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}")


def _write_grid(images: Sequence[Image.Image], prompts: Sequence[str], folder: Path, columns: int | None) -> Path:
    """Write a grid of all pictures; replace the last grid but no other picture."""
    from sd_lightning.report import image_grid

    names = itertools.chain(["grid.png"], (f"grid-{number}.png" for number in itertools.count(2)))
    path = next(path for name in names if not (path := folder / name).exists() or mark_of(path) == _GRID)
    write_marked(image_grid(list(images), columns, captions=list(prompts)), path, _GRID)
    return path


def write_png(image: Image.Image, path: Path, settings: Mapping[str, Any]) -> None:
    """Write a PNG with text chunks: all settings as JSON in "sd_lightning", and "prompt" and "seed" separately."""
    write_marked(image, path, json.dumps(settings), prompt=settings["prompt"], seed=settings["seed"])


def write_marked(image: Image.Image, path: Path, text: str, **more: Any) -> None:
    """Write a PNG with a text chunk "sd_lightning", and one for each keyword argument."""
    info = PngInfo()
    for key, value in {_KEY: text, **more}.items():
        info.add_text(key, str(value))
    image.save(path, pnginfo=info)


def mark_of(path: Path) -> str | None:
    """Return the text chunk "sd_lightning" of a picture; None if it has none or cannot be read."""
    try:
        with Image.open(path) as image:
            return image.info.get(_KEY)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings in a picture's metadata; an empty dict if it has none or cannot be read."""
    try:
        settings = parse_json(mark_of(path) or "null")
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}
