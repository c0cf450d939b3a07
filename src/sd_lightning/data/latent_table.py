"""Latents of all images of a source, encoded once (``cache_latents``).

The images are encoded in fixed blocks that are distributed over the ranks, so the table is bitwise equal at every
world size. It holds the moments of the VAE's posterior; every epoch samples latents from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sd_lightning._errors import UsageError
from sd_lightning.data.image_options import ImageOptions
from sd_lightning.data.loader import Batch, as_is
from sd_lightning.data.source import Bad, BadSample, Source
from sd_lightning.data.transform import MAX_IMAGE_PIXELS, read_placed, to_model_range

if TYPE_CHECKING:
    from sd_lightning.models.encoder import LatentEncoder

log = logging.getLogger(__name__)

_BLOCK = 32
"""Images that a rank encodes between two all-gathers, independent of the world size."""


@dataclass(frozen=True)
class LatentTable:
    """Latents of N images, in host memory."""

    moments: Tensor
    """(N, 2C, h, w) float32: mean and log-variance."""
    original_size: Tensor
    """(N, 2) int64, (height, width) in pixels."""
    crop_top_left: Tensor
    """(N, 2) int64, (top, left) in pixels."""
    substitute: Tensor
    """(N,) int64: the sample to use for each sample; another one if its image is broken."""
    bad: list[Bad]
    """Index and reason of each broken sample."""
    rows: Tensor | None = None
    """(M,) int64: image index of each sample where samples share images; None if each image is one sample."""

    def of_samples(self, rows: Tensor) -> LatentTable:
        """Return the table for M samples that share images; ``rows`` (M,) int64 is the image index of each."""
        samples = rows.tolist()
        reasons = dict(self.bad)
        substitute = _substitutes(len(samples), {i for i, row in enumerate(samples) if row in reasons})
        bad = [(samples.index(row), reason) for row, reason in self.bad if row in samples]
        return replace(self, rows=rows, substitute=substitute, bad=bad)

    def usable(self, index: Tensor) -> list[int]:
        """Return the sample to use for each of some samples; another one if its image is broken."""
        return self.substitute[index].tolist()

    def batch(self, used: Sequence[int], *, epoch: Tensor) -> dict[str, Tensor]:
        """Return the batch entries that replace the pixels; they are the same in every epoch."""
        rows = torch.as_tensor(used)
        rows = rows if self.rows is None else self.rows[rows]
        return {
            "latent_moments": self.moments[rows],
            "original_size": self.original_size[rows],
            "crop_top_left": self.crop_top_left[rows],
        }


class LatentTables:
    """The tables of a run's sources: each is encoded once per encoder, however often loaders are built."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[LatentEncoder, LatentTable]] = {}

    def of(
        self, source: Source, encoder: LatentEncoder, images: ImageOptions, *, device: torch.device, num_workers: int
    ) -> LatentTable:
        """Return the table of a source; the first call is collective, see :func:`encode_source`."""
        known = self._known.get(id(source))
        if known is None or known[0] is not encoder:
            table = encode_source(
                source.distinct,
                encoder.encode_moments,
                resolution=images.resolution,
                device=device,
                num_workers=num_workers,
                max_pixels=images.max_image_pixels,
            )
            table = table if source.rows is None else table.of_samples(source.rows)
            self._known[id(source)] = known = (encoder, table)
        return known[1]


class _Blocks(Dataset[Batch]):
    """Dataset of blocks of pixels; unreadable images are left out and listed as ``bad``."""

    def __init__(self, source: Source, resolution: int, max_pixels: int) -> None:
        self.source, self.shape, self.max_pixels = source, (resolution, resolution), max_pixels

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        good, placed, bad = [], [], []
        for i in indices:
            try:
                placed.append(read_placed(self.source, i, self.shape, max_pixels=self.max_pixels))
                good.append(i)
            except BadSample as reason:
                bad.append((i, str(reason)))
        pixels = [to_model_range(torch.from_numpy(p.pixels.copy())[None]) for p in placed]
        sizes = torch.tensor([[*p.original_size, *p.crop_top_left] for p in placed], dtype=torch.int64).view(-1, 4)
        return {"index": torch.tensor(good, dtype=torch.int64), "pixels": pixels, "sizes": sizes, "bad": bad}


def encode_source(
    source: Source,
    encode_moments: Callable[[Tensor], Tensor],
    *,
    resolution: int,
    device: torch.device,
    num_workers: int = 0,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> LatentTable:
    """Encode all images of a source; a collective call when torch.distributed is initialised.

    Args:
        source: The images; centre-cropped, not flipped.
        encode_moments: Maps pixels (B, 3, H, W) in [-1, 1] on ``device`` to moments (B, 2C, h, w).
        resolution: Side of the images, in pixels.
        device: Where to encode.
        num_workers: Processes that read images.
        max_pixels: Limit on an image's pixels, before and after resizing.

    Returns:
        The table, the same on every rank.

    Raises:
        UsageError: No image can be read.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    total = len(source)
    blocks = [list(range(i, min(i + _BLOCK, total))) for i in range(0, total, _BLOCK)]
    # Every rank gets the same number of blocks (some are empty): a collective follows each block.
    mine = [blocks[i] if i < len(blocks) else [] for i in range(rank, -(-len(blocks) // world) * world, world)]
    dataset = _Blocks(source, resolution, max_pixels)
    moments: Tensor | None = None
    sizes = torch.zeros(total, 4, dtype=torch.int64)
    bad: list[Bad] = []
    for block in DataLoader(dataset, batch_sampler=mine, collate_fn=as_is, num_workers=num_workers):
        pixels = block.pop("pixels")
        block["moments"] = encode_moments(torch.cat(pixels).to(device)).float().cpu() if pixels else None
        parts = [block] * world
        if world > 1:
            dist.all_gather_object(parts, block)
        for part in parts:
            bad += part["bad"]
            if part["moments"] is None:
                continue
            if moments is None:
                moments = torch.zeros(total, *part["moments"].shape[1:])
                log.info("encoding %d images once: %.2f GiB of latents per process", total, moments.nbytes / 2**30)
            moments[part["index"]] = part["moments"]
            sizes[part["index"]] = part["sizes"]
    bad.sort()
    if moments is None:
        shown = "; ".join(f"{source.name(i)}: {reason}" for i, reason in bad[:20])
        raise UsageError(f"data.cache_latents=true: none of the {total} images can be read ({shown})")
    return LatentTable(moments, sizes[:, :2], sizes[:, 2:], _substitutes(total, {i for i, _ in bad}), bad)


def _substitutes(num_samples: int, bad: set[int]) -> Tensor:
    """Map every good sample to itself, every bad one to the next good one."""
    substitute = torch.arange(num_samples)
    good = next(i for i in range(num_samples) if i not in bad)
    for i in range(num_samples - 1, -1, -1):
        good = good if i in bad else i
        substitute[i] = good
    return substitute
