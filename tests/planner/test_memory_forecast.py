"""What a run will take of memory: the trace against torch's own tracker, the forms against the engine, the presets."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from sd_lightning.planner.memory_forecast import DEVICE_ALLOWANCE, GB, Forecast, Training, forecast
from sd_lightning.planner.memory_trace import peak_bytes

from composing import Compose
from sd_lightning import LatentDiffusion, _conf
from sd_lightning.apps.dreambooth import predict_memory
from sd_lightning.apps.preflight import Parts
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.models.families import Architecture, architecture
from sd_lightning.planner.inference_memory import inference_bytes
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
    found = predict_memory(cfg, _conf.instantiate(cfg.strategy), Parts.build(cfg))
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
    assert device.startswith(f"device  {found.device / GB:5.2f} GB = weights and states")
    assert host.startswith(f"host    {found.host / GB:5.2f} GB = the larger of offloaded states")


@pytest.mark.full("platform")
def test_what_a_setting_saves_shows_in_the_forecast(compose: Compose, tmp_path: Path) -> None:  # noqa: F811
    base = predicted(compose, tmp_path, "8gb")
    more = predicted(compose, tmp_path, "8gb", "strategy.offload_optim_frac=1.0")
    assert more.weights_and_states < base.weights_and_states - 2 * GB and more.host > base.host + 2 * GB
    kept = predicted(compose, tmp_path, "8gb", "gradient_checkpointing=false")
    assert kept.activations > 2 * base.activations
    small = predicted(compose, tmp_path, "8gb", "trainable=lora")
    assert small.weights_and_states < 2.2 * GB and small.host_states < 0.1 * GB
    many = predicted(compose, tmp_path, "sdxl_lora_12gb", "sample_batch_size=4")
    assert many.device == many.class_images + DEVICE_ALLOWANCE > 12 * GB, "four class images at a time are too many"
    eight = predicted(compose, tmp_path, "8gb", "optimizer=adamw8bit")
    assert eight.host < base.host - 3 * GB and eight.weights_and_states < base.weights_and_states - 0.5 * GB
    made = predicted(compose, tmp_path, "8gb", "trainable=lora", "model.pretrained=null")
    networks = LatentDiffusion.build("sd15", device="meta").networks.values()
    whole = sum(4 * parameter.numel() for network in networks for parameter in network.parameters())
    assert made.host_loading == whole > 4 * small.host_loading, "random weights are made in float32, all at once"
    cfg = compose("dreambooth", "experiment=dreambooth_tiny", f"instance_data_dir={tmp_path}")
    assert predict_memory(cfg, _conf.instantiate(cfg.strategy), Parts.build(cfg)) is None, (
        "nothing is said of settings without a form"
    )


def test_pictures_encoders_and_averages_are_counted_where_they_are() -> None:
    def of_tiny(**options: Any) -> Forecast:
        training = Training(batch_size=1, resolution=32, num_images=16, **options)
        return forecast(LatentDiffusion.build("tiny", device="meta"), training, GeminiConfig())

    plain = of_tiny()
    kept = of_tiny(offload_encoders=False)
    encoders = plain.host_others - kept.host_others
    networks = LatentDiffusion.build("tiny", device="meta").networks
    assert encoders == sum(2 * p.numel() for name in ("vae", "text_encoder") for p in networks[name].parameters())
    assert kept.weights_and_states == plain.weights_and_states + encoders
    assert kept.drawing > 4 * (plain.drawing - encoders), "16 images are encoded at a time, and not one"
    each_step = of_tiny(offload_encoders=False, cache_latents=False)
    assert each_step.drawing < kept.drawing, "no more than a batch"
    assert each_step.host_others == kept.host_others - 16 * 8 * 8 * 8 * 4
    assert of_tiny(drawn_size=(64, 64)).drawing > plain.drawing
    assert of_tiny(sample_batch_size=8).drawing - encoders > 4 * (plain.drawing - encoders)
    averaged, offloaded = of_tiny(averages=True), of_tiny(averages=True, offload_averages=True)
    average = 4 * sum(p.numel() for p in networks["unet"].parameters())
    assert averaged.weights_and_states == plain.weights_and_states + average and averaged.host == plain.host
    assert offloaded.device == plain.device and offloaded.host_others == plain.host_others + average
    prior = [of_tiny(prior_batch_size=4, encoder_dtype=dtype).class_images for dtype in (torch.float32, torch.bfloat16)]
    assert prior[0] == prior[1] < of_tiny(prior_batch_size=4, prior_dtype=torch.float32).class_images


def test_settings_of_a_run_reach_the_forecast(
    compose: Compose,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sd_lightning.planner.memory_forecast.forecast", lambda model, training, config: training)

    def read(*options: str) -> Any:
        return predicted(compose, tmp_path, "8gb", *options)

    preset = read()
    assert (preset.sample_batch_size, preset.offload_encoders, preset.cache_latents) == (1, True, True)
    assert not preset.averages
    changed = read("sampling.batch_size=16", "module.offload_encoders=false", "data.cache_latents=false")
    assert (changed.sample_batch_size, changed.offload_encoders, changed.cache_latents) == (16, False, False)
    ema = "callbacks.ema={_target_: sd_lightning.callbacks.EMA, offload: true}"
    assert read(ema).averages and read(ema).offload_averages
    assert read("sampling.batch_size=16", "callbacks.samples.prompts=[a, b]").sample_batch_size == 2
    assert read("callbacks.samples=null").sample_batch_size == 0
    assert preset.drawn_size == (512, 512) and read("+sampling.height=256").drawn_size == (256, 512)
    assert preset.vae_tiling and not read("sampling.vae_tiling=false").vae_tiling
    assert (read("model=sd21").resolution, read("model=sd21").drawn_size) == (512, (768, 768)), "as SD 2.1 draws"


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = without_weights(LatentDiffusion.build(built, device="meta"), tmp_path / "own")
    noted: list[Any] = []

    def note(model: LatentDiffusion, training: Training, gemini: GeminiConfig) -> Forecast:
        noted[:] = training, gemini
        return forecast(model, training, gemini)

    monkeypatch.setattr("sd_lightning.planner.memory_forecast.forecast", note)
    found = predicted(compose, tmp_path, "8gb", f"model={model}", f"model.pretrained={folder}", "resolution=32")
    training, gemini = noted
    assert found == forecast(LatentDiffusion.build(built, device="meta"), training, gemini)
    assert training.drawn_size == ((64, 64) if built is WIDE else (32, 32))
    plain = forecast(LatentDiffusion.build("tiny", device="meta"), training, gemini)
    assert plain.weights_and_states < found.weights_and_states < 0.1 * GB
    loaded = LatentDiffusion.describe(folder)
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
    engine = GeminiEngine({"unet": network}, config, device=torch.device("cpu"))
    stepping = engine.optimizer(optimizer(list(network.parameters())))
    latents = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    hidden = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    network(latents, torch.tensor([3]), encoder_hidden_states=hidden).sample.square().mean().backward()
    stepping.step()
    found = engine.statistics()
    model = LatentDiffusion.build("tiny", device="meta")
    expected = forecast(model, Training(batch_size=1, resolution=32, optimizer=optimizer), config)
    assert expected.host_states == found.get("peak_bytes/slow", 0)
    in_flight = 6 * 4 * config.chunk_numel  # type: ignore[operator]
    assert 0 <= expected.weights_and_states - found["peak_bytes/fast"] <= in_flight, "gradients that are being reduced"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trace_agrees_with_real_allocations(checkpointing: bool) -> None:
    """The same passes on the CPU, where torch's tracker adds up real storages."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def network(device: str) -> Any:
        unet = LatentDiffusion.build("tiny", device=device).denoiser.train()
        if checkpointing:
            unet.enable_gradient_checkpointing()
        return unet

    def step(unet: Any, device: str) -> None:
        with torch.device(device):
            latents, hidden = torch.ones(8, 4, 8, 8), torch.ones(8, 8, 64)
            unet(latents, torch.ones(8), encoder_hidden_states=hidden).sample.square().mean().backward()

    meta = network("meta")
    traced = peak_bytes(lambda: step(meta, "meta"))
    real = network("cpu")
    tracker = MemTracker()
    tracker.track_external(real)
    with tracker:
        step(real, "cpu")
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    weights = sum(p.numel() * 4 for p in real.parameters())
    assert traced == pytest.approx(peak["Total"] - weights, rel=0.06)
