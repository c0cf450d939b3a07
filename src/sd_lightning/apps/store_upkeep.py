"""``precompute prune`` and ``precompute verify``: what they print, and delete on request."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sd_lightning._errors import UsageError
from sd_lightning.data.store.layout import LatentStore, recipes
from sd_lightning.data.store.texts import TEXTS, missing_texts, places_of, text_kinds
from sd_lightning.data.store.upkeep import NO_OTHER_LIST, Pruning, broken_files, missing_files
from sd_lightning.storage.object_store import open_location


def prune(store: str, *, dry_run: bool, drop_texts: str | None = None) -> int:
    """Print what a store no longer refers to, and its text embeddings; delete what is unused unless ``dry_run``.

    Args:
        store: URL of the store.
        dry_run: Only print.
        drop_texts: Beginning of the name of a kind of text embeddings to delete as well. Whether anybody still trains
            with its text encoders is for the user to know.

    Raises:
        UsageError: There is no store, or not one such kind.
    """
    freed = 0
    kind = None if drop_texts is None else _kind(store, drop_texts)
    for each in stores(store):
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch, each.locked():
            pruning = Pruning(each, Path(scratch), drop_texts=kind)
            unused = pruning.unused
            print(
                f"{each.folder.url}: {len(unused.files)} files that nothing refers to and {len(unused.partly)} partly "
                f"used: {unused.freed / 1e6:.3g} MB"
            )
            for texts in text_kinds(each):
                sizes = each.present(texts)
                dropped = ", to be deleted" if texts == kind else ""
                print(f"{each.folder.url}/{texts}: {len(sizes)} files, {sum(sizes.values()) / 1e6:.3g} MB{dropped}")
            freed += unused.freed
            if not dry_run:
                pruning.run()
    given = "" if drop_texts is None else f" drop_texts={drop_texts}"
    again = f"; to do it: python -m sd_lightning.precompute prune store={store}{given} dry_run=false" if dry_run else ""
    print(f"{freed / 1e6:.3g} MB {'would be' if dry_run else 'are'} freed{again if freed else ''}")
    return 0


def verify(store: str, *, dry_run: bool) -> int:
    """Read a store, and print the files that are not what was written, or not there.

    Those that are not what was written are deleted unless ``dry_run``; a list of samples only if another can be read.
    """
    num_broken = num_missing = num_stay = 0
    for each in stores(store):
        with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
            with suppress(UsageError):  # a broken list of samples is told of below, and says nothing
                for path in missing_files(each, Path(scratch)):
                    print(f"{each.folder.url}/{path}: it is not there, although samples need it")
                    num_missing += 1
                _print_incomplete(each)
            for path, reason in broken_files(each, Path(scratch)):
                print(f"{each.folder.url}/{path}: {reason}")
                num_broken += 1
                if reason == NO_OTHER_LIST:
                    num_stay += 1
                elif not dry_run:
                    each.folder.delete(path)
    if not num_broken + num_missing:
        print(f"{store}: all files are what was written")
        return 0
    delete = ""
    if num_broken > num_stay:
        command = f"python -m sd_lightning.precompute verify store={store} dry_run=false"
        delete = f"delete the broken ones with {command}, and " if dry_run else "the broken ones are deleted; "
    print(
        f"{num_broken} broken and {num_missing} missing files; {delete}run precompute again, which encodes only what "
        "is missing"
    )
    return 1


def _print_incomplete(store: LatentStore) -> None:
    """Print the kinds of text embeddings that lack captions: of a job that was killed, or since captions were added."""
    generation = store.generation()
    for kind in text_kinds(store):
        if lacking := len(missing_texts(store, generation, kind)):
            complete = "run precompute with text=true and the same model, or "
            if not store.present(places_of(kind)):  # no job completes a kind of earlier code
                complete = "if an earlier version wrote it, "
            print(
                f"{store.folder.url}/{kind}: the captions of {lacking} sample files have no embeddings, so training "
                f"encodes captions itself; {complete}delete all of this kind with precompute prune "
                f"drop_texts={kind.removeprefix(f'{TEXTS}/')}"
            )


def _kind(url: str, prefix: str) -> str:
    """Return the kind of text embeddings whose name begins with a prefix."""
    kinds = sorted({kind for store in stores(url) for kind in text_kinds(store)})
    matching = [kind for kind in kinds if kind.removeprefix(f"{TEXTS}/").startswith(prefix)]
    if len(matching) != 1:
        names = ", ".join(kind.removeprefix(f"{TEXTS}/") for kind in kinds) or "none"
        raise UsageError(
            f"precompute prune got drop_texts={prefix}, with which {len(matching)} kinds of text embeddings begin; "
            f"expected one of those of {url}: {names}; precompute prune lists their sizes"
        )
    return matching[0]


def stores(url: str) -> Iterator[LatentStore]:
    """Return the folders of all recipes of a store.

    Raises:
        UsageError: There is none.
    """
    root = open_location(url, key="store")
    of_store = recipes(root)
    if not of_store:
        raise UsageError(
            f"store={url}: there is no latent store; expected a folder that sd_lightning.precompute wrote; write "
            "store=<folder>"
        )
    return (LatentStore(root, recipe) for recipe in of_store)
