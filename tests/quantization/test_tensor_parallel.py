"""int8 models divided among processes: outputs of one device, bytes as computed, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.families import Architecture, architecture
from sd_lightning.quantization import Int8, quantize_
from small_models import SMALL_SD2, SMALL_SDXL, TINY_TRANSFORMERS
from tensor_parallel_jobs import write_model


def _divisible(name: str) -> Architecture:
    """Return a tiny architecture whose attentions two processes divide, all of them."""
    known = architecture(name)
    if name != "tiny_krea2":
        return known
    denoiser = known.networks["transformer"]
    config = {**denoiser.config, "num_key_value_heads": 2}
    return replace(known, networks={**known.networks, "transformer": replace(denoiser, config=config)})


MODELS: dict[str, str | Architecture] = {
    "tiny": "tiny",
    "small_sd2": SMALL_SD2,
    "small_sdxl": SMALL_SDXL,
    **{name: _divisible(name) for name in TINY_TRANSFORMERS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every model in float32, and in int8."""
    place = tmp_path_factory.mktemp("models")
    for name, known in MODELS.items():
        quantize_(write_model(known, place / name)).save_pretrained(place / f"{name}-int8")
    return place


def test_two_processes_compute_what_one_device_computes(folder: Path) -> None:
    jobs = {f"{name}{kind}": {"folder": str(folder / f"{name}{kind}")} for name in MODELS for kind in ("", "-int8")}
    found = ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, folder, world_size=2)
    for name in jobs:
        first, second = (each[name] for each in found)
        print(name, first["errors"])
        assert max(first["errors"].values()) < 1e-3, name
