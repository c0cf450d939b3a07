"""`lora.type=loha` and `lokr`: a run, its resumption, what is exported of it, and what goes on from that."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glyph import write_photos
from refusals import call, refuse
from sd_lightning import LatentDiffusion
from sd_lightning.models.lora import WEIGHTS_NAME
from suites import keep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with photos and a model."""
    before = Path.cwd()
    os.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    yield tmp_path
    os.chdir(before)


@pytest.mark.parametrize("kind", keep([], ["lokr", "loha"]))
def test_a_run_resumes_is_exported_and_gone_on_from(kind: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = (
        "dreambooth experiment=dreambooth_tiny instance_data_dir=photos 'instance_prompt=a handwritten sks digit' "
        "with_prior_preservation=false sampling.num_inference_steps=1 logger=csv data.batch_size=4 trainable=lora "
        "init_from=base callbacks.ema.decay=0.5 "
    )
    run = f"{base} lora.type={kind} lora.rank=3 lora.alpha=6"
    assert call(f"{run} max_train_steps=2 output_dir=whole") == 0
    assert "generate run=" in capfd.readouterr().out
    assert call(f"{run} max_train_steps=1 output_dir=halves") == 0
    assert call(f"{base} max_train_steps=2 output_dir=halves resume=auto") == 2
    assert f"write lora.type={kind}, or start a new run" in capfd.readouterr().err
    assert call(f"{run} max_train_steps=2 output_dir=halves resume=auto") == 0
    whole = Path("whole/pipeline", WEIGHTS_NAME)
    assert whole.read_bytes() == Path("halves/pipeline", WEIGHTS_NAME).read_bytes()

    refuse("export run=whole output_dir=folder", ("add merge_lora=true",), folder, capfd)
    for options, name in (("format=comfyui", "comfyui"), ("merge_lora=true", "sum"), ("format=single_file", "one")):
        assert call(f"export run=whole {options} output_dir={name}") == 0
    assert call("export run=whole format=non_ema merge_lora=true output_dir=last") == 0
    before, merged, last = (load_file(Path(name, UNET)) for name in ("whole/pipeline", "sum", "last"))
    changed = [key for key in before if not torch.equal(before[key], merged[key])]
    assert changed and not torch.equal(merged[changed[0]], last[changed[0]])

    assert call(f"{base} init_lora=comfyui learning_rate=0 max_train_steps=1 output_dir=on") == 0
    mine, theirs = load_file(Path("on/pipeline", WEIGHTS_NAME)), load_file(whole)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)

    drawn = "prompts=[a] num_images_per_prompt=1 seed=3 num_inference_steps=2"
    for name, source in (
        ("run", "run=whole"),
        ("none", "run=whole lora_weight=0"),
        ("sum", "model.pretrained=sum"),
        ("lora", "model.pretrained=base lora=comfyui"),
    ):
        assert call(f"generate {source} {drawn} output_dir=pictures-{name}") == 0
    pictures = {name: next(Path(f"pictures-{name}").rglob("*.png")).read_bytes() for name in ("run", "sum", "lora")}
    assert pictures["run"] == pictures["sum"] == pictures["lora"]
