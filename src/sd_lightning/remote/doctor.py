"""The doctor: machines and the links between them, looked at and compared; and what to change before a run."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from sd_lightning._conf import instantiate
from sd_lightning._console import aligned, print_lines
from sd_lightning._errors import UsageError
from sd_lightning.remote.cluster import connect
from sd_lightning.remote.launchers import Ray
from sd_lightning.remote.machine import Change, Machine, examine, existing
from sd_lightning.storage.atomic import hidden

if TYPE_CHECKING:
    from omegaconf import DictConfig

CLOCK_SECONDS = 30.0
"""How far clocks may be apart: a job that is silent for minutes counts as dead, by the clock of another machine."""
_ROUNDS = 5
_MOST_TEXTS = 4
"""Different texts of one row that are shown."""
_MUST_AGREE = ("python", "sd-lightning", "torch", "lightning", "NCCL", "ray")
"""Versions of which two in one run stop it, or change what it computes."""


@dataclass(frozen=True)
class Trial:
    """What the processes do together."""

    output_dir: str | None
    num_processes: int | None
    num_bytes: int
    """Size of the summed tensor."""
    seconds: float
    """Limit on each part."""


@dataclass
class Rank:
    """What a process has found."""

    host: str
    machine: Machine | None = None
    """Of the first process of each machine."""
    link: str = ""
    """Backend and transport."""
    gb_per_s: float | None = None
    """See :func:`all_reduce_speed`."""
    clock: float | None = None
    """Seconds since 1970, when all had met."""
    unseen: tuple[str, ...] = ()
    """Machines whose file in ``output_dir`` this one does not see."""
    failure: str | None = None


def run(cfg: DictConfig) -> int:
    """Print what the machines are and what to change.

    Returns:
        Exit code: 1 if something would stop a run.

    Raises:
        UsageError: A setting is invalid, or Ray does not answer.
    """
    for name in ("num_processes", "message_mb", "timeout_seconds"):
        if cfg[name] is not None and not cfg[name] > 0:
            raise UsageError(f"doctor got {name}={cfg[name]}; expected a number above 0; leave {name} out")
    trial = Trial(cfg.output_dir, cfg.num_processes, int(cfg.message_mb * 1e6), cfg.timeout_seconds)
    launcher = instantiate(cfg.launcher)
    if isinstance(launcher, Ray):
        ranks = _on_ray(launcher, trial)
    elif SLURMEnvironment.detect() or "RANK" in os.environ:
        ranks = _among_started(trial)
    else:
        ranks = on_machine(trial, trial.num_processes or torch.cuda.device_count() or 2)
    changes = changes_for(ranks)
    print_lines(_lines(ranks, changes, trial.num_bytes))
    return int(any(change.stops for change in changes))


def on_machine(trial: Trial, processes: int, first: int = 0, world: int = 0, master: str = "127.0.0.1:") -> list[Rank]:
    """Look at this machine, and let processes here do the trial: ranks from ``first`` on, of ``world``."""
    machine = examine(trial.output_dir, processes, seconds=trial.seconds)
    host, _, port = master.rpartition(":")
    place = {"MASTER_ADDR": host, "MASTER_PORT": port or str(find_free_network_port())}
    place |= {"WORLD_SIZE": str(world or processes), "LOCAL_WORLD_SIZE": str(processes)}
    tasks = [(trial, place | {"RANK": str(first + local), "LOCAL_RANK": str(local)}) for local in range(processes)]
    ranks = [Rank(machine.name)]
    if processes:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            try:
                ranks = pool.starmap_async(measure, tasks, chunksize=1).get(4 * trial.seconds)
            except multiprocessing.TimeoutError:
                ranks[0].failure = f"no answer in {4 * trial.seconds:g} s"
    ranks[0].machine = machine
    return ranks


def _among_started(trial: Trial) -> list[Rank]:
    """Do the trial as one of the processes that torchrun or srun has started; rank 0 gets what all have found."""
    if "RANK" not in os.environ:
        slurm = SLURMEnvironment()
        os.environ |= {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": str(slurm.main_port)}
        os.environ |= {"RANK": str(slurm.global_rank()), "WORLD_SIZE": str(slurm.world_size())}
        os.environ |= {"LOCAL_RANK": str(slurm.local_rank())}
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
    local = os.environ.get("LOCAL_RANK", "0")
    machine = examine(trial.output_dir, processes, seconds=trial.seconds) if local == "0" else None
    own = measure(trial, {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": str(processes)})
    own.machine, ranks = machine, [own] * int(os.environ["WORLD_SIZE"])
    if own.failure is None:
        dist.all_gather_object(ranks, own)
        dist.destroy_process_group()
    return ranks if os.environ["RANK"] == "0" or own.failure else []


def _on_ray(launcher: Ray, trial: Trial) -> list[Rank]:
    """Do the trial on every node of a Ray cluster that has the launcher's labels; where GPUs are, on those alone."""
    ray = connect("launcher=ray", launcher.address)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def start(node: Mapping[str, Any], gpus: int, function: Any, *args: Any) -> Any:
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=pinned)
        return task(function).remote(*args)

    wanted = (launcher.labels or {}).items()
    nodes = [node for node in ray.nodes() if node["Alive"] and wanted <= node["Labels"].items()]
    if not nodes:
        raise UsageError(f"launcher.labels={launcher.labels}: no node of the Ray cluster has them; leave them out")
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    counts = [trial.num_processes or own or 2 if own or not any(gpus) else 0 for own in gpus]
    chief = nodes[next(i for i, count in enumerate(counts) if count)]
    place = (sum(counts), f"{chief['NodeManagerAddress']}:{find_free_network_port()}")
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    tasks = [start(*each[:2], on_machine, trial, *each[2:], *place) for each in zip(nodes, gpus, counts, firsts)]
    ranks = []
    for node, task in zip(nodes, tasks, strict=True):
        try:
            ranks += ray.get(task, timeout=6 * trial.seconds)
        except ray.exceptions.RayError as error:
            late = (
                f"no answer in {6 * trial.seconds:g} s: its GPUs may be taken"
                if isinstance(error, TimeoutError)
                else ""
            )
            ranks.append(Rank(node["NodeManagerHostname"], failure=late or str(error).strip().splitlines()[-1]))
    return ranks


