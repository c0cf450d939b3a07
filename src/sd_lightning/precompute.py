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
    place = next((place for place, given in enumerate(sys.argv) if place and given in ACTIONS), None)
    if place is not None:  # also behind settings
        sys.argv[place] = f"action={sys.argv[place]}"
    _conf.main(PROGRAM)


if __name__ == "__main__":
    main()
