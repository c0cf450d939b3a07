"""What ranks tell rank 0 of themselves, its record of every rank, and the rules that find the one that ends a run."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sd_lightning.state.host import this_machine

Message = dict[str, Any]
NOWHERE = secrets.token_hex(16)
"""An ID that matches no other process."""


@dataclass
class RankHealth:
    """The last heartbeat of one rank; times are seconds on the clock of the process that keeps this record."""

    rank: int
    process: str
    """Name for messages: "process 4242 on node-b"."""
    heard_at: float
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of begun collectives, by process group and device."""
    advanced_at: float = 0.0
    """When ``collectives`` last changed."""
    position: str = "an unknown place"
    """Where its main thread is."""
    unfinished: str = ""
    """The collective that it is inside of while ``collectives`` stays the same; empty if there is none."""
    left: bool = False
    """Whether it has said goodbye: its connection may close."""
    failure: Failure | None = None

    def hear(self, now: float, collectives: Mapping[str, int], position: str, unfinished: str) -> None:
        """Record a heartbeat."""
        self.heard_at, self.position, self.unfinished = now, position, unfinished
        if collectives != self.collectives:
            self.collectives, self.advanced_at = collectives, now


@dataclass(frozen=True)
class Failure:
    """An exception that ended ``fit`` on one rank."""

    text: str
    in_collective: bool
    """Whether a collective raised it; the cause may then be another rank."""


@dataclass(frozen=True)
class Cause:
    """The reason why a run ends."""

    text: str
    ranks: tuple[int, ...]
    """The ranks that caused it."""
    frozen: bool = False
    """Whether these ranks cannot end by themselves."""


def died(rank: RankHealth) -> Cause:
    """Blame a rank whose connection closed without a goodbye."""
    return Cause(f"rank {rank.rank} died ({rank.process}: killed, out of memory or crashed)", (rank.rank,))


def raised(rank: RankHealth) -> Cause:
    """Blame a rank that has reported an exception."""
    assert rank.failure is not None
    text = f"rank {rank.rank} raised {rank.failure.text} ({rank.process}; see its output)"
    return Cause(text, (rank.rank,))


def silent(ranks: Iterable[RankHealth], now: float, limit: float) -> Cause | None:
    """Blame ranks that have sent no heartbeat for ``limit`` seconds."""
    quiet = [rank for rank in ranks if not rank.left and now - rank.heard_at >= limit]
    if not quiet:
        return None
    who = [f"rank {rank.rank} ({rank.process})" for rank in quiet]
    seconds = now - min(rank.heard_at for rank in quiet)
    return _cause(quiet, who, f"been silent for {seconds:.0f} s: stopped, frozen or cut off", frozen=True)


def behind(ranks: Iterable[RankHealth], now: float, limit: float) -> Cause | None:
    """Blame the ranks that others wait for, if no rank has begun a collective for ``limit`` seconds.

    A rank that is stuck in its data, its callbacks or a deadlock still sends heartbeats, and the ranks that wait for it
    look just as stuck. But they have begun a collective that it has not.
    """
    active = [rank for rank in ranks if not rank.left]
    if any(now - rank.advanced_at < limit for rank in active):
        return None
    for group in {name: None for rank in active for name in rank.collectives}:
        members = [rank for rank in active if group in rank.collectives]
        least = min(rank.collectives[group] for rank in members)
        late = [rank for rank in members if rank.collectives[group] == least]
        if len(late) < len(members):
            who = [f"rank {rank.rank} ({rank.process}, in {rank.position})" for rank in late]
            seconds = now - max(rank.advanced_at for rank in active)
            return _cause(late, who, f"kept the others waiting for {seconds:.0f} s")
    return None


def hung(ranks: Iterable[RankHealth], now: float, limit: float) -> Cause | None:
    """Blame nobody but the collective, if all ranks are inside of one and none has begun another for ``limit`` seconds.

    It is that of a kernel that hangs, a broken link, or ranks that disagree about which collective comes next.
    """
    active = [rank for rank in ranks if not rank.left]
    if len(active) < 2 or any(now - rank.advanced_at < limit or not rank.unfinished for rank in active):
        return None
    names = " or ".join(dict.fromkeys(rank.unfinished for rank in active))
    places = ", ".join(f"rank {rank.rank} in {rank.position}" for rank in active[:4]) + ", …" * (len(active) > 4)
    seconds = now - max(rank.advanced_at for rank in active)
    text = f"all ranks have waited inside a collective of {names} for {seconds:.0f} s ({places})"
    return Cause(f"{text}: a kernel or a link hangs", tuple(rank.rank for rank in active))


