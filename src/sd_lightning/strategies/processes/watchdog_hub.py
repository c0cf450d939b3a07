"""Rank 0's watchdog, and the start of the watchdogs of all ranks."""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import time
from contextlib import suppress

import torch.distributed as dist
from typing_extensions import override

from sd_lightning.strategies.processes import rank_health, rank_link
from sd_lightning.strategies.processes.rank_health import Cause, Failure, RankHealth
from sd_lightning.strategies.processes.rank_link import Link, Message, identity, this_process
from sd_lightning.strategies.processes.watchdog import FAREWELL, GRACE, Spoke, Watchdog, kill

log = logging.getLogger(__name__)

CONNECT = 20.0  # seconds to connect to rank 0, which listens already


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
        self._listener = rank_link.listen(host)
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
        told = {name: message.get(name, getattr(health, name)) for name in ("collectives", "position", "unfinished")}
        health.hear(now, **told)
        if message["kind"] == "failed":
            self._note_failure(health, Failure(message["text"], message["in_collective"]))
        elif message["kind"] == "bye":
            health.left = True

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
        self._ranks[0].hear(time.monotonic(), **self._own_state())
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


def start_watchdog(rank: int, world_size: int, store: dist.Store, *, timeout_seconds: float) -> Watchdog | None:
    """Connect this rank to rank 0 and start its watchdog; called by all ranks.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store: Store in which rank 0 publishes its address; not used afterwards.
        timeout_seconds: See :class:`Watchdog`.

    Returns:
        The running watchdog; None, after a warning, if rank 0 cannot be reached.
    """
    if rank == 0:
        host = rank_link.own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        hub = Hub(world_size, timeout_seconds=timeout_seconds, host=host)
        port = hub.port
        store.set("address", json.dumps({"host": host, "port": port, "token": hub.token, **identity()}))
        missing = world_size - 1 - hub.gather(min(CONNECT, timeout_seconds / 4))
        if missing:
            log.warning("%d ranks are not watched: they cannot reach rank 0 at %s:%d", missing, host, port)
        hub.start()
        return hub
    about = json.loads(store.get("address"))
    connection = rank_link.connect(about["host"], about["port"], CONNECT)
    if connection is None:
        log.warning("rank %d is not watched: it cannot reach rank 0 at %s:%d", rank, about["host"], about["port"])
        return None
    spoke = Spoke(rank, timeout_seconds=timeout_seconds, connection=connection, hub=about)
    spoke.start()
    return spoke
