"""Adapters tell of the weights that they were trained on, and a model with others is told from it."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import small_training as small
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.families import sampling
from sd_lightning.models.lora import BASE, BASE_VALUES, SCALES, WEIGHTS_NAME, Lora
from sd_lightning.storage.safetensors_file import open_safetensors
from small_models import few_blocks

WORDS = "these adapters were trained on other weights than those of"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with adapters that were trained on a base in NF4, read from files."""
    root = tmp_path_factory.mktemp("lora-base")
    few_blocks(seed=1).save_pretrained(root / "base")
    saving = small.Saving(root / "run")
    model = LatentDiffusion.from_pretrained(root / "base", deferred=["denoiser"])
    small.fit(small.module(model, lora=Lora(base="nf4", rank=2), train_text_encoder=False), small.data(), 1, saving)
    assert saving.last_saved is not None
    return saving.last_saved / "pipeline"


def told(folder: Path, file: Path | None, caplog: pytest.LogCaptureFixture, *, deferred: bool) -> list[str]:
    sampling._said.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "sd_lightning"):
        LatentDiffusion.from_pretrained(folder, lora=file, deferred=["denoiser"] if deferred else [])
    return [record.getMessage() for record in caplog.records if WORDS in record.getMessage()]


def test_the_file_tells_the_original_values(trained: Path) -> None:
    metadata = open_safetensors(trained / WEIGHTS_NAME).header.metadata
    recorded = json.loads(metadata[BASE_VALUES])
    weights = load_file(trained / "unet/diffusion_pytorch_model.safetensors")
    assert metadata[BASE] == "nf4" and 8 <= len(recorded) <= 16
    for name, values in recorded.items():
        theirs = weights[name.removeprefix("unet.")].reshape(-1)[: len(values)]
        assert torch.allclose(torch.tensor(values), theirs, rtol=1e-4)
        assert len({f"{value:.6g}" for value in values}) == 4


@pytest.mark.parametrize("deferred", [False, True])
def test_another_base_is_told(deferred: bool, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not told(trained, None, caplog, deferred=deferred), "its own"
    file = Path(shutil.copy(trained / WEIGHTS_NAME, tmp_path))
    for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16)):
        shutil.copytree(trained, tmp_path / name)
        (tmp_path / name / WEIGHTS_NAME).unlink()
        weights = tmp_path / name / "unet/diffusion_pytorch_model.safetensors"
        save_file({key: value.to(dtype) for key, value in load_file(weights).items()}, weights)
        assert not told(tmp_path / name, file, caplog, deferred=deferred), "the same model in another dtype"
    few_blocks(seed=2).save_pretrained(tmp_path / "other")
    (message,) = told(tmp_path / "other", file, caplog, deferred=deferred)
    for words in (str(file), f"those of {tmp_path / 'other'}", " %", "fine-tuned", "model.pretrained="):
        assert words in message
    save_file(load_file(file), file)
    assert not told(tmp_path / "other", file, caplog, deferred=deferred), "a file that tells nothing"


@pytest.mark.parametrize(
    ("key", "record"),
    [
        *((BASE_VALUES, text) for text in ('{"unet.conv_in.weight": 3}', "[1]", '{"unet.conv_in.weight": ["x"]}', "{")),
        *((SCALES, text) for text in ('{"unet.conv_in": [3]}', "[1]", '{"unet.conv_in": "x"}', "{")),
    ],
)
def test_a_damaged_record_is_refused(key: str, record: str, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "lora.safetensors"
    save_file(load_file(trained / WEIGHTS_NAME), file, metadata={key: record})
    with pytest.raises(UsageError, match=r"lora.safetensors: its metadata cannot be read.*copy the file again"):
        LatentDiffusion.from_pretrained(trained, lora=file)
