"""``precompute prune`` and ``precompute verify``: what they print, and delete on request."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.data.store.store import LatentStore, recipes
from sd_lightning.data.store.upkeep import Pruning, broken_files, missing_files
from sd_lightning.storage.locations import open_location


def prune(store: str, *, dry_run: bool) -> int:
    """Print what a store no longer refers to; delete it unless ``dry_run``."""
    freed = 0
    for each in stores(store):
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch, each.locked():
            pruning = Pruning(each, Path(scratch))
            unused = pruning.unused
            print(
                f"{each.folder.url}: {len(unused.files)} files that nothing refers to and {len(unused.partly)} partly "
                f"used: {unused.freed / 1e6:.3g} MB"
            )
            freed += unused.freed
            if not dry_run:
                pruning.run()
    again = f"; to do it: python -m sd_lightning.precompute prune store={store} dry_run=false" if dry_run else ""
    print(f"{freed / 1e6:.3g} MB {'would be' if dry_run else 'are'} freed{again if freed else ''}")
    return 0


def verify(store: str, *, dry_run: bool) -> int:
    """Read a store, and print the files that are not what was written, or not there.

    Those that are not what was written are deleted unless ``dry_run``.
    """
    num_broken = num_missing = 0
    for each in stores(store):
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
            for path in missing_files(each, Path(scratch)):
                print(f"{each.folder.url}/{path}: it is not there, although samples need it")
                num_missing += 1
            for path, reason in broken_files(each, Path(scratch)):
                print(f"{each.folder.url}/{path}: {reason}")
                num_broken += 1
                if not dry_run:
                    each.folder.delete(path)
    if not num_broken + num_missing:
        print(f"{store}: all files are what was written")
        return 0
    again = "run"
    if num_broken:
        again = (
            f"delete the broken ones with python -m sd_lightning.precompute verify store={store} dry_run=false, and run"
            if dry_run
            else "the broken ones are deleted; run"
        )
    print(
        f"{num_broken} broken and {num_missing} missing files; {again} precompute again, which encodes only what is "
        "missing"
    )
    return 1


def stores(url: str) -> Iterator[LatentStore]:
    """Return the folders of all recipes of a store.

    Raises:
        UsageError: There is none.
    """
    root = open_location(url, key="store")
    found = recipes(root)
    if not found:
        raise UsageError(
            f"store={url}: there is no latent store; expected a folder that sd_lightning.precompute wrote; write "
            "store=<folder>"
        )
    return (LatentStore(root, recipe) for recipe in found)
