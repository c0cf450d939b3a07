"""Time of `from sd_lightning import SDLightningModule` against `import lightning.pytorch`, in fresh processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import interleaved, medians, spread

BARS = {"ratio": "<= 1.1"}

SOURCE = Path(__file__).resolve().parents[2] / "src"
SIDES = {
    "sd_lightning": "from sd_lightning import SDLightningModule",
    "lightning": "import lightning.pytorch",
    "package_only": "import sd_lightning",
}


def seconds_of(statement: str) -> float:
    """Wall seconds of one import statement in a fresh interpreter, its own start not counted."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{statement!r} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def measure(rounds: int = 9) -> dict[str, float]:
    """Medians over interleaved runs; `ratio` is ours over Lightning's."""

    def side(statement: str) -> Callable[[], float]:
        return lambda: seconds_of(statement)

    taken = interleaved({name: side(statement) for name, statement in SIDES.items()}, rounds=rounds)
    middle = medians(taken)
    return {
        "ratio": middle["sd_lightning"] / middle["lightning"],
        "sd_lightning_seconds": middle["sd_lightning"],
        "lightning_seconds": middle["lightning"],
        "package_only_seconds": middle["package_only"],
        "spread": max(spread(figures) for name, figures in taken.items() if name != "package_only"),
        "rounds": rounds,
    }
