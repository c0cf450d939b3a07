"""PNG files that say themselves what they were drawn with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

_KEY = "sd_lightning"


def write_png(image: Image.Image, path: Path, settings: Mapping[str, Any]) -> None:
    """Write a PNG with its settings as text chunks: one JSON under "sd_lightning", and "prompt" and "seed" alone."""
    write_marked(image, path, json.dumps(settings), prompt=settings["prompt"], seed=settings["seed"])


def write_marked(image: Image.Image, path: Path, text: str, **more: Any) -> None:
    """Write a PNG with a text chunk "sd_lightning", and others by their names."""
    info = PngInfo()
    for key, value in {_KEY: text, **more}.items():
        info.add_text(key, str(value))
    image.save(path, pnginfo=info)


def mark_of(path: Path) -> str | None:
    """Return the text chunk "sd_lightning" of a picture; None of another's, or of a file that is broken or none."""
    try:
        with Image.open(path) as image:
            return image.info.get(_KEY)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def settings_of(path: Path) -> dict[str, Any]:
    """Return what a picture of this package says that it was drawn with; nothing of another, or a broken one."""
    try:
        settings = json.loads(mark_of(path) or "null")
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}
