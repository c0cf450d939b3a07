"""Time of `from sd_lightning import SDLightningModule` against `import lightning.pytorch`, in fresh processes."""

import subprocess
import sys
from functools import partial

from timing import interleaved, ratios

BARS = {"ratio": "<= 1.1"}
TABLE = {"`from sd_lightning import SDLightningModule` to `import lightning.pytorch`": "{ratio} ×"}

SIDES = {
    "sd_lightning": "from sd_lightning import SDLightningModule",
    "lightning": "import lightning.pytorch",
    "package_only": "import sd_lightning",
}


def peers() -> dict[str, dict[str, str]]:
    """Return Lightning, as it is."""
    return {"lightning": {}}


def seconds_of(statement: str) -> float:
    """Wall seconds of one import statement in a fresh interpreter, its own start not counted."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{statement!r} failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def measure(rounds: int = 9) -> dict[str, list[float]]:
    """Interleaved runs; `ratio` is ours over Lightning's."""
    taken = interleaved({name: partial(seconds_of, text) for name, text in SIDES.items()}, rounds=rounds)
    return {
        "ratio": ratios(taken["sd_lightning"], taken["lightning"]),
        **{f"{name}_seconds": figures for name, figures in taken.items()},
    }
