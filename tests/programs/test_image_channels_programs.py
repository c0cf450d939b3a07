"""The programs with the small inpainting and depth models, and what these learn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from refusals import call, refuse
from sd_lightning.data.sources.digits import Digits

pytestmark = pytest.mark.slow

FEW = "data.num_val_samples=8 data.batch_size=8 sampling.num_inference_steps=2 logger=csv trainer.max_steps=4"
DRAW = "prompts=[three] num_inference_steps=4 guidance_scale=3"
INPUTS = {"tiny_inpainting": "image=image.png mask=mask.png", "tiny_depth": "image=image.png strength=0.6"}
HALF = (16, 0, 32, 32)
"""What the mask hides: the right half."""


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"), dtype=int)


def write_pictures() -> None:
    Digits("val").image(0).save("image.png")
    mask = Image.new("L", (32, 32))
    mask.paste(255, HALF)
    mask.save("mask.png")
    mask.resize((64, 64)).save("large.png")


@pytest.fixture(scope="module", params=INPUTS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The model that is trained for four steps, in a folder with ``run`` and pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp(request.param))
        write_pictures()
        assert call(f"train model={request.param} {FEW} trainer.val_check_interval=2 output_dir=run") == 0
        yield request.param


@pytest.mark.holds("full", "int8")
def test_an_exported_run_draws_with_diffusers_what_generate_draws(family: str) -> None:
    assert call("export run=run output_dir=exported") == 0
    assert call(f"generate run=run {DRAW} {INPUTS[family]} seed=3 output_dir=drawn") == 0
    given: dict[str, Any] = dict(each.split("=") for each in INPUTS[family].split())
    pictures = {key: Image.open(each).convert("RGB") for key, each in given.items() if key in ("image", "mask")}
    if "mask" in pictures:
        pictures["mask_image"] = pictures.pop("mask")
    else:
        given["strength"] = float(given["strength"])
    more = {"strength": given["strength"]} if "strength" in given else {}
    pipeline: Any = DiffusionPipeline.from_pretrained("exported")
    settings = {"num_inference_steps": 4, "guidance_scale": 3.0, "generator": torch.Generator().manual_seed(3)}
    image = pipeline(prompt="three", **settings, **pictures, **more).images[0]
    found = next(path for path in Path("drawn").glob("three*.png"))
    assert np.abs(pixels(found) - np.asarray(image, dtype=int)).max() <= 1
    settings = json.loads(Image.open(found).info["sd_lightning"])
    assert settings["image"] == "image.png" and settings.get("mask") == given.get("mask")
    assert call(f"generate run=run {DRAW} seed=3 output_dir=alone") == 0
    assert (pixels("alone/three-seed-3.png") != pixels(found)).any()
    assert call(f"generate run=run {DRAW} seed=3 quantization=int8 output_dir=int8") == 0
    assert 0 < np.abs(pixels("alone/three-seed-3.png") - pixels("int8/three-seed-3.png")).mean() < 4


def test_a_training_is_planned(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = family.replace("tiny", "sd2")
    assert call(f"plan model={large} gpu=a100-80gb strategy=single data.batch_size=4 output=null") == 0
    assert "at 512 x 512" in capsys.readouterr().out


@pytest.mark.holds("DreamBooth")
@pytest.mark.parametrize("trainable", ["full", pytest.param("lora", marks=pytest.mark.holds("LoRA"))])
def test_dreambooth_trains_with_pictures_of_the_class(family: str, trainable: str) -> None:
    Path("photos").mkdir(exist_ok=True)
    for index in range(3):
        Digits("val").image(index).save(f"photos/{index}.png")
    prior = (
        "with_prior_preservation=true 'class_prompt=a handwritten digit' num_class_images=2 class_data_dir=drawn_class"
    )
    data = "init_from=run instance_data_dir=photos 'instance_prompt=a handwritten sks digit' resolution=32"
    few = "max_train_steps=2 data.batch_size=4 sampling.num_inference_steps=1 logger=csv"
    command = f"dreambooth model={family} {data} {few} {prior} trainable={trainable} output_dir=subject-{trainable}"
    assert call(command) == 0


REFUSED = {
    "train model=tiny_depth data.cache_latents=true output_dir=new": ("cache_latents=true", "Depth2Img", "false"),
    "train model=tiny_inpainting data=latents data.store=none output_dir=new": ("cache_latents", "latents_data"),
    "plan model=tiny_inpainting gpu=t4 encoders=text": ("encoders=text", "InpaintPipeline"),
    "precompute model=tiny_inpainting store=new": ("precompute", "InpaintPipeline", "images"),
    f"generate run=run {DRAW} mask=mask.png": ("mask=mask.png", "image="),
    f"generate run=run {DRAW} strength=0.5": ("strength=0.5", "image="),
    f"generate run=run {DRAW} {{inputs}} strength=0.1": ("strength=0.1", "4 steps"),
    f"generate run=run {DRAW} {{inputs}} image=run/summary.json": ("cannot be read", "summary.json"),
    f"generate run=run {DRAW} {{inputs}} width=40": ("(32, 32)", "one size"),
    f"generate run=plain {DRAW} image=image.png": ("image=image.png", "StableDiffusionPipeline", "prompts alone"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_does_not_fit_is_refused(command: str, family: str, capfd: pytest.CaptureFixture[str]) -> None:
    if "plain" in command and not Path("plain").exists():
        from sd_lightning import LatentDiffusion

        LatentDiffusion.build("tiny").save_pretrained("plain")
    inputs = " ".join(each for each in INPUTS[family].split() if "strength" not in each)
    refuse(command.format(inputs=inputs), REFUSED[command], Path("."), capfd)


def test_a_mask_of_another_size_is_refused(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("(64, 64)", "one size") if family == "tiny_inpainting" else ("mask=large.png",)
    refuse(f"generate run=run {DRAW} image=image.png mask=large.png", words, Path("."), capfd)


@pytest.mark.full("quality")
def test_digits_are_learned_from_captions_and_around_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures()
    assert call("train model=tiny_inpainting output_dir=run logger=csv callbacks.samples.every_n_steps=0") == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["prompted_accuracy"] >= 0.95 and summary["caption_gap"] > 0, summary
    digits, differences = Digits("val"), []
    for index in range(4):
        digits.image(index).save("image.png")
        prompt = f"prompts=['{digits.captions(index)[0]}']"
        assert call(f"generate run=run {prompt} image=image.png mask=mask.png output_dir=drawn{index}") == 0
        drawn = pixels(next(path for path in Path(f"drawn{index}").glob("*.png") if path.name != "grid.png"))
        difference = np.abs(drawn - pixels("image.png")).mean((0, 2))
        differences.append((difference[:15].mean(), difference[17:].mean()))
    kept, painted = np.mean(differences, axis=0)
    assert kept < 16 and painted > 2 * kept, differences
