"""The loaders that Lightning iterates: wrappers around torch's DataLoader, and files fetched ahead of them."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import dropwhile
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

from sd_lightning._errors import UsageError
from sd_lightning.data.order import ORDER_VERSION, Batch, BatchKeys, check_version
from sd_lightning.data.sampler import GlobalBatchSampler
from sd_lightning.data.source import Source

log = logging.getLogger(__name__)

NUM_THREADS = 4
"""Threads that fetch: one alone waits for the network most of the time."""
_END = -1
"""In place of the number of a file: there are no more."""
ENCODER_FIELDS = ("encoders", "num_encoders", "encoder_resources", "encoder_labels", "loaders")
"""Fields of ``LoaderOptions`` that say where images are encoded."""
_PAUSE = 1.0
"""Seconds without fetching after an error, which may pass."""
_SLOW_SECONDS = 120.0
"""After this, and each time it has doubled, a worker process says where it is in a batch."""


def fetch_all(source: Source, index: Sequence[int]) -> None:
    """Fetch the files of some samples of a source, if it has files to fetch."""
    with ThreadPoolExecutor(NUM_THREADS, "fetch") as pool:
        list(pool.map(source.fetch, source.files(np.array(index, np.int64))))


@contextmanager
def forking() -> Iterator[None]:
    """Leave the garbage of this process to it, while the context lasts in which it forks workers.

    A worker that collected it would end what only this process can end: the destructor of a process group of gloo
    joins its threads, which no fork has, and the worker hangs or is killed.
    """
    gc.freeze()  # what is alive now, and what is garbage, is none of a worker's collector's business
    try:
        yield
    finally:
        gc.unfreeze()


_FETCHING = [threading.Lock() for _ in range(NUM_THREADS)]
"""Held by each thread that fetches, while it does."""


def _wait_for_fetches() -> None:
    """Let no process be forked in the middle of a fetch, whose locks would stay locked in it for ever."""
    for lock in _FETCHING:
        lock.acquire()


def _go_on_fetching() -> None:
    for lock in _FETCHING:
        lock.release()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_wait_for_fetches, after_in_parent=_go_on_fetching, after_in_child=_go_on_fetching)


class LookAhead:
    """Fetches the files of coming batches in threads, some batches ahead.

    An error is logged and does not end them: it may pass before the file is read, and reading it raises if not.
    """

    def __init__(
        self,
        files_of: Callable[[np.ndarray], Sequence[int]],
        fetch: Callable[[int], None],
        *,
        num_batches: int,
    ) -> None:
        """Take the functions.

        Args:
            files_of: Sample indices of a global batch -> numbers of their files.
            fetch: Brings a file to this machine, if it is not there.
            num_batches: How far to be ahead of the batches that are read.
        """
        self._files_of = files_of
        self._fetch = fetch
        self._num_batches = num_batches

    @contextmanager
    def running(self, samples_of: Callable[[int], np.ndarray], begin: int, end: int) -> Iterator[Callable[[int], None]]:
        """Fetch for batches ``begin`` to ``end`` while the context lasts.

        Args:
            samples_of: Number of a global batch -> its sample indices.
            begin: The first batch.
            end: Behind the last one.

        Yields:
            A function to call with the number of the batch that is read now.
        """
        # Each thread has files of its own, so that they need not agree on who fetches what.
        queues = [SimpleQueue[int]() for _ in range(NUM_THREADS)]
        allowed, ended, now = threading.Semaphore(self._num_batches + 1), threading.Event(), begin

        def feed() -> None:
            for number in range(begin, end):
                allowed.acquire()
                if ended.is_set():
                    return
                for file in self._files_of(samples_of(number)):
                    queues[file % NUM_THREADS].put(file)

        def fetch(queue: SimpleQueue[int], fetching: threading.Lock) -> None:
            while (file := queue.get()) != _END and not ended.is_set():
                try:
                    with fetching:
                        self._fetch(file)
                except Exception as error:
                    log.warning("data: a file could not be fetched ahead (%s); reading it tries again", error)
                    ended.wait(_PAUSE)

        def move(number: int) -> None:
            nonlocal now
            if number > now:
                allowed.release(number - now)
                now = number

        # Not joined: the end of a run does not wait for a file that nobody reads.
        threading.Thread(target=feed, name="look-ahead", daemon=True).start()
        for each in zip(queues, _FETCHING, strict=True):
            threading.Thread(target=fetch, args=each, name="look-ahead", daemon=True).start()
        try:
            yield move
        finally:
            ended.set()
            allowed.release()
            for queue in queues:
                queue.put(_END)


@dataclass(frozen=True)
class LoaderOptions:
    """Torch's DataLoader options.

    Raises:
        UsageError: A value is out of range or has no effect.
    """

    num_workers: int | Literal["auto"] = "auto"
    """Processes that read images; 0 reads in the training process, "auto" chooses (see ``data/workers.py``)."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory; ``None`` does so when training on CUDA."""
    persistent_workers: bool = False
    """Keep the worker processes between epochs."""
    prefetch_factor: int | None = None
    """Batches each worker keeps ready; ``None`` is torch's default of 2, or chosen with ``num_workers="auto"``."""
    val_batch_size: int | None = None
    """Validation samples per process and batch; ``None`` takes the global batch size."""

    drop_last: bool | None = None
    """Leave incomplete last global batches out; ``None`` does so without aspect-ratio buckets.

    Otherwise they are trained on with their mean loss. Each bucket has one.
    """
    encoders: Literal["trainer", "ray"] = "trainer"
    """Where images are encoded during training; "ray": by ``loaders``, on a Ray cluster."""
    num_encoders: int = 1
    """Encoders of all processes together."""
    encoder_resources: dict[str, float] | None = None
    """What each one reserves, by Ray's names; ``None`` for a CPU, and a GPU if the cluster has any."""
    encoder_labels: dict[str, str] | None = None
    """Labels of the machines that may be used."""
    loaders: Any = None
    """What builds loaders in place of ``data/workers.py``: a ``RayEncoders``."""

    def __post_init__(self) -> None:
        if self.num_workers != "auto" and not (isinstance(self.num_workers, int) and self.num_workers >= 0):
            raise UsageError(
                f"data.num_workers={self.num_workers}: expected auto, or 0 or more; write data.num_workers=auto"
            )
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise UsageError(
                f"data.prefetch_factor={self.prefetch_factor}: expected 1 or more; write data.prefetch_factor=2"
            )
        if self.val_batch_size is not None and self.val_batch_size < 1:
            raise UsageError(
                f"data.val_batch_size={self.val_batch_size}: expected 1 or more; write data.val_batch_size=64"
            )
        if self.num_workers == 0 and (self.persistent_workers or self.prefetch_factor is not None):
            idle = "persistent_workers=true" if self.persistent_workers else f"prefetch_factor={self.prefetch_factor}"
            raise UsageError(
                f"data.{idle} has no effect with data.num_workers=0; add data.num_workers=4 or leave it out"
            )

        if self.encoders == "ray" and self.loaders is None:
            raise UsageError(
                "data.encoders=ray: images are encoded elsewhere only while a model is trained; leave it out here (in "
                "Python: SDDataModule(source, loader=LoaderOptions(loaders=RayEncoders(num_encoders=3))))"
            )
        for name in ENCODER_FIELDS[1:4]:
            if self.encoders == "trainer" and getattr(self, name) not in (1, None):
                given = f"data.{name}={getattr(self, name)}"
                raise UsageError(f"{given} has no effect with data.encoders=trainer; add data.encoders=ray")

    def in_memory(self) -> LoaderOptions:
        """Return the options for data that lie in memory: no workers, unless a number is given.

        Raises:
            UsageError: An option has no effect without workers.
        """
        return replace(self, num_workers=0) if self.num_workers == "auto" and self.loaders is None else self

    def build(self, dataset: Dataset[Batch], batch_sampler: BatchKeys, *, on_cuda: bool) -> DataLoader[Batch]:
        """Build the DataLoader of a dataset that returns whole batches; ``num_workers`` has to be a number."""
        assert self.num_workers != "auto", "data/workers.py chooses before a loader is built"
        if self.num_workers:
            # Otherwise fast tokenizers warn, and turn single-threaded, in every forked worker.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return DataLoader(
            dataset,
            batch_sampler=batch_sampler,
            collate_fn=as_is,
            num_workers=self.num_workers,
            worker_init_fn=report_trouble,
            pin_memory=on_cuda if self.pin_memory is None else self.pin_memory,
            persistent_workers=self.persistent_workers,
            prefetch_factor=self.prefetch_factor,
        )


