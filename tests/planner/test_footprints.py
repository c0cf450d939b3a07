"""What strategies declare: conservation laws, and the table in docs/strategies.md. Real peaks: `memory_forecast`."""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from places import REPO
from pretended_accelerator import pretended_accelerator
from sd_lightning import LatentDiffusion
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.placement import Tier
from sd_lightning.planner.footprint import (
    PAGE_LOCKED_ROUNDING,
    Candidate,
    Footprint,
    Holding,
    Weight,
    When,
    Workload,
    page_locked_bytes,
)
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import engine_of
from sd_lightning.strategies.deepspeed import deepspeed
from sd_lightning.strategies.gemini_footprint import footprint_of
from sd_lightning.strategies.presets import candidates

BY_NAME = {candidate.strategy: candidate for candidate in reversed(candidates())}
PAGE = (REPO / "docs" / "strategies.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("| `strategy=` |") :].split("\n\n")[0]
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \|", TABLE, re.MULTILINE)}
STATE = ("weights", "master weights", "gradients", "optimizer states", "float32 gradients")
MODELS = ("sd21", "sdxl")


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    """By model: training of all weights of the denoiser on one process."""
    found = {}
    for name in MODELS:
        model = LatentDiffusion.build(name, device="meta")
        run = TrainingRun(1, model.resolution, optimizer=partial(torch.optim.AdamW, lr=1e-4))
        found[name] = Forecaster(model, run).workload
    return found


def held(holdings: Any) -> int:
    """Return the bytes of model state at the optimizer's step."""
    at_step = (When.ALWAYS, When.AS_READY, When.UPDATE)
    return sum(each.nbytes for each in holdings if each.kind in STATE and each.when in at_step)


def footprint(candidate: Candidate, workload: Workload, world_size: int) -> Footprint:
    found = candidate.footprint(replace(workload, world_size=world_size))
    assert found is not None
    return found


def cell(candidate: Candidate, workload: Workload) -> str:
    """Return the text of a cell: GB on the device, and in host memory, on 1, 2 and 8 processes."""
    texts = []
    for world_size in (1, 2, 8):
        found = footprint(candidate, workload, world_size)
        parts = [f"{held(found.device) / 1e9:.1f}"] if held(found.device) else []
        parts += [f"{held(found.host) / 1e9:.1f} h"] if held(found.host) else []
        texts.append(" + ".join(parts))
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_guide_gives_what_strategies_declare(name: str, workloads: dict[str, Workload]) -> None:
    expected = [cell(BY_NAME[name], workloads[model]) for model in MODELS]
    assert [each.strip() for each in ROWS.get(name, ())] == expected, f"docs/strategies.md: {' | '.join(expected)}"


@pytest.mark.parametrize("name", BY_NAME)
def test_processes_divide_what_is_sharded(name: str, workloads: dict[str, Workload]) -> None:
    candidate, workload = BY_NAME[name], workloads["sd21"]
    count = sum(weight.numel for weight in workload.trained)
    alone, two, eight = (footprint(candidate, workload, world_size) for world_size in (1, 2, 8))
    for side in ("device", "host"):
        sizes = [held(getattr(found, side)) for found in (alone, two, eight)]
        whole = (4 * (sizes[2] - sizes[1] / 4) / 3) / count  # what eight processes do not divide
        assert -0.1 < whole < 16.1 and sizes[0] >= sizes[1] >= sizes[2]
    least = 16 if name in ("single", "ddp") or name.startswith("fsdp") else 14
    assert held(alone.device) + held(alone.host) >= least * count, "nothing of AdamW's state is lost by moving it"
    assert alone.averaged + alone.averaged_on_host >= count, "all weights are averaged"
    assert alone.traffic.stepped + alone.traffic.stepped_on_host >= count, "and stepped"


def test_offloaded_states_cross_pcie_and_sharded_weights_cross_the_link(workloads: dict[str, Workload]) -> None:
    workload = workloads["sd21"]
    count = sum(weight.numel for weight in workload.trained)
    for name in ("fsdp_offload", "deepspeed_zero2_offload", "deepspeed_zero3_offload", "gemini_offload"):
        traffic = footprint(BY_NAME[name], workload, 2).traffic
        assert traffic.to_host >= count and traffic.to_device + traffic.refreshed >= count
        assert traffic.stepped == 0 and traffic.stepped_on_host >= count // 2
    for name in ("fsdp", "deepspeed_zero3", "gemini"):
        traffic = footprint(BY_NAME[name], workload, 2).traffic
        assert traffic.gathered >= 2 * count and traffic.reduced >= 2 * count and not traffic.to_host
    assert footprint(BY_NAME["ddp"], workload, 2).traffic.all_reduced == 4 * count


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 1), (512, 512), (513, 1024), (2**30 + 1, 2**31)])
def test_page_locked_blocks_are_powers_of_two(nbytes: int, taken: int) -> None:
    assert page_locked_bytes(nbytes) == taken


