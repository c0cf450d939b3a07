"""The doctor: machines and the links between them, looked at and compared; and what to change before a run."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from sd_lightning._conf import instantiate
from sd_lightning._console import aligned, print_lines
from sd_lightning._errors import UsageError
from sd_lightning._launchers import is_first_process
from sd_lightning.remote.cluster import connect, machines_with
from sd_lightning.remote.launchers import Ray
from sd_lightning.remote.machine import Change, Fact, examine
from sd_lightning.storage.location import Location
from sd_lightning.storage.object_store import open_location

if TYPE_CHECKING:
    from omegaconf import DictConfig

CLOCK_SECONDS = 30.0
"""How far clocks may be apart: a job that is silent for minutes counts as dead, by the clock of another machine."""
_SECONDS = 60.0
"""How long processes wait for each other."""
_ANSWER_SECONDS = 240.0
"""After this a process that says nothing is given up: a driver or a network disk may never answer."""
_MESSAGE_BYTES = 64_000_000
_MUST_AGREE = ("sd-lightning", "torch", "diffusers")
"""Packages of which two versions in one run are refused, or change what it computes."""
_HELP = "see docs/multi_node.md#the-network"


@dataclass
class Rank:
    """What a process has found."""

    host: str
    facts: list[Fact] = field(default_factory=list)
    """Of its machine, from the first process there; of the shared folder, from each."""
    links: list[str] = field(default_factory=list)
    """Backend and transports."""
    gb_per_s: float = 0.0
    """See :func:`all_reduce_speed`."""
    clock: float = 0.0
    """Seconds since 1970, when all had met."""
    failure: str | None = None


def run(cfg: DictConfig) -> int:
    """Print what the machines are and what to change.

    Returns:
        Exit code: 1 if something would stop a run.

    Raises:
        UsageError: Ray does not answer, or ``output_dir`` is neither a folder nor a URL that is known.
    """
    launcher = instantiate(cfg.launcher)
    root = None if cfg.output_dir is None else open_location(cfg.output_dir, key="output_dir")
    slurm, processes = SLURMEnvironment(), torch.cuda.device_count() or 2
    if isinstance(launcher, Ray):
        ranks = _on_ray(launcher, root)
    elif "RANK" in os.environ:
        ranks = meet(root, [{}])
    elif slurm.detect():
        address, port = slurm.main_address, slurm.main_port
        ranks = meet(root, [_place(slurm.global_rank(), slurm.local_rank(), slurm.world_size(), address, port)])
    else:
        port = find_free_network_port()
        ranks = meet(root, [_place(local, local, processes, "127.0.0.1", port) for local in range(processes)])
    changes = changes_for([*ranks.values()])
    if is_first_process() or any(rank.failure for rank in ranks.values()):
        print_lines(_lines([*ranks.values()], changes))
    return int(any(change.stops for change in changes))


def _place(rank: int, local_rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a process."""
    values = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address}
    return {name: str(value) for name, value in (values | {"MASTER_PORT": port}).items()}


def meet(root: Location | None, places: Sequence[Mapping[str, str]]) -> dict[int, Rank]:
    """Start a process for each of some places, and return what has been found: by all ranks, unless something failed.

    Args:
        root: The folder or bucket to try; None for none.
        places: The variables that torchrun sets, unless they are set.
    """
    ranks: dict[int, Rank] = {}
    with multiprocessing.get_context("spawn").Pool(len(places)) as pool:
        answers = [pool.apply_async(measure, (root, place)) for place in places]
        end = time.monotonic() + _ANSWER_SECONDS
        for place, answer in zip(places, answers, strict=True):
            try:
                ranks |= answer.get(max(end - time.monotonic(), 0))
            except multiprocessing.TimeoutError:
                failure = f"a process has not answered for {_ANSWER_SECONDS:g} s, or was killed"
                ranks[int((os.environ | place)["RANK"])] = Rank(socket.gethostname(), failure=failure)
    return ranks


