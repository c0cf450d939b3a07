"""One of several processes that hold a pipeline in int8: memory while reading, error and time against one device.

    torchrun --nproc-per-node 2 tensor_parallel_ranks.py RESULTS.json FOLDER SIDE ROUNDS

`RESULTS.json` gets an entry per rank: bytes of its weights, of its peak beyond what was in use before, and of the
largest layer. Of rank 0 also errors, and the seconds of calls of the denoiser, in turns with one device's, which runs
on as many threads as there are processes.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from int8_networks import relative_error
from process_memory import begin_peak, peak, return_at_once
from sd_lightning import LatentDiffusion
from sd_lightning._console import quiet_libraries
from sd_lightning.models.families.conditioning import map_conditioning
from sd_lightning.models.meta import meta_batch, meta_conditioning
from sd_lightning.planner.passes import weight_bytes
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.quantization.layers import Int8Linear, int8_layers
from sd_lightning.quantization.tensor_parallel import TensorParallel

CONFIG = Int8(dtype="float32")
ROWS = 2
"""One picture with guidance."""


def read(folder: Path, rank: TensorParallel | None) -> LatentDiffusion:
    """Read a pipeline, or one rank's part of it, from files into int8."""
    return quantize_(LatentDiffusion.from_pretrained(folder, deferred=["all"]), CONFIG, tensor_parallel=rank)


class Call:
    """A call of a denoiser with random inputs."""

    def __init__(self, model: LatentDiffusion, side: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(like: Tensor) -> Tensor:
            if not like.is_floating_point():
                return torch.ones(like.shape, dtype=like.dtype)
            return torch.randn(like.shape, generator=generator)

        batch = meta_batch(model, ROWS, height=side, width=side)
        self._latents, self._timesteps = random(batch["latents"]), torch.full((ROWS,), 500.0)
        self._conditioning = map_conditioning(meta_conditioning(model, batch, torch.float32), random)

    def __call__(self, model: LatentDiffusion) -> Tensor:
        with torch.inference_mode():
            return model.family.denoise(model.denoiser, self._latents, self._timesteps, self._conditioning)


def set_kernel(model: LatentDiffusion, kernel: str) -> None:
    """Let the linear layers of the denoiser compute with a kernel."""
    for _, layer in int8_layers(model.denoiser):
        if isinstance(layer, Int8Linear):
            layer.kernel = kernel


def seconds(call: Call, model: LatentDiffusion) -> float:
    """Time a call."""
    begin = time.perf_counter()
    call(model)
    return time.perf_counter() - begin


def measure(folder: Path, side: int, rounds: int) -> dict[str, Any]:
    """Return what this rank found."""
    rank = TensorParallel(dist.get_rank(), dist.get_world_size())
    call = Call(LatentDiffusion.describe(folder), side)
    return_at_once()
    base = begin_peak()
    part = read(folder, rank)
    found: dict[str, Any] = {"peak": peak() - base, "weights": sum(map(weight_bytes, part.networks.values()))}
    described = LatentDiffusion.describe(folder).networks.values()
    found["layer"] = max(weight.numel() for network in described for weight in network.parameters())
    whole = read(folder, None) if rank.rank == 0 else None
    for kernel in ("bitsandbytes", "weight_only"):
        set_kernel(part, kernel)
        ours = call(part)
        if whole is not None:
            set_kernel(whole, kernel)
            found[f"error_{kernel}"] = relative_error(ours, call(whole))
    taken: dict[str, list[float]] = {"ours": [], "one": []}
    for _ in range(rounds):
        dist.barrier()
        taken["ours"].append(seconds(call, part))
        if whole is not None:
            torch.set_num_threads(rank.size)
            taken["one"].append(seconds(call, whole))
            torch.set_num_threads(1)
    dist.barrier()
    return found | taken


def main() -> None:
    """The command line."""
    results, folder, side, rounds = sys.argv[1:]
    quiet_libraries()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, measure(Path(folder), int(side), int(rounds)))
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
