"""Processes of this machine that encode latent and text files, one per GPU or per core, and their progress."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sd_lightning._console import start_bar
from sd_lightning._errors import UsageError
from sd_lightning.callbacks.progress import clock_time
from sd_lightning.data.loading import forking
from sd_lightning.data.store.encoding import STAGES, Encoded, EncodeTask, ShardEncoder
from sd_lightning.data.store.texts import EmbeddedTexts, TextEncoder, TextTask

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 5.0
"""Seconds between two lines of progress."""
_WAITING_PER_WORKER = 2
Encoders = tuple[ShardEncoder, TextEncoder | None]
"""Of images, and of captions if they are asked for; both use the same networks."""
_encoders: Encoders | None = None
"""In a worker: what it encodes with."""
Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Encodes latent and text files in this process, or in several others."""

    def __init__(self, encoder: ShardEncoder, num_workers: int, *, texts: TextEncoder | None = None) -> None:
        """Start the processes.

        Args:
            encoder: Copied into each; on CUDA each has a device of its own.
            num_workers: 1 encodes in this process.
            texts: Encoder of captions, if they are to be encoded; copied likewise.
        """
        self._encoders: Encoders = encoder, texts
        self._pool: ProcessPoolExecutor | None = None
        self._limit = num_workers * _WAITING_PER_WORKER
        on_cuda = encoder.device.type == "cuda"
        if not on_cuda:
            # One thread each, so that the bits do not depend on the number of workers.
            torch.set_num_threads(1)
        if num_workers > 1:
            # A forked process shares the memory of the networks, but cannot use CUDA.
            context = multiprocessing.get_context("spawn" if on_cuda else "fork")
            numbers = context.SimpleQueue()
            for number in range(num_workers):
                numbers.put(number)
            self._pool = ProcessPoolExecutor(
                num_workers, mp_context=context, initializer=_start, initargs=(self._encoders, numbers, os.getpid())
            )
            # All start now, before other threads hold locks that a fork would copy.
            with forking():
                wait([self._pool.submit(os.getpid) for _ in range(num_workers)])

    def __call__(self, tasks: Iterable[EncodeTask]) -> Iterator[Encoded]:
        """Encode latent files, and yield each when it is in the store.

        Raises:
            UsageError: An image or the store is unusable, or a worker was killed.
        """
        return map(self._encoders[0], tasks) if self._pool is None else self._run(_encode, tasks, self._pool)

    def embed(self, tasks: Iterable[TextTask]) -> Iterator[EmbeddedTexts]:
        """Encode text files, and yield each when it is in the store.

        Raises:
            UsageError: The store is unusable, or a worker was killed.
        """
        texts = self._encoders[1]
        assert texts is not None
        return map(texts, tasks) if self._pool is None else self._run(_embed, tasks, self._pool)

    def _run(
        self, encode: Callable[[Task], Result], tasks: Iterable[Task], pool: ProcessPoolExecutor
    ) -> Iterator[Result]:
        left, running = iter(tasks), set[Future[Result]]()
        try:
            while True:
                for task in left:
                    running.add(pool.submit(encode, task))
                    if len(running) >= self._limit:
                        break
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise UsageError(
                "precompute: a worker was killed, perhaps for lack of memory; nothing is lost: run it again, with "
                f"workers={max(self._limit // _WAITING_PER_WORKER // 2, 1)} if it happens again"
            ) from error

    def close(self) -> None:
        """End the processes; files that are being encoded are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def num_workers(asked: int | str, device: torch.device) -> int:
    """Return the number of workers: ``asked``, or with "auto" one per GPU or core.

    Raises:
        UsageError: It is no such number.
    """
    available = torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))
    if asked == "auto":
        return available
    if not isinstance(asked, int) or asked < 1:
        raise UsageError(f"precompute got workers={asked}; expected auto, or 1 or more processes; write workers=auto")
    if device.type == "cuda" and asked > available:
        raise UsageError(f"precompute got workers={asked}; this machine has {available} GPU(s); write workers=auto")
    return asked


def _start(encoders: Encoders, numbers: Any, parent: int) -> None:
    global _encoders
    torch.set_num_threads(1)
    number = numbers.get()
    images, texts = encoders
    device = torch.device("cuda", number) if images.device.type == "cuda" else images.device
    images.encoder.to(device)
    _encoders = replace(images, device=device), None if texts is None else replace(texts, device=device)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: a killed one cannot end its workers."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode(task: EncodeTask) -> Encoded:
    assert _encoders is not None
    return _encoders[0](task)


def _embed(task: TextTask) -> EmbeddedTexts:
    assert _encoders is not None and _encoders[1] is not None
    return _encoders[1](task)


class StageProgress:
    """In a terminal a bar; in a file or a pipe a line every few seconds.

    Use it as a context manager.

    Attributes:
        seconds: Seconds of all workers by stage, so far.
        images: Images encoded so far.
    """

    def __init__(self, total: int) -> None:
        """Start the clock.

        Args:
            total: Samples of the data set.
        """
        self.total = total
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.images = 0
        self._begin = self._shown = time.monotonic()
        self._bar: Progress | None = None
        self._is_encoding = False

    def __enter__(self) -> StageProgress:
        self._bar = start_bar("reading", self.total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def looked_at(self, count: int) -> None:
        """Note that ``count`` samples have been read and hashed; shown unless images are encoded meanwhile."""
        if not self._is_encoding:
            self._show("reading", count, self.total, [clock_time(time.monotonic() - self._begin)])

    def watch(self, tasks: Sequence[EncodeTask], results: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the results of some tasks, and show how far they are."""
        num, done, begin = sum(len(task.images) for task in tasks), 0, time.monotonic()
        self._is_encoding = True
        try:
            for each in results:
                yield each
                done += len(each.images) + len(each.bad)
                self.images += len(each.images)
                for stage, value in each.seconds.items():
                    self.seconds[stage] += value
                rate = done / max(time.monotonic() - begin, 1e-9)
                left = clock_time((num - done) / rate) if done else "?"
                self._show("encoding", done, num, [f"{rate:.3g} img/s", f"left {left}", shares(self.seconds)])
        finally:
            self._is_encoding = False

    def watch_texts(self, num: int, results: Iterable[EmbeddedTexts]) -> Iterator[EmbeddedTexts]:
        """Yield the results of ``num`` text files, and show how far they are."""
        captions, begin = 0, time.monotonic()
        for done, each in enumerate(results, 1):
            yield each
            captions += each.captions
            seconds = max(time.monotonic() - begin, 1e-9)
            left = clock_time((num - done) * seconds / done)
            self._show("encoding captions, file", done, num, [f"{captions / seconds:.3g} captions/s", f"left {left}"])

    def _show(self, activity: str, count: int, total: int, texts: Sequence[str]) -> None:
        now = time.monotonic()
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=activity, completed=count, total=total, text="  ".join(texts))
        elif now - self._shown >= _EVERY:
            self._shown = now
            print(" | ".join([f"{activity} {count}/{total}", *texts]), flush=True)


def shares(seconds: Mapping[str, float]) -> str:
    """Return the share of each stage as text: "read 2% decode 10% encode 86% write 2%"."""
    total = sum(seconds.values()) or 1.0
    return " ".join(f"{stage} {value / total:.0%}" for stage, value in seconds.items())
