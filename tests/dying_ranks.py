"""Lets ranks die, raise, freeze and hang in the midst of training, and tells how each process of the run ended.

``python dying_ranks.py RESULTS.json CASE …`` where a case is ``strategy:fault:rank``. The processes of a run are forks
of one that has imported everything.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool does not survive a fork
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402, F401
import lightning.pytorch as pl  # noqa: E402
from lightning.fabric.plugins.environments.lightning import find_free_network_port  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402

from sd_lightning.strategies.ddp import DDPStrategy  # noqa: E402
from sd_lightning.strategies.deepspeed import Buckets, DeepSpeedStrategy  # noqa: E402
from sd_lightning.strategies.fsdp import FSDPStrategy  # noqa: E402
from small_training import data, fit, module  # noqa: E402

TIMEOUT = 10.0
FAULT_AT = 2


class Fault(Callback):
    """What happens to one rank, or all, in its third step."""

    def __init__(self, kind: str, ranks: set[int], marker: Path) -> None:
        self.kind, self.ranks, self.marker = kind, ranks, marker

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.kind in ("kill", "stop", "hang"):
            self.happen(trainer)

    def happen(self, trainer: pl.Trainer) -> None:
        if trainer.global_step != FAULT_AT or trainer.global_rank not in self.ranks:
            return
        self.marker.write_text(str(time.time()))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "hang":
            wait_for_nothing()
        elif self.kind == "raise":
            raise ValueError("the data went bad")


def wait_for_nothing() -> None:
    while True:
        time.sleep(0.1)


def train(strategy: str, fault: Fault) -> None:
    """One rank."""
    chosen: Any = {
        "ddp": lambda: DDPStrategy(timeout_seconds=TIMEOUT),
        "fsdp": lambda: FSDPStrategy(timeout_seconds=TIMEOUT),
        "deepspeed_zero2": lambda: DeepSpeedStrategy(stage=2, buckets=Buckets(), timeout_seconds=TIMEOUT),
    }[strategy]()
    pl_module = module()
    if fault.kind == "raise":
        step = pl_module.training_step

        def training_step(*arguments: Any) -> Any:
            fault.happen(pl_module.trainer)
            return step(*arguments)

        pl_module.training_step = training_step  # type: ignore[method-assign]
    fit(pl_module, data(cache_latents=False), 5, fault, strategy=chosen, devices=2)


def fork(strategy: str, fault: Fault, rank: int, port: int, output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        handle = os.open(output, os.O_CREAT | os.O_WRONLY)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        train(strategy, fault)
        sys.exit(0)
    return pid


def run(case: str, folder: Path) -> dict[str, Any]:
    strategy, kind, culprits = case.split(":")
    ranks = {int(rank) for rank in culprits.split("+")}
    marker, port = folder / f"{case}.fault", find_free_network_port()
    outputs = [folder / f"{case}.{rank}.log" for rank in range(2)]
    fault = Fault(kind, ranks, marker)
    begun, pids = time.time(), {}
    for rank in range(2):
        pids[fork(strategy, fault, rank, port, outputs[rank])] = rank
    processes, codes, ended_at = {str(rank): pid for pid, rank in pids.items()}, {}, begun
    while pids and time.time() - begun < 90:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[str(pids.pop(pid))] = os.waitstatus_to_exitcode(status)
            ended_at = time.time()
        time.sleep(0.02)
    for pid in pids:  # what is left has to be ended from outside
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {
        "codes": codes,
        "processes": processes,
        "seconds": ended_at - float(marker.read_text()) if marker.exists() else None,
        "outputs": [path.read_text(errors="replace") for path in outputs],
    }


if __name__ == "__main__":
    results_file = Path(sys.argv[1])
    results_file.write_text(json.dumps({case: run(case, results_file.parent) for case in sys.argv[2:]}))
