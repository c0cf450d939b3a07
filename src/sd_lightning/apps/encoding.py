"""Processes of this machine that encode latent files: one per GPU, or per core."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from sd_lightning._errors import UsageError
from sd_lightning.data.store.encoding import Encoded, EncodeTask, ShardEncoder

_WAITING_PER_WORKER = 2
_encoder: ShardEncoder | None = None
"""In a worker: what it encodes with."""


class Workers:
    """Encodes latent files in this process, or in several others."""

    def __init__(self, encoder: ShardEncoder, num_workers: int) -> None:
        """Start the processes.

        Args:
            encoder: Copied into each; on CUDA each has a device of its own.
            num_workers: 1 encodes in this process.
        """
        self._encoder = encoder
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
                num_workers, mp_context=context, initializer=_start, initargs=(encoder, numbers, os.getpid())
            )
            # All start now, before other threads hold locks that a fork would copy.
            wait([self._pool.submit(os.getpid) for _ in range(num_workers)])

    def __call__(self, tasks: Sequence[EncodeTask]) -> Iterator[Encoded]:
        """Encode latent files, and yield each when it is in the store.

        Raises:
            UsageError: An image or the store is unusable, or a worker was killed.
        """
        if self._pool is None:
            yield from map(self._encoder, tasks)
            return
        left, running = iter(tasks), set[Future[Encoded]]()
        try:
            while True:
                for task in left:
                    running.add(self._pool.submit(_encode, task))
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


def _start(encoder: ShardEncoder, numbers: Any, parent: int) -> None:
    global _encoder
    torch.set_num_threads(1)
    number = numbers.get()
    if encoder.device.type == "cuda":
        encoder = replace(encoder, device=torch.device("cuda", number))
    encoder.encoder.to(encoder.device)  # type: ignore[attr-defined]
    _encoder = encoder
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent is gone: a killed one cannot end its workers."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode(task: EncodeTask) -> Encoded:
    assert _encoder is not None
    return _encoder(task)
