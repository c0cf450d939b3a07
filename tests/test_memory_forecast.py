"""What a run will take of memory: the trace against torch's own tracker, the forms against the engine, the presets."""

from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from sd_lightning import LatentDiffusion, dreambooth
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.memory_forecast import DEVICE_ALLOWANCE, GB, Forecast, Training, forecast
from sd_lightning.memory_trace import peak_bytes
from suites import keep
from test_configs import Compose, compose  # noqa: F401

PRESETS = {
    **{
        f"{name}-{model}": gb
        for name, gb in (("8gb", 8), ("12gb", 12), ("16gb", 16), ("24gb", 24), ("lora_6gb", 6))
        for model in ("sd15", "sd21")
    },
    "sdxl_lora_12gb-sdxl": 12,
}
"""Gigabytes in the name, by preset and model."""
QUICK = ("8gb-sd15", "8gb-sd21", "lora_6gb-sd15")
SLOW = ("12gb-sd21", "16gb-sd15", "24gb-sd21", "sdxl_lora_12gb-sdxl")
LEFT = [preset for preset in PRESETS if preset not in QUICK + SLOW]
HOST_GB = {"8gb": 16, "12gb": 12, "16gb": 8, "24gb": 4, "lora_6gb": 4, "sdxl_lora_12gb": 8}


def predicted(compose: Compose, tmp_path: Path, name: str, *options: str) -> Forecast:  # noqa: F811
    prior = ["with_prior_preservation=true", "class_prompt=a dog", "num_class_images=200"]
    files = [f"instance_data_dir={tmp_path}", "model.pretrained=folder"]
    cfg = compose("dreambooth", f"experiment=dreambooth_{name}", *files, *prior, *options)
    found = dreambooth.predict_memory(cfg)
    assert found is not None
    return found


@pytest.mark.parametrize("preset", [*QUICK, *(pytest.param(p, marks=pytest.mark.slow) for p in SLOW), *keep((), LEFT)])
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


@pytest.mark.slow
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
    assert dreambooth.predict_memory(cfg) is None, "nothing is said of settings without a form"


def test_pictures_encoders_and_averages_are_counted_where_they_are() -> None:
    def of_tiny(**options: Any) -> Forecast:
        return forecast("tiny", Training(batch_size=1, resolution=32, num_images=16, **options), GeminiConfig())

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
    monkeypatch.setattr("sd_lightning.memory_forecast.forecast", lambda architecture, training, config: training)

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
    network: Any = LatentDiffusion.build("tiny", seed=1).unet.requires_grad_(True)
    config = GeminiConfig(offload_optim_frac=fraction, compute_dtype=torch.bfloat16, chunk_numel=2**17)
    engine = GeminiEngine({"unet": network}, config, device=torch.device("cpu"))
    stepping = engine.optimizer(optimizer(list(network.parameters())))
    latents = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    hidden = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    network(latents, torch.tensor([3]), encoder_hidden_states=hidden).sample.square().mean().backward()
    stepping.step()
    found = engine.statistics()
    expected = forecast("tiny", Training(batch_size=1, resolution=32, optimizer=optimizer), config)
    assert expected.host_states == found.get("peak_bytes/slow", 0)
    in_flight = 6 * 4 * config.chunk_numel  # type: ignore[operator]
    assert 0 <= expected.weights_and_states - found["peak_bytes/fast"] <= in_flight, "gradients that are being reduced"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trace_agrees_with_real_allocations(checkpointing: bool) -> None:
    """The same passes on the CPU, where torch's tracker adds up real storages."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def network(device: str) -> Any:
        unet = LatentDiffusion.build("tiny", device=device).unet.train()
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
