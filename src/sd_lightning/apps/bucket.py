"""A run whose ``output_dir`` is in an object store: the checks, the lease and the uploads around it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import suppress

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.storage import checkpoint, far_runs, runs
from sd_lightning.storage.atomic import write_whole
from sd_lightning.storage.lease import Lease
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.uploads import RunUploads, whole_steps

log = logging.getLogger(__name__)

LEASE = ".lease.json"
_SILENCE = 150.0
"""Seconds without a sign of life after which a run on another machine counts as dead."""


def in_bucket(spec: RunSpec, run: Callable[[RunUploads | None], int]) -> int:
    """Hold the bucket of a run, if it has one, while it runs; then, and after an error, wait for the last checkpoint.

    Args:
        spec: The run.
        run: Trains, and returns the exit code. Gets what uploads the run's folder: None without a bucket, and on all
            but the first process.

    Returns:
        The exit code.

    Raises:
        UsageError: The bucket cannot be used, another run is at work in it, or it holds something else, before data
            or model are touched; or not all of the run could be uploaded.
    """
    if spec.url is None or not is_first_process():
        return run(None)
    from sd_lightning.callbacks.guards import EXIT_INTERRUPTED

    location, folder = open_location(spec.url, key="output_dir"), spec.output_dir
    location.check_writable()
    lease = Lease(location, LEASE, f"output_dir={spec.url}", "run", _SILENCE, waits=True)
    uploads = RunUploads(location, folder, lease)
    with lease.held():
        _check_bucket(spec, location)
        _adopt_mark(spec, location)
        try:
            try:
                code = run(uploads)
            except UsageError as error:
                text = str(error).replace(f"output_dir={folder}", f"output_dir={spec.url}")
                raise error if text == str(error) else UsageError(f"{text} (on this machine: {folder})") from error
            uploads.finish(raises=code != EXIT_INTERRUPTED)  # who restarts an interrupted run goes by its exit code
            return code
        except (Exception, SystemExit):
            uploads.finish(raises=False)
            raise
        finally:
            uploads.stop()  # also if Ctrl-C interrupts the wait


def _check_bucket(spec: RunSpec, location: Location) -> None:
    """Check that the folder in the bucket is new, or that of a run that is to be continued."""
    names, resume = [entry.name for entry in location.entries()], str(spec["resume"])
    if names and location.size(runs.MARK) is None:
        shown = sorted({name.partition("/")[0] for name in names})
        raise UsageError(
            f"output_dir={spec.url} holds what no run of sd_lightning wrote and a run could replace: "
            f"{', '.join(shown[:5])} ({len(names)} files in all); expected a folder that is new, empty or a run's; "
            f"write output_dir={spec.url}/run"
        )
    goes_on = resume == "auto" or f"{far_runs.name_of(resume)}/".startswith(f"{spec.url}/")
    if (whole_steps(names) or "summary.json" in names) and not goes_on:
        raise UsageError(
            f"output_dir={spec.url} already holds a run; continue it with resume=auto, choose another output_dir=, or "
            "delete it there"
        )


def _adopt_mark(spec: RunSpec, location: Location) -> None:
    """Mark the folder on this machine as that of the run in the bucket; one of another run is renamed."""
    folder = spec.output_dir
    try:
        mark = location.read(runs.MARK)
    except FileNotFoundError:  # the run is new, or only here
        if spec["resume"] == "auto" and checkpoint.all_checkpoints(folder):
            log.warning("%s is not in the bucket; the run goes on with the copy in %s", spec.url, folder)
        return
    with suppress(FileNotFoundError):
        if (folder / runs.MARK).read_bytes() != mark:
            aside = folder.rename(folder.with_name(f"{folder.name}-{secrets.token_hex(4)}"))
            log.warning("%s held another run than the bucket does now; it is in %s", folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / runs.MARK, mark)
