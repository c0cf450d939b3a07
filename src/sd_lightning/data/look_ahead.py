"""Fetch the files of coming batches in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class LookAhead:
    """Calls ``fetch`` for coming batches in a thread, some of them ahead.

    An error of ``fetch`` ends the thread silently: reading the same file for its batch raises it again, in the place
    that reports it.
    """

    def __init__(self, fetch: Callable[[np.ndarray], None], *, num_batches: int) -> None:
        """Take the function.

        Args:
            fetch: Receives the sample indices of one global batch.
            num_batches: How far to be ahead of the batches that are read.
        """
        self._fetch = fetch
        self._num_batches = num_batches
        self._moved = threading.Condition()
        self._at = 0
        self._ended = False

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
        self._at, self._ended = begin, False
        thread = threading.Thread(target=self._run, args=(samples_of, begin, end), name="look-ahead", daemon=True)
        thread.start()
        try:
            yield self._move
        finally:
            with self._moved:
                self._ended = True
                self._moved.notify()

    def _move(self, number: int) -> None:
        with self._moved:
            self._at = number
            self._moved.notify()

    def _run(self, samples_of: Callable[[int], np.ndarray], begin: int, end: int) -> None:
        for number in range(begin, end):
            with self._moved:
                while number > self._at + self._num_batches and not self._ended:
                    self._moved.wait()
                if self._ended:
                    return
            try:
                self._fetch(samples_of(number))
            except Exception:
                return
