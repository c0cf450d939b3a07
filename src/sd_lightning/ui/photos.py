"""Photos of a subject that are sent to the page: checked, written anew under names of our own, and captioned."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from sd_lightning._errors import UsageError
from sd_lightning.storage.atomic import new_file, write_whole

MAX_PHOTOS = 200
MAX_PIXELS = 64_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
_WRITES = threading.Lock()


def photos(folder: Path) -> list[tuple[str, str]]:
    """Return the names of the photos in a folder, each with its caption."""
    found = sorted(path for path in folder.glob("photo-*") if path.suffix in (".png", ".jpg"))
    texts = [path.with_suffix(".txt") for path in found]
    told = [text.read_text("utf-8", "replace") if text.is_file() else "" for text in texts]
    return [(path.name, text) for path, text in zip(found, told)]


def add_photos(folder: Path, files: Sequence[tuple[str, IO[bytes]]]) -> list[str]:
    """Write what are pictures; return a line about each file that is none.

    They are encoded again: what else was in the files, such as the place where a photo was taken, is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems = []
    for name, file in files:
        try:
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"more than {MAX_PIXELS // 10**6} million pixels")
                kind, has_alpha = image.format, image.has_transparency_data
                picture = ImageOps.exif_transpose(image).convert("RGBA" if has_alpha else "RGB")
            _write(folder, picture, ".jpg" if kind == "JPEG" else ".png")
        except _BROKEN as error:
            why = "it is no picture" if isinstance(error, Image.UnidentifiedImageError) else error
            problems.append(f"{name} is not used: {why}; expected a PNG, JPEG, WebP, BMP or TIFF file")
    return problems


def _write(folder: Path, picture: Image.Image, suffix: str) -> None:
    with _WRITES:
        names = [name for name, _ in photos(folder)]
        if len(names) >= MAX_PHOTOS:
            raise ValueError(f"there are {MAX_PHOTOS} photos already, which is the most")
        last = max((int(name[6:10]) for name in names), default=0)
        with new_file(folder / f"photo-{last + 1:04d}{suffix}") as unfinished:
            Image.fromarray(np.asarray(picture)).save(unfinished, {".jpg": "JPEG", ".png": "PNG"}[suffix], quality=95)


def add_examples(folder: Path, count: int = 5) -> None:
    """Draw photos of a glyph that the digits model does not know: a square with a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for _ in range(count):
        x, y, grey = (int(random.integers(*bounds)) for bounds in ((0, 3), (0, 3), (160, 250)))
        image = Image.new("L", (8, 8))
        ImageDraw.Draw(image).rectangle((x, y, x + 5, y + 5), outline=grey)
        image.paste(grey, (x + 2, y + 2, x + 4, y + 4))
        _write(folder, image.resize((32, 32), Image.Resampling.BILINEAR).convert("RGB"), ".png")


def write_caption(folder: Path, name: str, caption: str) -> None:
    """Write a photo's caption, of one line, beside it; an empty one deletes it."""
    path = (folder / name).with_suffix(".txt")
    if caption.strip():
        write_whole(path, " ".join(caption.split()))
    else:
        path.unlink(missing_ok=True)


def caption_all(folder: Path, model: str) -> None:
    """Caption the photos of a folder that have no caption, with a model of transformers in a local folder.

    Raises:
        UsageError: It cannot be loaded.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model, local_files_only=True)
        network: Any = AutoModelForImageTextToText.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"caption_model={model}: {error}; expected a folder with a model of transformers that describes pictures, "
            "such as BLIP"
        ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.to(device).eval()
    for name, caption in photos(folder):
        if caption:
            continue
        with Image.open(folder / name) as image:
            inputs = processor(images=image.convert("RGB"), return_tensors="pt").to(device)
        with torch.inference_mode():
            tokens = network.generate(**inputs, max_new_tokens=40)
        (text,) = processor.batch_decode(tokens, skip_special_tokens=True)
        write_caption(folder, name, text)
        print(json.dumps({name: text}))


if __name__ == "__main__":
    try:
        caption_all(Path(sys.argv[1]), sys.argv[2])
    except UsageError as error:
        sys.exit(f"error: {error}")
