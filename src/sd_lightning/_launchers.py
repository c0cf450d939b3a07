"""Rank and launcher of this process, read from environment variables without importing torch or Lightning.

torchrun, ``accelerate launch`` and ``deepspeed`` set RANK, LOCAL_RANK and WORLD_SIZE. Lightning's own launcher sets
NODE_RANK and LOCAL_RANK. ``srun`` sets SLURM_PROCID and SLURM_LOCALID.
"""

from __future__ import annotations

import os

from sd_lightning._errors import UsageError


def is_first_process() -> bool:
    """Return whether this is, or will be, rank 0; wrong only on several machines without any rank variables."""
    if "RANK" in os.environ:  # torchrun inside SLURM: torchrun's rendezvous assigns ranks, not SLURM
        return _is_zero("RANK") and is_first_on_machine()
    return _is_zero("NODE_RANK") and _is_zero("SLURM_PROCID") and is_first_on_machine()


def is_first_on_machine() -> bool:
    """Return whether this process has local rank 0."""
    return local_rank() == 0


def was_started_with_others() -> bool:
    """Return whether an external launcher started all processes, so that each one raises the same errors."""
    return "SLURM_PROCID" in os.environ or {"RANK", "LOCAL_RANK"} <= os.environ.keys()


def num_started_processes() -> int:
    """Return how many processes a launcher has started for this program, on all machines; 1 without a launcher."""
    return max(int(os.environ.get(name) or 1) for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))


def num_processes_here(size: int) -> int:
    """Return how many of the program's ``size`` processes are on this machine: all, unless its launcher says so."""
    slurm = os.environ.get("SLURM_NTASKS_PER_NODE") if _are_slurm_tasks() else None
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or slurm or size)


def sees_own_gpus() -> bool:
    """Return whether the process sees no GPUs but its own: ``srun --gpus-per-task``."""
    return "SLURM_GPUS_PER_TASK" in os.environ and _are_slurm_tasks()


def _are_slurm_tasks() -> bool:
    return "RANK" not in os.environ and num_started_processes() > 1


def local_rank() -> int:
    """Return the number of this process among those of the program on this machine."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def check_started_processes(devices: int, num_nodes: int) -> None:
    """Check that a launcher has started as many processes as the run asks for.

    Raises:
        UsageError: The numbers differ: the processes would wait for others that do not exist.
    """
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        started = int(os.environ["WORLD_SIZE"])
        on_machine = num_processes_here(started)
        who = "the launcher"
    elif os.environ.get("SLURM_NTASKS") and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        started = int(os.environ["SLURM_NTASKS"])
        on_machine = int(os.environ.get("SLURM_NTASKS_PER_NODE") or 0)
        who = "SLURM"
        if started > 1 and not on_machine:
            raise UsageError(
                f"SLURM started {started} tasks without saying how many per machine; give sbatch and srun "
                f"--ntasks-per-node=<n> instead of --ntasks={started}"
            )
        on_machine = on_machine or 1
    else:
        return
    if started != devices * num_nodes:
        raise UsageError(
            f"{who} started {started} process(es), but trainer.devices={devices} trainer.num_nodes={num_nodes} ask for "
            f"{devices * num_nodes}; write trainer.devices={on_machine} trainer.num_nodes={started // on_machine}"
            + (" and a strategy for several processes, such as strategy=ddp" if started > 1 else "")
            + (f", or start srun with --ntasks-per-node={devices} --nodes={num_nodes}" if who == "SLURM" else "")
        )


def _is_zero(name: str) -> bool:
    return os.environ.get(name, "0") == "0"
