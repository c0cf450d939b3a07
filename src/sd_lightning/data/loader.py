"""The loader that Lightning iterates: a torch DataLoader whose epoch starts at the first batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from sd_lightning._errors import UsageError
from sd_lightning.data.sampler import GlobalBatchSampler


@dataclass(frozen=True)
class LoaderOptions:
    """Torch's DataLoader options.

    Raises:
        UsageError: A value is out of range or has no effect.
    """

    num_workers: int = 0
    """Processes that read images; 0 reads in the training process."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory; ``None`` does so when training on CUDA."""
    persistent_workers: bool = False
    """Keep the worker processes from epoch to epoch."""
    prefetch_factor: int | None = None
    """Batches each worker keeps ready; ``None`` is torch's default of 2."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UsageError(f"data.num_workers={self.num_workers}: expected 0 or more; write data.num_workers=4")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise UsageError(
                f"data.prefetch_factor={self.prefetch_factor}: expected 1 or more; write data.prefetch_factor=2"
            )
        if self.num_workers == 0:
            for name, given in (
                ("persistent_workers=true", self.persistent_workers),
                (f"prefetch_factor={self.prefetch_factor}", self.prefetch_factor is not None),
            ):
                if given:
                    raise UsageError(
                        f"data.{name} has no effect with data.num_workers=0; add data.num_workers=4 or leave it out"
                    )

    def build(self, dataset: Dataset[Any], batch_sampler: Any, *, on_cuda: bool) -> DataLoader[Any]:
        """Build the DataLoader of a dataset that returns whole batches."""
        if self.num_workers:
            # Fast tokenizers warn, and turn single-threaded, in every forked worker unless told before.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=as_is,
            num_workers=self.num_workers,
            pin_memory=on_cuda if self.pin_memory is None else self.pin_memory,
            persistent_workers=self.persistent_workers,
            prefetch_factor=self.prefetch_factor,
        )


def as_is(batch: Any) -> Any:
    """Return the batch: the dataset has built it already (a named function, so that workers can be spawned)."""
    return batch


class WholeBatchLoader:
    """Iterable over a DataLoader, which Lightning leaves as it is.

    Into a ``DataLoader`` with a batch sampler of its own Lightning tries to put a
    ``DistributedSampler``, and fails; our samplers divide the data themselves.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.num_workers = loader.num_workers

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches."""
        return iter(self._loader)

    @property
    def _iterator(self) -> Any:
        """The worker processes' end, by the name under which Lightning shuts them down."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator


class EpochLoader(WholeBatchLoader):
    """Loader of the rest of the sampler's epoch, with a position that is the same on every rank.

    Lightning creates the iterator of the first epoch before it calls ``set_epoch``, and worker
    processes take their first indices at once; here the iterator of the DataLoader is created when
    the first batch is asked for, so that ``set_epoch`` and ``resume`` up to that moment count.

    ``state_dict``/``load_state_dict`` make Lightning's own checkpoints resume exactly, too.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batch_sampler: GlobalBatchSampler,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a DataLoader.

        Args:
            loader: The DataLoader, which uses the sampler.
            batch_sampler: The sampler.
            on_start: Called on every rank when an epoch's first batch is asked for.
        """
        super().__init__(loader)
        self._on_start = on_start
        self.batch_sampler = batch_sampler
        self._given = (0, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches of the rest of the epoch."""
        if self._on_start is not None:
            self._on_start()
        sampler = self.batch_sampler
        epoch, start = sampler.epoch, sampler.batches_done * sampler.accumulate
        for given, batch in enumerate(self._loader, start + 1):
            self._given = (epoch, given)
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch and its global batches already handed out."""
        sampler = self.batch_sampler
        epoch, given = self._given
        done = given // sampler.accumulate if epoch == sampler.epoch else 0
        return {"epoch": sampler.epoch, "batches_done": max(done, sampler.batches_done)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position that ``state_dict`` returned, at any world size."""
        self.batch_sampler.resume(state["epoch"], state["batches_done"])
