"""The programs with transformer families, tiny: every capability once, and what a frozen text encoder refuses.

What differs between families in their own files is tried with all of them; the rest with two, and in the full suite.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from glyph import write_photos
from refusals import call, refuse
from sd_lightning.models.families import FAMILIES, architecture
from sd_lightning.models.lora import WEIGHTS_NAME
from sd_lightning.storage.checkpoint import all_checkpoints
from shaped_data import TINY as IN_BUCKETS
from shaped_data import paint
from small_models import TINY_TRANSFORMERS
from small_training import same, stored
from suites import keep

pytestmark = pytest.mark.slow

FEW = "logger=csv trainer.log_every_n_steps=1 data.batch_size=8 sampling.num_inference_steps=2"
DIGITS = f"data.num_val_samples=8 trainer.val_check_interval=2 trainer.max_steps=4 {FEW}"
DREAMBOOTH = (
    "init_from=run instance_data_dir=../photos 'instance_prompt=a handwritten sks digit' max_train_steps=2 "
    "resolution=32 data.batch_size=4 sampling.num_inference_steps=1 logger=csv"
)
EVERY = pytest.mark.parametrize("family", TINY_TRANSFORMERS, indirect=True)
COMPLETE = pytest.mark.parametrize(
    "family", keep(("tiny_klein", "tiny_sd3"), TINY_TRANSFORMERS, "engines"), indirect=True
)
"""Of one with a chat model, and one with text encoders that are trained; of the others in the full suite."""


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The family that is trained, in a folder with ``run``: four steps of it, validated, and pictures read."""
    folder = tmp_path_factory.mktemp(request.param)
    before = Path.cwd()
    write_photos(folder / "photos")
    paint(folder / "pictures")
    (folder / "work").mkdir()
    os.chdir(folder / "work")
    accuracy = "callbacks.samples.accuracy_samples=20"
    assert call(f"train model={request.param} {DIGITS} {accuracy} output_dir=run") == 0
    yield request.param
    os.chdir(before)


def summary(run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(run) / "summary.json").read_text())
    return found


def pixels(folder: str) -> np.ndarray:
    return np.asarray(Image.open(Path(folder) / "grid.png"), dtype=int)


def trained(run: str) -> dict[str, Any]:
    """Return all tensors that the last checkpoint of a run holds."""
    return stored(all_checkpoints(Path(run))[-1])


def size_multiple(family: str) -> int:
    known = architecture(family)
    return FAMILIES[known.pipeline_class].size_multiple(known.networks["vae"].config)


@EVERY
@pytest.mark.holds("full")
def test_captions_and_pictures_of_a_run_are_measured(family: str) -> None:
    found = summary("run")
    assert 0 < found["val_loss"] < 3 and found["caption_gap"] != 0
    assert 0 <= found["prompted_accuracy"] <= 1 and found["prompted_accuracy_samples"] == 20


@EVERY
def test_an_exported_run_draws_the_same(family: str) -> None:
    assert call("export run=run output_dir=exported") == 0
    for run in ("run", "exported"):
        draw = f"generate run={run} prompts=[three] num_inference_steps=2 height=32 width=32 guidance_scale=3"
        assert call(f"{draw} output_dir=of-{run}") == 0
    assert (pixels("of-run") == pixels("of-exported")).all()


@COMPLETE
@pytest.mark.parametrize("speed", ["gradient_checkpointing=true", "gradient_checkpointing=0.1"])
def test_recomputed_blocks_train_the_same(family: str, speed: str) -> None:
    run = speed.replace("=", "-")
    assert call(f"train model={family} {DIGITS} callbacks.samples=null speed.{speed} output_dir={run}") == 0
    assert same(trained("run"), trained(run))


@EVERY
@pytest.mark.holds("stores")
def test_a_store_trains_as_its_images_do(family: str) -> None:
    images = "data=digits data.num_val_samples=8 dtype=float32"
    assert call(f"precompute model={family} {images} store=latents text=true workers=1") == 0
    data = "data=latents data.store=latents trainer.val_check_interval=2 trainer.max_steps=4 callbacks.samples=null"
    assert call(f"train model={family} {data} {FEW} output_dir=stored") == 0
    for name in ("final_loss", "val_loss"):
        assert summary("stored")[name] == pytest.approx(summary("run")[name], abs=1e-4), name


