"""What all sources of encoded images share: each image is a file, or the bytes of one."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import BinaryIO

from PIL import Image

from sd_lightning.data.source import BadSample, Source
from sd_lightning.data.sources.image_files import decode, read_size
from sd_lightning.data.transform import MAX_IMAGE_PIXELS


def repeats(names: Iterable[str]) -> dict[int, str]:
    """Return what tells repeated names apart: "#2" for the position where a name comes the second time."""
    seen: Counter[str] = Counter()
    found = {}
    for position, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            found[position] = f"#{seen[name]}"
    return found


class EncodedImages(Source):
    """Source of encoded images; a subclass opens them.

    Attributes:
        max_image_pixels: Limit on an image's pixels; larger ones are bad samples.
    """

    max_image_pixels: int = MAX_IMAGE_PIXELS

    @abstractmethod
    def open(self, index: int) -> BinaryIO:
        """Open an encoded image for reading; raise ``BadSample`` if there is none."""

    def image(self, index: int) -> Image.Image:
        with self.open(index) as file:
            return decode(file, max_pixels=self.max_image_pixels)

    def content(self, index: int) -> bytes:
        with self.open(index) as file:
            try:
                return file.read()
            except OSError as error:
                raise BadSample(f"cannot read {self.name(index)} ({error.strerror})") from error

    def decode(self, content: bytes) -> Image.Image:
        return decode(io.BytesIO(content), max_pixels=self.max_image_pixels)

    def size(self, index: int) -> tuple[int, int]:
        with self.open(index) as file:
            return read_size(file, max_pixels=self.max_image_pixels)
