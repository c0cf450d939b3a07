"""What the planner predicts of a run's configuration, as of the rungs of the ladder."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from ladder import RUNGS, Climb, Rung


@dataclass(frozen=True)
class Hardware:
    """What predictions are for."""

    device: Any
    """A `planner.devices.Device`."""
    speeds: Any
    """A `planner.roofline.Speeds`."""
    count: int
    on_cpu: bool = False


def forecasts(
    way: Climb, left_out: Sequence[Rung], hardware: Hardware, rungs: Sequence[Rung] = RUNGS
) -> Iterator[dict[str, float | list[float] | str]]:
    """Yield the planner's figures of rungs, all of them after each; those that it does not know have none.

    Args:
        way: What is the same on all rungs.
        left_out: Changes that rungs above do without.
        hardware: What they are for.
        rungs: To predict.
    """
    metrics: dict[str, float | list[float] | str] = {}
    for rung in rungs:
        if not rung.is_priced:
            continue
        rate, memory = predicted(way.command(rung, left_out), hardware)
        metrics[f"{rung.name}_predicted_images_per_second"] = rate
        if not hardware.on_cpu:  # where a process is mostly Python and libraries
            metrics[f"{rung.name}_predicted_gb"] = memory
        yield dict(metrics)


def predicted(options: Sequence[str], hardware: Hardware) -> tuple[float, float]:
    """Return the planner's images per second, and GB of a device at its peak."""
    from sd_lightning.apps.planning import run_of
    from sd_lightning.apps.run_spec import RunSpec
    from sd_lightning.planner.devices import Cluster
    from sd_lightning.planner.footprint import Candidate
    from sd_lightning.planner.search import Search
    from sd_lightning.strategies import engine_of

    spec, count = RunSpec.of(composed(options)), hardware.count
    model = spec.model.describe()
    cluster = Cluster(hardware.device, count)
    if hardware.on_cpu:
        cluster = Cluster.here(hardware.device, count, on_cpu=True)
    run = run_of(spec, model, count)
    candidate = Candidate("", lambda **_: engine_of(spec.strategy))
    search = Search(
        model,
        replace(run, sample_batch_size=0),
        replace(cluster, host_memory=2**50),
        speeds=hardware.speeds,
        batch_size=spec["data.batch_size"],
        micro_batches=[run.batch_size],
        checkpointing=False,
        candidates=[candidate],
        tf32=spec.speed.allow_tf32,
    )
    with explicit_attention() if spec.speed.attention == "math" else nullcontext():
        found = search.plans()
    if found.skip_reasons:
        raise RuntimeError(f"{options[0]}: {found.skip_reasons[0]}")
    (plan,) = found.best or found.too_large
    return plan.images_per_second, plan.memory.device / 1e9


def composed(options: Sequence[str]) -> Any:
    """Return the configuration that these overrides of `train` compose."""
    from sd_lightning import _conf
    from sd_lightning.train import PROGRAM

    received: list[Any] = []
    with patch.object(sys, "argv", ["train", *options]):
        _conf.main(replace(PROGRAM, task=received.append))
    return received[0]


@contextmanager
def explicit_attention() -> Iterator[None]:
    """Let traced attention write the matrix of its weights, as torch's math kernel does."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    def explicit(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        weights = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2)).softmax(-1)
        return torch.matmul(weights.to(value.dtype), value)

    with patch.object(F, "scaled_dot_product_attention", explicit):
        yield
