"""Shapes of training images, so that images of every aspect ratio keep most of their pixels (aspect-ratio buckets)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Shape = tuple[int, int]
"""(height, width) in pixels."""


def bucket_shapes(resolution: int, *, min_side: int, max_side: int, step: int) -> list[Shape]:
    """Return the shapes with about as many pixels as the square, and none with more, from tall to wide.

    For each longer side, they have the largest shorter side, as in kohya's sd-scripts, and the next smaller one if at
    least 90 % of the pixels remain. At 1024 pixels, up to 2048 in steps of 64, these are the 41 shapes of SDXL
    (arXiv 2307.01952, appendix I).

    Args:
        resolution: Side of the square, a multiple of ``step``.
        min_side: Smallest side.
        max_side: Largest side.
        step: All sides are multiples of it.
    """
    shapes = set()
    for longer in range(resolution, max_side + 1, step):
        largest = resolution**2 // longer // step * step
        for shorter in (largest, largest - step):
            is_full = shorter == largest or 10 * shorter * longer >= 9 * resolution**2
            if is_full and shorter >= min_side:
                shapes |= {(longer, shorter), (shorter, longer)}
    return sorted(shapes, key=lambda shape: (shape[1] / shape[0], shape))


def nearest_shapes(sizes: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Return for each image the shape whose aspect ratio is nearest, by the ratio's logarithm.

    Args:
        sizes: (N, 2), (height, width) of the images, at least 1.
        shapes: Sorted by width / height, as from :func:`bucket_shapes`.

    Returns:
        (N,) int64, indices in ``shapes``. They have the same bits on every machine: only divisions and square roots
        are computed.
    """
    height, width = np.asarray(shapes, dtype=np.float64).T
    ratios = width / height
    middles = np.sqrt(ratios[:-1] * ratios[1:])
    return np.searchsorted(middles, sizes[:, 1] / sizes[:, 0])
