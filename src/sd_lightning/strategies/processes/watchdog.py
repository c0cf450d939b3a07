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
import hmac
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from typing_extensions import override

from sd_lightning.state.host import this_machine
from sd_lightning.strategies.processes import rank_health
from sd_lightning.strategies.processes.rank_health import (
    NOWHERE,
    Cause,
    Failure,
    Link,
    Message,
    RankHealth,
    identity,
    this_process,
)

log = logging.getLogger(__name__)

EXIT_CODE = 1
CONTINUE = "continue from the last checkpoint"
"""What a user does about a rank that died, unless the program says otherwise."""
listeners: list[Callable[[str], object]] = []
"""Functions that hear why a run ends, for who starts it again; their errors are ignored."""
GRACE = 3.0  # seconds for other ranks to report the same exception
FAREWELL = 10.0  # seconds for other ranks to end
CONNECT = 20.0  # seconds to connect to rank 0, which listens already
_LAST_WORDS = 60.0  # seconds for a rank that raised to close its loggers and print its stack trace


class Watchdog(threading.Thread):
    """Thread that watches the other ranks: :class:`Hub` on rank 0, :class:`Spoke` elsewhere.

    Args:
        rank: This process's rank.
        timeout_seconds: A rank that is silent or stuck for 80 % of it ends the run, before the collectives' own
            timeout, which names no rank.
    """

    remedy = CONTINUE

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
        self._next_beat = 0.0  # the next heartbeat tells of it, and comes now
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
        """Handle a message of another rank."""

    def _lose(self, link: Link) -> None:
        """Handle the end of a connection."""

    def _beat(self) -> None:
        """Send heartbeats."""

    def _own_state(self) -> dict[str, Any]:
        """Return what a heartbeat tells of this process."""
        before, self._begun = self._begun, rank_health.begun_collectives()
        return {
            "collectives": self._begun,
            "position": rank_health.main_thread_position(),
            "unfinished": rank_health.unfinished_collective() if self._begun == before else "",
            "failure": self.failure and vars(self.failure),
        }

    def _judge(self, now: float) -> Cause | None:
        """Return why the run has to end; None if it goes on."""

    def _settle(self, cause: Cause) -> None:
        """Wait, for a limited time, until other ranks are ready for this one to end."""

    def _end(self, cause: Cause) -> NoReturn:
        if self.failure is None or self.failure.in_collective:
            say(f"error: {cause.text}; rank {self.rank} ends the run, {self.remedy}")
        if self.rank in cause.ranks and self.failure is None:
            faulthandler.dump_traceback(2, all_threads=True)  # where it is stuck; on whatever `sys.stderr` is
        for listener in listeners:
            with suppress(Exception):
                listener(cause.text)
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
        return rank_health.silent([self._hub], now, self.limit)

    @override
    def _settle(self, cause: Cause) -> None:
        if cause.frozen:
            kill([self._place])
        elif self.failure is not None and not self.failure.in_collective:
            self._pump_for(FAREWELL, self._released.is_set)