@EVERY
@pytest.mark.holds("buckets")
def test_buckets_of_several_shapes_are_trained_on_at_once(family: str) -> None:
    larger = size_multiple(family) // 8
    sides = {name: value if value is True else value * larger for name, value in IN_BUCKETS.items()}
    buckets = " ".join(f"data.{name}={str(value).lower()}" for name, value in sides.items())
    data = f"data=images data.train_data_dir=../pictures data.num_val_samples=5 data.resolution={32 * larger} {buckets}"
    more = "data.num_workers=0 callbacks.samples=null trainer.max_steps=8 trainer.val_check_interval=4"
    assert call(f"train model={family} {data} {FEW.replace('size=8', 'size=4')} {more} output_dir=buckets") == 0
    assert summary("buckets")["final_loss"] > 0 and summary("buckets")["val_loss"] > 0


@EVERY
@pytest.mark.holds("int8")
def test_int8_draws_nearly_the_same(family: str) -> None:
    draw = "generate run=run 'prompts=[a handwritten three]' num_inference_steps=2 guidance_scale=3"
    assert call(f"{draw} output_dir=whole") == 0
    assert call(f"{draw} quantization=int8 output_dir=int8") == 0
    difference = np.abs(pixels("whole") - pixels("int8"))
    assert 0 < difference.mean() < 4


def dreambooth(family: str, trainable: str) -> None:
    prior = "with_prior_preservation=true 'class_prompt=a handwritten digit' num_class_images=2 class_data_dir=drawn"
    run = f"dreambooth-{trainable}"
    command = f"dreambooth model={family} {DREAMBOOTH} {prior} trainable={trainable} learning_rate=1e-3"
    assert call(f"{command} output_dir={run}") == 0
    assert (Path(run) / "pipeline" / WEIGHTS_NAME).exists() == (trainable == "lora")
    assert len(list(Path("drawn").rglob("*.png"))) == 2
    draw = f"generate run={run} 'prompts=[a handwritten sks digit]' num_inference_steps=1"
    assert call(f"{draw} output_dir={run}-drawn") == 0


@EVERY
@pytest.mark.holds("DreamBooth", "LoRA")
def test_dreambooth_draws_its_class_and_trains_adapters(family: str) -> None:
    dreambooth(family, "lora")


@COMPLETE
def test_dreambooth_trains_all_weights(family: str) -> None:
    dreambooth(family, "full")


@COMPLETE
@pytest.mark.parametrize(
    "command",
    [
        f"train {DIGITS} callbacks.samples=null module.train_text_encoder=true",
        f"dreambooth {DREAMBOOTH} train_text_encoder=true",
    ],
    ids=lambda command: command.partition(" ")[0],
)
def test_text_encoders_are_trained_where_one_is_no_language_model(
    family: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program, _, rest = command.partition(" ")
    if family not in ("tiny_sd3", "tiny_flux"):
        refuse(
            f"{program} model={family} output_dir=new {rest}",
            ("train_text_encoder=true", "language model", "leave"),
            Path("."),
            capfd,
        )
        return
    assert call(f"{program} model={family} output_dir=texts-{program} {rest}") == 0
    numbers = ("", "_2", "_3") if family == "tiny_sd3" else ("", "_2")
    files = [f"pipeline/text_encoder{number}/model.safetensors" for number in numbers]
    changed = [Path("run", file).read_bytes() != Path(f"texts-{program}", file).read_bytes() for file in files]
    assert changed == [True] * (len(numbers) - 1) + [False], "T5 is the last"


@COMPLETE
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"dreambooth {DREAMBOOTH.replace('sks', 'S*')} learn_token=true", ("learn", "language model", "leave")),
        (f"train {DIGITS} data.resolution=36", ("resolution=36", "multiple", "8")),
        ("generate run=run prompts=[three] height=36", ("height=36", "multiples of {multiple}")),
        ("generate run=run prompts=[three] scheduler=ddim", ("scheduler=ddim", "FlowMatchEulerDiscreteScheduler")),
    ],
)
def test_what_the_family_cannot_do_is_refused(
    family: str, command: str, words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    program, _, rest = command.partition(" ")
    model = "" if program == "generate" else f"model={family} output_dir=new"
    words = tuple(word.format(multiple=size_multiple(family)) for word in words)
    refuse(f"{program} {model} {rest}", words, Path("."), capfd)
