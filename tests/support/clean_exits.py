"""Trains two steps on two processes again and again, and counts how the processes end.

``python tests/support/clean_exits.py [--runs 10] [STRATEGY …]`` prints one JSON object: strategy -> how often each pair
of exit codes was seen (0 is clean, minus a signal's number is a crash) and the median seconds of a pair. A crash in the
interpreter's last moments shows only in the exit code, and rarely. Every process is a fork of one that has imported
everything, and ends as any Python process does, with all its destructors.
"""

import argparse
import collections
import faulthandler
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool does not survive a fork
os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from lightning.fabric.plugins.environments.lightning import find_free_network_port  # noqa: E402

from small_training import data, fit, module  # noqa: E402
from strategy_table import strategy_of  # noqa: E402

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "gemini")


def train(strategy: str, *, leave: bool) -> None:
    """One rank: train, and end the process group as the entry point does."""
    fit(module(), data(cache_latents=False), 2, strategy=strategy_of(strategy), devices=2)
    if leave:
        from sd_lightning.strategies.processes.group import leave_process_group

        leave_process_group()


def start(rank: int, port: int, output: Path) -> int:
    """Fork; return the child's pid in the parent, 0 in the child, which has become a rank."""
    pid = os.fork()
    if pid == 0:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        handle = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        faulthandler.enable()
    return pid


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--without-teardown", action="store_true", help="leave the process group to the destructors")
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES))
    arguments = parser.parse_args()
    if any(name.startswith("zero") for name in arguments.strategies):
        import deepspeed  # noqa: F401
    seen: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in arguments.strategies}
    seconds: dict[str, list[float]] = {name: [] for name in arguments.strategies}
    folder = Path(tempfile.mkdtemp())  # not a context manager: the children would leave it, too
    module(), data(cache_latents=False)  # imports what is imported where it is used
    for run in range(arguments.runs):
        for strategy in arguments.strategies:
            begin, port, pids = time.monotonic(), find_free_network_port(), []
            outputs = [folder / f"{strategy}-{run}-{rank}.log" for rank in range(2)]
            for rank in range(2):
                pid = start(rank, port, outputs[rank])
                if pid == 0:
                    train(strategy, leave=not arguments.without_teardown)
                    return  # and through the interpreter's own end
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            seconds[strategy].append(time.monotonic() - begin)
            seen[strategy][str(codes)] += 1
            if any(codes):
                for path in outputs:
                    sys.stderr.write(f"--- {path.name} {codes}\n{path.read_text(errors='replace')[-6000:]}\n")
    shutil.rmtree(folder)
    medians = {name: round(statistics.median(values), 1) for name, values in seconds.items()}
    print(json.dumps({name: {"exits": dict(seen[name]), "seconds": medians[name]} for name in seen}))


if __name__ == "__main__":
    main()
