"""Generate images with a trained run or a pretrained pipeline: ``python -m sd_lightning.generate [key=value …]``."""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "generate",
    "sd_lightning.apps.generate.run",
    among=PROGRAMS,
    instead={"model": "write run=runs/<name>, or model.pretrained=<hub id or folder>"},
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
