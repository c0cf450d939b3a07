"""Encode a data set once: ``python -m sd_lightning.precompute store=<folder> [key=value …]``."""

from __future__ import annotations

import sys
from typing import Literal

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

ACTIONS = ("prune", "verify", "export", "import")
"""What else the program does with a store: ``python -m sd_lightning.precompute prune store=<folder>``."""
PROGRAM = _conf.Program(
    "precompute",
    "sd_lightning.apps.precompute.run",
    among=PROGRAMS,
    given={"model": {"deferred"}},
    hints={
        "store": str,
        "action": Literal["encode", "prune", "verify", "export", "import"],
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


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ACTIONS:
        sys.argv[1] = f"action={sys.argv[1]}"
    _conf.main(PROGRAM)


if __name__ == "__main__":
    main()
