"""The forecast of FSDP2 against torch's own ``FSDPMemTracker``, on a process group without other processes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from sd_lightning import LatentDiffusion
from sd_lightning.models.families.blocks import blocks_of, repeated_blocks
from sd_lightning.planner.footprint import When, Workload
from sd_lightning.planner.forecast import StepCurves
from sd_lightning.planner.passes import weights_of
from sd_lightning.planner.recording import PRIME, record
from sd_lightning.strategies.fsdp import FSDPStrategy
from sd_lightning.strategies.processes.group import leave_process_group

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield init_device_mesh("cpu", (WORLD_SIZE,))
    leave_process_group()


def denoiser(model: str, device: str) -> Any:
    return LatentDiffusion.build(model, device="meta").denoiser.to_empty(device=device).train()


def loss_of(network: Any, device: str, count: int, side: int) -> torch.Tensor:
    with torch.device(device):
        inputs = torch.ones(count, 4, side, side), torch.ones(count)
        hidden = torch.ones(count, 77, network.config.cross_attention_dim)
    loss: torch.Tensor = network(*inputs, hidden).sample.square().mean()
    return loss


def tracked(network: Any, count: int, side: int) -> int:
    """Return the peak of the second step."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    tracker = FSDPMemTracker(network, optimizer)
    with tracker:
        for _ in range(2):
            loss = loss_of(network, "cpu", count, side)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tracker.reset_mod_stats()  # or it refuses a second step
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return int(peak["Total"])


def predicted(network: Any, count: int, side: int, strategy: FSDPStrategy) -> float:
    workload = Workload(weights_of({"unet": network}), "32-true", torch.optim.AdamW, WORLD_SIZE)
    footprint = strategy.footprint(workload)
    recorded = record(
        lambda: loss_of(network, "meta", PRIME, side),
        blocks=blocks_of({"unet": network}),
        parameters=list(network.parameters()),
        batch_size=PRIME,
    )
    always = sum(each.nbytes for each in footprint.device if each.when is When.ALWAYS)
    return always + float(StepCurves(recorded, footprint).total(count).max())


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("model", "count", "side"), [("tiny", 8, 8), pytest.param("sd21", 1, 32, marks=pytest.mark.full("platform"))]
)  # sd21 takes two minutes and 12 GB
def test_a_forecast_agrees_with_torchs_own_tracker(mesh: Any, model: str, count: int, side: int, reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    network = denoiser(model, "cpu")
    for part in (*repeated_blocks(network).values(), network):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    told = predicted(denoiser(model, "meta"), count, side, FSDPStrategy(reshard_after_forward=reshard))
    assert told == pytest.approx(tracked(network, count, side), rel=0.01)
