"""Starts ``python -m sd_lightning.train`` on two processes by each launcher, and looks at how it ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from lightning.fabric.plugins.environments.lightning import find_free_network_port

SMALL = (
    "strategy=fsdp",
    "trainer.accelerator=cpu",
    "data.batch_size=8",
    "data.cache_latents=false",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1",
    "callbacks.samples=null",
    "+callbacks.progress.refresh_seconds=0",
    "logger=csv",
    "lr_scheduler.warmup_steps=1",
)
"""Eight pictures a step, encoded on the fly; no validation, no pictures drawn."""

BIN = Path(sys.executable).parent
TRAIN = "sd_lightning.train"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}


def command(launcher: str, *, steps: int = 2) -> list[list[str]]:
    """Return the commands that a launcher takes: one, or under SLURM one per task."""
    port = str(find_free_network_port())
    run = [TRAIN, *SMALL, "trainer.devices=2", f"trainer.max_steps={steps}", f"lr_scheduler.total_steps={steps}"]
    prefixes = {
        "lightning": [sys.executable, "-m"],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "-m"],
        "accelerate": [
            *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
            *("--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={port}", "-m"),
        ],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus=2", f"--master_port={port}", "--module"],
        "slurm": [sys.executable, "-m"],
    }
    return [prefixes[launcher] + run] * (2 if launcher == "slurm" else 1)


def slurm_task(rank: int, job_id: int) -> dict[str, str]:
    """Return what ``srun --ntasks-per-node=2`` tells a task."""
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


class Launched:
    """A training that is going on, with the output of all its processes in a file."""

    def __init__(
        self, launcher: str, output_dir: Path, *overrides: str, steps: int = 2, env: Mapping[str, str] | None = None
    ) -> None:
        self.output_dir = output_dir
        self.output_file = output_dir.with_name(f"{output_dir.name}-{launcher}-{time.monotonic_ns()}.log")
        commands = [
            [*each, f"output_dir={output_dir}", *overrides] for each in reversed(command(launcher, steps=steps))
        ]
        self._launchers = []
        with self.output_file.open("w") as output:
            for rank, each in reversed(list(enumerate(commands))):  # the last rank comes first
                task = slurm_task(rank, os.getpid() * 10) if launcher == "slurm" else {}
                self._launchers.append(
                    subprocess.Popen(
                        each,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=os.environ | _ENVIRONMENT | task | dict(env or {}),
                        start_new_session=True,
                    )
                )

    def wait(self, seconds: float = 240) -> list[int]:
        """Wait for the launchers to end; return their exit codes."""
        until = time.monotonic() + seconds
        return [launcher.wait(max(until - time.monotonic(), 0.1)) for launcher in self._launchers]

    def wait_for(self, text: str, seconds: float = 180) -> None:
        """Wait until the output holds a text."""
        until = time.monotonic() + seconds
        while text not in self.output():
            assert time.monotonic() < until, f"no {text!r} in {seconds:.0f} s:\n{self.output()[-4000:]}"
            assert all(each.poll() is None for each in self._launchers), self.output()[-4000:]
            time.sleep(0.1)

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of a rank."""
        for process in self.processes():
            environment = process.environ()
            is_rank = environment.get("LOCAL_RANK", "0") == str(rank)
            if is_rank and "torchrun" not in " ".join(process.cmdline()):
                return process
        raise AssertionError(f"no rank {rank} among {self.processes()}")

    def processes(self) -> list[psutil.Process]:
        """Return every process of the run that exists, started by whomever."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            arguments = process.info["cmdline"] or []
            if f"output_dir={self.output_dir}" in arguments and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def end(self) -> None:
        """End what is left of it."""
        for process in self.processes():
            process.kill()
        for launcher in self._launchers:
            launcher.wait(30)

    def output(self) -> str:
        return self.output_file.read_text(errors="replace")


def losses(output_dir: Path) -> list[str]:
    """Read the logged loss of every step, digit by digit, and the summary's."""
    import csv

    files = list(output_dir.rglob("metrics.csv"))
    assert len(files) == 1, f"one process writes one log: {files}"
    with files[0].open() as file:
        logged = [row["train/loss"] for row in csv.DictReader(file) if row.get("train/loss")]
    summary: dict[str, Any] = json.loads((output_dir / "summary.json").read_text())
    return [*logged, str(summary["final_loss"])]
