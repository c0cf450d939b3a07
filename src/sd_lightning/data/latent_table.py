"""Latents of all images of a source, encoded once (``cache_latents``).

The images are encoded in fixed blocks, each by one process of the machine into a latent file as in a store. Then every
process maps all files into its memory, so that a machine holds them once, and the files are deleted: their space is
free when the last process has ended, in whatever way. The latents are bitwise equal at every world size. They are the
moments of the VAE's posterior; every epoch draws from them.
"""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.data.source import Bad, Source, SourceSubset
from sd_lightning.data.sources.masks import place_mask
from sd_lightning.data.store.encoding import Encoded, EncodeTask, ShardEncoder
from sd_lightning.data.store.files import StoreFile, hashes_of
from sd_lightning.data.store.layout import LATENTS, Recipe, path_of
from sd_lightning.data.transform import ImageOptions
from sd_lightning.state.ranks import failing_together, gathered, rank_and_world_size
from sd_lightning.storage.location import LocalFolder

if TYPE_CHECKING:
    from PIL import Image

    from sd_lightning.models.encoder import LatentEncoder

log = logging.getLogger(__name__)

_WHO = "data.cache_latents=true"


@dataclass(frozen=True)
class LatentTable:
    """Latents of N samples, in memory that the processes of a machine share."""

    files: list[Tensor]
    """(R, 2C, h, w) float32 for each file: mean and log-variance of its images."""
    place: Tensor
    """(N, 2) int64: the file of each sample's image, and its row there."""
    sizes: Tensor
    """(N, 4) int64: original height and width, top and left of the crop, in pixels."""
    substitute: Tensor
    """(N,) int64: the sample to use for each sample; another one if its image is broken."""
    bad: list[Bad]
    """Index and reason of each broken sample; of those that share an image, of the first."""

    def usable(self, index: Tensor) -> list[int]:
        """Return the sample to use for each of some samples; another one if its image is broken."""
        return self.substitute[index].tolist()

    def batch(self, used: Sequence[int], *, epoch: Tensor) -> dict[str, Tensor]:
        """Return the batch entries that replace the pixels; they are the same in every epoch."""
        sizes = self.sizes[used]
        return {
            "latent_moments": torch.stack([self.files[file][row] for file, row in self.place[used].tolist()]),
            "original_size": sizes[:, :2],
            "crop_top_left": sizes[:, 2:],
        }


class _ByIndex(SourceSubset):
    """Images known to the store's encoder by their index, not by a hash of their content: nothing is read twice."""

    def content(self, index: int) -> bytes:
        return b"%d" % index

    images: ImageOptions

    def decode(self, content: bytes) -> Image.Image:
        index, side = int(content), self.images.resolution
        self.captions(index)
        mask = self.mask(index)
        if mask is not None:
            place_mask(mask, (side, side), max_pixels=self.images.max_image_pixels)  # raises if it is outside
        return self.image(index)


def encode_source(
    source: Source, encoder: LatentEncoder, images: ImageOptions, *, device: torch.device, num_threads: int = 2
) -> LatentTable:
    """Encode all images of a source; a collective call when torch.distributed is initialised.

    Args:
        source: The images; centre-cropped, not flipped. Samples may share them.
        encoder: Maps pixels (B, 3, H, W) in [-1, 1] on ``device`` to moments (B, 2C, h, w).
        images: Their size, and the limit on an image's pixels.
        device: Where to encode.
        num_threads: Threads that read images.

    Returns:
        The table, the same on every rank.

    Raises:
        UsageError: No image can be read, latents are infinite, or there is no space for the temporary files.
    """
    total = len(source.distinct)
    known = _ByIndex(source.distinct, range(total))
    known.images = images
    hashes = hashes_of([known.content(index) for index in range(total)])
    recipe = Recipe(family="", vae="", resolution=images.resolution, dtype="float32")  # this run's alone
    remedy = "write module.encoder_dtype=float32 if the VAE overflows"
    with ExitStack() as stack:
        with failing_together():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sd_lightning-")))
        log.info("encoding %d images once, into files in %s that all processes of a machine share", total, folder)
        host = socket.gethostname()
        everyone = gathered((host, folder))
        here = [rank for rank, (name, path) in enumerate(everyone) if name == host and path.is_dir()]
        number = here.index(rank_and_world_size()[0])
        location = LocalFolder(str(folder), folder, f"{_WHO} with TMPDIR={folder.parent}")
        shard = ShardEncoder(
            {"": known}, encoder, recipe, location, device, images.max_image_pixels, num_threads, remedy=remedy
        )
        step = min(max(total // 16, 32), 512)  # whatever the world size
        blocks = [np.arange(begin, min(begin + step, total)) for begin in range(0, total, step)][number :: len(here)]
        with failing_together():
            mine = [shard(EncodeTask("", block, hashes[block], *recipe.all_shapes)) for block in blocks]
        parts = gathered(mine)
        with failing_together():  # all have mapped the files before they are deleted
            files = [(everyone[rank][1] / path_of(LATENTS, each.name), each) for rank in here for each in parts[rank]]
            return _table(source, files, {image.tobytes(): index for index, image in enumerate(hashes)})


def _table(source: Source, files: Sequence[tuple[Path, Encoded]], index_of: Mapping[bytes, int]) -> LatentTable:
    """Map the files of all images of a source."""
    distinct = source.distinct
    place, sizes = torch.full((len(distinct), 2), -1), torch.zeros(len(distinct), 4, dtype=torch.int64)
    mapped: list[Tensor] = []
    for path, encoded in files:
        if encoded.size:
            latents, sizes_here = _mapped(path)
            good = [index_of[image.tobytes()] for image in encoded.images]
            sizes[good] = sizes_here
            place[good] = torch.tensor([[len(mapped), row] for row in range(len(good))])
            mapped.append(latents)
    reasons = {index_of[bytes.fromhex(image)]: reason for _, each in files for image, reason in each.bad.items()}
    if not mapped:
        shown = "; ".join(f"{distinct.name(i)}: {reasons[i]}" for i in sorted(reasons)[:20])
        raise UsageError(f"{_WHO}: none of the {len(distinct)} images can be read ({shown})")
    rows = torch.arange(len(distinct)) if source.rows is None else source.rows
    broken = {sample: row for sample, row in enumerate(rows.tolist()) if row in reasons}
    first = {row: sample for sample, row in reversed(broken.items())}
    bad = [(sample, reasons[row]) for row, sample in sorted(first.items())]
    return LatentTable(mapped, place[rows], sizes[rows], _substitutes(len(rows), broken), bad)


def _mapped(path: Path) -> tuple[Tensor, Tensor]:
    """Return latents and sizes of a file; the latents stay there, also when it is deleted."""
    with open(path, "rb", buffering=0) as handle:
        file = StoreFile(handle, name=str(path))
        at = file.columns["latents"]
        end = at.begin + at.shape[0] * at.row_bytes
        mapped = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
        return mapped[at.begin :].view(at.dtype).view(at.shape), file.read("sizes").long()


def _substitutes(num_samples: int, bad: Collection[int]) -> Tensor:
    """Map every good sample to itself, every bad one to the next good one."""
    substitute = torch.arange(num_samples)
    good = next(i for i in range(num_samples) if i not in bad)
    for i in range(num_samples - 1, -1, -1):
        good = good if i in bad else i
        substitute[i] = good
    return substitute
