"""Fetch the files of coming batches in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from sd_lightning.data.source import Source

log = logging.getLogger(__name__)

NUM_THREADS = 4
"""Threads that fetch: one alone waits for the network most of the time."""


def fetch_all(source: Source, index: Sequence[int]) -> None:
    """Fetch the files of some samples of a source, if it has files to fetch."""
    with ThreadPoolExecutor(NUM_THREADS, "fetch") as pool:
        list(pool.map(source.fetch, source.files(np.array(index, np.int64))))


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
        position = _Position(begin)

        def run(own: int) -> None:
            # Each thread has files of its own, so that they need not agree on who fetches what.
            for number in range(begin, end):
                if not position.wait_for(number - self._num_batches):
                    return
                for file in self._files_of(samples_of(number)):
                    if file % NUM_THREADS == own and not self._fetched(file, position):
                        return

        for own in range(NUM_THREADS):
            # Not joined: the end of a run does not wait for a file that nobody reads.
            threading.Thread(target=run, args=(own,), name=f"look-ahead-{own}", daemon=True).start()
        try:
            yield position.move
        finally:
            position.end()

    def _fetched(self, file: int, position: _Position) -> bool:
        """Fetch a file; return whether to go on. After an error wait until the reader has moved."""
        if position.ended:
            return False
        try:
            self._fetch(file)
        except Exception as error:
            log.warning("data: a file could not be fetched ahead (%s); it is tried again when it is read", error)
            return position.wait_for(position.now + 1)
        return True


class _Position:
    """The batch that is read now."""

    def __init__(self, begin: int) -> None:
        self._moved = threading.Condition()
        self.now = begin
        self.ended = False

    def move(self, number: int) -> None:
        with self._moved:
            self.now = number
            self._moved.notify_all()

    def end(self) -> None:
        with self._moved:
            self.ended = True
            self._moved.notify_all()

    def wait_for(self, number: int) -> bool:
        """Wait until a batch is read; return False if reading has ended."""
        with self._moved:
            self._moved.wait_for(lambda: self.ended or self.now >= number)
            return not self.ended
