"""Images side by side on one sheet, with or without captions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

_GAP = 4
"""Pixels between the tiles of a grid."""
TILES = "sd_lightning tiles"
"""Key in the PNG of a sheet with captions: a list of pairs, each a caption and the box of its picture in pixels."""


def image_grid(
    images: Sequence[Image.Image], columns: int | None = None, captions: Sequence[str] | None = None
) -> Image.Image:
    """Put images on one sheet, row by row, each centred in a tile of the largest width and height.

    Images of few pixels (the digits have 32) are enlarged by a whole factor, pixel by pixel, so that the sheet is
    legible and keeps every original pixel value.

    Args:
        images: PIL images of any modes and sizes.
        columns: Images in a row; by default the smallest number that makes the sheet at least as wide as high.
        captions: One text for each image, drawn under it in at most two lines.

    Returns:
        An RGB image with a white background; its ``info`` has :data:`TILES`.

    Raises:
        UsageError: No images, ``columns`` below 1, or a number of captions that differs from the number of images.
    """
    if not images:
        raise UsageError("image_grid got no images; expected at least one.")
    if columns is None:
        columns = math.ceil(math.sqrt(len(images)))
    if columns < 1:
        raise UsageError(f"image_grid got columns={columns}; expected a whole number of at least 1.")
    if captions is not None and len(captions) != len(images):
        raise UsageError(f"image_grid got {len(captions)} captions for {len(images)} images; pass one for each image.")
    columns = min(columns, len(images))
    width, height = max(i.width for i in images), max(i.height for i in images)
    # Captions need room for a few words, bare tiles do not.
    scale = max(1, math.ceil((96 if captions else 64) / max(width, height)))
    width, height = width * scale, height * scale
    font = _caption_font(max(11, min(22, width // 18))) if captions else None
    lines = [_two_lines(caption, font, width) for caption in captions] if captions is not None and font else []
    strip = _line_height(font) * max(map(len, lines)) + _GAP if font and lines else 0
    rows = math.ceil(len(images) / columns)
    sheet = Image.new(
        "RGB", (columns * (width + _GAP) + _GAP, rows * (height + strip + _GAP) + _GAP), color=(255, 255, 255)
    )
    boxes: list[tuple[int, int, int, int]] = []
    for i, image in enumerate(images):
        tile = image.convert("RGB")
        if scale > 1:
            tile = tile.resize((tile.width * scale, tile.height * scale), Image.Resampling.NEAREST)
        left = _GAP + (i % columns) * (width + _GAP)
        top = _GAP + (i // columns) * (height + strip + _GAP)
        x, y = left + (width - tile.width) // 2, top + (height - tile.height) // 2
        sheet.paste(tile, (x, y))
        boxes.append((x, y, x + tile.width, y + tile.height))
        if lines and font:
            _draw_caption(sheet, lines[i], font, left + width // 2, top + height + _GAP // 2)
    sheet.info[TILES] = json.dumps(list(zip(captions or [""] * len(boxes), boxes, strict=True)))
    return sheet


def _caption_font(size: int) -> FreeTypeFont:
    # matplotlib ships DejaVu Sans, which has Latin, Greek and Cyrillic; Pillow's own font is little more than ASCII.
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), size)


def _line_height(font: FreeTypeFont) -> int:
    ascent, descent = font.getmetrics()
    return ascent + descent


def _draw_caption(sheet: Image.Image, lines: Sequence[str], font: FreeTypeFont, centre: int, top: int) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(sheet)
    for row, line in enumerate(lines):
        draw.text((centre, top + row * _line_height(font)), line, font=font, fill=(60, 60, 60), anchor="ma")


def _two_lines(text: str, font: FreeTypeFont, width: int) -> list[str]:
    """Break ``text`` at spaces into at most two lines of ``width`` pixels; a truncated line ends in an ellipsis."""
    words = text.split()
    first = ""
    while words and font.getlength(f"{first} {words[0]}".strip()) <= width:
        first = f"{first} {words.pop(0)}".strip()
    lines = [first, " ".join(words)] if first else [" ".join(words)]
    return [_shorten(line, font, width) for line in lines if line]


def _shorten(line: str, font: FreeTypeFont, width: int) -> str:
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(line + "…") > width:
        line = line[:-1]
    return line.rstrip() + "…"
