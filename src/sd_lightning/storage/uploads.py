"""The copy of a run's folder in an object store, brought up to date in the background.

The bucket holds the tree of the run's folder, without what is hidden, set aside or foreign there. A checkpoint is whole
in it if and only if its ``manifest.json`` is there, which is uploaded last and deleted first; so with ``summary.json``
and the results that it describes.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
_AT_A_TIME = 8
"""Files."""
_SUMMARY, _REPORT, _PIPELINE = "summary.json", "report.html", "pipeline/"
_STEP = re.compile(r"checkpoints/(step-\d{8,})/(.+)")


def whole_steps(names: Iterable[str]) -> list[int]:
    """Return the steps, in order, of the whole checkpoints among the files of a run."""
    matches = (_STEP.fullmatch(name) for name in names)
    return sorted(checkpoint.step_of(match[1]) for match in matches if match and match[2] == MANIFEST_NAME)


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
        self._keep = 0
        self._far: dict[str, str] = {}
        """Files in the bucket -> their SHA-256, or what else changes with them: the text of a manifest, size and time
        on disk, or the size alone if an earlier start of the run has uploaded them."""
        self._back_to: int | None = None
        self._warned: Path | None = None
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._wake, self._ending = threading.Event(), threading.Event()

    def open(self, *, keep: int, overwrite: bool = False) -> None:
        """Mark the folder in the bucket as the run's; the run's folder on this machine is marked already.

        Args:
            keep: How many checkpoints stay in the bucket; at least 2 do.
            overwrite: Delete what an earlier run wrote to it.

        Raises:
            UsageError: The bucket cannot be read or written.
        """
        self.lease.check()
        sizes = {entry.name: entry.size for entry in self.location.entries()}
        self._far = {name: str(size) for name, size in sizes.items()}
        if overwrite:
            self._delete(filter(runs.is_written, sizes))
        self.location.replace(runs.MARK, (self.folder / runs.MARK).read_bytes())
        for path in (checkpoint.checkpoint_path("", step) for step in whole_steps(self._far)):
            text = self.location.read((path / MANIFEST_NAME).as_posix())
            with suppress(ValueError):  # else it is uploaded anew
                files = _files(path, text)
                if all(sizes.get(name) == size for name, (size, _) in files.items()):
                    self._far |= {name: digest for name, (_, digest) in files.items()}
                    self._far[(path / MANIFEST_NAME).as_posix()] = text.decode()
        self._keep = max(keep, 2)  # the newest is not whole while validation at its step is added to it

    def begin(self, step: int) -> None:
        """Upload in the background from now on; what the bucket holds of later steps than this is set aside there."""
        self._back_to = step
        if self._thread.ident is None:
            self._thread.start()
        self._wake.set()

    def publish(self, saved: Path) -> None:
        """Upload a checkpoint that is complete on disk, as soon as no other is being uploaded."""
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        log.info("%s; step %d (%.2g GB) is next", self.state(), checkpoint.step_of(saved), size / 1e9)
        self._wake.set()

    def finish(self, *, everything: bool) -> None:
        """Wait until the newest checkpoint, results, pictures and logs are in the bucket; then upload no more.

        Args:
            everything: Also older checkpoints that were skipped.

        Raises:
            UsageError: Something is only on this machine: names what, and where.
        """
        if not self._keep or self._ending.is_set():
            return  # nothing was opened, or all is done
        self._ending.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self._sync(everything=everything)
        except (UsageError, OSError, ValueError) as error:
            here, there = map(checkpoint.step_of, checkpoint.all_checkpoints(self.folder)), whole_steps(self._far)
            missing = ", ".join(str(step) for step in here if step not in there)
            raise UsageError(
                f"{error} {self.state()}; {f'step {missing}' if missing else 'some files'} of the run is only in "
                f"{self.folder}; then run the same command with resume=auto on this machine, which uploads it"
            ) from error
        print(f"{self.state()}; a copy is in {self.folder}")

    def state(self) -> str:
        """Return which checkpoint is in the bucket, and which is on its way."""
        whole, busy = whole_steps(list(self._far)), self.busy
        state = f"step {whole[-1]} is in {self.location.url}" if whole else f"no step is in {self.location.url} yet"
        return state if busy is None else f"{state}; step {checkpoint.step_of(busy)} is being uploaded"

    def _work(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(PAUSE)
            self._wake.clear()
            try:
                self._sync()
            except FileNotFoundError:  # what was being uploaded was replaced or deleted
                self._ending.wait(0.2)
                self._wake.set()
            except Exception as error:  # the run goes on; `finish` tries again, and raises
                newest = next(reversed(checkpoint.all_checkpoints(self.folder)), None)
                if newest is None or newest != self._warned:
                    self._warned = newest
                    log.warning("%s %s; the run goes on, and keeps the rest in %s", error, self.state(), self.folder)

    def _sync(self, *, everything: bool = False) -> None:
        """Bring the bucket up to date: the newest checkpoint first.

        Raises:
            FileNotFoundError: A file was replaced or deleted meanwhile.
        """
        self.lease.check()
        if self._back_to is not None:
            self._set_aside(self._back_to)
            self._back_to = None
        paths = checkpoint.all_checkpoints(self.folder)
        steps = {*whole_steps(self._far), *map(checkpoint.step_of, paths)}
        kept = sorted(steps)[-self._keep :]  # older ones may be here if another machine has continued the run
        for path in reversed(paths if everything else paths[-1:]):
            if checkpoint.step_of(path) in kept:
                self.busy = path
                try:
                    self._upload_checkpoint(path)
                finally:
                    self.busy = None
        self._upload_rest()
        self.lease.check()
        self._prune({path.name for path in paths}, newest=paths[-1].name if paths else None)

    def _upload_checkpoint(self, path: Path) -> None:
        begin, text = time.monotonic(), (path / MANIFEST_NAME).read_bytes()
        manifest = f"checkpoints/{path.name}/{MANIFEST_NAME}"
        if self._far.get(manifest) == text.decode():
            return
        files = _files(Path("checkpoints", path.name), text)
        changed = {name: digest for name, (_, digest) in files.items() if self._far.get(name) != digest}
        self.location.delete(manifest)  # also one of which this process has not heard
        self._far.pop(manifest, None)
        self._put(changed)
        if (path / MANIFEST_NAME).read_bytes() != text:  # else all files were those of this manifest
            self._far = {name: "" if name in changed else stamp for name, stamp in self._far.items()}
            raise FileNotFoundError(f"{path} was replaced")
        self.lease.check()
        self.location.replace(manifest, text)
        self._far[manifest] = text.decode()
        size, seconds = sum(files[name][0] for name in changed), time.monotonic() - begin
        step = checkpoint.step_of(path)
        log.info("step %d is in %s (%.2g GB in %.0f s)", step, self.location.url, size / 1e9, seconds)

    def _upload_rest(self) -> None:
        """Upload what is no checkpoint and has changed; ``summary.json`` last."""
        files = self._stamps()
        changed = {name: stamp for name, stamp in files.items() if self._far.get(name) != stamp}
        stale = [name for name in self._far if name.startswith(_PIPELINE) and name not in files]
        stale = [name for name in stale if runs.is_written(name) and (self.folder / _PIPELINE).exists()]
        if any(name.startswith((_PIPELINE, _REPORT)) for name in [*changed, *stale]):
            self._delete([_SUMMARY])
        changed.pop(_SUMMARY, None)
        self._put(changed)
        self._delete(stale)
        if _SUMMARY in files and self._far.get(_SUMMARY) != files[_SUMMARY]:
            self.lease.check()
            self._put({_SUMMARY: files[_SUMMARY]})

    def _stamps(self) -> dict[str, str]:
        """Return the files on disk that belong to no checkpoint, each with what changes with it."""
        links, stamps = checkpoint.linked_digests(self.folder), {}
        for entry in LocalFolder(str(self.folder), self.folder, self.lease.who).entries():
            part = entry.name.partition("/")[0]
            if part in runs.NAMES and part != "checkpoints":
                status = (self.folder / entry.name).stat()
                stamp = links.get((status.st_dev, status.st_ino))
                stamp = stamp or f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
                # Frozen parts are those of the run, whichever start of it has written them.
                is_there = part.startswith("frozen") and self._far.get(entry.name) == str(status.st_size)
                stamps[entry.name] = str(status.st_size) if is_there else stamp
        return stamps

    def _put(self, files: Mapping[str, str]) -> None:
        """Bring files into the bucket, of which the stamps are given; by a copy of a twin there, if there is one."""
        twins = {stamp: name for name, stamp in self._far.items() if stamp}

        def put(name: str) -> None:
            path, twin = self.folder / name, twins.get(files[name])
            if twin is None:  # what is small may grow while it is read
                self.location.replace(name, path if path.stat().st_size > PART_BYTES else path.read_bytes())
            else:
                try:
                    self.location.copy(twin, name)
                except FileNotFoundError:
                    self._far[twin] = ""  # somebody has deleted it
                    raise
            self._far[name] = files[name]

        with ThreadPoolExecutor(_AT_A_TIME, "uploads") as pool:
            list(pool.map(put, files))

    def _delete(self, names: Iterable[str]) -> None:
        """Delete files that are in the bucket; those that vouch for others first."""
        for name in sorted(names, key=_vouches, reverse=True):
            if name in self._far:
                self.location.delete(name)
                del self._far[name]

    def _prune(self, local: set[str], newest: str | None) -> None:
        """Delete the checkpoints that the rule of the run has deleted on disk, and those that are cut off."""
        steps = {match[1] for match in map(_STEP.fullmatch, self._far) if match}
        whole = [checkpoint.checkpoint_path("", step).name for step in whole_steps(self._far)]
        doomed = steps.difference(whole, {newest}) | set(whole[: -self._keep]) - local
        self._delete([name for name in self._far if (match := _STEP.fullmatch(name)) and match[1] in doomed])

    def _set_aside(self, step: int) -> None:
        """Rename checkpoints and results of later steps in the bucket, as :func:`runs.go_back` does on disk."""
        token, moves, whole = secrets.token_hex(4), {}, set(whole_steps(self._far))
        for name, match in ((name, _STEP.fullmatch(name)) for name in self._far):
            if match and checkpoint.step_of(match[1]) > step and checkpoint.step_of(match[1]) in whole:
                moves[name] = f"checkpoints/set-aside-{match[1]}-{token}/{match[2]}"
        steps = re.search(rb'"steps": (\d+)', self.location.read(_SUMMARY)) if _SUMMARY in self._far else None
        if steps is not None and (step == 0 or int(steps[1]) > step):
            results = [name for name in self._far if name.startswith((_PIPELINE, _REPORT, _SUMMARY))]
            moves |= {name: f"checkpoints/set-aside-{token}-{name}" for name in results}
        if moves:
            log.warning("%s goes on from step %d; what is of later steps is set aside", self.location.url, step)
        for name in sorted(moves, key=_vouches):
            self.location.copy(name, moves[name])
        self._delete(moves)


def _vouches(name: str) -> bool:
    """Return whether a file says that others are complete."""
    return name.rpartition("/")[2] in (MANIFEST_NAME, _SUMMARY)


def _files(path: Path, manifest: bytes) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of a checkpoint's files, by their names in the run's folder."""
    return {(path / name).as_posix(): each for name, each in checkpoint.files_of(parse_json(manifest)).items()}
