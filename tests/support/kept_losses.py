"""The first losses of the tiny run under every strategy and objective, kept in ``tests/kept/losses.json``.

``make keep-losses`` writes the file again, after a change that is meant to change them; name it in ``CHANGELOG.md``.
A job of :mod:`ranks` is ``{"strategy": …, "objective": …, "run_dir": …}``, and gives the losses of ``python -m
sd_lightning.train`` with these options.
"""

import json
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import fake_aio
from places import REPO
from ranks import run_jobs
from sd_lightning import _conf, train
from strategy_jobs import Losses

FILE = REPO / "tests" / "kept" / "losses.json"
STEPS = 10
OBJECTIVES = ("epsilon", "v_prediction", "sample", "flow")
STRATEGIES = sorted({file.stem for file in (REPO / "conf" / "strategy").glob("*.yaml")} - {"auto", "colossalai"})
"""All but the one that picks another, and the one that needs CUDA."""
CASES = tuple(f"{strategy} {objective}" for strategy in STRATEGIES for objective in OBJECTIVES)
RUN = (
    *("trainer.accelerator=cpu", "data.batch_size=8", "data.num_val_samples=8", "trainer.limit_val_batches=0"),
    *("optimizer.lr=3e-4", "lr_scheduler=none", "callbacks.samples=null", "callbacks.checkpoint.every_n_steps=0"),
    *("callbacks.progress=null", "callbacks.throughput=null", "logger=csv", f"trainer.max_steps={STEPS}"),
    "+callbacks.losses._target_=kept_losses.AllLosses",
)
"""Rounding grows with the learning rate: at the tiny model's own, 2e-3, the losses of two CPUs differ by more."""


class AllLosses(Losses):
    """The losses of the last run of this process."""

    last: "AllLosses"

    def __init__(self) -> None:
        super().__init__()
        AllLosses.last = self


def run(job: Mapping[str, str]) -> list[float]:
    """Train, and return the mean loss of every step over all ranks."""
    options = [f"{name}={job[name]}" for name in ("strategy", "objective")]
    if job["strategy"].endswith("nvme"):
        fake_aio.install()
        options.append(f"strategy.nvme_path={tempfile.gettempdir()}")
    devices = 1 if job["strategy"] == "single" else 2
    arguments = [f"trainer.devices={devices}", f"output_dir={job['run_dir']}", *options, *RUN]
    stays = mock.patch.object(dist, "destroy_process_group")  # for the next job
    with mock.patch.object(sys, "argv", ["train", *arguments]), stays:
        _conf.main(train.PROGRAM)
    return AllLosses.last.values


def train_all(cases: Collection[str], folder: Path) -> dict[str, list[float]]:
    """Train cases, on two processes or, under ``single``, on one."""
    found: dict[str, Any] = {}
    for world_size in (1, 2):
        jobs = {}
        for case in cases:
            strategy, objective = case.split()
            if (strategy == "single") == (world_size == 1):
                jobs[case] = {"strategy": strategy, "objective": objective, "run_dir": f"{folder}/{case}"}
        if jobs:
            found |= run_jobs("kept_losses", jobs, folder, world_size=world_size, timeout=1200)
    return {case: found[case] for case in cases}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        made = train_all(CASES, Path(place))
    lines = (f"{json.dumps(case)}: {json.dumps([float(f'{loss:.8f}') for loss in made[case]])}" for case in CASES)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(made)} runs of {STEPS} steps in {FILE.relative_to(REPO)}")
