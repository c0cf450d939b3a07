"""Run a training program and write when each of its optimizer steps ended, whoever wrote the program.

    python benchmarks/step_stamps.py STAMPS.json MODULE [ARGUMENT…]    like python -m MODULE ARGUMENT…

STAMPS.json becomes `{"steps": …, "peak_bytes": …, "denoiser": …, "encoders": …, "optimizer": …}`: seconds of one clock
at the end of each optimizer step, the most memory of the process, and the seconds of each step that went into forward
and backward of diffusers' UNet, into the VAE's and the text encoder's forward, and into the optimizer. The rest is what
a program adds to them.
"""

import atexit
import functools
import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from process_memory import peak

PARTS = ("denoiser", "encoders", "optimizer")


def record(path: Path) -> None:
    """From now on note the steps of this process; write them to ``path`` at its exit.

    Only the optimizer that steps last counts: a program may try one on parameters of nothing before it trains.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps: list[float] = []
    taken: dict[str, list[float]] = {part: [] for part in PARTS}
    spent = dict.fromkeys(PARTS, 0.0)
    stepping: Any = None
    begin = 0.0

    def start(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal begin
        begin = time.perf_counter()
        closure = kwargs.get("closure")
        return args, kwargs | ({"closure": functools.partial(compute, closure)} if closure else {})

    def compute(closure: Callable[[], Any]) -> Any:
        """Lightning's forward and backward, within the optimizer's step."""
        nonlocal begin
        loss = closure()
        begin = time.perf_counter()
        return loss

    def note(optimizer: Any, *_: Any) -> None:
        nonlocal stepping
        if optimizer is not stepping:
            for times in (steps, *taken.values()):
                times.clear()
            stepping = optimizer
        steps.append(time.perf_counter())
        spent["optimizer"] = steps[-1] - begin
        for part in PARTS:
            taken[part].append(spent[part])
            spent[part] = 0.0

    def add(part: str, seconds: float) -> None:
        spent[part] += seconds

    register_optimizer_step_pre_hook(start)
    register_optimizer_step_post_hook(note)
    _time_denoiser(functools.partial(add, "denoiser"))
    _time_encoders(functools.partial(add, "encoders"))
    atexit.register(lambda: path.write_text(json.dumps({"steps": steps, "peak_bytes": peak()} | taken)))


def _time_denoiser(add: Callable[[float], None]) -> None:
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


def _time_encoders(add: Callable[[float], None]) -> None:
    """Call ``add(seconds)`` after every call of the encoders; they are frozen, so that they have no backward."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = function(*args, **kwargs)
            add(time.perf_counter() - begin)
            return found

        return call

    AutoencoderKL.encode = timed(AutoencoderKL.encode)
    CLIPTextModel.forward = timed(CLIPTextModel.forward)


def main() -> None:
    """The command line."""
    record(Path(sys.argv[1]))
    sys.argv = sys.argv[2:]
    sys.path[0] = ""  # as python -m has it: the working directory, not this folder
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