def as_is(batch: Any) -> Any:
    """Return the batch unchanged (as ``collate_fn``: spawned workers could not pickle a lambda)."""
    return batch


def report_trouble(worker: int) -> None:
    """Let this worker process tell its stack when it crashes, and while it takes minutes for one batch.

    Training waits for it without a word otherwise, and a stack of the training process does not say why.
    """
    faulthandler.disable()  # if training had it: torch has taken its signals since
    faulthandler.enable(2)  # standard error, whatever `sys.stderr` is
    info = get_worker_info()
    assert info is not None
    read, main = info.dataset.__getitems__, threading.get_ident()  # type: ignore[attr-defined]
    begun: float | None = None

    def timed_read(keys: Any) -> Any:
        nonlocal begun
        begun = time.monotonic()
        try:
            return read(keys)
        finally:
            begun = None

    def watch() -> None:
        limit = _SLOW_SECONDS
        while True:
            time.sleep(_SLOW_SECONDS / 10)
            seconds = 0.0 if (since := begun) is None else time.monotonic() - since
            if seconds < _SLOW_SECONDS:
                limit = _SLOW_SECONDS
            elif seconds >= limit:
                limit *= 2
                # Without the frames of training, in which this process was forked.
                frames = traceback.extract_stack(sys._current_frames()[main])
                stack = "".join(traceback.format_list([*dropwhile(lambda frame: frame.name != "timed_read", frames)]))
                log.warning("data: worker %d has read one batch for %.0f s, and is at:\n%s", worker, seconds, stack)

    info.dataset.__getitems__ = timed_read  # type: ignore[attr-defined]
    threading.Thread(target=watch, name="slow-batches", daemon=True).start()