def _cause(ranks: list[RankHealth], who: list[str], what: str, *, frozen: bool = False) -> Cause:
    names = ", ".join(who[:4]) + (", …" if len(who) > 4 else "")
    text = f"{names} {'has' if len(ranks) == 1 else 'have'} {what}"
    return Cause(text, tuple(rank.rank for rank in ranks), frozen)


def begun_collectives() -> dict[str, int]:
    """Count the collectives that this process has begun, by process group and device."""
    counts: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        for device in group._device_types:
            try:
                backend: Any = group._get_backend(device)
                counts[f"{name}/{device.type}"] = backend._get_sequence_number_for_group()
            except RuntimeError:  # a backend that does not count, or that is being destroyed
                continue
    return counts


def unfinished_collective() -> str:
    """Name the first collective that this process has begun and not finished, or return an empty string."""
    for recorder in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's, and that of the other backends
        dump = getattr(torch._C._distributed_c10d, recorder, None)  # builds without CUDA lack the first
        for entry in json.loads(dump(True, True)).get("entries", ()) if dump is not None else ():
            if not entry["retired"] and not entry["is_p2p"]:
                return f"{entry['profiling_name']} {entry['input_sizes']} in group {entry['process_group'][-1]}"
    return ""


def main_thread_position() -> str:
    """Describe where the main thread is: the innermost function, and the innermost one outside of libraries."""
    own = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "an unknown place"
    while own is not None and own.f_code.co_filename.startswith(_LIBRARIES):
        own = own.f_back
    inner = _describe(frame)
    return inner if own is None or own is frame else f"{inner} called from {_describe(own)}"


_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<frozen")


def _describe(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})"


def failure_of(error: BaseException) -> Failure:
    """Describe an exception in one line."""
    lines = str(error).strip().splitlines()
    text = type(error).__name__ + (f": {lines[0][:300]}" if lines else "")
    # gloo and NCCL also raise plain RuntimeErrors, which name their source files.
    in_collective = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup"))
    )
    return Failure(text, in_collective)


class Link:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._received = self._unsent = b""

    def send(self, **message: Any) -> None:
        """Send without waiting; drop the message if the buffer is full: the receiver is silent for too long anyway."""
        with suppress(OSError):
            self._send(self._unsent)
            if not self._unsent:
                self._send(json.dumps(message).encode() + b"\n")

    def _send(self, data: bytes) -> None:
        """Send as much as the buffer takes; the next message must not follow half a line."""
        self._unsent = data
        if data:
            self._unsent = data[self.connection.send(data) :]

    def end_sending(self) -> None:
        """Close the sending direction of the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def receive(self) -> tuple[list[Message], bool]:
        """Return the messages that have arrived, and whether the other side has closed."""
        closed = False
        while not closed:
            try:
                data = self.connection.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            closed = not data
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], True
        well_formed = all(isinstance(message, dict) and "kind" in message for message in messages)
        return (messages, closed) if well_formed and len(self._received) <= 65536 else ([], True)


def own_address(master: str, port: int) -> str:
    """Return this machine's source address for packets to the master; the loopback on the master itself."""
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def listen(host: str) -> socket.socket:
    """Return a listening socket: on ``host`` if the master is the loopback (one machine), else on all interfaces."""
    master = os.environ["MASTER_ADDR"]
    if master in ("localhost", "127.0.0.1", "::1"):
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(host: str, port: int, seconds: float) -> socket.socket | None:
    """Connect to rank 0 at ``host``, or at the master's address if that is a loopback; return None on failure."""
    if host.startswith("127.") or host == "::1":
        host = os.environ["MASTER_ADDR"]
    try:
        return socket.create_connection((host, port), timeout=seconds)
    except OSError:
        return None


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def identity() -> dict[str, Any]:
    """Return what other ranks know this process by."""
    return {"process": this_process(), "place": this_machine(NOWHERE), "pid": os.getpid()}
