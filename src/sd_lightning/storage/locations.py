"""Open locations by their URL."""

from __future__ import annotations

import os
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage.local_folder import LocalFolder
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_object_store


def open_location(url: str | os.PathLike[str], *, key: str) -> Location:
    """Open a folder that may not exist yet; object stores are not asked before they are used.

    Args:
        url: A local path, or ``s3://bucket/…``, ``gs://bucket/…``, ``hf://datasets/…`` (read only).
        key: The setting that holds it, for messages, e.g. ``"data.store"``.

    Raises:
        UsageError: It is no folder, its protocol is not supported, or the package for it is not installed.
    """
    text = os.fspath(url)
    who = f"{key}={text}"
    protocol, separator, rest = text.partition("://")
    if separator and protocol != "file":
        return open_object_store(text, who=who)
    folder = Path(rest if separator else text).expanduser().absolute()
    if not text:
        raise UsageError(f"{key} is empty; expected a folder, or a URL such as s3://bucket/folder.")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{who} is a file; expected a folder, which need not exist; choose another path.")
    return LocalFolder(text.rstrip("/") or "/", folder, who)
