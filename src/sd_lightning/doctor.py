"""Say what this machine or cluster is, and what to change before a run: ``python -m sd_lightning.doctor``."""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "doctor",
    "sd_lightning.remote.doctor.run",
    among=PROGRAMS,
    hints={"output_dir": str | None},
)


if __name__ == "__main__":
    _conf.main(PROGRAM)
