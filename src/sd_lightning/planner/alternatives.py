"""Other ways to do the same training: changes that make it fit, and other GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from sd_lightning.models.lora import Lora
from sd_lightning.planner.devices import Cluster, tables
from sd_lightning.planner.forecast import GB
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Plans, Search, TrainingPlan

_COUNTS = (1, 2, 4, 8)
_LEADERS = 4
"""Strategies of the fastest plans that are compared on other GPUs, beside those that take the least memory."""
_NOTICEABLE = 1.01
"""The least speed-up that is reported."""


def remedies(search: Search, plans: Plans) -> dict[str, str]:
    """Return changes of several kinds with which at least one strategy fits, with the smallest batch.

    Args:
        search: The search.
        plans: Its result, in which nothing fits.

    Returns:
        A change on the command line, "trainable=lora" -> the strategy that fits then.
    """
    changes = {}
    host = [plan for plan in plans.too_large if plan.memory.device <= plans.cluster.memory]
    if host:
        least = min(host, key=lambda plan: plan.memory.host)
        changes[f"host_gb={-(-least.memory.host // int(GB))}"] = " ".join(least.candidate.options)
    kinds: set[str] = set()
    for kind, option, run, cluster in _changes(search, plans.cluster):
        fitting = None if kind in kinds else search.with_changes(run, cluster).smallest_that_fits()
        if fitting is not None:
            kinds.add(kind)
            changes[option] = " ".join(fitting.candidate.options)
    return changes


def _changes(search: Search, cluster: Cluster) -> Iterator[tuple[str, str, TrainingRun, Cluster]]:
    """Yield changes: kind, command line, and what they change; the cheapest of a kind first."""
    run = search.run
    is_storable = run.encodes and not search.model_with_encoders.family.image_channels
    if is_storable and not run.cache_latents:
        yield "encoders", "encoders=text", replace(run, cache_latents=True), cluster
    if run.encodes and not run.offload_encoders:
        yield "encoders", "module.offload_encoders=true", replace(run, offload_encoders=True), cluster
    if is_storable:
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
    if run.precision.endswith("-mixed"):
        yield "precision", "trainer.precision=bf16-true", replace(run, precision="bf16-true"), cluster
    for count in _COUNTS:
        if count > cluster.count:
            yield "count", f"gpus={count}", run, replace(cluster, count=count)
    for name, device in tables().items():
        if device.memory > cluster.device.memory:
            yield "gpu", f"gpu={name}", run, replace(cluster, device=device, host_memory=None)


def smallest(search: Search) -> TrainingPlan | None:
    """Return a plan for one GPU with the least memory that the training fits, with the smallest batch."""
    plans = (search.with_changes(search.run, Cluster(device)).smallest_that_fits() for device in tables().values())
    return next((plan for plan in plans if plan is not None), None)


def speedup_of_memory(search: Search, plans: Plans, more: int = int(GB)) -> float | None:
    """Return how much faster the fastest plan would be with more memory per GPU, e.g. 0.05; None below 1 %.

    Args:
        search: The search.
        plans: Its result.
        more: Bytes.
    """
    leaders = [plan.candidate for plan in plans.best[:_LEADERS]]
    if not leaders:
        return None
    ratio = _most(search.within(plans.cluster.memory + more, leaders).plans().best) / _most(plans.best)
    return ratio - 1 if ratio >= _NOTICEABLE else None


def _most(plans: Sequence[TrainingPlan]) -> float:
    """Return the most images per second; the first plan may be a simpler one, as fast as can be told."""
    return max(plan.images_per_second for plan in plans)


def on_other_gpus(search: Search, plans: Plans) -> Iterator[TrainingPlan]:
    """Yield the fastest plan on each kind and number of GPUs that the training fits.

    Only the strategies of the fastest plans are tried, and those that take the least memory.
    """
    candidates = [plan.candidate for plan in plans.best[:_LEADERS]]
    for count in _COUNTS:
        suited = [plan for plan in (*plans.best, *plans.too_large) if plan.candidate.suits(count)]
        for plan in sorted(suited, key=lambda plan: plan.memory.device)[:2]:
            candidates += [plan.candidate] * (plan.candidate not in candidates)
    for device in tables().values():
        for count in _COUNTS:
            best = search.with_changes(search.run, Cluster(device, count), candidates).plans().best
            yield from best[:1]
