"""Jobs: our own programs as detached processes, one at a time per card; they outlive the server.

A job is a JSON file, with a log beside it. A process per card, ``python -m sd_lightning.ui.jobs <folder> <card>``,
takes the jobs of its card in order. It and the program that it runs hold the card's lock: the card is taken until both
have ended, whichever is killed.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.untrusted import read_json

CPU = "cpu"
_RESULTS = ("summary.json", "*-seed-*.png")
"""What our programs write at their end."""


@dataclass(frozen=True)
class Job:
    """A start of a program."""

    id: str
    """Sorts by time."""
    program: str
    """Module below ``sd_lightning``."""
    settings: list[str]
    card: str
    """Number of the GPU as ``nvidia-smi`` counts, or ``cpu``."""
    folder: str
    """What it writes."""
    state: str = "queued"
    """Then running, then ended or cancelled."""
    pid: int = 0
    code: int | None = None
    note: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("queued", "running")


def cards() -> dict[str, tuple[str, float | None]]:
    """Return the GPUs that may be used by number, with name and memory in GB, or the CPU; no GPU is touched."""
    command = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    if (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:  # by a scheduler, for instance
        command.append(f"--id={allowed}")
    found = {}
    with suppress(OSError, subprocess.SubprocessError):
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        for index, name, mib in re.findall(r"^(\d+), (.+), (.+)$", out, re.MULTILINE):
            found[index] = name, int(mib) * 2**20 / 1e9 if mib.isdigit() else None
    return found or {CPU: ("CPU", None)}


def environment(card: str) -> dict[str, str]:
    """Return the environment of a program that sees one card alone.

    Raises:
        UsageError: The card is not there.
    """
    if card != CPU and card not in cards():
        raise UsageError(f"card={card} is not there; expected one of {', '.join(cards())}; choose that")
    own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": card.removesuffix(CPU), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own}


class Queue:
    """The jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._started = 0.0

    def jobs(self) -> list[Job]:
        """Return all jobs, the oldest first; a card whose process was killed gets a new one."""
        found = self._jobs()
        idle = {each.card for each in found if each.is_open and not self.is_busy(each.card)}
        if idle and time.monotonic() > self._started + 10:  # one that begins needs a moment
            for card in idle:
                self.start(card)
        return found

    def _jobs(self) -> list[Job]:
        found: list[Job] = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            with suppress(OSError, ValueError, TypeError, AttributeError):
                job = Job(**read_json(path))  # its words become parts of paths
                found += [job] * (job.id == path.stem and job.card.isalnum() and Path(job.folder).is_absolute())
        return found

    def add(self, program: str, settings: Sequence[str], card: str, folder: Path) -> Job:
        """Append a job, and start the card's process.

        Raises:
            UsageError: There is no such card, or an open job writes the folder.
        """
        environment(card)
        name = f"{time.time_ns() // 1000}-{secrets.token_hex(3)}"
        job = Job(name, program, list(settings), card, str(folder))
        with self.locked("changes", patience=math.inf):
            if any(each.is_open and each.folder == job.folder for each in self._jobs()):
                raise UsageError(f"output_dir={folder.name}: a job writes there already; wait, or choose another name")
            self._write(job)
        self.start(card)
        return job

    def start(self, card: str) -> None:
        """Start the card's process; if there is one, the new one ends at once."""
        self._started = time.monotonic()
        command = [sys.executable, "-m", "sd_lightning.ui.jobs", str(self.folder), card]
        with open(self.folder / "runner.log", "ab") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def stop(self, job_id: str) -> None:
        """Cancel a job that waits; send one that runs the signal at which a run saves and ends."""
        with self.locked("changes", patience=math.inf):
            for job in self._jobs():
                if job.id == job_id and job.state == "queued":
                    self._write(replace(job, state="cancelled"))
                elif job.id == job_id and job.state == "running" and self.is_busy(job.card):
                    with suppress(ProcessLookupError):
                        os.kill(job.pid, signal.SIGTERM)

    def is_busy(self, card: str) -> bool:
        """Return whether the card's process, or a program that it started, is there."""
        with self.locked(f"card-{card}") as lock:
            return lock is None

    def work(self, card: str) -> None:
        """Run the jobs of a card until none waits, unless another process does."""
        while any(each.is_open and each.card == card for each in self._jobs()):
            with self.locked(f"card-{card}", patience=1) as lock:  # others look at it for an instant
                if lock is None:
                    return  # that process looks again after it has given the lock back
                while job := next((each for each in self._jobs() if each.is_open and each.card == card), None):
                    if job.state == "queued":
                        self._run(job.id, lock)
                    else:  # the process that waited for it was killed
                        begin = (self.folder / f"{job.id}.json").stat().st_mtime
                        files = [file for name in _RESULTS for file in Path(job.folder).glob(name)]
                        code = 0 if any(file.stat().st_mtime >= begin for file in files) else None
                        self._write(replace(job, state="ended", code=code, note="it was killed"))

    def _run(self, job_id: str, lock: int) -> None:
        with self.locked("changes", patience=math.inf):
            job = Job(**read_json(self.folder / f"{job_id}.json"))
            if job.state != "queued":
                return
            try:
                command = [sys.executable, "-m", f"sd_lightning.{job.program}", *job.settings]
                with open(self.log(job), "ab") as log:
                    how = {"env": environment(job.card), "pass_fds": [lock], "start_new_session": True}
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **how)  # type: ignore[call-overload]
            except (UsageError, OSError, TypeError, ValueError) as error:  # no card, or settings that are too long
                self._write(replace(job, state="ended", note=str(error)))
                return
            job = replace(job, state="running", pid=process.pid)
            self._write(job)
        self._write(replace(job, state="ended", code=process.wait()))

    def log(self, job: Job) -> Path:
        """Return the file of what a job prints."""
        return self.folder / f"{job.id}.log"

    def _write(self, job: Job) -> None:
        write_whole(self.folder / f"{job.id}.json", json.dumps(asdict(job), indent=1))

    @contextmanager
    def locked(self, name: str, *, patience: float = 0.0) -> Iterator[int | None]:
        """Yield the file that is locked; None if another process has it for so many seconds."""
        end = time.monotonic() + patience
        with open(self.folder / f".{name}.lock", "ab") as file:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= end:
                    yield None
                    return
                time.sleep(0.02)
            yield file.fileno()


if __name__ == "__main__":
    Queue(Path(sys.argv[1])).work(sys.argv[2])
