"""DreamBooth from the command line, on the tiny model with random weights: what a run writes, and what it refuses."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from glyph import write_photos
from sd_lightning import LatentDiffusion, checkpoint
from sd_lightning.lora import WEIGHTS_NAME
from small_training import assert_bitwise_equal
from test_bad_input import call, refuse

DREAMBOOTH = (
    "dreambooth experiment=dreambooth_tiny instance_data_dir=photos 'instance_prompt=a handwritten sks digit' "
    "sampling.num_inference_steps=1 logger=csv data.batch_size=4 "
)
PRIOR = "'class_prompts=[a handwritten digit, a handwritten two]' class_data_dir=pictures "
LORA = f"{DREAMBOOTH} {PRIOR} num_class_images=4 trainable=lora lora.alpha=12 learning_rate=2e-2 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all commands run in, with photos, a model to start from, and broken things."""
    root = tmp_path_factory.mktemp("dreambooth")
    before = Path.cwd()
    os.chdir(root)
    write_photos(root / "photos")
    LatentDiffusion.build("tiny", seed=7).save_pretrained("base")
    for name in ("empty", "one", "torn", "mixed"):
        (root / name).mkdir()
    shutil.copy("photos/0.png", "one")
    for i in range(3):
        shutil.copy(f"photos/{i}.png", "torn")
        shutil.copy(f"photos/{i}.png", "mixed")
    Path("torn/1.png").write_bytes(b"not a picture")
    Path("file").write_text("in the way")
    yield root
    os.chdir(before)


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    return pipeline("a handwritten sks digit", num_inference_steps=2, generator=noise, output_type="np").images


@pytest.fixture(scope="module")
def full(folder: Path) -> Path:
    """A run that trained all weights for two steps."""
    assert call(f"{DREAMBOOTH} {PRIOR} num_class_images=4 max_train_steps=2 init_from=base output_dir=full") == 0
    return folder / "full"


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Path:
    """A run that trained adapters for four steps."""
    assert call(f"{LORA} max_train_steps=4 init_from=base output_dir=lora") == 0
    return folder / "lora"


def test_class_images_are_kept_and_topped_up(full: Path, folder: Path) -> None:
    first = {path: path.stat().st_mtime_ns for path in (folder / "pictures").rglob("*.png")}
    assert len(first) == 4
    with Image.open(min(first)) as image:
        assert (image.size, image.info["prompt"], image.info["seed"]) == ((32, 32), "a handwritten digit", "0")
        assert '"model": "base"' in image.info["sd_lightning"]
    options = f"{PRIOR} num_class_images=6 max_train_steps=1 init_from=base output_dir=more validation_prompt=two"
    assert call(f"{DREAMBOOTH} {options}") == 0
    second = {path: path.stat().st_mtime_ns for path in (folder / "pictures").rglob("*.png")}
    assert len(second) == 6 and second.items() >= first.items()
    assert not list((folder / "pictures").rglob(".tmp*"))
    with Image.open("more/samples/step-00000001.png") as four, Image.open("full/samples/step-00000002.png") as many:
        assert four.width < many.width, "four pictures of the validation prompt"


def test_a_full_run_writes_a_pipeline_that_diffusers_loads_from_a_folder_and_from_one_file(
    full: Path, folder: Path
) -> None:
    import diffusers

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(full / "pipeline")
    trained = draw(pipeline)
    assert np.abs(trained - draw(LatentDiffusion.from_pretrained("base").pipeline())).max() > 0.01
    assert call("export run=full format=single_file output_dir=single") == 0
    single = diffusers.StableDiffusionPipeline.from_single_file(
        "single/model.safetensors", config="single/config", local_files_only=True
    )
    assert np.abs(draw(single) - trained).max() < 1 / 255


def test_adapters_load_into_the_model_they_were_trained_on(adapted: Path) -> None:
    from diffusers import DiffusionPipeline

    base: Any = DiffusionPipeline.from_pretrained("base")
    before = draw(base)
    base.load_lora_weights(adapted / "pipeline")
    expected = draw(base)
    assert np.abs(expected - before).max() > 0.01
    assert np.abs(draw(LatentDiffusion.from_pretrained(adapted / "pipeline").pipeline()) - expected).max() < 1 / 255
    assert call("generate run=lora 'prompts=[a handwritten sks digit]' num_inference_steps=1") == 0
    size = (adapted / "pipeline" / WEIGHTS_NAME).stat().st_size
    assert size < 0.2 * Path("base/unet/diffusion_pytorch_model.safetensors").stat().st_size


