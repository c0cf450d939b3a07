"""Assignment of a source's images to aspect-ratio buckets, from the sizes in their headers."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sd_lightning._errors import UsageError
from sd_lightning.data.buckets import Bucket, listed
from sd_lightning.data.image_options import ImageOptions
from sd_lightning.data.shapes import Shape, nearest_shapes
from sd_lightning.data.source import Bad, BadSample, Source
from sd_lightning.data.transform import any_error_is_a_bad_sample, check_size, resized
from sd_lightning.state.ranks import gathered, rank_and_world_size

log = logging.getLogger(__name__)

_AT_ONCE = 256
"""Images whose sizes a thread reads before it takes the next ones."""
_NAMED = 20


def find_buckets(source: Source, options: ImageOptions) -> tuple[tuple[Bucket, ...], list[Bad]]:
    """Assign each image to the bucket of the nearest aspect ratio; a collective call with torch.distributed.

    The ranks share the images, and each reads its part with several threads. An image keeps one small integer in
    memory.

    Args:
        source: The images.
        options: Gives the buckets' shapes, and the limit on pixels.

    Returns:
        The buckets that have images, and the images that fit none: unreadable ones, and those with too many pixels
        before or after resizing. The same on every rank.

    Raises:
        UsageError: No image fits a bucket.
    """
    distinct, shapes = source.distinct, options.shapes
    total = len(distinct)
    rank, world = rank_and_world_size()
    own = range(rank * total // world, (rank + 1) * total // world)
    log.info("data: reading the sizes of %d images for aspect-ratio buckets", total)
    pieces = [own[i : i + _AT_ONCE] for i in range(0, len(own), _AT_ONCE)]
    # Headers are small: most of the time goes to waiting for the disk or the network.
    with ThreadPoolExecutor(min(32, 4 * (os.cpu_count() or 1))) as pool:
        found = list(pool.map(lambda piece: _assign(distinct, piece, shapes, options.max_image_pixels), pieces))
    parts = gathered(found)
    assigned = np.concatenate([numbers for part in parts for numbers, _ in part])
    bad = [each for part in parts for _, some in part for each in some]
    if len(bad) == total:
        shown = "; ".join(f"{distinct.name(i)}: {reason}" for i, reason in bad[:_NAMED])
        raise UsageError(
            f"data.enable_bucket=true: none of the {total} images fits a bucket ({shown}); mend or replace them, or "
            "raise data.max_image_pixels"
        )
    if source.rows is not None:
        rows = source.rows.numpy()
        assigned = assigned[rows]
        bad = [(int(np.flatnonzero(rows == row)[0]), reason) for row, reason in bad if row in rows]
    return listed(assigned, shapes), bad


def _assign(source: Source, indices: range, shapes: Sequence[Shape], max_pixels: int) -> tuple[np.ndarray, list[Bad]]:
    """Return the number of each image's shape (N,) int16, -1 for none, and why some have none."""
    assigned = np.full(len(indices), -1, dtype=np.int16)
    bad: list[Bad] = []
    for place, index in enumerate(indices):
        try:
            with any_error_is_a_bad_sample():
                height, width = source.size(index)
            check_size((width, height), max_pixels)
            number = int(nearest_shapes(np.array([[height, width]]), shapes)[0])
            resized((width, height), shapes[number], max_pixels)
            assigned[place] = number
        except BadSample as reason:
            bad.append((index, str(reason)))
    return assigned, bad
