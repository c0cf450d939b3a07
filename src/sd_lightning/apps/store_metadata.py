"""``precompute export`` and ``precompute import``: the metadata of a store as a Parquet table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning._errors import UsageError
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.apps.store_upkeep import stores
from sd_lightning.data.store.metadata import CaptionImport, export_table
from sd_lightning.data.store.store import LatentStore
from sd_lightning.data.store.texts import text_kinds
from sd_lightning.data.store.tokenizing import Tokenizing

if TYPE_CHECKING:
    from omegaconf import DictConfig


def export_metadata(store: str, *, recipe: str | None, table: Path) -> int:
    """Write the metadata of a store to a new Parquet file."""
    if table.exists() or not table.absolute().parent.is_dir():
        problem = "exists" if table.exists() else "is in a folder that does not exist"
        raise UsageError(f"precompute export: table={table} {problem}; expected a new file; write another name")
    with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
        count = export_table(chosen(store, recipe, action="export"), table, Path(scratch))
    print(f"{table}: {count} rows")
    return 0


def import_metadata(cfg: DictConfig, *, table: Path) -> int:
    """Replace captions of a store by those of a Parquet file; ``model=`` makes their token ids."""
    source = RunSpec.of(cfg).model
    source.check()
    folder = chosen(cfg.store, cfg.recipe, action="import")
    tokenizing = Tokenizing.of(source.load(deferred=("all",)))
    with folder.locked(), tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
        job = CaptionImport(folder, table, tokenizing, Path(scratch))
        job.run()
        has_texts = bool(text_kinds(folder))
    counts = job.counts
    print(
        f"{folder.folder.url}: {counts.changed} samples have other captions, {counts.same} have these already, "
        f"{counts.absent} are not in the table and keep theirs"
    )
    if counts.changed and has_texts:
        print("their text embeddings are missing now: run precompute with text=true")
    return 0


def chosen(store: str, recipe: str | None, *, action: str) -> LatentStore:
    """Return the folder of the one recipe of a store whose fingerprint begins with ``recipe``, if that is given.

    Raises:
        UsageError: There is none, or several.
    """
    found = list(stores(store))
    fits = [each for each in found if each.recipe.fingerprint.startswith(recipe or "")]
    if len(fits) != 1:
        told = "; ".join(f"{each.recipe.fingerprint}: {each.recipe.told()}" for each in fits or found)
        given = "" if recipe is None else f" that begin with {recipe}"
        raise UsageError(
            f"precompute {action}: store={store} has {len(fits) or 'no'} recipes{given}; expected one of ({told}); "
            f"write recipe={(fits or found)[0].recipe.fingerprint}"
        )
    return fits[0]
