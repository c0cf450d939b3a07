"""Lets ranks die, raise, freeze and hang in the midst of training, and tells how each process of the run ended.

``python dying_ranks.py RESULTS.json CASE …`` where a case is ``strategy:fault:ranks`` with a fault of kill, raise,
stop, hang, lost and none, and ranks such as 1 or 0+1. Runs are forks of a process that has imported everything.
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
import torch  # noqa: E402
from lightning.fabric.plugins.environments.lightning import find_free_network_port  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402

from small_training import data, fit, module  # noqa: E402
from strategy_table import strategy_of  # noqa: E402

TIMEOUT = 10.0  # seconds
GIVE_UP = 90.0
NEVER_ENDED = 999
FAULT_AT = 2


class Fault(Callback):
    """What happens to one rank, or all, in its third step."""

    def __init__(self, kind: str, ranks: set[int], marker: Path) -> None:
        self.kind, self.ranks, self.marker = kind, ranks, marker

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.kind in ("kill", "stop", "hang", "lost"):
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
        elif self.kind == "lost":
            await_the_other(trainer)
        elif self.kind == "raise":
            raise ValueError("the data went bad")


def wait_for_nothing() -> None:
    while True:
        time.sleep(0.1)


def await_the_other(trainer: pl.Trainer) -> None:
    """Wait in a collective that all ranks have begun and none finishes: each expects another's values."""
    torch.distributed.broadcast(torch.zeros(4), src=1 - trainer.global_rank)


def train(strategy: str, fault: Fault) -> None:
    """One rank."""
    name = {"gemini": "gemini_default"}.get(strategy, strategy.removeprefix("deepspeed_"))
    chosen = strategy_of(name, timeout_seconds=TIMEOUT)
    pl_module = module()
    if fault.kind == "raise":
        step = pl_module.training_step

        def training_step(*arguments: Any) -> Any:
            fault.happen(pl_module.trainer)
            return step(*arguments)

        pl_module.training_step = training_step  # type: ignore[method-assign]
    fit(pl_module, data(cache_latents=False), 4, fault, strategy=chosen, devices=2)


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


class Run:
    """The two processes of a case."""

    def __init__(self, case: str, folder: Path) -> None:
        strategy, kind, culprits = case.split(":")
        self.marker = folder / f"{case}.fault"
        self.outputs = [folder / f"{case}.{rank}.log" for rank in range(2)]
        fault = Fault(kind, {int(rank) for rank in culprits.split("+")}, self.marker)
        self.begun = self.ended = time.time()
        port = find_free_network_port()
        self.pids = {rank: fork(strategy, fault, rank, port, self.outputs[rank]) for rank in range(2)}
        self.codes: dict[int, int] = {}

    def poll(self) -> bool:
        """Look who has ended; return whether nobody is left."""
        for rank in self.pids.keys() - self.codes.keys():
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if not pid and time.time() - self.begun > GIVE_UP:
                os.kill(self.pids[rank], signal.SIGKILL)
                self.codes[rank] = NEVER_ENDED
                os.waitpid(self.pids[rank], 0)
            elif pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
            self.ended = time.time()
        return len(self.codes) == 2

    def result(self) -> dict[str, Any]:
        return {
            "codes": [self.codes[rank] for rank in range(2)],
            "seconds": self.ended - float(self.marker.read_text()) if self.marker.exists() else None,
            "outputs": [path.read_text(errors="replace") for path in self.outputs],
        }


def main() -> None:
    results_file = Path(sys.argv[1])
    waiting, running, results = sys.argv[2:], dict[str, Run](), {}
    while waiting or running:
        while waiting and len(running) < 2:  # most of them wait for a timeout
            case = waiting.pop(0)
            running[case] = Run(case, results_file.parent)
        for case in [case for case, run in running.items() if run.poll()]:
            results[case] = running.pop(case).result()
        time.sleep(0.02)
    results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
