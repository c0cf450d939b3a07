"""Runs put into a bucket, as uploads leave them."""

from pathlib import Path

from locations import opened
from sd_lightning.storage.runs import MARK


def put(folder: Path, url: str) -> None:
    """Copy the folder of a run, or a part of it, to a URL: manifests last."""
    location = opened(url, "test")
    files = [path for path in folder.rglob("*") if path.is_file() and (path.name == MARK or path.name[0] != ".")]
    for path in sorted(files, key=lambda path: path.name == "manifest.json"):
        name = path.relative_to(folder).as_posix()
        location.delete(name)
        location.create(name, path.read_bytes())
