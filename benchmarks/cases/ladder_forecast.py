"""The rungs of `ladder` as the planner predicts them for this machine, which is calibrated for it."""

from collections.abc import Iterator
from typing import Any

import ladder
import ladder_runs
from cases.ladder import SETTING
from lines import Measured

BARS: dict[str, str] = {}
TABLE = ladder.told("tiny model")


def measure(**options: Any) -> Iterator[Measured]:
    """Predict every rung.

    Args:
        **options: Of :func:`ladder_runs.forecast`.
    """
    return ladder_runs.forecast(SETTING, **options)
