"""The ladder on this machine: the tiny model on JPEG photos, a run of the program per rung, in turns.

On a CPU two processes of one thread train over gloo. What the planner predicts is in `ladder_forecast`.
"""

from collections.abc import Iterator
from typing import Any

import ladder
import ladder_runs
from lines import Measured

BARS = {"gained": ">= 1.3"}
SETTING = ladder_runs.Setting("tiny", resolution=32, photo_size=256, batch_sizes=(8, 32), steps=24)
TABLE = ladder.rows("tiny model") | {"tiny model, the fastest rung to the first": "{gained} ×"}


def measure(rounds: int = 3, **options: Any) -> Iterator[Measured]:
    """Train every rung.

    Args:
        rounds: Runs of each rung.
        **options: Of :func:`ladder_runs.measure`.
    """
    return ladder_runs.measure(SETTING, rounds=rounds, **options)