def test_weights_that_adapters_leave_alone_are_those_of_the_base_and_written_once(adapted: Path) -> None:
    for name in ("unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        trained, base = load_file(adapted / "pipeline" / name), load_file(Path("base", name))
        assert trained.keys() == base.keys()
        assert all(torch.equal(trained[key], base[key]) for key in base)
        (newest,) = checkpoint.all_checkpoints(adapted)
        assert (newest / "pipeline" / name).samefile(adapted / "frozen" / name)


def test_a_merged_run_is_a_plain_pipeline_that_draws_the_same(adapted: Path) -> None:
    assert call(f"{LORA} max_train_steps=4 init_from=base output_dir=merged merge_lora=true") == 0
    assert not (Path("merged") / "pipeline" / WEIGHTS_NAME).exists()
    from diffusers import DiffusionPipeline

    merged = draw(DiffusionPipeline.from_pretrained("merged/pipeline"))
    assert np.abs(merged - draw(LatentDiffusion.from_pretrained(adapted / "pipeline").pipeline())).max() < 1 / 255
    assert call("export run=merged format=single_file output_dir=merged-single") == 0


def test_adapters_resume_bit_for_bit(adapted: Path) -> None:
    stop = f"{LORA} max_train_steps=2 init_from=base output_dir=resumed"
    assert call(stop) == 0
    assert call(f"{LORA} max_train_steps=4 model.pretrained=base output_dir=resumed resume=auto") == 0
    (straight,) = checkpoint.all_checkpoints(adapted)
    assert_bitwise_equal(checkpoint.all_checkpoints("resumed")[-1], straight)


BAD = [
    ("instance_data_dir=nowhere", "instance_data_dir=nowhere", "not a folder", "write instance_data_dir=<folder>"),
    ("instance_data_dir=empty", "no photos in it", "expected at least 2", "add photos"),
    ("instance_data_dir=one", "one photo (one/0.png)", "expected at least 2", "add photos from other angles"),
    ("instance_data_dir=torn", "cannot read 1 of the 3 photos", "torn/1.png: ", "not an image", "mend or remove"),
    ("instance_prompt=null", "without instance_prompt", "photos/0.png has no caption", "write 'instance_prompt="),
    (
        "'instance_prompt=a handwritten digit'",
        *("no word that tells the subject from", "'a handwritten digit'", "instance_prompt=a handwritten sks digit"),
    ),
    ("class_prompts=[]", "with_prior_preservation=true without a class prompt", "write 'class_prompt="),
    ("with_prior_preservation=false", "class_prompt='a handwritten digit'", "add with_prior_preservation=true"),
    ("prior_loss_weight=-1", "prior_loss_weight=-1", "at least 0", "write prior_loss_weight=1"),
    ("num_class_images=0", "num_class_images=0", "expected at least 1", "write num_class_images=100"),
    ("class_data_dir=mixed", "class_data_dir=mixed", "2 class prompts", "expected pictures in a folder per", "move"),
    ("class_data_dir=file/x", "class_data_dir=file/x", "cannot be written", "choose another class_data_dir=<folder>"),
    ("trainable=lora lora.rank=0", "rank=0", "expected at least 1", "write lora.rank=4"),
    ("trainable=lora lora.rank=x", "lora.rank=x", "expected int", "write lora.rank=4"),
    ("lora.rank=4", "lora.rank=4", "no key", "lora.rank"),
    ("use_8bit_adam=true optimizer=sgd", "use_8bit_adam=true", "optimizer._target_=torch.optim.SGD", "one of the two"),
    (
        "learn_token=true",
        *("learn_token=true and instance_prompt='a handwritten sks digit'", "without the word S*"),
        "write 'instance_prompt=a handwritten sks S* digit'",
    ),
    ("resolution=30", "data.resolution=30", "multiple of 8", "write data.resolution=32"),
    ("learning_rate=fast", "learning_rate=fast", "expected float", "write learning_rate="),
    ("instance_promt=x", "instance_promt=x", "no key", "write instance_prompt=x"),
]


@pytest.mark.parametrize(("options", "words"), [(c, tuple(w)) for c, *w in BAD], ids=[c for c, *_ in BAD])
def test_mistake_is_one_line_and_touches_nothing(
    options: str, words: tuple[str, ...], full: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    refuse(f"{DREAMBOOTH} {PRIOR} num_class_images=4 output_dir=bad init_from=base {options}", words, folder, capfd)


def test_pictures_of_another_prompt_are_refused(full: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own,) = (path for path in (folder / "pictures").iterdir() if path.name.startswith("a-handwritten-two"))
    options = f"class_prompts=[] 'class_prompt=a dog' class_data_dir=pictures/{own.name} output_dir=bad init_from=base"
    words = ("pictures of 'a handwritten two'", "the class prompt is 'a dog'", "choose another class_data_dir")
    refuse(f"{DREAMBOOTH} {options}", words, folder, capfd)


def test_a_run_with_adapters_beside_its_weights_is_not_exported_without_them(
    adapted: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("run=lora", WEIGHTS_NAME, "merge_lora=true", "save_pretrained('merged')")
    refuse("export run=lora format=single_file output_dir=bad", words, folder, capfd)


def test_8bit_adam_trains(full: Path, folder: Path) -> None:
    options = f"{PRIOR} num_class_images=4 use_8bit_adam=true max_train_steps=1 output_dir=8bit init_from=base"
    assert call(f"{DREAMBOOTH} {options}") == 0
    assert "AdamW8bit" in Path("8bit/config.yaml").read_text()


@pytest.mark.parametrize("preset", ["dreambooth_8gb", "dreambooth_lora_6gb"])
def test_a_preset_says_what_it_will_take_and_trains(
    preset: str, full: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    command = (
        f"dreambooth experiment={preset} model=tiny init_from=base instance_data_dir=photos output_dir={preset} "
        "'instance_prompt=a handwritten sks digit' max_train_steps=2 data.batch_size=4 resolution=32 logger=csv "
        f"with_prior_preservation=true {PRIOR} num_class_images=4 sampling.num_inference_steps=1"
    )
    assert call(command) == 0
    out = capfd.readouterr().out
    assert "predicted peak of memory per process\n  device   0." in out and "\n  host " in out
    pipeline = LatentDiffusion.from_pretrained(f"{preset}/pipeline")
    weights, base = pipeline.unet.state_dict(), LatentDiffusion.from_pretrained("base").unet.state_dict()
    assert any(not torch.equal(weights[key], base[key]) for key in base)
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_a_learned_token_is_part_of_the_pipeline(full: Path, folder: Path) -> None:
    from diffusers import DiffusionPipeline

    options = "learn_token=true train_text_encoder=false trainable=lora module.text_encoder_lr=1e-2 output_dir=token"
    prompt = "'instance_prompt=a handwritten S* digit'"
    assert call(f"{DREAMBOOTH} {PRIOR} num_class_images=4 max_train_steps=2 init_from=base {options} {prompt}") == 0
    pipeline: Any = DiffusionPipeline.from_pretrained("token/pipeline")
    base = LatentDiffusion.from_pretrained("base")
    (old,) = base.tokenizers.values()
    ids = pipeline.tokenizer("a handwritten S* digit").input_ids
    assert ids[3] == len(old) == pipeline.text_encoder.config.vocab_size - 1
    words = pipeline.text_encoder.get_input_embeddings().weight
    before = base.text_encoders["text_encoder"].get_input_embeddings().weight  # type: ignore[operator]
    assert torch.equal(words[:-1], before), "no other word has changed"
    assert 0.005 < (words[-1] - before.mean(0)).abs().max() < 0.05, "two steps of the learning rate"
    others = pipeline.text_encoder.state_dict()
    assert all(
        torch.equal(value, others[key])
        for key, value in base.text_encoders["text_encoder"].state_dict().items()
        if "token_embedding" not in key
    )
    pipeline.load_lora_weights("token/pipeline")
    ours = LatentDiffusion.from_pretrained("token/pipeline").pipeline()
    assert np.abs(draw(pipeline) - draw(ours)).max() < 1 / 255
