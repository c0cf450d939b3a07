"""Connections between the watchdogs of the ranks, and the names of processes and machines."""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from typing import Any

Message = dict[str, Any]


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
    return {"process": this_process(), "place": this_machine(), "pid": os.getpid()}


def this_machine() -> str:
    """Return an ID of the scope of process IDs: this boot of the kernel, and the container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)  # not Linux: an ID that matches no other process
