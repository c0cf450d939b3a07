"""``data.num_workers=auto``: how many processes read the data, chosen from how long a batch takes to load.

The samples do not depend on the choice, so each rank makes its own.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sd_lightning.data.loading import LoaderOptions, fetch_all
from sd_lightning.data.order import BatchKeys

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from sd_lightning.data.batch import CaptionedImages
    from sd_lightning.data.source import Source
    from sd_lightning.data.transform import ImageOptions

log = logging.getLogger(__name__)

PRECOMPUTE = "python -m sd_lightning.precompute"
"""The program that encodes a whole data set once."""
_TIMED_BATCHES = 3
_TIMED_SAMPLES = 16
"""Samples of a batch that are read to time it."""
_TIMED_SECONDS = 2.0
"""After this no further batch is timed."""
_FAST_SECONDS = 0.005
"""A batch that loads faster is read in the training process: handing it over would take about as long."""
_MAX_WORKERS = 8
_MAX_PREFETCH = 8
READY_BYTES = 2**30
"""Limit on the batches that a process keeps ready, unless one for each worker takes more."""
_CACHE_BYTES = 8 * 2**30
"""Limit on the latents of all images for which the cache is named as the remedy."""
SHARED_MEMORY = Path("/dev/shm")
"""Where workers put batches under Linux; in containers it often has 64 MB."""


@dataclass(frozen=True)
class BatchCost:
    """What loading one batch takes."""

    num_samples: int
    seconds: float
    num_bytes: int


class Loaders:
    """Builds the loaders of a datamodule: DataLoaders, which read images in processes of this machine.

    With ``num_workers=auto`` loading is timed when the first one is built, and all of them follow that choice.
    """

    _used: LoaderOptions | None = None
    _processes = 1

    def take(self, options: LoaderOptions, sources: Sequence[Source], *, in_memory: bool) -> None:
        """Take the user's options, before any loader is built.

        Args:
            options: The options.
            sources: What is loaded.
            in_memory: Whether batches come from memory: ``auto`` then means no workers.

        Raises:
            UsageError: An option or a source is of no use to these loaders.
        """
        self._options = options
        self._in_memory = in_memory
        self._used = options.in_memory() if in_memory else None

    def build(self, dataset: CaptionedImages, batches: BatchKeys, trainer: pl.Trainer) -> Any:
        """Build a loader of a dataset, used as a ``DataLoader``, for a trainer's process; a collective call."""
        self._processes = trainer.num_devices
        if self._used is None:
            self._used = choose(self._options, dataset, batches, processes=self._processes)
        return self._used.build(dataset, batches, on_cuda=trainer.strategy.root_device.type == "cuda")

    def bottleneck_remedy(self, images: ImageOptions, latents_bytes: int | None) -> str | None:
        """Return what makes batches arrive sooner; see ``TunableData``.

        Args:
            images: Options of the training set.
            latents_bytes: Size of the latents of all its images; None if it holds latents.
        """
        if self._used is None or self._used.num_workers == "auto" or self._in_memory:
            return None
        cores, now = cores_per_process(self._processes), self._used.num_workers
        if now < cores:
            return f"data.num_workers={min(cores, max(_MAX_WORKERS, 2 * now))}"
        if latents_bytes is None:
            return None
        is_fixed = images.center_crop and not images.random_flip
        return "data.cache_latents=true" if is_fixed and latents_bytes <= _CACHE_BYTES else PRECOMPUTE

    def waits(self) -> str | None:
        """Return what training waited for, a collective call; None: only the callback ``Throughput`` measures it."""
        return None

    def close(self) -> None:
        """End what the loaders have started."""