def _on_ray(launcher: Ray, root: Location | None) -> dict[int, Rank]:
    """Meet on every node of a Ray cluster that has the launcher's labels; where GPUs are, on those alone."""
    ray = connect("launcher=ray", launcher.address)

    def start(node: Mapping[str, Any], gpus: int, function: Any, *args: Any) -> Any:
        here = {"ray.io/node-id": node["NodeID"]}
        return ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0, label_selector=here)(function).remote(*args)

    nodes = machines_with(launcher.labels)
    if not nodes:
        raise UsageError(f"launcher.labels={launcher.labels}: no node of the Ray cluster has them; leave them out")
    nodes = [node for node in nodes if node["Resources"].get("GPU")] or nodes
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    counts = [each or 2 for each in gpus]
    firsts = [sum(counts[:number]) for number in range(len(counts))]
    chief = nodes[0]["NodeManagerAddress"], ray.get(start(nodes[0], 0, find_free_network_port))
    tasks = [
        start(node, gpu, meet, root, [_place(first + i, i, sum(counts), *chief) for i in range(count)])
        for node, gpu, count, first in zip(nodes, gpus, counts, firsts, strict=True)
    ]
    ray.wait(tasks, num_returns=len(tasks), timeout=_SECONDS + _ANSWER_SECONDS)
    ranks: dict[int, Rank] = {}
    for node, task, first in zip(nodes, tasks, firsts, strict=True):
        try:
            ranks |= ray.get(task, timeout=0)
        except ray.exceptions.RayError as error:
            failure = f"{str(error).strip().splitlines()[-1]} (ray status shows what holds GPUs)"
            ranks[first] = Rank(node["NodeManagerHostname"], failure=failure)
    return ranks


def measure(root: Location | None, place: Mapping[str, str]) -> dict[int, Rank]:
    """Look at this machine, meet the other processes, look for their files in the shared folder, and sum a tensor.

    Args:
        root: The folder or bucket to try; None for none.
        place: The variables that torchrun sets, unless they are set.

    Returns:
        All ranks and what they have found; this one alone if something failed.
    """
    own = Rank(socket.gethostname())
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": log.name, **place}
        rank, local, gpus = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
        try:
            if local == 0:
                own.facts += examine()
            if gpus:
                torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(seconds=_SECONDS))
            if root is not None:
                own.facts += _share(root, own.host, is_first=local == 0)
            own.gb_per_s = all_reduce_speed(device)
            own.links = ["gloo by TCP", *transports(log.read())]
            dist.barrier()
            own.clock, ranks = time.time(), [own] * dist.get_world_size()
            dist.all_gather_object(ranks, own)
            return dict(enumerate(ranks))
        except Exception as error:
            own.failure = " ".join(str(error).split())[:400] or type(error).__name__
            return {rank: own}


def _share(root: Location, host: str, *, is_first: bool) -> Iterator[Fact]:
    """Put a file into the folder, and look for those of the other machines; a collective call."""
    path, mark = root.path(""), f".tmp-doctor-{host}-{os.getpid()}" if is_first else ""
    if path is not None:  # nothing is left of a folder that is not there yet
        root = open_location(next(each for each in (path, *path.parents) if each.is_dir()), key="output_dir")
    try:
        if mark:
            root.replace(mark, b"")
    except (UsageError, OSError) as error:
        yield Change(f"let {host} write to output_dir", str(error), "output_dir=<a folder of all machines>", stops=True)
        mark = ""
    marks: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(marks, (host, mark))
        unseen = ", ".join(sorted({other for other, name in marks if name and root.size(name) is None}))
        dist.barrier()
    finally:
        if mark:
            root.delete(mark)
    yield "shared folder", "output_dir", f"files of {unseen} are not seen" if unseen else "seen by all machines"
    if unseen:
        why = f"{host} does not see in output_dir what {unseen} wrote there"
        yield Change("share output_dir between all machines", why, "output_dir=<a folder of all machines>", stops=True)


