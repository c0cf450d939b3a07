"""Runs in buckets: the folders that stand for them on this machine, and what is fetched of them."""

from __future__ import annotations

import os
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.storage.providers import PROVIDERS

CACHE = "SD_LIGHTNING_CACHE"
"""Environment variable: the folder for runs in buckets; ``~/.cache/sd_lightning`` by default."""


def is_url(place: object) -> bool:
    """Return whether a run or model is named by the URL of a bucket."""
    return str(place).partition("://")[0] in PROVIDERS and "://" in str(place)


def working_folder(url: str) -> Path:
    """Return the folder in which the run of a URL works on this machine."""
    return _place("runs", url)


def _place(kind: str, url: str) -> Path:
    protocol, _, rest = url.rstrip("/").partition("://")
    names = rest.split("/")
    if protocol not in PROVIDERS or any(name in ("", ".", "..") or "\0" in name for name in names):
        raise UsageError(
            f"{url}: no place of a run; expected {', '.join(f'{each}://bucket/folder' for each in PROVIDERS)}, without "
            "empty names, . and .."
        )
    return Path(_cache(), kind, protocol, *names)


def _cache() -> Path:
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "sd_lightning").absolute()


def url_of(path: Path) -> str | None:
    """Return the URL that a path of this cache stands for; None for other paths."""
    path, cache = path.absolute(), _cache()
    names = path.relative_to(cache).parts if path.is_relative_to(cache) else ()
    is_ours = len(names) > 2 and names[0] in ("runs", "fetched", "records") and names[1] in PROVIDERS
    return f"{names[1]}://{'/'.join(names[2:])}" if is_ours else None


def name_of(path: str | os.PathLike[str]) -> str:
    """Return how users name a path: by its URL if it is a copy."""
    return url_of(Path(path)) or os.fspath(path)