def choose(options: LoaderOptions, dataset: CaptionedImages, batches: BatchKeys, *, processes: int) -> LoaderOptions:
    """Return the options with a number of workers: theirs, or for ``auto`` one chosen by timing a few batches.

    The timed batches are thrown away and read again in training: bad samples in them are counted there.

    Args:
        options: The user's options.
        dataset: The data.
        batches: Keys of the batches to come.
        processes: Training processes on this machine.
    """
    if options.num_workers != "auto":
        return options
    cost = measure(dataset, batches)
    room = _room(processes)  # each worker keeps at least one batch ready
    most = min(cores_per_process(processes), _MAX_WORKERS, room // cost.num_bytes)
    chosen = settle(options, cost, most=most, room=room)
    took = f"{1000 * cost.seconds:.3g} ms" if cost.seconds < 1 else f"{cost.seconds:.3g} s"
    prefetch = f" prefetch_factor={chosen.prefetch_factor}" if chosen.num_workers else ""
    log.info(
        "data: a batch of %d loads in %s; num_workers=%s%s (data.num_workers=auto)",
        *(cost.num_samples, took, chosen.num_workers, prefetch),
    )
    return chosen


def measure(dataset: CaptionedImages, batches: BatchKeys) -> BatchCost:
    """Load up to three batches in this process and return what the fastest took: the first one also pays for imports.

    Of large batches 16 samples are read, and their time and size are scaled up. Fetching files is not timed: in
    training they are fetched ahead, whatever the number of workers.
    """
    timed = list(itertools.islice(batches, _TIMED_BATCHES))
    if not timed:  # the run resumes at the end of an epoch
        timed = [[(0, index) for index in range(min(_TIMED_SAMPLES, len(dataset)))]]
    costs = []
    begin = time.perf_counter()
    for keys in timed:
        few = keys[:_TIMED_SAMPLES]
        fetch_all(dataset.source, [index for _, index, *_ in few])
        start = time.perf_counter()
        batch = dataset.__getitems__(few)
        end = time.perf_counter()
        scale = len(keys) / len(few)
        costs.append(BatchCost(len(keys), scale * (end - start), max(1, round(scale * _num_bytes(batch)))))
        if time.perf_counter() - begin > _TIMED_SECONDS:
            break
    return min(costs, key=lambda cost: cost.seconds)


def settle(options: LoaderOptions, cost: BatchCost, *, most: int, room: int = READY_BYTES) -> LoaderOptions:
    """Replace ``num_workers=auto`` by a number, and choose ``prefetch_factor`` unless it is given.

    Each worker keeps as many batches ready as it loads in a second, 2 to 8, but all of them no more than 1 GiB. Without
    workers ``prefetch_factor`` and ``persistent_workers`` do not apply.

    Args:
        options: Options with ``num_workers=auto``.
        cost: What loading one batch takes.
        most: Limit on the workers.
        room: Limit on the batches that are ready, in bytes.
    """
    workers = most if cost.seconds >= _FAST_SECONDS else 0
    if not workers:
        return replace(options, num_workers=0, persistent_workers=False, prefetch_factor=None)
    in_a_second = min(max(math.ceil(1 / cost.seconds), 2), _MAX_PREFETCH)
    prefetch = max(1, min(in_a_second, min(room, READY_BYTES) // (workers * cost.num_bytes)))
    return replace(options, num_workers=workers, prefetch_factor=options.prefetch_factor or prefetch)


def cores_per_process(processes: int) -> int:
    """Return the cores for the workers of one of ``processes`` training processes on this machine; 0 if too few.

    One core is left to the training process where it has more than two.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    share = cores // processes
    return share - 1 if share > 2 else share


def reading_threads(processes: int) -> int:
    """Return the threads with which one of ``processes`` processes reads images once, for ``cache_latents``."""
    return max(1, min(cores_per_process(processes), _MAX_WORKERS))


def _room(processes: int) -> int:
    """Return the bytes that the batches of one process may take in the memory shared with its workers."""
    return shutil.disk_usage(SHARED_MEMORY).free // (2 * processes) if SHARED_MEMORY.is_dir() else sys.maxsize


def _num_bytes(entry: object) -> int:
    """Return the bytes of the tensors in a batch."""
    if isinstance(entry, Tensor):
        return entry.nbytes
    return sum(map(_num_bytes, entry.values())) if isinstance(entry, Mapping) else 0
