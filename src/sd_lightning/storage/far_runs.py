"""Runs in buckets: the folders that stand for them on this machine, and what is fetched of them.

A bucket holds the same files as a run's folder, under the run's URL. A checkpoint in it is whole if its manifest, which
is uploaded last, is there, and so is every file that the manifest names, with its size.

In the cache of this machine, ``runs/s3/bucket/runs/a`` is the folder in which the run ``s3://bucket/runs/a`` works, and
``fetched/s3/bucket/runs/a`` holds copies of what was read of it: of a checkpoint its small files, and more as it is
needed. The path of a copy says where the rest is. Files that are fetched whole are hashed and compared with the
manifest. Of files that are read in ranges (:mod:`sd_lightning.storage.ranged_file`) only the size and the safetensors
header are checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal

from filelock import FileLock

from sd_lightning._errors import UsageError
from sd_lightning.storage import atomic, checkpoint
from sd_lightning.storage.checkpoint import MANIFEST_NAME
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location
from sd_lightning.storage.providers import PROVIDERS
from sd_lightning.storage.untrusted import MAX_BYTES, parse_json, read_json

log = logging.getLogger(__name__)

CACHE = "SD_LIGHTNING_CACHE"
"""Environment variable: the folder for runs in buckets; ``~/.cache/sd_lightning`` by default."""
_AT_A_TIME = 8
"""Files that a process fetches at a time."""


class NotWhole(Exception):
    """A checkpoint in a bucket is damaged, or was not uploaded to its end."""


def is_url(place: object) -> bool:
    """Return whether a run or model is named by the URL of a bucket."""
    return str(place).partition("://")[0] in PROVIDERS and "://" in str(place)


def working_folder(url: str, kind: Literal["runs", "fetched", "records"] = "runs") -> Path:
    """Return the folder in which the run of a URL works on this machine.

    Args:
        url: The run.
        kind: "fetched": the folder of copies of its checkpoints; "records": that of what it has recorded, which is
            fetched anew each time.
    """
    protocol, _, rest = url.rstrip("/").partition("://")
    names = rest.split("/")
    if protocol not in PROVIDERS or any(name in ("", ".", "..") or "\0" in name for name in names):
        raise UsageError(
            f"{url}: no place of a run; expected {', '.join(f'{each}://bucket/folder' for each in PROVIDERS)}, without "
            "empty names, . and .."
        )
    return Path(cache(), kind, protocol, *names)


def cache() -> Path:
    """Return the folder for runs in buckets."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "sd_lightning").absolute()


def url_of(path: Path) -> str | None:
    """Return the URL that a path of this cache stands for; None for other paths."""
    path, root = path.absolute(), cache()
    names = path.relative_to(root).parts if path.is_relative_to(root) else ()
    is_ours = len(names) > 2 and names[0] in ("runs", "fetched", "records") and names[1] in PROVIDERS
    return f"{names[1]}://{'/'.join(names[2:])}" if is_ours else None


def name_of(path: str | os.PathLike[str]) -> str:
    """Return how users name a path: by its URL if it is a copy."""
    return url_of(Path(path)) or os.fspath(path)


def is_copy(path: Path) -> bool:
    """Return whether a path belongs to a copy, of which files may be missing here."""
    return url_of(path) is not None and path.absolute().is_relative_to(cache() / "fetched")


def newer(run_dir: Path, newest: Path | None) -> Path | None:
    """Return the newest whole checkpoint of a run: one in its folder, or the copy of a later one in its bucket.

    Args:
        run_dir: The run's folder; if it stands for no URL, nothing is looked for.
        newest: The newest whole one in the folder.
    """
    url, step = url_of(run_dir), -1 if newest is None else checkpoint.step_of(newest)
    return newest if url is None else _newest(url, who="output_dir", after=step) or newest


def fetch(url: str, *, who: str, pipeline: bool = False) -> Path:
    """Fetch a checkpoint without the tensors of its state, which are fetched as they are read.

    Args:
        url: A run, of which the newest whole checkpoint is fetched, one of its checkpoints, or the pipeline in one.
        who: Name of the setting, for messages.
        pipeline: Fetch the pipeline, too.

    Returns:
        The copy of the checkpoint or pipeline.

    Raises:
        UsageError: There is no whole checkpoint, or the bucket cannot be read.
    """
    place = url.rstrip("/")
    match = re.fullmatch(r"(.+?)(?:/checkpoints/(step-\d{8,}))?(/pipeline)?", place)
    run, step, inner = match.groups() if match else (place, None, None)
    fetched = _newest(run, who=who, only=step, pipeline=pipeline or inner is not None)
    if fetched is None:
        raise UsageError(
            f"{who}={url}: there is no whole checkpoint, with manifest.json and all files that it names; expected a "
            "run or one of its checkpoints, such as s3://bucket/runs/a; correct the URL, or copy other folders here"
        )
    return fetched / "pipeline" if inner else fetched


