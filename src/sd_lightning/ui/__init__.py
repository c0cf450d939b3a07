"""A page in the browser: teach subjects, watch runs, draw pictures: ``python -m sd_lightning.ui [key=value …]``.

It starts the other programs as processes that outlive it, and reads the folders that they write.
"""

from __future__ import annotations

from sd_lightning import _conf
from sd_lightning.apps import PROGRAMS

PROGRAM = _conf.Program(
    "ui",
    "sd_lightning.ui.server.run",
    among=PROGRAMS,
    hints={"runs": str, "folders": list[str], "host": str, "port": int, "token": str | None},
)
