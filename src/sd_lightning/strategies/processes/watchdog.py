"""Watchdog that ends the run on every rank, and names the rank that died, raised, froze or hung.

Collectives alone do not do that: NCCL waits for its timeout and names no rank, gloo prints "connection closed by peer"
in one stack trace per rank, and a launcher sees only processes that have ended on its own machine.

Every rank keeps a connection to rank 0 and sends heartbeats: where its main thread is, and how many collectives it has
begun. A connection that closes without a goodbye means a dead process, because its kernel closes it. Rank 0 finds the
cause and tells the others. If rank 0 itself is gone or silent, each rank notices it.

The thread uses plain sockets, not torch's store: a Python thread that is inside a C++ call when the interpreter shuts
down is unwound through code that does not support it, which aborts the process.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from typing_extensions import override

from sd_lightning.strategies.processes import rank_health
from sd_lightning.strategies.processes.rank_health import Cause, Failure, RankHealth
from sd_lightning.strategies.processes.rank_link import Link, Message, identity, this_machine

EXIT_CODE = 1
GRACE = 3.0  # seconds for other ranks to report the same exception
FAREWELL = 10.0  # seconds for other ranks to end
_LAST_WORDS = 60.0  # seconds for a rank that raised to close its loggers and print its stack trace


class Watchdog(threading.Thread):
    """Thread that watches the other ranks: ``Hub`` on rank 0, :class:`Spoke` elsewhere.

    Args:
        rank: This process's rank.
        timeout_seconds: A rank that is silent or stuck for 80 % of it ends the run, before the collectives' own
            timeout, which names no rank.
    """

    def __init__(self, rank: int, *, timeout_seconds: float) -> None:
        super().__init__(name="sd-lightning-watchdog", daemon=True)
        self.rank = rank
        self.set_timeout(timeout_seconds)
        self.cause: Cause | None = None
        """Why the run ends; None until that is known."""
        self.failure: Failure | None = None
        """This rank's own exception."""
        self._selector = selectors.DefaultSelector()
        self._links: set[Link] = set()
        self._wakes, self._waked = socket.socketpair()
        self._waked.setblocking(False)
        self._selector.register(self._waked, selectors.EVENT_READ)
        self._stopping = False
        self._released = threading.Event()
        """Set when a main thread that waits in :meth:`fail` or :meth:`stop` may continue."""
        self._next_beat = 0.0
        self._begun: dict[str, int] = {}
        os.register_at_fork(after_in_child=self._close_all)

    def set_timeout(self, seconds: float) -> None:
        """Change ``timeout_seconds``."""
        self.limit = 0.8 * seconds
        self.interval = min(5.0, seconds / 20)

    def fail(self, error: BaseException) -> None:
        """Report that this rank's ``fit`` raised; return when the other ranks know, or at a timeout."""
        if self.failure is not None or not self.is_alive():
            return
        self.failure = rank_health.failure_of(error)
        self._wake()
        self._released.wait(3 * self.interval + 2 * FAREWELL)

    def stop(self) -> None:
        """Say goodbye to the other ranks, so that this process may end."""
        if not self.is_alive():  # nor is it in a forked process
            return
        self._stopping = True
        self._wake()
        self._released.wait(self.interval + 3 * FAREWELL)

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has ended
            self._wakes.send(b"\0")

    def _close_all(self) -> None:
        """Close all sockets, also in a forked process (a data loader's): they keep a dead rank's connection open."""
        self._selector.close()
        for connection in (self._wakes, self._waked, *(link.connection for link in self._links)):
            connection.close()

    @override
    def run(self) -> None:
        while not self._stopping and self.cause is None:
            self._pump(self._next_beat - time.monotonic())
            self.cause = self.cause or self._judge(time.monotonic())
            if time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + self.interval
                self._beat()
        if self.cause is not None:
            self._end(self.cause)
        self._part()
        self._close_all()
        self._released.set()

    def _part(self) -> None:
        """Say goodbye and close every connection without loss: stop sending, read until the other side ends, close.

        Closing a socket with unread data resets the connection, and the other side may never see the goodbye.
        """
        for link in self._links:
            link.send(kind="bye")
            link.end_sending()
        self._pump_for(FAREWELL / 2, lambda: not self._links)
        for link in list(self._links):
            self._close(link)

    def _pump(self, seconds: float) -> None:
        """Wait for messages and handle them."""
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if key.fileobj is self._waked:
                self._waked.recv(4096)
                continue
            link: Link = key.data
            messages, closed = link.receive()
            for message in messages:
                self._hear(link, message)
            if closed:
                self._close(link)
                self._lose(link)

    def _add(self, link: Link) -> None:
        self._links.add(link)
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _close(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.connection)
        link.connection.close()

    def _hear(self, link: Link, message: Message) -> None:
        raise NotImplementedError

    def _lose(self, link: Link) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        raise NotImplementedError

    def _own_state(self) -> dict[str, Any]:
        """Return what a heartbeat tells of this process."""
        before, self._begun = self._begun, rank_health.begun_collectives()
        return {
            "collectives": self._begun,
            "position": rank_health.main_thread_position(),
            "unfinished": rank_health.unfinished_collective() if self._begun == before else "",
        }

    def _judge(self, now: float) -> Cause | None:
        raise NotImplementedError

    def _settle(self, cause: Cause) -> None:
        """Wait, for a limited time, until other ranks are ready for this one to end."""

    def _end(self, cause: Cause) -> NoReturn:
        if self.failure is None or self.failure.in_collective:
            say(f"error: {cause.text}; rank {self.rank} ends the run, continue from the last checkpoint")
        if self.rank in cause.ranks and self.failure is None:
            faulthandler.dump_traceback(all_threads=True)  # where it is stuck
        self._settle(cause)
        self._released.set()
        if self.failure is not None:
            time.sleep(_LAST_WORDS)  # normally the main thread ends the process meanwhile
            say(f"error: rank {self.rank} did not end {_LAST_WORDS:.0f} s after its exception; it is ended now")
        flush()
        os._exit(EXIT_CODE)

    def _pump_for(self, seconds: float, done: Callable[[], bool]) -> None:
        """Handle messages until a condition holds or time is up."""
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            self._pump(min(0.1, until - time.monotonic()))