class Hub(Watchdog):
    """Watchdog of rank 0: collects reports, finds the cause, and tells every rank.

    Args:
        world_size: Number of ranks.
        timeout_seconds: See :class:`Watchdog`.
        host: Address of rank 0 for the other ranks; on one machine (loopback) the hub listens on it alone.
    """

    def __init__(self, world_size: int, *, timeout_seconds: float, host: str) -> None:
        super().__init__(0, timeout_seconds=timeout_seconds)
        self.world_size = world_size
        self.token = secrets.token_hex(16)
        self._listener = rank_health.listen(host)
        self._ranks = {0: RankHealth(0, this_process(), time.monotonic(), advanced_at=time.monotonic())}
        self._rank_of: dict[Link, int] = {}
        self._places: dict[int, tuple[str, int]] = {}
        self._suspicion: float | None = None
        """Time at which to decide on the cause of a reported exception."""

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def gather(self, seconds: float) -> int:
        """Wait for the other ranks to connect, before the thread starts; return how many have."""
        until = time.monotonic() + seconds
        self._listener.settimeout(0.1)
        while len(self._rank_of) < self.world_size - 1 and time.monotonic() < until:
            with suppress(TimeoutError):
                self._add(Link(self._listener.accept()[0]))
            self._pump(0)
        self._listener.close()
        for link in self._links - self._rank_of.keys():
            self._close(link)
        return len(self._rank_of)

    @override
    def _hear(self, link: Link, message: Message) -> None:
        now = time.monotonic()
        if message["kind"] == "hello" and hmac.compare_digest(str(message.get("token")), self.token):
            rank = int(message["rank"])
            self._rank_of[link] = rank
            self._ranks[rank] = RankHealth(rank, message["process"], now, advanced_at=now)
            self._places[rank] = (message["place"], message["pid"])
            return
        if link not in self._rank_of:
            return  # not one of the ranks
        health = self._ranks[self._rank_of[link]]
        health.heard_at = now
        if message["kind"] == "bye":
            health.left = True
            return
        health.hear(now, message["collectives"], message["position"], message["unfinished"])
        if message["failure"] is not None and health.failure is None:
            self._note_failure(health, Failure(**message["failure"]))

    def _note_failure(self, health: RankHealth, failure: Failure) -> None:
        health.failure = failure
        # An exception in a collective is mostly caused by another rank: wait for the next heartbeats.
        delay = self.interval + 1.0 if failure.in_collective else GRACE
        self._suspicion = min(self._suspicion or float("inf"), time.monotonic() + delay)

    @override
    def _lose(self, link: Link) -> None:
        rank = self._rank_of.pop(link, None)
        if rank is None or self._ranks[rank].left or self._stopping:
            return
        self._ranks[rank].left = True
        if self.cause is None and self._ranks[rank].failure is None:
            self.cause = rank_health.died(self._ranks[rank])

    @override
    def _beat(self) -> None:
        own = self._own_state()
        self._ranks[0].hear(time.monotonic(), own["collectives"], own["position"], own["unfinished"])
        for link in self._rank_of:
            link.send(kind="beat")

    @override
    def _judge(self, now: float) -> Cause | None:
        own = self._ranks[0]
        own.heard_at = now
        if self.failure is not None and own.failure is None:
            self._note_failure(own, self.failure)
        ranks = list(self._ranks.values())
        failed = [rank for rank in ranks if rank.failure is not None]
        if len(failed) == self.world_size and not any(rank.failure.in_collective for rank in failed if rank.failure):
            self._stopping = True  # all ranks raised: none waits for another, and the caller may continue
            return None
        if self._suspicion is not None and now >= self._suspicion:
            return self._judge_failures(failed, now)
        rules = (rank_health.silent, rank_health.behind, rank_health.hung)
        return next((cause for rule in rules if (cause := rule(ranks, now, self.limit)) is not None), None)

    def _judge_failures(self, failed: list[RankHealth], now: float) -> Cause:
        for rank in failed:
            if rank.failure is not None and not rank.failure.in_collective:
                return rank_health.raised(rank)
        ranks = [rank for rank in self._ranks.values() if rank.failure is None]
        late = rank_health.behind(self._ranks.values(), now, 0.0)
        if late is not None and any(self._ranks[rank].failure is not None for rank in late.ranks):
            late = None
        return rank_health.silent(ranks, now, 3 * self.interval) or late or rank_health.raised(failed[0])

    @override
    def _settle(self, cause: Cause) -> None:
        kills = [self._places[rank] for rank in cause.ranks if cause.frozen and rank in self._places]
        for link in self._rank_of:
            link.send(kind="end", text=cause.text, ranks=cause.ranks, kills=kills)
        kill(kills)
        self._pump_for(FAREWELL / 2, lambda: not self._waiting())
        kill([self._places[rank] for rank in self._waiting()])  # child processes would outlive this one
        for link in self._rank_of:
            link.send(kind="release")
        if self.failure is None or self.failure.in_collective:
            self._pump_for(FAREWELL, lambda: not self._rank_of)  # they print their stack traces first

    def _waiting(self) -> list[int]:
        return [rank for rank in self._rank_of.values() if self._ranks[rank].failure is None]


def start_watchdog(
    rank: int, world_size: int, store: dist.Store, *, timeout_seconds: float, remedy: str = CONTINUE
) -> Watchdog | None:
    """Connect this rank to rank 0 and start its watchdog; called by all ranks.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store: Store in which rank 0 publishes its address; not used afterwards.
        timeout_seconds: See :class:`Watchdog`.
        remedy: What the last line of a run that ends tells its user to do.

    Returns:
        The running watchdog; None, after a warning, if rank 0 cannot be reached.
    """
    if rank == 0:
        host = rank_health.own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        hub = Hub(world_size, timeout_seconds=timeout_seconds, host=host)
        port = hub.port
        store.set("address", json.dumps({"host": host, "port": port, "token": hub.token, **identity()}))
        missing = world_size - 1 - hub.gather(min(CONNECT, timeout_seconds / 4))
        if missing:
            log.warning("%d ranks are not watched: they cannot reach rank 0 at %s:%d", missing, host, port)
        return _started(hub, remedy)
    about = json.loads(store.get("address"))
    connection = rank_health.connect(about["host"], about["port"], CONNECT)
    if connection is None:
        log.warning("rank %d is not watched: it cannot reach rank 0 at %s:%d", rank, about["host"], about["port"])
        return None
    spoke = Spoke(rank, timeout_seconds=timeout_seconds, connection=connection, hub=about)
    return _started(spoke, remedy)


def _started(watchdog: Watchdog, remedy: str) -> Watchdog:
    watchdog.remedy = remedy
    watchdog.start()
    return watchdog


def kill(places: list[tuple[str, int]]) -> None:
    """Kill those (machine, process ID) on this machine; they cannot end by themselves."""
    for machine, pid in places:
        if machine == this_machine(NOWHERE) and pid != os.getpid():
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
