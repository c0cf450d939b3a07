"""What ``precompute`` does with a store besides encoding, and which settings are for what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sd_lightning._errors import UsageError
from sd_lightning.apps.store_metadata import export_metadata, import_metadata
from sd_lightning.apps.store_upkeep import prune, verify

if TYPE_CHECKING:
    from omegaconf import DictConfig

ACTIONS: Mapping[str, Callable[[DictConfig], int]] = {
    "prune": lambda cfg: prune(cfg.store, dry_run=cfg.dry_run, drop_texts=cfg.drop_texts),
    "verify": lambda cfg: verify(cfg.store, dry_run=cfg.dry_run),
    "export": lambda cfg: export_metadata(cfg.store, recipe=cfg.recipe, table=Path(cfg.table)),
    "import": lambda cfg: import_metadata(cfg, table=Path(cfg.table)),
}
_ONLY_FOR = {
    "text": ("encode",),
    "dry_run": ("prune", "verify"),
    "drop_texts": ("prune",),
    "table": ("export", "import"),
    "recipe": ("export", "import"),
}
"""Settings -> the actions that they are for; the others would ignore them."""
_NOT_GIVEN = {"text": False, "dry_run": True, "drop_texts": None, "table": None, "recipe": None}


def check_action(cfg: DictConfig) -> None:
    """Check that the settings are for the action.

    Raises:
        UsageError: One is for another, or one is missing.
    """
    who = "precompute" if cfg.action == "encode" else f"precompute {cfg.action}"
    for key, actions in _ONLY_FOR.items():
        if cfg.action not in actions and cfg[key] != _NOT_GIVEN[key]:
            whose = " and ".join("encoding" if each == "encode" else f"precompute {each}" for each in actions)
            value = str(cfg[key]).lower() if isinstance(cfg[key], bool) else cfg[key]
            raise UsageError(f"{who} got {key}={value}; expected it only with {whose}; leave it out")
    if cfg.table is None and cfg.action in _ONLY_FOR["table"]:
        made = "to write" if cfg.action == "export" else "that precompute export wrote, with other captions"
        raise UsageError(f"{who} got no table=; expected a Parquet file {made}; write table=<file>.parquet")
