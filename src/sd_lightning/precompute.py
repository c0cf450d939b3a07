"""Encode a data set once: ``python -m sd_lightning.precompute store=<folder> [key=value …]``."""

from __future__ import annotations

from typing import Literal

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "precompute",
    "sd_lightning.apps.precompute.run",
    among=PROGRAMS,
    reserved={"model": {"deferred"}},
    hints={
        "store": str,
        "action": Literal["encode", "prune", "verify"],
        "dry_run": bool,
        "latents": str,
        "dtype": str,
        "compute_dtype": str,
        "variants": int,
        "workers": int | str,
        "shard_mb": float,
        "text": bool,
        "drop_texts": str | None,
        "table": str | None,
        "recipe": str | None,
        "seed": int,
    },
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
