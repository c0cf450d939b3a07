"""Run a training program and write when each of its optimizer steps ended, whoever wrote the program.

    python benchmarks/step_stamps.py STAMPS.json MODULE [ARGUMENT…]    like python -m MODULE ARGUMENT…

STAMPS.json becomes a list of seconds of one clock.
"""

import atexit
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def record(path: Path) -> None:
    """From now on note the end of every optimizer step in this process; write them to ``path`` at its exit.

    Only the optimizer that steps last counts: a program may try one on parameters of nothing before it trains.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    stamps: list[float] = []
    stepping: Any = None

    def note(optimizer: Any, *_: Any) -> None:
        nonlocal stepping
        if optimizer is not stepping:
            stamps.clear()
            stepping = optimizer
        stamps.append(time.perf_counter())

    register_optimizer_step_post_hook(note)
    atexit.register(lambda: path.write_text(json.dumps(stamps)))


def main() -> None:
    """The command line."""
    record(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = ""  # as python -m has it: the working directory, not this folder
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
