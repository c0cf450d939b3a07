"""The cheapest changes that make a run fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from sd_lightning.models.lora import Lora
from sd_lightning.planner.devices import tables
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Cluster, Plans, Search

_COUNTS = (2, 4, 8)


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits."""

    option: str
    """On the command line: "trainable=lora"."""
    strategy: str
    """A strategy that fits then, on the command line."""


def remedies(search: Search, found: Plans) -> list[Remedy]:
    """Return changes of several kinds with which at least one strategy fits, with the smallest batch.

    Args:
        search: The search.
        found: Its result, in which nothing fits.
    """
    made = []
    host = [each.memory.host for each in found.too_large if each.memory.device <= found.cluster.memory]
    if host:
        least = min(host)
        plan = next(each for each in found.too_large if each.memory.host == least)
        made.append(Remedy(f"host_gb={-(-least // int(GB))}", " ".join(plan.candidate.options)))
    kinds: set[str] = set()
    for kind, option, run, cluster in _changes(search.run, found.cluster):
        if kind in kinds:
            continue
        fitting = search.with_changes(run, cluster).smallest_that_fits()
        if fitting is not None:
            kinds.add(kind)
            made.append(Remedy(option, " ".join(fitting.candidate.options)))
    return made


def _changes(run: TrainingRun, cluster: Cluster) -> Iterator[tuple[str, str, TrainingRun, Cluster]]:
    """Yield changes: kind, command line, and what they change; the cheapest of a kind first."""
    if run.encodes and not run.cache_latents:
        yield "encoders", "encoders=text", replace(run, cache_latents=True), cluster
    if run.encodes:
        yield "encoders", "encoders=none", replace(run, encodes=False), cluster
    if run.lora is None:
        try:
            import bitsandbytes
        except ImportError:
            pass
        else:
            eight_bit = partial(bitsandbytes.optim.AdamW8bit, lr=1e-5)
            yield "optimizer", "optimizer=adamw8bit", replace(run, optimizer=eight_bit), cluster
        yield "lora", "trainable=lora", replace(run, lora=Lora()), cluster
    for count in _COUNTS:
        if count > cluster.count:
            yield "count", f"gpus={count}", run, replace(cluster, count=count)
    for name, device in tables().items():
        if device.memory > cluster.device.memory:
            yield "gpu", f"gpu={name}", run, replace(cluster, device=device, host_memory=None)