def test_offloading_that_torch_page_locks_takes_powers_of_two(workloads: dict[str, Workload]) -> None:
    workload = replace(workloads["sd21"], precision="bf16-mixed", world_size=2)
    numels = [weight.numel for weight in workload.weights]
    part = -(-sum(numels) // 2)

    def lost(name: str, **settings: Any) -> int:
        candidate = replace(BY_NAME[name], settings=settings)
        found = footprint(candidate, workload, 2)
        assert not any(each.kind == PAGE_LOCKED_ROUNDING for each in found.device)
        return sum(each.nbytes for each in found.host if each.kind == PAGE_LOCKED_ROUNDING)

    def rounded(*blocks: int) -> int:
        return sum(2 ** math.ceil(math.log2(block)) - block for block in blocks)

    rows = [4 * weight.rows_of(2) for weight in workload.weights]
    assert lost("fsdp_offload") == 2 * rounded(*rows), "each weight and its gradient"
    largest = 2 * max(numels)
    of_zero2 = rounded(4 * part, 4 * part, 2 * part, largest)
    assert lost("deepspeed_zero1_offload") == lost("deepspeed_zero2_offload") == of_zero2, "flat buffers"
    shards = [2 * -(-numel // 2) for numel in numels]
    part = sum(shards) // 2
    partitions = sum(shards) + rounded(*shards)  # freed, and kept by torch
    of_zero3 = rounded(2 * part, 4 * part, 2 * part) + partitions
    assert lost("deepspeed_zero3_offload") == of_zero3
    assert not any(lost(name) for name in ("gemini", "fsdp", "deepspeed_zero2", "single"))
    assert lost("gemini_offload") < 2**22, "whole pages only"
    unlocked = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    by_hand = deepspeed(config={"zero_optimization": {"stage": 2, **unlocked}})
    found = engine_of(by_hand).footprint(workload)
    assert found is not None and not any(each.kind == PAGE_LOCKED_ROUNDING for each in found.host)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("master", ["float32", "split", "bfloat16"])
def test_page_locked_memory_of_gemini_is_what_its_ledger_counts_on_an_accelerator(master: Any, early: bool) -> None:
    """In whole pages, with the free blocks that await a chunk of their size; chunks have three sizes."""
    config = GeminiConfig(
        chunk_numel=16,
        compute_dtype=torch.bfloat16,
        master=master,
        offload_optim_frac=1.0,
        offload_param_frac=1.0,
        gathered_budget=0,
        gradient_dtype=torch.bfloat16,
        step_in_backward=early,
    )
    torch.manual_seed(0)
    widths = [30, 50, 50, 30, 30, 70, 30, 50, 30, 30, 30, 70, 30, 30]
    parts = (nn.Sequential(nn.Linear(30, n, bias=False), nn.Linear(n, 30, bias=False)) for n in widths)
    network = nn.Sequential(*parts)
    with pretended_accelerator(with_network=False):
        engine = GeminiEngine({"net": network}, config)
        optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=1e-3))
        for _ in range(3):
            engine.backward(network(torch.ones(2, 30, dtype=torch.bfloat16)).float().square().mean())
            optimizer.step()
        ties = sum(ties.nbytes for chunk in engine.chunks for ties in chunk.master._ties.values())
        peak = engine.ledger.peak[Tier.SLOW]
        engine.close()
    shapes = {f"net.{name}": tuple(weight.shape) for name, weight in network.named_parameters()}
    weights = [Weight(name, shape, True, name.rpartition(".")[0]) for name, shape in shapes.items()]
    workload = Workload(weights, "bf16-mixed", partial(torch.optim.AdamW, lr=1e-3))
    found = footprint_of(config, workload, lambda name: tuple(map(int, name.split(".")[1:3])))
    assert found is not None
    predicted = sum(each.nbytes for each in found.host if each.when is not When.SWAPPED)
    if early:  # how many are on their way at a time is at most what is predicted
        assert 0.98 * predicted <= peak <= predicted + 2 * ties
    else:
        assert predicted <= peak <= predicted + 2 * ties


def test_forecasts_of_host_memory_count_what_page_locking_takes() -> None:
    forecaster = Forecaster(LatentDiffusion.build("tiny", device="meta"), TrainingRun(1, 32, encodes=False))
    found = footprint(BY_NAME["deepspeed_zero2_offload"], forecaster.workload, 1)
    parts = forecaster.forecast(found).host_phase.parts
    assert parts[PAGE_LOCKED_ROUNDING] > 0
    exact = replace(found, host=[each for each in found.host if each.kind != PAGE_LOCKED_ROUNDING])
    assert forecaster.forecast(found).host - forecaster.forecast(exact).host == parts[PAGE_LOCKED_ROUNDING]


def test_accumulation_keeps_gradients_in_the_forward_pass(workloads: dict[str, Workload]) -> None:
    for name in ("single", "fsdp", "gemini"):
        found = BY_NAME[name].footprint(replace(workloads["sd21"], accumulates=True))
        assert found is not None
        assert [each.when for each in found.device if each.kind == "gradients"] == [When.ALWAYS], name


def test_blocks_are_gathered_one_at_a_time(workloads: dict[str, Workload]) -> None:
    workload = workloads["sd21"]
    found = footprint(BY_NAME["fsdp"], workload, 2)
    sizes: dict[str, int] = {}
    for weight in workload.weights:
        sizes[weight.block] = sizes.get(weight.block, 0) + 4 * weight.numel
    outside = sizes.pop("")
    before = [0, *sizes.values()]  # its buffer is still there
    assert found.in_forward == {name: 2 * size + last for (name, size), last in zip(sizes.items(), before)}
    assert found.in_backward.keys() == sizes.keys() and all(found.in_backward[n] >= 3 * sizes[n] for n in sizes)
    assert Holding("gathered weights", outside, When.COMPUTE) in found.device
    assert found.traffic.gathered == 2 * (outside + sum(sizes.values())), "before forward and before backward"
    kept = footprint(BY_NAME["gemini"], workload, 2)
    assert any(each.when is When.UNTIL_READY and each.nbytes >= 2 * sum(sizes.values()) // 4 for each in kept.device)


def test_colossalai_is_counted_by_its_chunks(workloads: dict[str, Workload]) -> None:
    from sd_lightning.strategies.colossalai.settings import ColossalAIConfig, footprint_of

    workload = replace(workloads["sd21"], world_size=8)
    count = sum(weight.numel for weight in workload.trained)
    found = footprint_of(ColossalAIConfig(), workload)
    assert found is not None and not found.host
    state = sum(each.nbytes for each in found.device if each.when is When.ALWAYS)
    assert state == pytest.approx(14 * count / 8, rel=0.05)
    offloaded = footprint_of(ColossalAIConfig(offload_optim_frac=1.0), workload)
    assert offloaded is not None and sum(each.nbytes for each in offloaded.host) == pytest.approx(
        12 * count / 8, rel=0.05
    )
    assert footprint_of(ColossalAIConfig(placement_policy="auto"), workload) is None
