"""Train under each of our strategies and by hand in turns, in one set of processes; started by `cases/strategies.py`.

    torchrun --nproc-per-node=2 benchmarks/strategy_turns.py RESULTS.json ROUNDS WARM_UP STRATEGY …

RESULTS.json: strategy -> `Taken` of rank 0. Ours, its hand-written peer and plain DDP, which all strategies are
measured by, do one step each in turns; every rank waits for the others before and after a step.
"""

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import hand_written
import process_memory
from hand_written import BUCKET, Batch, Recipe, Step
from sd_lightning import SDLightningModule
from sd_lightning._console import quiet_libraries
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.processes.group import leave_process_group
from sd_lightning.training.speed import Speed
from unet_35m import CLIP, LR, build, make_batches, recipe

ALONE = 3  # steps of ours before the peer is built, in the last of which memory is measured

Pair = tuple[Callable[[], Any], Callable[[nn.Module, Recipe], Step]]
"""Our strategy and the same engine by hand."""
_BUCKETS: dict[str, int] = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
PAIRS: dict[str, Pair] = {
    "ddp": (DDPStrategy, hand_written.ddp),
    "fsdp": (FSDPStrategy, hand_written.fsdp2),
    "fsdp_grad_op": (
        lambda: FSDPStrategy(reshard_after_forward=False),
        partial(hand_written.fsdp2, reshard_after_forward=False),
    ),
    "fsdp_offload": (lambda: FSDPStrategy(cpu_offload=True), partial(hand_written.fsdp2, offload=True)),
    "deepspeed_zero1": (lambda: deepspeed(stage=1, **_BUCKETS), partial(hand_written.deepspeed, stage=1)),
    "deepspeed_zero2": (lambda: deepspeed(stage=2, **_BUCKETS), partial(hand_written.deepspeed, stage=2)),
    "deepspeed_zero3": (lambda: deepspeed(stage=3, **_BUCKETS), partial(hand_written.deepspeed, stage=3)),
    "deepspeed_zero1_offload": (
        lambda: deepspeed(stage=1, offload_optimizer="cpu", **_BUCKETS),
        partial(hand_written.deepspeed, stage=1, offload=True),
    ),
    "deepspeed_zero2_offload": (
        lambda: deepspeed(stage=2, offload_optimizer="cpu", **_BUCKETS),
        partial(hand_written.deepspeed, stage=2, offload=True),
    ),
    "deepspeed_zero3_offload": (
        lambda: deepspeed(stage=3, offload_optimizer="cpu", offload_parameters="cpu", **_BUCKETS),
        partial(hand_written.deepspeed, stage=3, offload=True),
    ),
}


@dataclass
class Taken:
    """What was measured of one strategy on this rank."""

    ours: list[float] = field(default_factory=list)
    """Seconds of each step."""
    by_hand: list[float] = field(default_factory=list)
    ddp: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    losses_by_hand: list[float] = field(default_factory=list)
    bytes_at_rest: int = 0
    """Of all tensors between two steps, without the frozen encoders and the batches."""
    bytes_peak: int = 0
    """At rest, and what one step needs beyond it."""


class Turns(pl.Callback):
    """Lets the other loops do a step after each of the trainer's, and times them all.

    The trainer's step begins where the other's ended, inside the last hook of a step, so it holds everything that
    Lightning does between that hook and the same hook of the next step.
    """

    def __init__(self, build_peer: Callable[[], Step], yardstick: Step, batches: list[Batch], *, warm_up: int) -> None:
        self.build_peer, self.yardstick, self.batches, self.warm_up = build_peer, yardstick, batches, warm_up
        self.taken = Taken()
        self.peer: Step | None = None
        self.before = process_memory.storages()
        self._began = 0.0
        self._at_rest = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = _now()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seconds = _now() - self._began
        self.taken.losses.append(float(pl_module.last_loss))
        alone = trainer.global_step - ALONE
        if alone < 0:
            self._at_rest = process_memory.begin_peak()
        elif alone == 0:
            self._measure_memory()
            self.peer = self.build_peer()
        else:
            self._let_others_step(seconds, alone - 1)
        self._began = _now()

    def _measure_memory(self) -> None:
        beyond = process_memory.peak() - self._at_rest
        self.taken.bytes_at_rest = process_memory.bytes_beyond(self.before)
        self.taken.bytes_peak = self.taken.bytes_at_rest + beyond

    def _let_others_step(self, seconds: float, number: int) -> None:
        assert self.peer is not None
        loops = {"by_hand": self.peer, "ddp": self.yardstick}
        figures = {"ours": seconds}
        for name in loops if number % 2 else reversed(loops):
            begin = _now()
            loss = loops[name](self.batches[number])
            figures[name] = _now() - begin
            if name == "by_hand":
                self.taken.losses_by_hand.append(float(loss))
        if number >= self.warm_up:
            for name, figure in figures.items():
                getattr(self.taken, name).append(figure)


def _now() -> float:
    """The time at which every rank has come here."""
    dist.barrier()
    return time.perf_counter()


def measure(name: str, hand: Recipe, yardstick: Step, *, rounds: int, warm_up: int) -> Taken:
    """Train under one of our strategies and by hand in turns."""
    make_ours, make_peer = PAIRS[name]
    steps = ALONE + warm_up + rounds
    batches = make_batches(steps, dist.get_rank(), dist.get_world_size())
    turns = Turns(lambda: make_peer(build().denoiser, hand), yardstick, batches, warm_up=warm_up)
    model = build()
    Speed(channels_last=name == "ddp").apply_({"unet": model.denoiser})  # as by hand
    module = SDLightningModule(model, optimizer=partial(torch.optim.AdamW, lr=LR, fused=True))
    trainer = pl.Trainer(
        strategy=make_ours(),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=steps,
        gradient_clip_val=CLIP,
        log_every_n_steps=10,
        callbacks=[turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return turns.taken


def main() -> None:
    """The command line."""
    results, rounds, warm_up, *names = sys.argv[1:]
    quiet_libraries()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hand = recipe()
    yardstick = hand_written.ddp(build().denoiser, hand)
    taken = {}
    for name in names:
        taken[name] = asdict(measure(name, hand, yardstick, rounds=int(rounds), warm_up=int(warm_up)))
        gc.collect()
        if dist.get_rank() == 0:
            print(f"{name}: {sum(taken[name]['ours']) / int(rounds):.3f} s a step", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(taken))
    leave_process_group()


if __name__ == "__main__":
    main()
