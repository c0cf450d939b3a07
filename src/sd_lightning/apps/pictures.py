"""PNG files with the settings of their generation as metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd_lightning.storage.untrusted import parse_json

_KEY = "sd_lightning"


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