def _newest(url: str, *, who: str, after: int = -1, only: str | None = None, pipeline: bool = False) -> Path | None:
    """Return the copy of the newest whole checkpoint of a run; warn about each one skipped.

    Args:
        url: The run.
        who: Name of the setting.
        after: Look for later steps than this.
        only: Name of the only checkpoint to look for.
        pipeline: Fetch the pipeline, too.
    """
    location, copy = open_location(url, key=who), working_folder(url, "fetched")
    names = {only} if only else {entry.name.split("/")[1] for entry in location.entries("checkpoints/")}
    steps = [name for name in names if checkpoint.is_step(name) and checkpoint.step_of(name) > after]
    for name in sorted(steps, key=checkpoint.step_of, reverse=True):
        place = f"checkpoints/{name}"
        try:
            _fetch(location.child(place), copy / place, pipeline=pipeline)
        except (NotWhole, FileNotFoundError) as problem:  # or the run has just deleted it
            log.warning("Checkpoint %s/%s is not used: %s; trying the one before it.", url, place, problem)
            continue
        for file in ("config.yaml", "summary.json"):
            try:
                location.fetch(file, copy / file)
            except FileNotFoundError:
                (copy / file).unlink(missing_ok=True)
        return copy / place
    return None


def _sizes(location: Location) -> dict[str, int]:
    """Return the sizes of a folder's files by name, without names that lead elsewhere."""
    inside = [each for each in location.entries() if checkpoint.is_inside(each.name) and "\0" not in each.name]
    return {each.name: each.size for each in inside}


def _fetch(location: Location, copy: Path, *, pipeline: bool) -> None:
    """Bring the copy of a checkpoint up to date, once for all processes of this machine.

    Raises:
        NotWhole: The checkpoint is not.
        FileNotFoundError: A file has just been deleted.
    """
    sizes = _sizes(location)
    if not 0 <= sizes.get(MANIFEST_NAME, -1) <= MAX_BYTES:
        raise NotWhole(f"{MANIFEST_NAME} is missing, or has more than {MAX_BYTES:,} bytes")
    text = location.read(MANIFEST_NAME)
    try:
        files = checkpoint.files_of(parse_json(text))
    except ValueError as error:
        raise NotWhole(f"{MANIFEST_NAME} cannot be read ({error})") from error
    for name, (size, _) in files.items():
        if sizes.get(name) != size:  # names that lead elsewhere have none
            raise NotWhole(
                f"{name} has {sizes[name]} bytes instead of {size}" if name in sizes else f"{name} is missing"
            )
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _locked(copy):
        if copy.exists() and not ((copy / MANIFEST_NAME).is_file() and (copy / MANIFEST_NAME).read_bytes() == text):
            atomic.delete_folder(copy)  # of another checkpoint of that step
        copy.mkdir(exist_ok=True)
        atomic.write_whole(copy / MANIFEST_NAME, text)
        wanted = [n for n in files if (pipeline if n.startswith("pipeline/") else not n.endswith(".safetensors"))]
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(lambda name: _bring(location, copy, name, files[name][1]), wanted))


def _locked(copy: Path) -> FileLock:
    return FileLock(copy.with_name(f".{copy.name}.lock"), thread_local=False, fallback_to_soft=False)


def _bring(location: Location, copy: Path, name: str, digest: str) -> None:
    path = copy / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.new_file(path) as tmp:
        location.fetch(name, tmp)
        with open(tmp, "rb", buffering=0) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise NotWhole(f"{name} was altered (its SHA-256 differs)")


@lru_cache(maxsize=8)  # a client of S3 takes a second
def location_of(copy: Path) -> Location:
    """Return where the files of a checkpoint's copy come from."""
    return open_location(name_of(copy), key="checkpoint")


def fetch_file(path: Path) -> None:
    """Fetch a tensor file in the state of a copy whole, once for all processes of this machine.

    Raises:
        UsageError: It is not that of the manifest.
    """
    copy = path.parents[1]
    name = path.relative_to(copy).as_posix()
    try:
        with _locked(copy):
            _bring(location_of(copy), copy, name, checkpoint.files_of(read_json(copy / MANIFEST_NAME))[name][1])
    except (NotWhole, FileNotFoundError) as problem:
        raise UsageError(f"{name_of(copy)} is damaged: {problem}; use another checkpoint.") from problem


def fetch_records(url: str, folder: Path, wanted: Callable[[str], bool], *, who: str) -> None:
    """Fetch what a run has recorded, such as its settings, logs and summary; existing files are replaced.

    Args:
        url: The run.
        folder: Where the files go.
        wanted: Which files, by name.
        who: Name of the setting, for messages.

    Raises:
        UsageError: There is nothing at the URL, or it cannot be read.
    """
    location = open_location(url, key=who)
    sizes = _sizes(location)
    if not sizes:
        raise UsageError(f"{who}={url}: there is nothing at that URL; expected a run; correct the URL")

    def bring(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        location.fetch(name, folder / name)

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(bring, filter(wanted, sizes)))