def all_reduce_speed(device: torch.device) -> float:
    """Return the algorithm bandwidth of an all-reduce of 64 MB in 10**9 bytes per second: ``bytes / seconds``.

    The median of five, after one that is not timed. The bus bandwidth, which can be compared with that of the links
    whatever the number n of processes, is ``2 (n - 1) / n`` times it; both as in NVIDIA's nccl-tests.
    """
    message, seconds = torch.zeros(_MESSAGE_BYTES // 4, device=device), []
    for _ in range(6):
        begin = time.perf_counter()
        dist.all_reduce(message)
        message[0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - begin)
    return _MESSAGE_BYTES / sorted(seconds[1:])[2] / 1e9


def transports(log: str) -> list[str]:
    """Return the interface, network and transports that NCCL's log names: "eth0, Socket, P2P/CUMEM, NET/Socket"."""
    names = re.findall(r"(?:Bootstrap: Using|Using network| via) ([^\n:]*[^\n:\s])", log)
    return [*dict.fromkeys("NCCL " + re.sub(r"/\d+(\(\d+\))?", "", name) for name in names)]


def changes_for(ranks: Sequence[Rank]) -> list[Change]:
    """Return what to change: on machines, where they differ, and between them."""
    changes, table = [fact for rank in ranks for fact in rank.facts if isinstance(fact, Change)], _table(ranks)
    for label, text in table["versions"].items():
        if len({re.split(r"[+ ]", version)[0] for version in text.split("; ")}) > 1:  # builds may differ
            command = "take one image, or install on all with pip install -c constraints.txt"
            changes.append(Change(f"use one {label} on all machines", text, command, label in _MUST_AGREE))
    for host, failure in {rank.host: rank.failure for rank in ranks if rank.failure is not None}.items():
        changes.append(Change(f"let the processes of {host} meet the others", failure, _HELP, stops=True))
    clocks = {rank.clock: rank.host for rank in ranks if rank.failure is None}
    if clocks and max(clocks) - min(clocks) > CLOCK_SECONDS:
        why = f"{clocks[max(clocks)]} is {max(clocks) - min(clocks):.1f} s ahead of {clocks[min(clocks)]}"
        changes.append(Change("set the clocks", why, "chronyc makestep", stops=True))
    fabric = table["network"].get("fabric", "none")
    if fabric != "none" and any("NCCL NET/Socket" in rank.links for rank in ranks):
        changes.append(Change("let NCCL use the fabric", f"there is {fabric}, and it takes TCP", _HELP))
    return list(dict.fromkeys(changes))


def _table(ranks: Sequence[Rank]) -> dict[str, dict[str, str]]:
    """Return section -> label -> the text that all machines have, or each text with who has it."""
    machines: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for rank in (rank for rank in ranks if rank.facts):
        machines[rank.host] |= {fact[:2]: fact[2] for fact in rank.facts if not isinstance(fact, Change)}
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for section, label in dict.fromkeys(key for facts in machines.values() for key in facts):
        owners: dict[str, list[str]] = defaultdict(list)
        for host, facts in machines.items():
            owners[facts.get((section, label), "none")].append(host)
        texts = [f"{text} ({', '.join(hosts)})" for text, hosts in owners.items()]
        table[section][label] = next(iter(owners)) if len(owners) == 1 else "; ".join(texts)
    return table


def _lines(ranks: Sequence[Rank], changes: Sequence[Change]) -> Iterator[str]:
    table, met = _table(ranks), [rank for rank in ranks if rank.failure is None]
    if met:
        machines = len({rank.host for rank in met})
        between = table[f"{len(met)} processes on {machines} machine{'s' * (machines > 1)}"]
        between["links"] = ", ".join(dict.fromkeys(link for rank in met for link in rank.links))
        speed, bus, clocks = met[0].gb_per_s, 2 * (len(met) - 1) / len(met), [rank.clock for rank in met]
        between["all-reduce"] = f"64 MB: {speed:.3g} GB/s, {bus * speed:.3g} GB/s on the bus"
        between["clocks"] = f"{max(clocks) - min(clocks):.3f} s apart; {CLOCK_SECONDS:g} s are allowed"
    for title, rows in table.items():
        yield from ["", title, *(f"  {line}" for line in aligned(list(rows.items()), at_left={0, 1}))]
    yield from ["", "What to change" if changes else "Nothing to change"]
    for number, change in enumerate(changes, 1):
        stops = " (a run would stop)" if change.stops else ""
        yield from [f"  {number}. {change.what}{stops}", f"     why: {change.why}", f"     {change.command}"]