class Spoke(Watchdog):
    """Watchdog of any other rank: reports to rank 0, which tells it the cause.

    Args:
        rank: This process's rank.
        timeout_seconds: See :class:`Watchdog`.
        connection: Connection to rank 0.
        hub: What rank 0 has published: its process for messages, its machine and process number, and the secret by
            which it recognises its ranks.
    """

    def __init__(self, rank: int, *, timeout_seconds: float, connection: socket.socket, hub: Mapping[str, Any]) -> None:
        super().__init__(rank, timeout_seconds=timeout_seconds)
        self._hub = RankHealth(0, hub["process"], time.monotonic())
        self._place = (hub["place"], hub["pid"])
        self._link = Link(connection)
        self._add(self._link)
        self._reported = False
        self._link.send(kind="hello", token=hub["token"], rank=rank, **identity())

    @override
    def _hear(self, link: Link, message: Message) -> None:
        self._hub.heard_at = time.monotonic()
        if message["kind"] == "end":
            self.cause = Cause(message["text"], tuple(message["ranks"]))
            kill([(place, pid) for place, pid in message["kills"]])
        elif message["kind"] == "release":
            self._released.set()
        elif message["kind"] == "bye":
            self._hub.left = True
            self._stopping = True

    @override
    def _lose(self, link: Link) -> None:
        self._released.set()
        if self.cause is None and not self._hub.left and not self._stopping:
            self.cause = rank_health.died(self._hub)

    @override
    def _beat(self) -> None:
        self._link.send(kind="beat", **self._own_state())

    @override
    def _judge(self, now: float) -> Cause | None:
        if self.failure is not None and not self._reported:
            self._reported = True
            self._beat()
            self._link.send(kind="failed", **vars(self.failure))
        return rank_health.silent([self._hub], now, self.limit)

    @override
    def _settle(self, cause: Cause) -> None:
        if cause.frozen:
            kill([self._place])
        elif self.failure is not None and not self.failure.in_collective:
            self._pump_for(FAREWELL, self._released.is_set)


def kill(places: list[tuple[str, int]]) -> None:
    """Kill those (machine, process ID) on this machine; they cannot end by themselves."""
    for machine, pid in places:
        if machine == this_machine() and pid != os.getpid():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def say(line: str) -> None:
    """Write a line to stderr without Python's buffers, whose locks a stuck main thread may hold."""
    os.write(2, f"\n{line}\n".encode(errors="replace"))


def flush() -> None:
    """Flush stdout and stderr, but wait at most 1 s."""
    thread = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    thread.start()
    thread.join(1.0)
