"""What captions cost, and when they are better stored, encoded once or encoded in each step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sd_lightning import LatentDiffusion
from sd_lightning.models.encoder import CACHED_CAPTIONS_BYTES
from sd_lightning.planner.forecast import GB, Forecaster
from sd_lightning.planner.passes import caption_numel, captions_encoded
from sd_lightning.planner.run import TrainingRun
from sd_lightning.planner.search import plan
from sd_lightning.planner.texts import READABLE, TextBill
from sd_lightning.strategies.presets import PRESETS


def bill(**changes: Any) -> TextBill:
    """Return one by which a store is best."""
    figures = {"caption_bytes": 8_000_000, "latents_bytes": 500_000, "drops_padding": False, "captions": 100_000}
    figures |= {"seconds": 0.1, "share": 0.2, "read_per_second": 0.1 * READABLE, "memory_share": 0.3}
    figures["needs_images"] = False
    return TextBill(**(figures | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "choice"),
    [
        ({}, "store"),
        ({"captions": None}, "store"),
        ({"drops_padding": True}, "trim"),
        ({"captions": CACHED_CAPTIONS_BYTES // 8_000_000}, "cache"),
        ({"captions": CACHED_CAPTIONS_BYTES // 8_000_000 + 1}, "store"),
        ({"read_per_second": 1.1 * READABLE}, "online"),
        ({"share": 0.01}, "store"),
        ({"share": 0.01, "memory_share": 0.05}, "online"),
        ({"memory_share": 0.05}, "store"),
        ({"needs_images": True}, "online"),
    ],
)
def test_the_cheapest_way_is_recommended(changes: dict[str, Any], choice: str) -> None:
    found = bill(**changes)
    assert found.choice == choice
    line = found.line()
    assert line.startswith(f"text: {'at most ' * found.drops_padding}8 MB per caption, 16 times its latents")
    assert ("800 GB of all" in line) == (found.captions == 100_000)
    words = {"store": "store them (", "trim": "without padding", "cache": "encode each once", "online": "in each step"}
    assert [key for key, text in words.items() if text in line] == [choice]


@pytest.mark.parametrize(
    ("model", "size", "resolution"),
    [
        ("klein_4b", 512 * 7680, 512),
        ("z_image", 512 * 2561, 512),
        ("flux1_dev", 512 * 4096 + 768, 512),
        ("qwen_image", 512 * 3585, 512),
        ("krea2", 512 * (12 * 2560 + 1), 512),
        ("qwen_image_21", 512 * 4097, 512),
        ("tiny", 8 * 64, 32),
    ],
)
def test_a_caption_is_as_large_as_what_text_encoders_make_of_it(model: str, size: int, resolution: int) -> None:
    """Beside embeddings, Z-Image's has a mask."""
    assert caption_numel(LatentDiffusion.build(model, device="meta")) == size


def test_a_bill_of_a_plan() -> None:
    model, run = LatentDiffusion.build("tiny_klein", device="meta"), TrainingRun(1, 32)
    from sd_lightning.planner.calibration import hardware
    from sd_lightning.planner.devices import Cluster
    from sd_lightning.planner.search import Search

    device, speeds = hardware("rtx-3090")
    search = Search(model, run, Cluster(device), PRESETS["single"].candidates(), speeds=speeds, batch_size=64)
    (best,) = search.plans().best
    found = TextBill.of(search, best)
    assert found.caption_bytes == 2 * 16 * 96 and found.latents_bytes == 2 * 8 * 8 * 8
    assert 0 < found.share < 1 and found.seconds * 64 < best.time.encoding, "images are encoded, too"
    rest = best.time.total / 64 - found.seconds
    assert found.read_per_second == pytest.approx(found.caption_bytes / rest)
    stored = replace(search, run=replace(run, encodes=False))
    (plan_of_store,) = stored.plans().best
    of_store = TextBill.of(stored, plan_of_store)
    assert of_store.memory_share == 0 < found.memory_share
    assert of_store.seconds == pytest.approx(found.seconds)


def test_text_encoders_activations_are_in_the_forecast_and_captions_in_the_batch() -> None:
    model = LatentDiffusion.build("klein_4b", device="meta")
    trace = captions_encoded(model, torch.bfloat16)
    states = 37 * 512 * 2560 * 2
    assert trace.peak(8) - trace.peak(4) >= 4 * states, "all hidden states of four captions more"
    run = TrainingRun(8, 512, "bf16-true", encoder_dtype=torch.bfloat16, gradient_checkpointing=True)
    found = plan(
        model,
        "h100",
        run=run,
        host_memory=2**50,
        micro_batches=[8],
        checkpointing=True,
        candidates=PRESETS["gemini_offload"].candidates(),
    ).best[0]
    phases = {phase.name: phase.parts for phase in found.memory.on_device}
    assert phases["encoding"]["activations"] >= 8 * states
    assert phases["a training step"]["activations"] >= 8 * 512 * 7680 * 4, "in float32 as long as the step lasts"
    loading = {phase.name: phase.parts for phase in found.memory.on_host}["loading encoders"]
    assert loading["encoders"] == pytest.approx(2 * 4.022 * GB + 4 * 0.084 * GB, rel=0.01), "chat models in 16 bits"
    away = Forecaster(model, replace(run, offload_encoders=True, num_images=10_000))
    footprint = PRESETS["gemini_offload"].candidates()[0].footprint(away.workload)
    assert footprint is not None
    cached = {phase.name: phase.parts for phase in away.forecast(footprint).on_host}["training"]["cached captions"]
    assert cached == CACHED_CAPTIONS_BYTES < 10_000 * 512 * 7680 * 2
