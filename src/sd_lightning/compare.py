"""Compare runs from their folders alone: ``python -m sd_lightning.compare <run> <run> [<run> …] [key=value …]``."""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "compare",
    "sd_lightning.apps.compare.run",
    among=PROGRAMS,
    hints={"runs": list[str], "output": str | None, "price": float | None},
    words="runs",
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