def measure(trial: Trial, place: Mapping[str, str]) -> Rank:
    """Meet the other processes, look for their files in the shared folder, and sum a tensor.

    Args:
        trial: What to do.
        place: The variables that torchrun sets, unless they are set.
    """
    os.environ |= place
    own, log = Rank(socket.gethostname()), Path(tempfile.gettempdir(), f"sd_lightning-nccl-{os.getpid()}")
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    folder = None if trial.output_dir is None or "://" in trial.output_dir else existing(trial.output_dir)
    mark = log if folder is None else hidden(folder / "doctor")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=trial.seconds))
        with suppress(OSError):  # the machine's section tells
            mark.touch()
        marks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(marks, (own.host, str(mark) if mark.exists() else ""))
        unseen = [host for host, path in marks if folder is not None and path and not Path(path).exists()]
        own.gb_per_s = all_reduce_speed(trial.num_bytes, device)
        dist.barrier()
        own.clock, own.unseen = time.time(), tuple(dict.fromkeys(unseen))
        own.link = f"NCCL by {transport(log.read_text(errors='replace'))}" if on_gpu else "gloo by TCP"
    except (RuntimeError, OSError) as error:
        own.failure = str(error).splitlines()[0]
    finally:
        for each in (mark, log):
            each.unlink(missing_ok=True)
    return own


