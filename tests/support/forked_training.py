"""`python -m sd_lightning.train` many times for one import: each run is a fork of a process that has imported it.

Import this only in a process started for it (with OMP_NUM_THREADS=1: a thread pool does not survive a fork).
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

os.environ["OMP_NUM_THREADS"] = "1"

# What a run imports later on; nothing of it computes.
import diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion  # noqa: E402, F401
import lightning.pytorch  # noqa: E402, F401
import matplotlib.figure  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
import sklearn.model_selection  # noqa: E402, F401
import transformers.models.clip.modeling_clip  # noqa: E402, F401

import sd_lightning.apps.train  # noqa: E402, F401
import sd_lightning.callbacks  # noqa: E402, F401
import sd_lightning.data.builders  # noqa: E402, F401
import sd_lightning.report  # noqa: E402, F401
import sd_lightning.training.module  # noqa: E402, F401
from sd_lightning import _conf, train  # noqa: E402

SMALL = (
    "data.batch_size=8",
    "data.cache_latents=false",
    "trainer.limit_val_batches=0",
    "callbacks.samples=null",
    "logger=csv",
    "lr_scheduler.warmup_steps=3",
)
"""Eight pictures a step, encoded on the fly; no validation, no pictures drawn."""


class Command:
    """A run in a process of its own, with its output in a file."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self._output = output
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _child(arguments, output)

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the signal's number."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def ended(self) -> bool:
        """Whether it has ended by now."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> bool:
        """Wait until something has happened; return whether it did while the run was going on."""
        until = time.monotonic() + seconds
        while not condition():
            if self.ended() or time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def send(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> bool:
        """End it at once; return whether it was still running."""
        if self.ended():
            return False
        os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def output(self) -> str:
        return self._output.read_text()


def start(run_dir: Path, *overrides: str) -> Command:
    """Start a small run in a directory."""
    arguments = [f"output_dir={run_dir}", *SMALL, *overrides]
    return Command(arguments, run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}.log"))


def _child(arguments: list[str], output: Path) -> NoReturn:
    code = 1
    try:
        handle = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.argv[1:] = arguments
        _conf.main(train.PROGRAM)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
