"""A run whose ``output_dir`` is in an object store: the checks, the lease and the uploads around it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.storage import far_runs, runs
from sd_lightning.storage.atomic import new_file
from sd_lightning.storage.lease import Lease
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.uploads import RunUploads, whole_steps

log = logging.getLogger(__name__)

LEASE = ".lease.json"
_SILENCE = 150.0
"""Seconds without a sign of life after which a run on another machine counts as dead."""


@contextmanager
def in_bucket(spec: RunSpec) -> Iterator[RunUploads | None]:
    """Hold the bucket of a run; after an error, upload the last checkpoint.

    Yields:
        What uploads the run's folder; None without a bucket, and on all but the first process.

    Raises:
        UsageError: The bucket cannot be used, another run is at work in it, or it holds something else; before data
            or model are touched.
    """
    if spec.url is None:
        yield None
        return
    if spec["trainer.num_nodes"] > 1 and far_runs.CACHE not in os.environ:
        raise UsageError(
            f"trainer.num_nodes={spec['trainer.num_nodes']}: output_dir={spec.url} is written by way of a folder on "
            f"one machine; expected one that all machines share; set {far_runs.CACHE}=<shared folder>, or "
            "trainer.num_nodes=1"
        )
    location, folder = open_location(spec.url, key="output_dir"), spec.output_dir
    if not is_first_process():
        yield None
        return
    location.check_writable()
    lease = Lease(location, LEASE, f"output_dir={spec.url}", "run", _SILENCE, waits=True)
    uploads = RunUploads(location, folder, lease)
    with lease.held():
        _check_bucket(spec, location)
        _set_aside_another(folder, location)
        try:
            yield uploads
        except (Exception, SystemExit) as error:
            try:
                uploads.finish(everything=False)
            except UsageError as failure:
                log.warning("%s", failure)
            if isinstance(error, UsageError):
                text = str(error).replace(f"output_dir={folder}", f"output_dir={spec.url}")
                raise UsageError(text) from error
            raise


def _check_bucket(spec: RunSpec, location: Location) -> None:
    """Check that the folder in the bucket is new, or that of a run that is to be continued or deleted."""
    names = [entry.name for entry in location.entries()]
    if names and location.size(runs.MARK) is None:
        shown = sorted({name.partition("/")[0] for name in names})
        raise UsageError(
            f"output_dir={spec.url} holds what no run of sd_lightning wrote and a run could replace: "
            f"{', '.join(shown[:5])} ({len(names)} files in all); expected a folder that is new, empty or a run's; "
            f"write output_dir={spec.url}/run"
        )
    resume = str(spec["resume"])
    goes_on = resume == "auto" or f"{far_runs.name_of(resume)}/".startswith(f"{spec.url}/")
    if (whole_steps(names) or "summary.json" in names) and not goes_on and not spec["overwrite"]:
        raise UsageError(
            f"output_dir={spec.url} already holds a run; continue it with resume=auto, choose another output_dir=, or "
            "delete it with overwrite=true"
        )


def _set_aside_another(folder: Path, location: Location) -> None:
    """Rename a folder on this machine that holds another run than the bucket, and mark the folder as that run's."""
    mark = location.read(runs.MARK) if location.size(runs.MARK) else None
    with suppress(FileNotFoundError):
        if (folder / runs.MARK).read_bytes() != mark:
            aside = folder.rename(folder.with_name(f"{folder.name}-{secrets.token_hex(4)}"))
            log.warning("%s held another run than the bucket does now; it is in %s", folder, aside)
    if mark is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with new_file(folder / runs.MARK) as tmp:
            tmp.write_bytes(mark)
