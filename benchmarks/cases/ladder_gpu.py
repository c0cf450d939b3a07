"""The ladder on the GPUs of this machine: Stable Diffusion 1.5 with random weights on photos of 512 x 512 pixels.

Beside each rung is what the planner predicts, calibrated here.
"""

from typing import Any

import ladder
import ladder_runs
from lines import Measured
from training_runs import Run

BARS: dict[str, str] = {}
MEASURED = {"ema": Run("sd15", 512, "single", batch_size=16)}
SETTING = ladder_runs.Setting("sd15", resolution=512, photo_size=768, batch_sizes=(4, 16), steps=12, photos=256)
TABLE = ladder.rows("sd15 on GPUs") | ladder.told("sd15 on GPUs", memory=True)


def measure(
    setting: ladder_runs.Setting = SETTING, *, rungs: tuple[str, ...] | None = None, effort: Any = None
) -> Measured:
    """Train every rung once, and predict it.

    Args:
        setting: What is trained.
        rungs: Names of those to run; all if not given.
        effort: How long the calibration may take.
    """
    told = ladder_runs.forecast(setting, rungs=rungs, effort=effort)
    return {**told, **ladder_runs.measure(setting, rounds=1, rungs=rungs)}
