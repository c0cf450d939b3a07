"""Pictures of several aspect ratios, in memory and as a folder."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sd_lightning.data.source import BadSample
from sd_lightning.data.transform import ImageOptions
from square_data import Squares

SIZES = [(64, 64)] * 9 + [(40, 90)] * 4 + [(120, 30)] * 5 + [(33, 47)] * 6 + [(50, 44)] * 3
"""(height, width) of the pictures."""
NUM = len(SIZES)
TINY: dict[str, Any] = {
    "enable_bucket": True,
    "min_bucket_reso": 8,
    "max_bucket_reso": 64,
    "bucket_reso_steps": 8,
}
"""Buckets for the tiny model."""
OPTIONS = ImageOptions(32, proportion_empty_prompts=0.3, **TINY)
IN_BUCKETS = {(64, 16): 5, (32, 32): 12, (24, 40): 6, (16, 48): 4}
"""(height, width) of a bucket -> pictures that it gets with ``OPTIONS``."""


def picture(index: int) -> Image.Image:
    """A picture of its own colours."""
    height, width = SIZES[index]
    pixels = torch.arange(height * width * 3).mul(index + 3).remainder(251).to(torch.uint8)
    return Image.fromarray(pixels.view(height, width, 3).numpy())


class Shapes(Squares):
    """Pictures of several aspect ratios with three captions each; some are broken, some of these have a good header."""

    def __init__(self, num: int = NUM, headless: tuple[int, ...] = (), cut: tuple[int, ...] = ()) -> None:
        super().__init__(num, (*headless, *cut))
        self.headless = headless

    def image(self, index: int) -> Image.Image:
        super().image(index)
        return picture(index)

    def size(self, index: int) -> tuple[int, int]:
        if index in self.headless:
            raise BadSample("no header")
        return SIZES[index]


def paint(folder: Path) -> Path:
    """Write the pictures, with captions, into a new folder."""
    folder.mkdir()
    for index in range(NUM):
        picture(index).save(folder / f"{index:02}.png")
        (folder / f"{index:02}.txt").write_text(f"a picture of {SIZES[index][0]} by {SIZES[index][1]}")
    return folder
