"""One job at a time per folder: a small file that its job renews, on a local disk or in an object store."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from sd_lightning._errors import UsageError
from sd_lightning.state.host import this_machine
from sd_lightning.storage.location import Location
from sd_lightning.storage.untrusted import parse_json

log = logging.getLogger(__name__)

_MACHINE = this_machine(socket.gethostname())
BEAT = 30.0
"""Seconds between two signs of life of a job."""
LOOK = 2.0
"""Seconds between two looks at the lease of a job that may be dead."""


@dataclass(frozen=True)
class Lease:
    """The right of one job to write to a folder.

    A job that was killed leaves its lease. It ends when the process is dead, as far as this machine, or this
    container, can see, and else after ``silence`` seconds without a sign of life. Clocks may differ: what another
    machine holds is watched for two signs of life at least. Of two jobs that take over the same lease at the same
    moment, one learns it from :meth:`check`.
    """

    location: Location
    name: str
    """Of the file."""
    who: str
    """Start of messages: ``"store=s3://bucket/store"``."""
    job: str
    """What holds it, for messages: ``"precompute job"``."""
    silence: float = 600.0
    """Seconds without a sign of life after which a job counts as dead."""
    waits: bool = False
    """Whether to wait for the silence of a job on another machine, which is refused at its next sign of life."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease, with a sign of life twice a minute.

        Raises:
            UsageError: Another job holds it.
        """
        if not self.location.create(self.name, self._sign()):
            self._check_dead()
            self.location.replace(self.name, self._sign())
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            try:
                self.check()
                self.location.delete(self.name)
            except UsageError as error:  # what the job has done is done
                log.warning("%s", error)

    def check(self) -> None:
        """Raise a ``UsageError`` if another job has taken the lease over meanwhile; a lost lease stays lost."""
        holder = self._holder()
        if holder.get("token") != self.token:  # if it is gone, another job may have come and ended
            who = f"another {self.job} ({_process(holder)}) has taken" if holder else f"another {self.job} has deleted"
            raise UsageError(
                f"{self.who}: {who} {self.location.url}/{self.name}, as this one was silent; expected one {self.job} "
                "at a time; end one of the two"
            )

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT):
            try:
                self.check()
                self.location.replace(self.name, self._sign())
            except UsageError as error:  # the job may go on and end with it, or it passes
                log.warning("%s", error)

    def _sign(self) -> bytes:
        process = {"host": socket.gethostname(), "machine": _MACHINE, "pid": os.getpid()}
        process["started"] = psutil.Process().create_time()
        return json.dumps(process | {"token": self.token, "time": time.time()}).encode()

    def _holder(self) -> dict[str, Any]:
        try:
            return dict(parse_json(self.location.read(self.name)))
        except (FileNotFoundError, ValueError, TypeError):
            return {}  # it has just ended, or was cut off

    def _check_dead(self) -> None:
        """Raise if the job that holds the lease is alive; wait for a sign of life of one that may be dead."""
        first, begin = self._holder(), time.monotonic()
        holder = first
        while True:
            try:
                age, is_here = time.time() - float(holder["time"]), holder.get("machine") == _MACHINE
                watched, is_silent = time.monotonic() - begin, age >= self.silence
                if is_here and (is_silent or _is_dead(holder)):
                    return
                if watched >= (2 * BEAT if is_silent else self.silence):
                    return
            except (LookupError, ValueError, TypeError):
                return  # it was cut off
            who = f"{self.who}: another {self.job} ({_process(holder)})"
            if is_here or not (self.waits or is_silent) or holder["time"] != first["time"]:
                raise UsageError(
                    f"{who} writes to it, last sign of life {max(age, 0):.0f} s ago; expected one {self.job} at a "
                    f"time; wait for it, or end it. If it is dead, delete {self.location.url}/{self.name}, or wait "
                    f"until it was silent for {self.silence:.0f} s"
                )
            if holder is first:
                seconds = 2 * BEAT if is_silent else self.silence
                log.warning("%s has not left; waiting up to %.0f s to see if it is dead", who, seconds)
            time.sleep(LOOK)
            holder = self._holder()


def _is_dead(holder: dict[str, Any]) -> bool:
    pid = int(holder["pid"])
    if pid == os.getpid() or not psutil.pid_exists(pid):  # or an earlier job of this process
        return True
    try:
        return bool(abs(psutil.Process(pid).create_time() - holder["started"]) > 2.0)  # another with that number
    except psutil.Error:
        return False


def _process(holder: dict[str, Any]) -> str:
    is_here = holder.get("machine") == _MACHINE
    return f"process {holder.get('pid')} of {'this machine' if is_here else holder.get('host')}"
