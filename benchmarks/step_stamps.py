"""Run a training program and write when each of its optimizer steps ended, whoever wrote the program.

    python benchmarks/step_stamps.py STAMPS.json MODULE [ARGUMENT…]    like python -m MODULE ARGUMENT…

STAMPS.json becomes `{"steps": …, "denoiser": …}`: seconds of one clock at the end of each optimizer step, and the
seconds that forward and backward of diffusers' UNet took in each, so that what a program adds to them can be told.
"""

import atexit
import functools
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def record(path: Path) -> None:
    """From now on note the steps of this process; write them to ``path`` at its exit.

    Only the optimizer that steps last counts: a program may try one on parameters of nothing before it trains.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps: list[float] = []
    denoiser: list[float] = []
    spent = 0.0
    stepping: Any = None

    def note(optimizer: Any, *_: Any) -> None:
        nonlocal spent, stepping
        if optimizer is not stepping:
            steps.clear()
            denoiser.clear()
            stepping = optimizer
        steps.append(time.perf_counter())
        denoiser.append(spent)
        spent = 0.0

    def add(seconds: float) -> None:
        nonlocal spent
        spent += seconds

    register_optimizer_step_post_hook(note)
    _time_denoiser(add)
    atexit.register(lambda: path.write_text(json.dumps({"steps": steps, "denoiser": denoiser})))


def _time_denoiser(add: Any) -> None:
    """Call ``add(seconds)`` after every forward and every backward of a UNet that is trained.

    Its backward is the end of the whole backward: nothing before it is trained. It begins when the gradient of its
    output is there.
    """
    import torch
    from diffusers import UNet2DConditionModel

    forward = UNet2DConditionModel.forward

    def begin_backward(_: Any) -> None:
        begin = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: add(time.perf_counter() - begin))

    @functools.wraps(forward)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        found = forward(self, *args, **kwargs)
        if found[0].requires_grad:
            add(time.perf_counter() - begin)
            found[0].register_hook(begin_backward)
        return found

    UNet2DConditionModel.forward = timed


def main() -> None:
    """The command line."""
    record(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = ""  # as python -m has it: the working directory, not this folder
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
