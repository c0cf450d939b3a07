"""Forecasts of a quantised base: its bytes are those of the live network, and the preset's peaks keep their promise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composing import Compose
from sd_lightning import LatentDiffusion, SDLightningModule
from sd_lightning.apps.planning import run_of
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.models.lora import Lora
from sd_lightning.planner.forecast import Forecaster
from sd_lightning.planner.run import TrainingRun
from sd_lightning.quantization.base import base_bytes
from sd_lightning.quantization.casting import cast_
from sd_lightning.strategies.base import engine_of

GB = 1e9
PEAKS = {"sdxl": (1024, 4), "klein_4b": (1024, 6), "krea2": (512, 12)}
"""Pixels, and GB of the card."""


def forecast(model: LatentDiffusion, run: TrainingRun, strategy: Any) -> Any:
    forecaster = Forecaster(model, run)
    footprint = engine_of(strategy).footprint(forecaster.workload)
    assert footprint is not None
    return forecaster.forecast(footprint)


@pytest.mark.parametrize("architecture", ["tiny", "tiny_klein"])
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_the_forecast_counts_the_bytes_of_the_live_network(architecture: str, base: Any) -> None:
    live = SDLightningModule(LatentDiffusion.build(architecture, seed=1), lora=Lora(base=base, rank=2)).denoiser
    run = TrainingRun(2, 32, "bf16-true", lora=Lora(base=base, rank=2), encodes=False)
    model = LatentDiffusion.build(architecture, device="meta")
    parts = forecast(model, run, "auto").device_phase.parts
    assert parts["frozen networks"] == base_bytes(live)
    plain = forecast(
        model, TrainingRun(2, 32, "bf16-true", lora=Lora(rank=2), encodes=False), "auto"
    ).device_phase.parts
    weights = sum(p.numel() for p in live.parameters())
    assert parts["weights"] == 2 * weights < plain["weights"]
    assert parts["activations"] < 1.3 * plain["activations"], "dequantised weights are not kept for backward"


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_class_images_take_the_bytes_of_the_quantised_model(base: Any) -> None:
    run = TrainingRun(2, 32, lora=Lora(base=base, rank=2), prior_batch_size=2, prior_dtype=torch.float16)
    found = forecast(LatentDiffusion.build("tiny", device="meta"), run, "auto")
    (phase,) = (each for each in found.on_device if each.name == "drawing class images")
    live = LatentDiffusion.build("tiny")
    for name, network in live.networks.items():
        cast_(network, live.family.vae_dtype(network, torch.float16) if name == "vae" else torch.float16)
    Lora(base=base).quantize_base_(live.denoiser)
    parameters = sum(p.nbytes for network in live.networks.values() for p in network.parameters())
    assert phase.parts["weights"] == parameters + base_bytes(live.denoiser)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", PEAKS)
def test_the_preset_fits_its_card(architecture: str, compose: Compose, tmp_path: Path) -> None:
    size, card = PEAKS[architecture]
    options = ("experiment=qlora", f"model={architecture}", f"data.store={tmp_path}", f"data.resolution={size}")
    spec = RunSpec.of(compose("train", *options))
    model = LatentDiffusion.build(architecture, device="meta")
    run = replace(run_of(spec, model, 1), encodes=False)  # as the store has latents and texts
    found = forecast(model, run, spec.strategy)
    assert found.device <= card * GB