class WholeBatchLoader:
    """Iterable that hides a DataLoader from Lightning: our samplers shard the data themselves.

    Lightning would try to replace the DataLoader's batch sampler by a ``DistributedSampler``, and fail.
    """

    def __init__(self, loader: DataLoader[Batch]) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.num_workers = loader.num_workers

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        with forking():
            return iter(self._loader)

    @property
    def _iterator(self) -> Any:
        """The DataLoader's iterator; Lightning uses this name to shut down worker processes."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator


class EpochLoader(WholeBatchLoader):
    """Loader of the rest of the sampler's epoch, with a position that is the same on every rank.

    Lightning creates the first epoch's iterator before it calls ``set_epoch``, and worker processes take their first
    indices at once. So the DataLoader's iterator is only created when the first batch is requested; ``set_epoch`` and
    ``resume`` take effect until then.

    ``state_dict``/``load_state_dict`` make Lightning's own checkpoints resume exactly, too.
    """

    def __init__(
        self,
        loader: DataLoader[Batch],
        batch_sampler: GlobalBatchSampler,
        *,
        on_start: Callable[[], None] = lambda: None,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """Wrap a DataLoader.

        Args:
            loader: A DataLoader that uses ``batch_sampler``.
            batch_sampler: The sampler.
            on_start: Called on every rank when an epoch's first batch is requested.
            look_ahead: Fetches the files of coming batches.
        """
        super().__init__(loader)
        self._on_start = on_start
        self._look_ahead = look_ahead
        self.batch_sampler = batch_sampler
        self._yielded = (0, 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of the rest of the epoch."""
        self._on_start()
        sampler = self.batch_sampler
        epoch, start = sampler.epoch, sampler.batches_done * sampler.accumulate
        batches = super().__iter__()
        with self._fetching() as move:
            for yielded, batch in enumerate(batches, start + 1):
                self._yielded = (epoch, yielded)
                move(yielded // sampler.accumulate)
                yield batch

    def _fetching(self) -> AbstractContextManager[Callable[[int], None]]:
        """Fetch files ahead while the context lasts, which gives a function that takes the current global batch."""
        if self._look_ahead is None:
            return nullcontext(lambda number: None)
        sampler = self.batch_sampler
        samples_of = sampler.order.of_epoch(sampler.epoch)
        return self._look_ahead.running(samples_of, sampler.batches_done, sampler.order.batches_per_epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, the number of its global batches already yielded, and the order's version."""
        sampler = self.batch_sampler
        epoch, yielded = self._yielded
        done = yielded // sampler.accumulate if epoch == sampler.epoch else 0
        done = max(done, sampler.batches_done)
        return {"epoch": sampler.epoch, "batches_done": done, "order_version": ORDER_VERSION}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position that ``state_dict`` returned, at any world size.

        Raises:
            UsageError: It is one of another order.
        """
        check_version(state.get("order_version", 1))
        self.batch_sampler.resume(state["epoch"], state["batches_done"])
