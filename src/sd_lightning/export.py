"""Export a trained model for other programs: ``python -m sd_lightning.export run=… format=… [key=value …]``."""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "export", "sd_lightning.apps.export.run", among=PROGRAMS, instead={"model": "write run=runs/<name>"}
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
