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
TABLE = ladder.rows("sd15 on GPUs")


def measure(setting: ladder_runs.Setting | None = None, **options: Any) -> Measured:
    """Train every rung once.

    Args:
        setting: What is trained; sd15 if not given.
        **options: Of :func:`ladder_runs.measure`.
    """
    of_sd15 = ladder_runs.Setting("sd15", resolution=512, photo_size=768, batch_sizes=(4, 16), steps=12, photos=256)
    return ladder_runs.measure(setting or of_sd15, rounds=1, **options)
