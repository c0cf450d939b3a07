"""The copy of a run's folder in an object store, brought up to date in the background.

The bucket holds a run's checkpoints and records, without what is hidden, set aside, foreign, or a link to what a
checkpoint holds. A checkpoint is whole in it if and only if its ``manifest.json`` is there, which is uploaded last and
deleted first.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.checkpoint import MANIFEST_NAME
from sd_lightning.storage.lease import Lease
from sd_lightning.storage.location import LocalFolder, Location
from sd_lightning.storage.object_store import PART_BYTES
from sd_lightning.storage.untrusted import parse_json

log = logging.getLogger(__name__)

PAUSE = 60.0
"""Seconds after which pictures and logs are uploaded where no checkpoint is saved."""
PATIENCE = 5.0
"""Seconds within which a checkpoint that replaces or deletes a file is published."""
_AT_A_TIME = 8
"""Files."""
_SUMMARY = "summary.json"
_RESULTS = ("report.html", _SUMMARY)
_OF_STEP = re.compile(r"checkpoints/step-(\d{8,})/(.+)")


def whole_steps(names: Iterable[str]) -> list[int]:
    """Return the steps, in order, of the whole checkpoints among the files of a run."""
    matches = (_OF_STEP.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and match[2] == MANIFEST_NAME)


class RunUploads:
    """Uploads a run's folder while the run goes on; of rank 0, which holds the lease of the bucket.

    If uploads take longer than the next checkpoint, the newest comes next, and those in between are skipped. A file of
    which the bucket holds a twin, by its checksum, is copied there. What cannot be uploaded stays on disk, and is tried
    again with the next checkpoint and at the end.

    Args:
        location: The run's folder in the bucket.
        folder: The run's folder on this machine.
        lease: Held while this object is used.
    """

    def __init__(self, location: Location, folder: Path, lease: Lease) -> None:
        self.location, self.folder, self.lease = location, folder, lease
        self.busy: Path | None = None
        """The checkpoint that is being uploaded; it must stay on disk."""
        self._keep = self._start = 0
        self._before: Path | None = None
        self._later: list[str] = []
        """Files in the bucket of later steps than the one from which the run goes on, until they are set aside."""
        self._token = secrets.token_hex(4)
        self._far: dict[str, str] = {}
        """Files in the bucket -> their SHA-256, or what else changes with them: the text of a manifest, size and time
        on disk, or nothing if an earlier start of the run has uploaded them."""
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._wake, self._ending = threading.Event(), threading.Event()

    def open(self, *, keep: int, step: int = 0) -> None:
        """Mark the folder in the bucket as the run's; the run's folder on this machine is marked already.

        What the bucket holds of later steps is set aside there, as :func:`runs.go_back` does on disk, with the first
        upload.

        Args:
            keep: How many checkpoints stay in the bucket; at least 2 do.
            step: Where the run goes on; checkpoints on this machine of earlier steps are not uploaded.

        Raises:
            UsageError: The bucket cannot be read or written.
        """
        self.lease.check()
        sizes = {entry.name: entry.size for entry in self.location.entries()}
        self._far = dict.fromkeys(sizes, "")
        self.location.replace(runs.MARK, (self.folder / runs.MARK).read_bytes())
        self._keep = max(keep, 2)  # the newest is not whole while validation at its step is added to it
        self._start = step
        whole = whole_steps(self._far)
        for folder in (checkpoint.checkpoint_path("", each).as_posix() for each in whole):
            text = self.location.read(f"{folder}/{MANIFEST_NAME}")
            with suppress(ValueError):  # else it is uploaded anew
                files = _files(folder, text)
                if all(sizes.get(name) == size for name, (size, _) in files.items()):
                    self._far |= {name: digest for name, (_, digest) in files.items()}
                    self._far[f"{folder}/{MANIFEST_NAME}"] = text.decode()
        self._later = [name for name in sizes if _step(name) in whole and _step(name) > step]
        if self._later or not step:
            self._later += [name for name in _RESULTS if name in sizes]

    def begin(self) -> None:
        """Upload in the background from now on."""
        if self._thread.ident is None:
            self._thread.start()
        self._wake.set()

    def publish(self, saved: Path, before: Path | None = None) -> None:
        """Upload a checkpoint that is complete on disk, as soon as no other is being uploaded.

        Args:
            saved: The newest checkpoint.
            before: An earlier one that is not skipped, such as the last one before losses that are not finite.
        """
        self._before = before
        log.info("%s; step %d is next", self.state(), checkpoint.step_of(saved))
        self._wake.set()

    def stop(self) -> None:
        """Upload no more than what is being uploaded now."""
        self._ending.set()
        self._wake.set()

    def finish(self, *, raises: bool = True) -> None:
        """Wait until the newest checkpoint, pictures, logs and results are in the bucket; then upload no more.

        Args:
            raises: Raise if something is not; else the log says so.

        Raises:
            UsageError: Something is only on this machine: names what, and where.
        """
        if self._thread.ident is None or self._ending.is_set():
            return  # nothing was begun, or all is done
        self.stop()
        self._thread.join()
        try:
            self._sync()
        except (UsageError, OSError, ValueError) as error:
            text = (
                f"{error} {self.state()}; what is newer is only in {self.folder}; then run the same command with "
                "resume=auto on this machine, which uploads it"
            )
            if raises:
                raise UsageError(text) from error
            log.warning("%s", text)
        else:
            print(f"{self.state()}; a copy is in {self.folder}")

    def state(self) -> str:
        """Return which checkpoint is in the bucket, and which is on its way."""
        whole, busy = whole_steps(name for name, stamp in list(self._far.items()) if stamp), self.busy
        state = f"step {whole[-1]} is in {self.location.url}" if whole else f"no step is in {self.location.url} yet"
        return state if busy is None else f"{state}; step {checkpoint.step_of(busy)} is being uploaded"

    def _work(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(PAUSE)
            self._wake.clear()
            try:
                self._sync()
            except Exception as error:  # the run goes on; `finish` tries again, and raises
                if isinstance(error, FileNotFoundError) and self._wake.wait(PATIENCE):
                    continue  # a file was replaced or deleted meanwhile, as a newer checkpoint was saved
                if not self._ending.is_set():
                    log.warning("%s %s; the run goes on, and keeps the rest in %s", error, self.state(), self.folder)

    def _sync(self) -> None:
        """Bring the bucket up to date: the newest checkpoint first, ``summary.json`` last.

        Raises:
            FileNotFoundError: A file was replaced or deleted meanwhile, or is lost.
        """
        self.lease.check()
        self._set_aside_later()
        paths = checkpoint.all_checkpoints(self.folder)
        for path in (*paths[-1:], self._before):
            if path in paths and checkpoint.step_of(path) >= self._start:
                self.busy = path
                try:
                    self._upload_checkpoint(path)
                finally:
                    self.busy = None
        entries = LocalFolder(str(self.folder), self.folder, self.lease.who).entries()
        stats = {entry.name: (self.folder / entry.name).stat() for entry in entries if runs.is_record(entry.name)}
        stamps = {name: f"{status.st_ino} {status.st_size} {status.st_mtime_ns}" for name, status in stats.items()}
        changed = {name: stamp for name, stamp in stamps.items() if self._far.get(name) != stamp}
        for names in (changed.keys() - {_SUMMARY}, changed.keys() & {_SUMMARY}):
            self._put({name: changed[name] for name in names})
            self.lease.check()
        # What the rule of the run has deleted on disk goes, and what is cut off.
        kept = {-1, *whole_steps(self._far)[-self._keep :], *map(checkpoint.step_of, paths)}
        self._delete([name for name in self._far if _step(name) not in kept])

    def _set_aside_later(self) -> None:
        later = [name for name in self._later if name in self._far]
        if later:
            log.warning("%s goes on from step %d; what is of later steps is set aside", self.location.url, self._start)
        for name in sorted(later, key=lambda name: name.endswith((MANIFEST_NAME, _SUMMARY))):
            self.location.copy(name, f"checkpoints/set-aside-{self._token}-{name.removeprefix('checkpoints/')}")
        self._delete(later)
        self._later = []

    def _upload_checkpoint(self, path: Path) -> None:
        text = (path / MANIFEST_NAME).read_bytes()
        manifest = f"checkpoints/{path.name}/{MANIFEST_NAME}"
        if self._far.get(manifest) == text.decode():
            return
        files = _files(f"checkpoints/{path.name}", text)
        changed = {name: digest for name, (_, digest) in files.items() if self._far.get(name) != digest}
        self.location.delete(manifest)  # also one of which this process has not heard
        self._far.pop(manifest, None)
        self._put(changed)
        if (path / MANIFEST_NAME).read_bytes() != text:  # else all files were those of this manifest
            self._far |= dict.fromkeys(changed, "")
            raise FileNotFoundError(f"{path} was replaced")
        self.lease.check()
        self.location.replace(manifest, text)
        self._far[manifest] = text.decode()
        log.info("step %d is in %s", checkpoint.step_of(path), self.location.url)

    def _put(self, files: Mapping[str, str]) -> None:
        """Bring files into the bucket, of which the stamps are given; by a copy of a twin there, if there is one."""
        twins, failed = {stamp: name for name, stamp in self._far.items()}, threading.Event()

        def put(name: str) -> None:
            if failed.is_set():
                return  # the map raises; each other file would be tried for as long
            path = self.folder / name
            try:
                try:
                    self.location.copy(twins[files[name]], name)
                except (KeyError, FileNotFoundError):  # there is none, or somebody has deleted it
                    # What is small may grow while it is read.
                    self.location.replace(name, path if path.stat().st_size > PART_BYTES else path.read_bytes())
            except BaseException:
                failed.set()
                raise
            self._far[name] = files[name]

        with ThreadPool(_AT_A_TIME) as pool:  # its threads end with the program, also in the middle of a file
            pool.map(put, files, 1)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files that are in the bucket; first those that vouch for others."""
        for name in sorted(names, key=lambda name: not name.endswith((MANIFEST_NAME, _SUMMARY))):
            if name in self._far:
                self.location.delete(name)
                del self._far[name]


def _step(name: str) -> int:
    """Return the step of the checkpoint that a file belongs to; -1 for other files."""
    match = _OF_STEP.fullmatch(name)
    return -1 if match is None else int(match[1])


def _files(folder: str, manifest: bytes) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of a checkpoint's files, by their names in the run's folder."""
    return {f"{folder}/{name}": each for name, each in checkpoint.files_of(parse_json(manifest)).items()}
