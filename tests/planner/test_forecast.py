"""What a run will take of memory: the presets, what settings change, and the engine's own count of its states."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from composing import Compose
from sd_lightning import LatentDiffusion
from sd_lightning.apps.dreambooth import predict_memory
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families import Architecture, architecture
from sd_lightning.models.families.blocks import execution_position, repeated_blocks
from sd_lightning.planner.footprint import PAGE_LOCKED_ROUNDING, When
from sd_lightning.planner.forecast import GB, Forecast, Forecaster
from sd_lightning.planner.passes import inference_bytes
from sd_lightning.planner.run import TrainingRun
from sd_lightning.strategies import engine_of
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from small_models import SMALL_SDXL
from suites import keep

PRESETS = {
    **{
        f"{name}-{model}": gb
        for name, gb in (("8gb", 8), ("12gb", 12), ("16gb", 16), ("24gb", 24), ("lora_6gb", 6))
        for model in ("sd15", "sd21")
    },
    "sdxl_lora_12gb-sdxl": 12,
}
"""Gigabytes in the name, by preset and model."""
QUICK = ("8gb-sd21",)
SLOW = ("24gb-sd21",)
LEFT = [preset for preset in PRESETS if preset not in QUICK + SLOW]
HOST_GB = {"8gb": 16, "12gb": 12, "16gb": 8, "24gb": 4, "lora_6gb": 4, "sdxl_lora_12gb": 8}


def without_weights(model: LatentDiffusion, folder: Path) -> Path:
    """Write a pipeline folder without weights, once: a forecast reads none."""
    if not folder.exists():
        model.save_pretrained(folder, skip=list(model.networks))
    return folder


def predicted(compose: Compose, tmp_path: Path, name: str, *options: str) -> Forecast:  # noqa: F811
    prior = ["with_prior_preservation=true", "class_prompt=a dog", "num_class_images=200"]
    cfg = compose("dreambooth", f"experiment=dreambooth_{name}", f"instance_data_dir={tmp_path}", *prior, *options)
    if not any(option.startswith("model.pretrained=") for option in options):
        model = LatentDiffusion.build(cfg.model.architecture, device="meta")
        cfg.model.pretrained = str(without_weights(model, tmp_path / cfg.model.architecture))
    found = predict_memory(RunSpec.of(cfg))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "preset", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW), *keep((), LEFT, "platform")]
)
def test_every_preset_stays_a_gigabyte_below_what_it_is_named_for(
    preset: str,
    compose: Compose,  # noqa: F811
    tmp_path: Path,
) -> None:
    name, _, model = preset.rpartition("-")
    found = predicted(compose, tmp_path, name, f"model={model}")
    assert found.device <= (PRESETS[preset] - 1) * GB, found.lines()
    assert found.host <= HOST_GB[name] * GB, found.lines()
    assert found.device > 0.4 * PRESETS[preset] * GB, "the preset makes use of its memory"
    device, host = found.lines()
    assert device.startswith(f"device {found.device / GB:5.2f} GB in ") and "weights " in device
    assert host.startswith(f"host   {found.host / GB:5.2f} GB in ") and "allowance " in host


def phases(found: Forecast) -> dict[str, dict[str, int]]:
    """Return the parts of each phase on the device."""
    return {phase.name: dict(phase.parts) for phase in found.on_device}


@pytest.mark.full("platform")
def test_what_a_setting_saves_shows_in_the_forecast(compose: Compose, tmp_path: Path) -> None:  # noqa: F811
    base = predicted(compose, tmp_path, "8gb")
    more = predicted(compose, tmp_path, "8gb", "strategy.offload_optim_frac=1.0")
    assert more.device < base.device - GB and more.host > base.host + 2 * GB
    kept = predicted(compose, tmp_path, "8gb", "gradient_checkpointing=false")
    assert kept.device > base.device + 0.9 * GB
    small = predicted(compose, tmp_path, "8gb", "trainable=lora")
    assert "optimizer states" not in dict(small.host_phase.parts) or small.host < base.host - 8 * GB
    many = predicted(compose, tmp_path, "sdxl_lora_12gb", "sample_batch_size=4")
    assert many.device_phase.name == "drawing class images" and many.device > 12 * GB, "four at a time are too many"
    eight = predicted(compose, tmp_path, "8gb", "optimizer=adamw8bit")
    assert eight.host < base.host - 3 * GB and eight.device < base.device - 0.5 * GB
    made = predicted(compose, tmp_path, "8gb", "trainable=lora", "model.pretrained=null")
    networks = LatentDiffusion.build("sd15", device="meta").networks.values()
    whole = sum(4 * parameter.numel() for network in networks for parameter in network.parameters())
    assert made.host_phase.parts["the whole model"] == whole, "random weights are made in float32, all at once"


def test_every_strategy_that_does_not_measure_its_first_step_has_a_forecast(
    compose: Compose,  # noqa: F811
    tmp_path: Path,
) -> None:
    for strategy, is_known in (("ddp", True), ("fsdp", True), ("gemini_offload", True), ("gemini_auto", False)):
        options = ("model=tiny", f"instance_data_dir={tmp_path}", f"strategy={strategy}", "callbacks.samples=null")
        cfg = compose("dreambooth", *options)
        found = predict_memory(RunSpec.of(cfg))
        assert (found is not None) == is_known, strategy


def of_tiny(strategy: Any = None, **options: Any) -> Forecast:
    run = TrainingRun(**{"batch_size": 1, "resolution": 32, "num_images": 16, **options})
    forecaster = Forecaster(LatentDiffusion.build("tiny", device="meta"), run)
    footprint = engine_of(strategy or GeminiStrategy()).footprint(forecaster.workload)
    assert footprint is not None
    return forecaster.forecast(footprint)


def test_a_frozen_text_encoder_beside_trained_ones_is_counted_without_images_to_encode() -> None:
    model = LatentDiffusion.build("tiny_sd3", device="meta")
    t5 = sum(2 * p.numel() for p in model.networks["text_encoder_3"].parameters())
    vae = sum(2 * p.numel() for p in model.networks["vae"].parameters())

    def counted(**options: Any) -> dict[str, Any]:
        run = TrainingRun(batch_size=1, resolution=32, encodes=False, encoder_dtype=torch.bfloat16, **options)
        forecaster = Forecaster(model, run)
        footprint = engine_of(GeminiStrategy()).footprint(forecaster.workload)
        assert footprint is not None
        return phases(forecaster.forecast(footprint))

    assert counted(train_text_encoder=True)["a training step"]["encoders"] == t5 + vae, "which stays beside it"
    moved = counted(train_text_encoder=True, offload_encoders=True)
    assert moved["encoding"]["encoders"] == t5 and "encoders" not in moved["a training step"]
    assert "encoders" not in counted()["a training step"], "its embeddings are stored"


def test_what_overflows_in_float16_is_counted_in_float32() -> None:
    model = LatentDiffusion.build("tiny_flux", device="meta")
    run = TrainingRun(1, 32, encoder_dtype=torch.float16)
    forecaster = Forecaster(model, run)
    footprint = engine_of(GeminiStrategy()).footprint(forecaster.workload)
    assert footprint is not None
    counted = phases(forecaster.forecast(footprint))["a training step"]["encoders"]
    LatentEncoder(model, dtype="float16").to(torch.device("meta"))
    networks = [model.networks[name] for name in ("vae", "text_encoder", "text_encoder_2")]
    assert counted == sum(p.nbytes for network in networks for p in network.parameters())


def test_pictures_encoders_and_averages_are_counted_where_they_are() -> None:
    networks = LatentDiffusion.build("tiny", device="meta").networks
    encoders = sum(4 * p.numel() for name in ("vae", "text_encoder") for p in networks[name].parameters())
    kept = of_tiny(cache_latents=True)
    moved = of_tiny(cache_latents=True, offload_encoders=True)
    assert phases(kept)["a training step"]["encoders"] == encoders == phases(moved)["encoding"]["encoders"]
    assert "encoders" not in phases(moved)["a training step"]
    assert "encoding" not in phases(of_tiny(encodes=False))
    encoded = [phases(found)["encoding"]["activations"] for found in (kept, moved, of_tiny())]
    assert encoded[0] > 4 * encoded[1], "16 images are encoded at a time, and not one"
    assert encoded[2] == encoded[1], "no more than a batch"
    assert phases(of_tiny(batch_size=16))["encoding"]["activations"] == encoded[0], "a batch at a time"
    parts = {phase.name: phase.parts for phase in moved.on_host}
    assert parts["training"]["cached latents"] == 16 * 8 * 8 * 8 * 4
    drawn = [
        phases(of_tiny(sample_batch_size=count, drawn_size=size))["drawing images"]["activations"]
        for count, size in ((1, (None, None)), (1, (64, 64)), (8, (None, None)))
    ]
    assert drawn[1] > 2 * drawn[0] and drawn[2] > 4 * drawn[0]
    average = 4 * sum(p.numel() for p in networks["unet"].parameters())
    averaged, offloaded = of_tiny(averages=True), of_tiny(averages=True, offload_averages=True)
    assert phases(averaged)["a training step"]["EMA"] == pytest.approx(average, rel=0.1), "chunks are padded"
    room = phases(offloaded)["a training step"]["EMA"]
    assert room == phases(averaged)["a training step"]["EMA"] < 64 * 2**20, "it fits the room that it passes through"
    on_host = {phase.name: phase.parts for phase in offloaded.on_host}["training"]["EMA"]
    assert average <= on_host < 2 * average and not on_host & (on_host - 1), "pinned memory is a power of two"
    cast = of_tiny("auto", averages=True, precision="bf16-true")
    assert phases(cast)["a training step"]["EMA"] == 2 * average, "weights of 16 bits are cast in each update"
    prior = [of_tiny(prior_batch_size=4, encoder_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    drawing = [phases(found)["drawing class images"] for found in prior]
    wider = phases(of_tiny(prior_batch_size=4, prior_dtype=torch.float32))["drawing class images"]
    assert drawing[0] == drawing[1] and wider["weights"] == 2 * drawing[0]["weights"]


def test_lightnings_own_strategies_and_precisions_are_known() -> None:
    count = sum(p.numel() for p in LatentDiffusion.build("tiny", device="meta").denoiser.parameters())
    full, half = (phases(of_tiny("auto", precision=precision)) for precision in ("32-true", "bf16-true"))
    for parts, width in ((full, 4), (half, 2)):
        assert parts["the optimizer's step"]["weights"] == width * count == parts["the optimizer's step"]["gradients"]
        assert parts["the optimizer's step"]["optimizer states"] == 2 * width * count
    ddp = phases(of_tiny(DDPStrategy(), precision="32-true", world_size=2))
    assert ddp["the optimizer's step"]["new buckets"] == 4 * count
    sgd = phases(of_tiny("auto", optimizer=partial(torch.optim.SGD, lr=1e-3)))
    assert not sgd["the optimizer's step"].get("optimizer states")
    eight = phases(of_tiny("auto", optimizer=partial(bitsandbytes.optim.AdamW8bit, lr=1e-3)))
    assert 2 * count < eight["the optimizer's step"]["optimizer states"] < 2.5 * count


def test_settings_of_a_run_reach_the_forecast(
    compose: Compose,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[TrainingRun] = []
    build = Forecaster.__init__

    def note(self: Forecaster, model: LatentDiffusion, run: TrainingRun) -> None:
        noted.append(run)
        build(self, model, run)

    monkeypatch.setattr(Forecaster, "__init__", note)
    monkeypatch.setattr(Forecaster, "forecast", lambda self, footprint: "forecast")

    def read(*options: str) -> TrainingRun:
        predicted(compose, tmp_path, "8gb", *options)
        return noted[-1]

    preset = read()
    assert (preset.sample_batch_size, preset.offload_encoders, preset.cache_latents) == (1, True, True)
    assert not preset.averages
    changed = read("sampling.batch_size=16", "module.offload_encoders=false", "data.cache_latents=false")
    assert (changed.sample_batch_size, changed.offload_encoders, changed.cache_latents) == (16, False, False)
    ema = "callbacks.ema={_target_: sd_lightning.callbacks.EMA, offload: true}"
    assert read(ema).averages and read(ema).offload_averages
    assert read("sampling.batch_size=16", "callbacks.samples.prompts=[a, b]").sample_batch_size == 2
    assert read("callbacks.samples=null").sample_batch_size == 0
    assert preset.drawn_size == (None, None) and read("+sampling.height=256").drawn_size == (256, None)
    assert preset.vae_tiling and not read("sampling.vae_tiling=false").vae_tiling
    assert read("model=sd21").resolution == 512


WIDE = replace(
    architecture("tiny"),
    networks={
        **architecture("tiny").networks,
        "unet": replace(
            architecture("tiny").networks["unet"],
            config=architecture("tiny").networks["unet"].config | {"block_out_channels": [64, 96], "sample_size": 16},
        ),
    },
)
"""As a fine-tuned variant: the channels and the size of pictures are its own."""


@pytest.mark.parametrize(("model", "built"), [("tiny", WIDE), ("sdxl", SMALL_SDXL)], ids=["wide", "sdxl"])
def test_the_forecast_is_of_the_pipeline_that_is_loaded(
    model: str,
    built: Architecture,
    compose: Compose,  # noqa: F811
    tmp_path: Path,
) -> None:
    folder = without_weights(LatentDiffusion.build(built, device="meta"), tmp_path / "own")
    found = predicted(compose, tmp_path, "8gb", f"model={model}", f"model.pretrained={folder}", "resolution=32")
    loaded = LatentDiffusion.describe(folder)
    denoiser = sum(p.numel() for p in LatentDiffusion.build(built, device="meta").denoiser.parameters())
    weights = dict(found.on_device[0].parts)["weights"]
    assert weights == pytest.approx(2 * denoiser, rel=0.2), "of the pipeline, not of the architecture that is named"
    assert all(p.is_meta for network in loaded.networks.values() for p in [*network.parameters(), *network.buffers()])
    whole = inference_bytes(LatentDiffusion.build(built), height=64, width=64)
    assert inference_bytes(loaded, height=64, width=64) == whole, "what generate prints is of its pipeline, too"


ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@pytest.mark.parametrize(
    ("fraction", "optimizer"),
    [
        *((fraction, ADAMW) for fraction in (0.0, 0.5, 1.0)),
        (0.5, partial(torch.optim.SGD, lr=1e-3, momentum=0.9)),
        (1.0, partial(torch.optim.SGD, lr=1e-3)),
        (0.5, partial(bitsandbytes.optim.AdamW8bit, lr=1e-3)),
    ],
)
def test_states_are_what_the_engine_keeps_in_a_step(fraction: float, optimizer: Any) -> None:
    network: Any = LatentDiffusion.build("tiny", seed=1).denoiser.requires_grad_(True)
    config = GeminiConfig(offload_optim_frac=fraction, compute_dtype=torch.bfloat16, chunk_numel=2**17)
    engine = GeminiEngine(
        {"unet": network},
        config,
        device=torch.device("cpu"),
        blocks=list(repeated_blocks(network).values()),
        order=lambda name: execution_position(name.removeprefix("unet.")),
    )
    stepping = engine.optimizer(optimizer(list(network.parameters())))
    latents = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    hidden = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    network(latents, torch.tensor([3]), encoder_hidden_states=hidden).sample.square().mean().backward()
    stepping.step()
    found = engine.statistics()
    run = TrainingRun(batch_size=1, resolution=32, precision="bf16-true", optimizer=optimizer)
    forecaster = Forecaster(LatentDiffusion.build("tiny", device="meta"), run)
    footprint = GeminiStrategy(offload_optim_frac=fraction, chunk_numel=2**17).footprint(forecaster.workload)
    assert footprint is not None
    only_with_cuda = PAGE_LOCKED_ROUNDING, "staged weights"
    host = sum(held.nbytes for held in footprint.host if held.kind not in only_with_cuda)
    assert host == found.get("peak_bytes/slow", 0)
    kept = sum(held.nbytes for held in footprint.device if held.when in (When.ALWAYS, When.AS_READY))
    moving = max(footprint.in_backward.values())
    assert kept <= found["peak_bytes/fast"] <= kept + moving, "gradients that are being reduced"
