"""The timeline of a step adds up to its forecast, and names what its peak consists of."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sd_lightning import LatentDiffusion
from sd_lightning.models.checkpointing import SavedActivations
from sd_lightning.planner import alternatives
from sd_lightning.planner.alternatives import smallest, speedup_of_memory
from sd_lightning.planner.devices import GIB, Cluster, Device
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.recording import record
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import Search
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.presets import candidates


@pytest.fixture(scope="module")
def tiny() -> LatentDiffusion:
    return LatentDiffusion.build("tiny", device="meta")


@pytest.mark.parametrize("kept", [SavedActivations.ALL, SavedActivations.INPUTS])
def test_all_kinds_together_are_the_forecast(tiny: LatentDiffusion, kept: SavedActivations) -> None:
    blocks = {} if kept is SavedActivations.ALL else {"unet.mid_block.attentions.0": kept}
    forecaster = Forecaster(tiny, TrainingRun(1024, 32, averages=True, kept=blocks))
    footprint = GeminiStrategy().footprint(forecaster.workload)
    assert footprint is not None
    found = forecaster.timeline(footprint)
    phase = forecaster.forecast(footprint).on_device[0]
    assert found.total.max() == pytest.approx(phase.nbytes, abs=8), "bytes are rounded down in a phase"
    at_peak = {kind: float(curve[found.total.argmax()]) for kind, curve in found.kinds.items()}
    activations = {k.removeprefix("activations: "): n for k, n in at_peak.items() if k.startswith("activations")}
    assert sum(activations.values()) == phase.parts["activations"]
    for kind in at_peak.keys() - {f"activations: {each}" for each in activations}:
        assert at_peak[kind] == pytest.approx(phase.parts.get(kind, 0), abs=1)
    shares = ", ".join(f"{k} {n / 1e9:.2f}" for k, n in sorted(activations.items(), key=lambda each: -each[1]) if n)
    told = rf"{phase.where}: (.*) GB of {phase.nbytes / 1e9:.2f} are activations \({shares}\); (.*) made (.*) of them"
    match = re.fullmatch(told, found.description)
    assert match is not None and match[1] == f"{phase.parts['activations'] / 1e9:.2f}"
    trace, peak = forecaster.trace(footprint), int(found.total.argmax())
    makers = np.array([trace.operations[min(born, len(found.blocks) - 1)].block for born in trace.born])
    by_block = {block: int(trace.live(1024, makers == block)[peak]) for block in set(found.blocks) - {""}}
    largest = max(by_block, key=lambda block: by_block[block])
    assert (match[2], match[3]) == (largest, f"{by_block[largest] / 1e9:.2f}") and by_block[largest] > 0


def test_activations_are_of_the_kind_of_operation_that_made_them() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False, device="meta"), nn.SiLU(), nn.Flatten(), nn.SiLU())
    x = torch.zeros(16, 2, 8, 8, device="meta")
    trace = record(lambda: network(x).sum(), parameters=network.parameters())
    names = [each.cost.name for each in trace.operations]
    forward = names.index("convolution")
    after = names.index("silu", names.index("silu") + 1)
    output = 4 * 16 * 4 * 8 * 8
    makers = np.array([names[index] for index in trace.born])
    assert trace.live(1, makers == "convolution")[forward] == output
    assert trace.live(1, makers == "silu")[after] == 2 * output
    assert trace.live(1, makers == "convolution")[after] == output, "kept for the gradient of the activation"


def prepared(tiny: LatentDiffusion, gigabytes: float) -> Search:
    device = Device(
        "small", gigabytes * 1e9 / GIB, 64, dict.fromkeys(("float32", "tf32", "float16", "bfloat16"), 9.0), 90, 9
    )
    return Search(tiny, TrainingRun(1, 32), Cluster(device), candidates=candidates(), batch_size=256)


def test_more_memory_is_worth_something_only_if_it_lacks(tiny: LatentDiffusion) -> None:
    tight, ample = prepared(tiny, 0.75), prepared(tiny, 24)
    gain = speedup_of_memory(tight, tight.plans())
    assert gain is not None and gain > 0.01
    assert speedup_of_memory(ample, ample.plans()) is None


def test_the_smallest_gpu_is_the_first_that_fits(tiny: LatentDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    search = prepared(tiny, 24)
    found = smallest(search)
    assert found is not None and found.fits and found.cluster.device.memory_gib == 12, "of the tables that ship"
    table = found.cluster.device
    sizes = {str(size): replace(table, memory_gib=size) for size in (0.5, 0.55, 1.0, 12)}
    monkeypatch.setattr(alternatives, "tables", lambda: sizes)
    found = smallest(search)
    assert found is not None and found.cluster.device.memory_gib == 1.0
    monkeypatch.setattr(alternatives, "tables", lambda: dict(list(sizes.items())[:2]))
    assert smallest(search) is None
