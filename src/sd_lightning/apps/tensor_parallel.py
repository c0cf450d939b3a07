"""Over how many ranks ``generate`` divides a model: what is asked for, what is there, and what fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning._launchers import num_processes_here, num_started_processes, sees_own_gpus
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.planner.devices import USABLE
from sd_lightning.quantization.tensor_parallel import TensorParallel, check_division

Size = int | Literal["auto"]


def check_size(size: Size, *, device: str, save_to: str | None) -> None:
    """Check ``tensor_parallel`` against the settings beside it, and the GPUs of this machine.

    Raises:
        UsageError: It does not fit them.
    """
    if size == 1:
        return
    if size != "auto" and size < 1:
        raise UsageError(f"generate got tensor_parallel={size}; expected at least 1, or auto; write tensor_parallel=2")
    if save_to is not None:
        raise UsageError(
            f"generate got save_to={save_to} and tensor_parallel={size}, with which no process has the whole model; "
            f"save first, with quantization=int8 save_to={save_to} alone, and then draw with "
            f"model.pretrained={save_to} tensor_parallel={size}"
        )
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"generate got device={device} and tensor_parallel={size}, with which each process has a device of its "
            "own; write device=cuda, and choose among GPUs by CUDA_VISIBLE_DEVICES"
        )
    number = 1 if sees_own_gpus() else num_processes_here(num_started_processes() if size == "auto" else size)
    here = torch.cuda.device_count()
    if device != "cpu" and 0 < here < number:
        raise UsageError(
            f"generate got tensor_parallel={size}, for which this machine needs {number} GPUs; expected at most the "
            f"{here} that are here; write tensor_parallel={here}, or auto"
        )


def num_ranks(
    size: Size, model: LatentDiffusion, device: torch.device, rank_peak: Callable[[TensorParallel | None], int]
) -> int:
    """Return the number of ranks that divide a model.

    Args:
        size: As the user has set it; ``auto`` is the fewest GPUs, a power of two, of which each has room for its part.
        model: The model; its weights may be in files.
        device: This rank's.
        rank_peak: Returns the bytes that one rank takes on its device.

    Raises:
        UsageError: A launcher started another number, the heads cannot be divided, or the GPUs have no room.
    """
    started = num_started_processes()
    is_launched = started > 1 or "RANK" in os.environ
    if size == "auto":
        size = started if is_launched else _fewest(model, device, rank_peak)
    if is_launched and started != size:
        raise UsageError(
            f"a launcher started {started} process{'es' if started > 1 else ''}, but tensor_parallel={size}; write "
            f"tensor_parallel={started}, or start the program without it: it starts the processes itself"
        )
    check_division(model, size)
    return size


def _fewest(model: LatentDiffusion, device: torch.device, rank_peak: Callable[[TensorParallel | None], int]) -> int:
    if device.type != "cuda":  # processes would share the memory
        return 1
    here, memory = torch.cuda.device_count(), int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    size, peak = 1, rank_peak(None)
    while peak > memory and 2 * size <= here:
        size *= 2
        check_division(model, size)
        peak = rank_peak(TensorParallel(0, size))
    if peak > memory:
        raise UsageError(
            f"tensor_parallel=auto: a computed peak of {peak / 1e9:.3g} GB on each of {size} GPUs, of which "
            f"{memory / 1e9:.3g} GB can be used; write offload=blocks, vae_tiling=true or a smaller batch_size"
        )
    print(f"tensor_parallel={size}: computed peak {peak / 1e9:.3g} GB on each GPU, of {memory / 1e9:.3g} GB")
    return size


@contextmanager
def joined_ranks(size: int, device: torch.device) -> Iterator[TensorParallel | None]:
    """Run the block on several ranks; see :func:`sd_lightning.strategies.processes.ranks.ranks`.

    Returns:
        This rank; None if it is alone.
    """
    if size == 1:
        yield None
        return
    from sd_lightning.strategies.processes.ranks import ranks  # imports Lightning

    with ranks(size, device):
        yield TensorParallel(torch.distributed.get_rank(), size)