def all_reduce_speed(num_bytes: int, device: torch.device) -> float:
    """Return the algorithm bandwidth of an all-reduce in 10**9 bytes per second: ``bytes / seconds``.

    The median of five, after one that is not timed. The bus bandwidth, which can be compared with that of the links
    whatever the number n of processes, is ``2 (n - 1) / n`` times it; both as in NVIDIA's nccl-tests.
    """
    message, seconds = torch.zeros(max(num_bytes // 4, 1), device=device), []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return message.nbytes / statistics.median(seconds[1:]) / 1e9


def transport(log: str) -> str:
    """Return what NCCL's log says it uses: "Socket, P2P/CUMEM, NET/Socket/0"."""
    return ", ".join(dict.fromkeys(re.findall(r"(?<=Using network )\w[\w ]*|(?<= via )\S+", log))) or "itself alone"


def changes_for(ranks: Sequence[Rank]) -> list[Change]:
    """Return what to change: on machines, where they differ, and between them."""
    machines = [rank.machine for rank in ranks if rank.machine is not None]
    changes = [change for machine in machines for change in machine.changes]
    drivers = _rows([machine for machine in machines if "driver" in machine.sections["GPU"]], "GPU")
    for label, text in ({"driver": drivers.get("driver", "")} | _rows(machines, "versions")).items():
        if "; " in text:
            command = "install the same on all of them, for instance pip install -c constraints.txt"
            changes.append(Change(f"use one {label} on all machines", text, command, label in _MUST_AGREE))
    for rank in ranks:
        if rank.failure is not None:
            what, help_ = f"let the processes of {rank.host} meet the others", "see docs/multi_node.md#the-network"
            changes.append(Change(what, rank.failure, help_, stops=True))
        if rank.unseen:
            why = f"{rank.host} does not see in output_dir what {', '.join(rank.unseen)} wrote there"
            changes.append(Change("share output_dir between all machines", why, "output_dir=<shared folder>", True))
    clocks = {rank.clock: rank.host for rank in ranks if rank.clock is not None}
    if clocks and max(clocks) - min(clocks) > CLOCK_SECONDS:
        why = f"{clocks[max(clocks)]} is {max(clocks) - min(clocks):.1f} s ahead of {clocks[min(clocks)]}"
        changes.append(Change("set the clocks", why, "chronyc makestep", stops=True))
    if any("Socket" in rank.link for rank in ranks) and any("fabric" in str(each.sections) for each in machines):
        why = f"a machine has InfiniBand or EFA; the link is {ranks[0].link}"
        changes.append(Change("let NCCL use the fabric", why, "see docs/multi_node.md#the-network"))
    return list(dict.fromkeys(changes))


def _rows(machines: Sequence[Machine], section: str) -> dict[str, str]:
    """Return label -> the text that all machines have, or the first few texts with who has them."""
    rows = {}
    for label in dict.fromkeys(label for machine in machines for label in machine.sections[section]):
        owners: dict[str, list[str]] = defaultdict(list)
        for machine in machines:
            owners[machine.sections[section].get(label, "none")].append(machine.name)
        parts = [f"{text} ({', '.join(names)})" for text, names in owners.items()]
        more = [f"{len(parts) - _MOST_TEXTS} more"] * (len(parts) > _MOST_TEXTS)
        rows[label] = next(iter(owners)) if len(parts) == 1 else "; ".join(parts[:_MOST_TEXTS] + more)
    return rows


def _lines(ranks: Sequence[Rank], changes: Sequence[Change], num_bytes: int) -> Iterator[str]:
    machines = [rank.machine for rank in ranks if rank.machine is not None]
    sections = {title: _rows(machines, title) for machine in machines for title in machine.sections}
    for first in ranks[:1]:
        between = sections.setdefault(f"{len(ranks)} processes on {len(machines)} machine(s)", {})
        between["link"] = first.failure or first.link
        bus = 2 * (len(ranks) - 1) / len(ranks)
        clocks = [rank.clock for rank in ranks if rank.clock is not None]
        if first.gb_per_s is not None and clocks:
            speeds = f"{first.gb_per_s:.3g} GB/s, {bus * first.gb_per_s:.3g} GB/s on the bus"
            between["all-reduce"] = f"{num_bytes / 1e6:g} MB: {speeds}"
            between["clocks"] = f"{max(clocks) - min(clocks):.3f} s apart; {CLOCK_SECONDS:g} s are allowed"
            if "hard links" in sections["shared folder"]:
                between["shared folder"] = "not seen by all" if any(rank.unseen for rank in ranks) else "seen by all"
    for title, rows in sections.items():
        yield from ["", title, *(f"  {line}" for line in aligned(list(rows.items()), at_left={0, 1}))]
    yield from ["", "What to change" if changes else "Nothing to change"] if ranks else []
    for number, change in enumerate(changes, 1):
        stops = " (a run would stop)" if change.stops else ""
        yield from [f"  {number}. {change.what}{stops}", f"     why: {change.why}", f"     {change.command}"]
