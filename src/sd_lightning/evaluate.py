"""Measure how good a trained run is: ``python -m sd_lightning.evaluate run=<folder> [key=value …]``."""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "evaluate",
    "sd_lightning.apps.evaluate.run",
    among=PROGRAMS,
    instead={"model": "write run=runs/<name>, or a pipeline's folder"},
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
