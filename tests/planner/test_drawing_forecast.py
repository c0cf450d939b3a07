"""What drawing will take: bytes and calls against a drawing that happened, seconds against their bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from sd_lightning import LatentDiffusion
from sd_lightning.gemini.memory import Memory
from sd_lightning.gemini.placement import Tier
from sd_lightning.models import generation
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.offloading import OffloadedBytes
from sd_lightning.planner.calibration import hardware
from sd_lightning.planner.drawing import drawing_forecast, readable_bytes
from sd_lightning.planner.passes import drawing_passes, inference_bytes, weight_bytes
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.quantization.tensor_parallel import TensorParallel
from small_models import TINY_TRANSFORMERS

SPEEDS = hardware("rtx-4090")[1]
CPU = torch.device("cpu")


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    used: list[Memory] = []
    original = generation.offloading

    @contextmanager
    def spied(*args: Any) -> Iterator[Memory]:
        with original(*args) as memory:
            used.append(memory)
            yield memory

    monkeypatch.setattr(generation, "offloading", spied)
    return used


@pytest.mark.parametrize("guidance_scale", [None, 0.0])
@pytest.mark.parametrize("architecture", ["tiny", *TINY_TRANSFORMERS])
def test_what_crosses_in_a_step_is_what_crossed(
    architecture: str, guidance_scale: float | None, memories: list[Memory]
) -> None:
    model = quantize_(LatentDiffusion.build(architecture, seed=1), Int8(dtype="bfloat16"))
    options = SamplingOptions(batch_size=2, guidance_scale=guidance_scale)
    for steps in (3, 4):
        drawn = replace(options, num_inference_steps=steps)
        generate(model, ["a three", "a one"], seeds=[0, 1], options=drawn, offload="blocks", device=CPU)
    moved = [memory.ledger.moved[Tier.SLOW, Tier.FAST] for memory in memories]
    described = quantize_(LatentDiffusion.build(architecture, device="meta"), Int8(dtype="bfloat16"))
    forecast = drawing_forecast(described, options, offload="blocks")
    assert forecast.copied == moved[1] - moved[0] > 0
    assert forecast.weights == sum(
        t.nbytes for n in model.networks.values() for t in {*n.parameters(), *n.buffers()}
    ), "on the meta device they take as many bytes"
    assert memories[0].ledger.peak[Tier.FAST] == max(
        OffloadedBytes.of(described, name).on_device for name in model.networks
    )


def test_without_offload_it_is_what_int8_prints() -> None:
    model = quantize_(LatentDiffusion.build("tiny", device="meta"), Int8())
    options = SamplingOptions(batch_size=3, height=64, width=32, guidance_scale=5.0)
    forecast = drawing_forecast(model, options)
    weights, peak = inference_bytes(model, height=64, width=32, batch_size=3)
    assert forecast.weights == weights and forecast.copied == 0
    assert 0 < forecast.peak - peak < 100_000, "of latents and captions"
    alone = drawing_forecast(model, replace(options, guidance_scale=1.0))
    assert alone.peak < forecast.peak, "without guidance there are half as many samples"


def test_seconds_are_between_the_longest_and_the_sum_of_copies_and_computation() -> None:
    model = quantize_(LatentDiffusion.build("tiny_flux", device="meta"), Int8(dtype="bfloat16"))
    options = SamplingOptions(batch_size=64, height=128, width=128)
    whole = drawing_forecast(model, options, speeds=SPEEDS)
    assert whole.step is not None and whole.copying == 0
    steps = []
    for pcie in (1e15, 1e9, 1e8, 1e6, 1e3):
        found = drawing_forecast(model, options, speeds=replace(SPEEDS, to_device=pcie), offload="blocks")
        assert found.step is not None and found.copying is not None
        assert max(whole.step, found.copying) <= found.step * (1 + 1e-9) <= (whole.step + found.copying) * (1 + 2e-9)
        steps.append(found.step)
    assert steps[0] == pytest.approx(whole.step) and all(a <= b for a, b in pairwise(steps))
    assert steps[-1] == pytest.approx(found.copying, rel=1e-3), "over a slow link the computation is hidden"
    on_cpu = drawing_forecast(model, options, speeds=replace(SPEEDS, to_device=1e8, overlaps=False), offload="blocks")
    without = drawing_forecast(model, options, speeds=replace(SPEEDS, to_device=1e8, overlaps=False))
    assert on_cpu.step == pytest.approx(without.step + on_cpu.copying), "a CPU copies with the cores that compute"


def test_the_denoiser_gets_captions_in_its_dtype() -> None:
    """T5 stays in float32 in a pipeline of float16."""
    described = {dtype: LatentDiffusion.build("tiny_flux", device="meta") for dtype in ("float16", "bfloat16")}
    half, brain = (quantize_(model, Int8(dtype=dtype)) for dtype, model in described.items())
    assert next(half.networks["text_encoder_2"].parameters()).dtype == torch.float32
    drawing = drawing_passes(half, height=32, width=32, batch_size=1, rows=1)
    products = [each.cost for each in drawing.traces["denoise"].operations if each.cost.kind == "matmul"]
    assert {each.dtype for each in products} == {torch.float16}
    ours, theirs = (drawing_forecast(m, SamplingOptions(batch_size=1), speeds=SPEEDS).step for m in (half, brain))
    assert ours == pytest.approx(theirs, rel=0.02), "but for clipping, which Flux does in float16"


def test_bytes_are_in_gb_or_mb() -> None:
    assert [*map(readable_bytes, (756e3, 99.9e6, 0.1e9, 17.01e9))] == ["0.756 MB", "99.9 MB", "0.1 GB", "17 GB"]


def test_the_time_of_llm_int8_is_not_predicted() -> None:
    model = quantize_(LatentDiffusion.build("tiny", device="meta"), Int8(linear="bitsandbytes"))
    forecast = drawing_forecast(model, SamplingOptions(batch_size=1), speeds=SPEEDS, offload="blocks")
    assert (forecast.step, forecast.copying) == (None, None) and forecast.copied > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["flux1_dev", "sd35_large", "qwen_image", "krea2"])
def test_models_of_8_to_20_billion_weights_draw_within_4_gb(architecture: str) -> None:
    model = quantize_(LatentDiffusion.build(architecture, device="meta"), Int8(dtype="bfloat16"))
    for side in (512, 1024):
        options = SamplingOptions(batch_size=1, height=side, width=side)
        forecast = drawing_forecast(model, options, speeds=SPEEDS, offload="blocks")
        assert forecast.peak < 4e9 < forecast.weights / 3
        assert forecast.step is not None and forecast.copying is not None and forecast.step > 0.999 * forecast.copying


@pytest.mark.parametrize("architecture", ["tiny", "tiny_flux"])
def test_one_rank_of_a_divided_model_is_counted(architecture: str) -> None:
    given: dict[str, Any] = {"height": 32, "width": 32}
    whole = quantize_(LatentDiffusion.build(architecture, device="meta"))
    part = quantize_(LatentDiffusion.build(architecture, device="meta"), tensor_parallel=TensorParallel(1, 2))
    networks = drawing_passes(part, **given, batch_size=1, rows=2).networks
    for name, network in part.networks.items():
        shapes, of_twin = ({t: each.shape for t, each in n.state_dict().items()} for n in (network, networks[name]))
        assert shapes == of_twin
    weights, peak = inference_bytes(part, **given)
    of_whole = inference_bytes(whole, **given)
    assert weights == sum(map(weight_bytes, part.networks.values())) < of_whole[0]
    assert weights < peak < of_whole[1]
