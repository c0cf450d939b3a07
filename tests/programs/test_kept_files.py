"""What the commit before the rooms of the package wrote (``kept/before_rooms.tar.xz``) is read by this one.

It holds, of a model of 20,000 weights: a pipeline, a run of three steps under Gemini with a checkpoint of the second
and of the third, a run with adapters, a pipeline in int8, and a picture that was drawn with it.
"""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from comparing import rms
from refusals import call

ARCHIVE = Path(__file__).with_name("kept") / "before_rooms.tar.xz"
SETTINGS = (
    "model.pretrained=pipeline trainer.limit_val_batches=0 trainer.accelerator=cpu data.batch_size=8 logger=csv "
    "callbacks.samples=null trainer.log_every_n_steps=1 callbacks.checkpoint.keep=9"
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that everything lies in, which is the working directory, too."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("strategy", ["gemini", "single"])
def test_a_run_goes_on_as_it_did(kept: Path, strategy: str) -> None:
    then = kept / "then"
    shutil.move(kept / "run/checkpoints/step-00000003", then)
    assert call(f"train {SETTINGS} output_dir=run resume=auto trainer.max_steps=3 strategy={strategy}") == 0
    for kind in ("master", "exp_avg", "ema"):
        assert rms(str(then), str(kept / "run/checkpoints/step-00000003"), kind) < 1e-6, kind
        assert rms(str(then), str(kept / "run/checkpoints/step-00000002"), kind) > 1e-6, kind


def test_a_run_with_adapters_goes_on_and_its_file_is_read(kept: Path) -> None:
    assert (kept / "lora/pipeline/pytorch_lora_weights.safetensors").is_file()
    assert call("generate run=lora prompts=[seven] num_inference_steps=2 output_dir=before") == 0
    assert call(f"train {SETTINGS} output_dir=lora resume=auto trainer.max_steps=3 trainable=lora") == 0
    assert (kept / "lora/checkpoints/step-00000003").is_dir()
    assert call("export run=lora format=single_file output_dir=single") == 0


def test_a_pipeline_in_int8_draws_what_it_did(kept: Path) -> None:
    options = "prompts=[seven] num_inference_steps=2 output_dir=now"
    assert call(f"generate model.pretrained=int8 {options}") == 0
    then, now = (np.asarray(Image.open(kept / name / "seven-seed-0.png"), float) for name in ("drawn", "now"))
    assert then.std() > 0 and np.abs(then - now).max() <= 1
