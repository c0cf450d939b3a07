"""Starts ``python -m sd_lightning.train launcher=ray`` on a cluster, ends its workers, and looks at how it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import psutil
from lightning.pytorch.callbacks import Callback

from sd_lightning.storage import checkpoint

SMALL = (
    "trainer.accelerator=cpu",
    "data.batch_size=8",
    "data.cache_latents=false",
    "trainer.limit_val_batches=0",
    "callbacks.samples=null",
    "callbacks.checkpoint.every_n_steps=3",
    "+callbacks.progress.refresh_seconds=0",
    "lr_scheduler.warmup_steps=1",
)
"""Eight pictures a step, encoded on the fly; no validation, no pictures drawn; every step on the console."""
_NAME = "SD_LIGHTNING_TESTED_RUN"
"""Environment variable by which a run's workers are found."""


class ForkedWriter(Callback):
    """Writes at the end of training: from a forked process, as a loader's workers may, and a line without an end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            fork = multiprocessing.get_context("fork").Process(target=print, args=["written by a forked process"])
            fork.start()
            fork.join()
            print("a line without an end", end="")


class Training:
    """A training that is going on, with what the program shows in a file."""

    def __init__(self, address: str | None, output_dir: Path, *overrides: str, steps: int = 8) -> None:
        self.output_dir, self._name = output_dir, str(output_dir)
        self.file = output_dir.with_name(f"{output_dir.name}-{time.monotonic_ns()}.log")
        launcher = ("launcher=ray", f"launcher.address={address}") if address else ()
        length = (f"trainer.max_steps={steps}", f"lr_scheduler.total_steps={steps}")
        command = [sys.executable, "-m", "sd_lightning.train", *launcher, *SMALL, *length, f"output_dir={output_dir}"]
        here = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
        environment = os.environ | {_NAME: self._name, "PYTHONPATH": here}
        with self.file.open("w") as output:
            self.program = subprocess.Popen([*command, *overrides], stdout=output, stderr=output, env=environment)

    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait(self, seconds: float = 300) -> int:
        """Wait for the program's end; return its exit code."""
        return self.program.wait(seconds)

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Wait until the program has shown a text."""
        until = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < until, f"no {text!r} in {seconds:.0f} s:\n{self.output()[-4000:]}"
            assert self.program.poll() is None, self.output()[-4000:]
            time.sleep(0.05)

    def worker(self, rank: int) -> psutil.Process:
        """Return the process of a rank, of two."""
        first = int((self.output_dir / ".lock").read_text().split()[0])
        (other,) = [each for each in self.workers() if each.pid != first]
        return psutil.Process(first) if rank == 0 else other

    def workers(self) -> list[psutil.Process]:
        """Return the processes of Ray's workers that train."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            is_worker = " ".join(process.info["cmdline"] or []).startswith("ray::RayTrainWorker")
            with suppress(psutil.Error):
                if is_worker and process.environ().get(_NAME) == self._name:
                    found.append(process)
        return found

    def end(self) -> None:
        """End what is left of it."""
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGKILL)
            self.program.wait(30)


def weights(run_dir: Path) -> dict[str, bytes]:
    """Return the bytes of a run's last weights, by file."""
    last = checkpoint.newest_valid(run_dir)
    assert last is not None
    return {path.name: path.read_bytes() for path in sorted((last / "pipeline" / "unet").glob("*.safetensors"))}
