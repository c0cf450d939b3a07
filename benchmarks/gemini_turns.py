"""Steps of the Gemini engine and of its peers in turns, in one set of processes; started by `cases/gemini.py`.

    torchrun --nproc-per-node=2 benchmarks/gemini_turns.py RESULTS.json ROUNDS WARM_UP

RESULTS.json: engine -> `Taken` of rank 0. Every engine trains its own copy of the same network by a loop written by
hand, so only engines are compared; each does one step in every round, in an order that turns, and every rank waits for
the others before and after a step.
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

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from torch import nn

import hand_written
import process_memory
from hand_written import Recipe, Step
from sd_lightning._console import quiet_libraries
from sd_lightning.gemini import GeminiEngine
from sd_lightning.strategies.processes.group import leave_process_group
from unet_35m import build, make_batches, recipe

ALONE = 3  # steps of an engine before the next is built, in the last of which memory is measured
WEIGHTS = sum(p.numel() for p in build().denoiser.parameters()) * 4

PEERS: dict[str, Callable[[nn.Module, Recipe], Step]] = {
    "ddp": hand_written.ddp,
    "fsdp2": hand_written.fsdp2,
    "fsdp2_grad_op": partial(hand_written.fsdp2, reshard_after_forward=False),
    "fsdp2_prefetch": partial(hand_written.fsdp2, reshard_after_forward=False, prefetch=True),
    "fsdp2_offload": partial(hand_written.fsdp2, offload=True),
    "fsdp2_offload_grad_op": partial(hand_written.fsdp2, reshard_after_forward=False, offload=True),
    "zero2": partial(hand_written.deepspeed, stage=2),
    "zero3": partial(hand_written.deepspeed, stage=3),
    "zero2_offload": partial(hand_written.deepspeed, stage=2, offload=True),
    "zero3_offload": partial(hand_written.deepspeed, stage=3, offload=True),
    "zero3_offload_budget": partial(hand_written.deepspeed, stage=3, offload=True, live=WEIGHTS // 4 // 2),
}
GEMINI = {
    "gathered": {"shard_param_frac": 0.0},
    "half_offloaded": {"shard_param_frac": 0.0, "offload_optim_frac": 0.5},
    "offloaded": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0, "gathered_budget": WEIGHTS // 2},
}


@dataclass
class Taken:
    """What was measured of one engine on this rank."""

    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    losses: list[float] = field(default_factory=list)
    bytes_at_rest: int = 0
    """Of all tensors between two steps, without the frozen encoders and the batches."""
    bytes_peak: int = 0
    """At rest, and what one step needs beyond it, activations included."""
    reduced_over_form: float | None = None
    """Bytes of gradients reduced in a step over those of all weights, Gemini only: 1."""
    gathered_over_form: float | None = None
    """Bytes of weights gathered in a step over their closed form: all once where they are kept, otherwise
    :func:`least_bytes`."""
    gathered_over_continuous: float | None = None
    """The same over twice the weights less the budget, as if parts of chunks could be kept."""


class Racer:
    """One engine with its own network.

    Args:
        make: Builds the step around a network.
        hand: The loss, learning rate and clipping that all share.
    """

    def __init__(self, make: Callable[[nn.Module, Recipe], Step], hand: Recipe, engines: list[GeminiEngine]) -> None:
        self.taken = Taken()
        self.batches = make_batches(64, dist.get_rank(), dist.get_world_size())
        self._number = 0
        before, known = process_memory.storages(), len(engines)
        self._step = make(build().denoiser, hand)
        for _ in range(ALONE - 1):
            self.step()
        at_rest = process_memory.begin_peak()
        self.step()
        beyond = process_memory.peak() - at_rest
        self.taken.bytes_at_rest = process_memory.bytes_beyond(before)
        self.taken.bytes_peak = self.taken.bytes_at_rest + beyond
        for engine in engines[known:]:
            self._count_collectives(engine)

    def step(self) -> float:
        """Do one step and return its seconds."""
        dist.barrier()
        begin = time.perf_counter()
        loss = self._step(self.batches[self._number])
        dist.barrier()
        seconds = time.perf_counter() - begin
        self._number += 1
        self.taken.losses.append(float(loss))
        return seconds

    def _count_collectives(self, engine: GeminiEngine) -> None:
        counts, world_size = engine.collectives, dist.get_world_size()
        gathered, reduced = counts.gathered_bytes, counts.reduced_bytes
        self.step()
        weights = sum(layout.nbytes for layout in engine.layouts)
        budget = engine.plan.gathered_budget
        crossing = (world_size - 1) / world_size
        self.taken.reduced_over_form = (counts.reduced_bytes - reduced) / (crossing * weights)
        ours = (counts.gathered_bytes - gathered) / crossing
        self.taken.gathered_over_form = ours / (weights if budget is None else least_bytes(engine, budget))
        if budget is not None:
            self.taken.gathered_over_continuous = ours / (2 * weights - budget)


def least_bytes(engine: GeminiEngine, budget: int) -> int:
    """Return the bytes of whole chunks that a step has to gather if what is used furthest ahead makes room.

    They are the fewest where chunks are of one size (Belady 1966).
    """
    runtime = engine.runtime
    sizes = [layout.nbytes for layout in engine.layouts]
    used = [{engine.chunk_of[p].index for p in runtime.units[unit].parameters} for unit in runtime.tracer.order]
    gathered, held = 0, set[int]()
    for position, chunks in enumerate(used):

        def next_use(chunk: int, after: int = position) -> int:
            return next((later for later in range(after + 1, len(used)) if chunk in used[later]), len(used))

        missing = chunks - held
        while sum(sizes[chunk] for chunk in held | missing) > budget and held - chunks:
            held.remove(max(held - chunks, key=next_use))
        gathered += sum(sizes[chunk] for chunk in missing)
        held = {chunk for chunk in held | missing if next_use(chunk) < len(used)}
    return gathered


def main() -> None:
    """The command line."""
    results, rounds, warm_up = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    quiet_libraries()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hand = recipe()
    engines: list[GeminiEngine] = []
    makers = {name: partial(hand_written.gemini, engines=engines, **settings) for name, settings in GEMINI.items()}
    racers = {}
    for name, make in (makers | PEERS).items():
        racers[name] = Racer(make, hand, engines)
        gc.collect()
        if dist.get_rank() == 0:
            print(f"{name}: {racers[name].taken.bytes_at_rest / 2**20:.0f} MiB at rest", file=sys.stderr, flush=True)
    for number in range(warm_up + rounds):
        order = list(racers) if number % 2 else list(reversed(racers))
        for name in order:
            seconds = racers[name].step()
            if number >= warm_up:
                racers[name].taken.seconds.append(seconds)
    if dist.get_rank() == 0:
        results.write_text(json.dumps({name: asdict(racer.taken) for name, racer in racers.items()}))
    leave_process_group()


if __name__ == "__main__":
    main()
