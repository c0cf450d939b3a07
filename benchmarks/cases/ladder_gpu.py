"""The ladder on the GPUs of this machine: Stable Diffusion 1.5 with random weights on photos of 512 x 512 pixels.

Beside each rung is what the planner predicts, calibrated here.
"""

from collections.abc import Iterator
from typing import Any

import ladder
import ladder_runs
from lines import Measured
from sd_lightning.planner.measuring import Effort
from training_runs import Run

BARS: dict[str, str] = {}
MEASURED = {"ema": Run("sd15", 512, "single", batch_size=16)}
SETTING = ladder_runs.Setting("sd15", resolution=512, photo_size=768, batch_sizes=(4, 16), steps=12, photos=256)
TABLE = ladder.rows("sd15 on GPUs") | ladder.told("sd15 on GPUs", memory=True)


DRY = {
    "setting": ladder_runs.Setting("tiny", 32, photo_size=48, batch_sizes=(4, 16), steps=3, photos=48),
    "rungs": ("baseline", "tf32"),
    "effort": Effort(least=1e-4, sizes=2, stepped=2**20, links=False),
}


def measure(
    setting: ladder_runs.Setting = SETTING,
    *,
    rungs: tuple[str, ...] | None = None,
    effort: Any = None,
    done: Measured = ladder_runs.NOTHING,
) -> Iterator[Measured]:
    """Train every rung once, then predict it.

    Args:
        setting: What is trained.
        rungs: Names of those to run; all if not given.
        effort: How long the calibration may take.
        done: Metrics of a run that was stopped; rungs that it has are not run again.
    """
    measured: Measured = {}
    for measured in ladder_runs.measure(setting, rounds=1, rungs=rungs, done=done):
        yield measured
    for told in ladder_runs.forecast(setting, rungs=rungs, effort=effort):
        yield {**told, **measured}
