"""DreamBooth from the command line, on the tiny model with random weights: what a run writes, and what it refuses."""

import json
import os
import re
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
from refusals import call, contents, refuse
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.apps import class_images, dreambooth
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.models.generation import SamplingOptions, generate
from sd_lightning.models.lora import WEIGHTS_NAME
from sd_lightning.quantization.base import NF4Linear
from sd_lightning.quantization.layers import int8_layers
from sd_lightning.report import read_metrics
from sd_lightning.storage import checkpoint
from small_training import assert_bitwise_equal

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
    for name in ("phone/holiday", "photos-in-parts/3_sks digit/classes"):
        Path(name).mkdir(parents=True)
    for i in range(2):
        shutil.copy(f"photos/{i}.png", f"phone/holiday/{i}.png")
        shutil.copy(f"photos/{i}.png", f"photos-in-parts/3_sks digit/{i}.png")
    Path("phone/IMG_1.HEIC").write_bytes(b"from a telephone")
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
        model = LatentDiffusion.from_pretrained("base")
        options = SamplingOptions(num_inference_steps=1, guidance_scale=3.0)
        (expected,) = generate(model, ["a handwritten digit"], seeds=[0], options=options, device=torch.device("cpu"))
        assert np.abs(np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1
    options = f"{PRIOR} num_class_images=6 max_train_steps=1 init_from=base output_dir=more validation_prompt=two"
    assert call(f"{DREAMBOOTH} {options}") == 0
    second = {path: path.stat().st_mtime_ns for path in (folder / "pictures").rglob("*.png")}
    assert len(second) == 6 and second.items() >= first.items()
    assert not list((folder / "pictures").rglob(".tmp*"))
    with Image.open("more/samples/step-00000001.png") as four, Image.open("full/samples/step-00000002.png") as many:
        assert four.width < many.width, "four pictures of the validation prompt"


@pytest.mark.holds("DreamBooth", of="tiny")
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


def test_a_merged_run_is_a_plain_pipeline_that_draws_the_same(adapted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(f"{LORA} max_train_steps=4 init_from=base output_dir=merged merge_lora=true") == 0
    assert "merged/pipeline (diffusers: DiffusionPipeline.from_pretrained)\n" in capfd.readouterr().out
    assert not (Path("merged") / "pipeline" / WEIGHTS_NAME).exists()
    from diffusers import DiffusionPipeline

    merged = draw(DiffusionPipeline.from_pretrained("merged/pipeline"))
    assert np.abs(merged - draw(LatentDiffusion.from_pretrained(adapted / "pipeline").pipeline())).max() < 1 / 255
    assert call("export run=merged format=single_file output_dir=merged-single") == 0


def test_adapters_resume_bit_for_bit(adapted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop = f"{LORA} max_train_steps=2 init_from=base output_dir=resumed"
    assert call(stop) == 0
    told = "DiffusionPipeline.from_pretrained; then pipeline.load_lora_weights('resumed/pipeline'))\n"
    assert told in capfd.readouterr().out, "without, the pictures lack the subject"
    assert call(f"{LORA} max_train_steps=4 model=sdxl output_dir=resumed resume=auto") == 2
    assert "error: model=sdxl, but base holds a StableDiffusionPipeline; write model=tiny" in capfd.readouterr().err
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
    ("placeholder_token=dog", "placeholder_token=dog", "nothing uses without learn_token", "add learn_token=true, or"),
    ("initializer_token=dog", "initializer_token=dog", "nothing uses without learn_token", "add learn_token=true, or"),
    ("init_from=null", "model.pretrained=null", "random weights of tiny", "expected a trained", "add model.pretrained"),
    ("init_from=null resume=auto", "model.pretrained=null", "random weights of tiny", "or init_from=<run or pipeline"),
    (
        "class_data_dir=photos",
        "class_data_dir=photos and instance_data_dir=photos",
        "the same folder",
        "choose another",
    ),
    (
        "class_data_dir=photos/class",
        "class_data_dir=photos/class",
        "one inside the other",
        "expected two folders apart",
    ),
    (
        "'instance_data_dir=photos-in-parts/3_sks digit' class_data_dir=photos-in-parts",
        *("class_data_dir=photos-in-parts", "one inside the other", "leave class_data_dir out, or choose another"),
    ),
    (
        "instance_data_dir=phone",
        *("no photos", "expected at least 2", "not counted: 1 file(s) (phone/IMG_1.HEIC)", "convert to JPEG"),
        *("2 file(s) (phone/holiday/0.png, phone/holiday/1.png)", "rename holiday to '10_holiday'", "move its photos"),
    ),
    ("model=sd15", "model=sd15, but base holds a unet with cross_attention_dim=64, not 768", "write model=tiny"),
    ("num_class_images=1", "num_class_images=1", "none is left for 'a handwritten two'", "write num_class_images=2"),
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
    (
        "learn_token=true 'placeholder_token=S* dog' 'instance_prompt=a handwritten S* dog'",
        *("placeholder_token='S* dog'", "expected one word without blanks", "write placeholder_token=S*-dog"),
    ),
    (
        "max_train_steps=10 trainer.max_steps=12",
        *("max_train_steps=10 and trainer.max_steps=12", "two names of one setting", "leave trainer.max_steps out"),
    ),
    ("resolution=30", "data.resolution=30", "multiple of 8", "write data.resolution=32"),
    ("learning_rate=fast", "learning_rate=fast", "expected float", "write learning_rate="),
    ("instance_promt=x", "instance_promt=x", "no key", "write instance_prompt=x"),
]


def test_class_images_beside_an_output_that_cannot_be_written_are_not_drawn(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    words = ("output_dir=file/x cannot be written", "choose another output_dir=<folder>")
    options = "with_prior_preservation=true 'class_prompts=[a handwritten digit]' init_from=base output_dir=file/x"
    refuse(f"{DREAMBOOTH} {options}", words, folder, capfd)


@pytest.mark.parametrize(("options", "words"), [(c, tuple(w)) for c, *w in BAD], ids=[c for c, *_ in BAD])
def test_mistake_is_one_line_and_touches_nothing(
    options: str, words: tuple[str, ...], full: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    refuse(f"{DREAMBOOTH} {PRIOR} num_class_images=4 output_dir=bad init_from=base {options}", words, folder, capfd)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "learn_token=true placeholder_token=sks",
            ("placeholder_token=sks", "tokenizer has this word", "expected a new one", "placeholder_token=S*"),
        ),
        (
            "learn_token=true 'instance_prompt=a handwritten S* digit' initializer_token=square_dot",
            ("initializer_token=square_dot", "tokens; expected a single, common word", "initializer_token=dog"),
        ),
        (
            "trainable=lora lora.target_modules=[foo]",
            ("lora.target_modules=['foo']", "expected endings of the names of linear", "of unet, e.g. "),
        ),
    ],
    ids=["known word", "several tokens", "no such layer"],
)
def test_what_does_not_fit_into_the_model_is_refused_before_class_images_are_drawn(
    options: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prior = f"{PRIOR.replace('=pictures', '=never')} num_class_images=4"
    refuse(f"{DREAMBOOTH} {prior} output_dir=bad init_from=base {options}", words, folder, capfd)


@pytest.mark.parametrize(
    ("token", "caption", "prompt", "remedy"),
    [
        ("S*", "S*, brown, photo", "a photo", None),
        ("<cat-toy>", "a photo of a <cat-toy>.", "a photo of a cat toy", None),
        ("S*", "a photo of an S*x toy", "a toy", "write 'instance_prompt=a photo of an S*x S* toy'"),
        ("S*", "a photo of S*", "a photo of S*", "no word that tells the subject from its class"),
    ],
)
def test_a_learned_token_is_found_beside_punctuation_and_tells_the_subject(
    token: str, caption: str, prompt: str, remedy: str | None
) -> None:
    given = {"learn_token": True, "placeholder_token": token, "initializer_token": None, "subjects": []}
    prior = {"with_prior_preservation": True, "class_prompt": prompt, "class_prompts": []}
    spec = RunSpec({**given, **prior, "num_class_images": 4, "sample_batch_size": 4})
    if remedy is None:
        dreambooth.check_token(spec, [caption])
        assert dreambooth.class_prompts(spec, [caption]) == [prompt]
        return
    with pytest.raises(UsageError, match=re.escape(remedy)):
        dreambooth.check_token(spec, [caption])
        dreambooth.class_prompts(spec, [caption])


def test_class_images_lie_beside_an_output_that_is_named_as_a_folder(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    specs: list[Any] = []
    monkeypatch.setattr(dreambooth.train, "run", lambda spec, prepare: specs.append(spec) or 0)
    options = "with_prior_preservation=true 'class_prompts=[a handwritten digit]' init_from=base output_dir=slashed/"
    assert call(f"{DREAMBOOTH} {options}") == 0
    assert specs[0]["output_dir"] == "slashed"
    assert specs[0]["class_data_dir"] == specs[0]["data.class_data_dir"] == "slashed-class-images"


def test_class_images_without_the_switch_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = "dreambooth model=tiny init_from=base instance_data_dir=photos 'instance_prompt=a handwritten sks digit'"
    words = ("class_prompt=a handwritten digit num_class_images=4", "nothing uses without with_prior_preservation")
    remedy = ("add with_prior_preservation=true", "leave class_prompt, num_class_images out")
    refuse(f"{command} 'class_prompt=a handwritten digit' num_class_images=4", words + remedy, folder, capfd)


def test_what_only_a_preset_says_of_class_images_is_not_refused_without_them(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = "with_prior_preservation=false max_train_steps=1 output_dir=alone init_from=base"
    assert call(f"{DREAMBOOTH} {options}") == 0
    assert not Path("alone-class-images").exists()


def test_photos_that_are_not_used_are_named_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("phone", "mostly")
    for i in range(2):
        shutil.copy(f"photos/{i}.png", "mostly")
    options = "instance_data_dir=mostly with_prior_preservation=false max_train_steps=1 output_dir=mostly-run"
    capfd.readouterr()
    assert call(f"{DREAMBOOTH} {options} init_from=base") == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "IMG_1.HEIC" in line)
    assert line.startswith("WARNING: instance_data_dir=mostly: not used: 1 file(s) (mostly/IMG_1.HEIC) of a kind that")
    assert "2 file(s) (mostly/holiday/0.png, mostly/holiday/1.png)" in line and "rename holiday to '10_holiday'" in line


def drawn_by(pictures: Path) -> dict[str, str]:
    """Names of class images, and the models that they say to be drawn by."""
    found = {}
    for path in pictures.rglob("*.png"):
        with Image.open(path) as image:
            found[str(path)] = json.loads(image.info["sd_lightning"])["model"]
    return found


def test_the_same_command_with_resume_starts_a_run_and_continues_it_from_the_same_model(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prior = f"{PRIOR.replace('=pictures', '=topped')} output_dir=again resume=auto"
    assert call(f"{DREAMBOOTH} {prior} num_class_images=2 max_train_steps=1 init_from=base") == 0
    assert call(f"{DREAMBOOTH} {prior} num_class_images=2 max_train_steps=2 init_from=base") == 0
    assert [checkpoint.step_of(path) for path in checkpoint.all_checkpoints("again")][-1] == 2
    shutil.rmtree("topped")
    capfd.readouterr()
    assert call(f"{DREAMBOOTH} {prior} num_class_images=2 max_train_steps=3") == 0
    assert "INFO: resume=auto: the run started from base" in capfd.readouterr().err
    assert set(drawn_by(folder / "topped").values()) == {"base"}
    model = LatentDiffusion.from_pretrained("base")
    options = SamplingOptions(num_inference_steps=1, guidance_scale=3.0)
    for path in (folder / "topped").rglob("*.png"):
        with Image.open(path) as image:
            (expected,) = generate(model, [image.info["prompt"]], seeds=[0], options=options)
            assert np.abs(np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1
    words = ("resume=auto and init_from=single-base", "give one of the two")
    shutil.copytree("base", "single-base")
    refuse(f"{DREAMBOOTH} {prior} num_class_images=2 max_train_steps=4 init_from=single-base", words, folder, capfd)


def test_class_images_are_not_drawn_by_an_unknown_model(
    full: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(full, "moved")
    Path("moved/config.yaml").unlink()
    prior = f"{PRIOR.replace('=pictures', '=unknown')} num_class_images=4 max_train_steps=3"
    words = ("resume=moved with 4 of 4 class images missing in unknown", "no config.yaml that", "add model.pretrained=")
    refuse(f"{DREAMBOOTH} {prior} output_dir=bad resume=moved", words, folder, capfd)


def test_class_images_are_drawn_with_the_weights_of_a_lightning_checkpoint(folder: Path) -> None:
    model = LatentDiffusion.from_pretrained("base")
    torch.save({"state_dict": SDLightningModule(model, train_text_encoder=True).state_dict()}, "base.ckpt")
    prior = "'class_prompts=[a handwritten digit]' class_data_dir=of-ckpt num_class_images=1"
    assert call(f"{DREAMBOOTH} {prior} max_train_steps=1 init_from=base.ckpt output_dir=from-ckpt") == 0
    ((path, name),) = drawn_by(folder / "of-ckpt").items()
    assert name == "base.ckpt"
    options = SamplingOptions(num_inference_steps=1, guidance_scale=3.0)
    (expected,) = generate(LatentDiffusion.from_pretrained("base"), ["a handwritten digit"], seeds=[0], options=options)
    with Image.open(path) as image:
        assert np.abs(np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)).max() <= 1


def test_class_images_are_drawn_with_the_quantised_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full precision they would take more memory than the training."""
    draw, models = class_images.draw, []

    def noted(model: LatentDiffusion, *args: Any, **options: Any) -> None:
        models.append(model)
        draw(model, *args, **options)

    monkeypatch.setattr(class_images, "draw", noted)
    command = f"{DREAMBOOTH} 'class_prompts=[a handwritten digit]' num_class_images=2 max_train_steps=1 init_from=base "
    assert call(f"{command} trainable=lora base=nf4 output_dir=nf4 class_data_dir=nf4-pictures") == 0
    (model,) = models
    assert not model.deferred and any(type(layer) is NF4Linear for _, layer in int8_layers(model.denoiser))
    options = SamplingOptions(num_inference_steps=1, guidance_scale=3.0)
    (expected,) = generate(model, ["a handwritten digit"], seeds=[0], options=options, device=torch.device("cpu"))
    pictures = sorted((folder / "nf4-pictures").rglob("*.png"))
    with Image.open(pictures[0]) as image:
        assert np.array_equal(image, expected)
    assert call(f"{command} trainable=lora output_dir=plain class_data_dir=plain-pictures") == 0
    assert not any(int8_layers(models[1].denoiser))
    with Image.open(pictures[0]) as ours, Image.open(min((folder / "plain-pictures").rglob("*.png"))) as theirs:
        assert 0 < np.abs(np.asarray(ours, float) - np.asarray(theirs, float)).mean() < 16


def test_class_images_of_another_model_are_named_once(
    full: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LatentDiffusion.build("tiny", seed=9).save_pretrained("other")
    capfd.readouterr()
    options = f"{PRIOR} num_class_images=4 max_train_steps=1 output_dir=of-other"
    assert call(f"{DREAMBOOTH} {options} init_from=other") == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "were drawn by" in line)
    assert line.startswith("WARNING: class images: 4 of those in pictures were drawn by base, and this run starts from")
    assert "starts from other, " in line and "choose another class_data_dir=<folder>" in line
    absolute = f"{options.replace('of-other', 'of-base')} init_from={folder / 'base'}"
    assert call(f"{DREAMBOOTH} {absolute}") == 0
    assert "were drawn by" not in capfd.readouterr().err, "the same folder by another name"


def test_class_images_are_counted_as_they_are(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = "'class_prompts=[a handwritten one, a handwritten two, a handwritten three]' class_data_dir=counted"
    options = f"{prompts} num_class_images=10 max_train_steps=1 init_from=base"
    capfd.readouterr()
    assert call(f"{DREAMBOOTH} {options} output_dir=counted-1") == 0
    assert "INFO: class images: drawing 10 of 10 in counted" in capfd.readouterr().err
    assert sorted(len(list(part.iterdir())) for part in (folder / "counted").iterdir()) == [3, 3, 4]
    assert call(f"{DREAMBOOTH} {options} output_dir=counted-2") == 0
    assert "INFO: class images: all 10 are in counted" in capfd.readouterr().err


def test_pictures_of_another_prompt_are_refused(full: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (own,) = (path for path in (folder / "pictures").iterdir() if path.name.startswith("a-handwritten-two"))
    options = f"class_prompts=[] 'class_prompt=a dog' class_data_dir=pictures/{own.name} output_dir=bad init_from=base"
    words = ("pictures of 'a handwritten two'", "the class prompt is 'a dog'", "choose another class_data_dir")
    refuse(f"{DREAMBOOTH} {options}", words, folder, capfd)


def test_a_run_with_adapters_beside_its_weights_is_exported_with_them(adapted: Path, folder: Path) -> None:
    from diffusers import DiffusionPipeline, StableDiffusionPipeline

    pipeline: Any = DiffusionPipeline.from_pretrained(adapted / "pipeline")
    pipeline.load_lora_weights(adapted / "pipeline")
    trained = draw(pipeline)
    assert call("export run=lora format=single_file output_dir=lora-single") == 0
    assert call("export run=lora merge_lora=true output_dir=lora-merged") == 0
    single = StableDiffusionPipeline.from_single_file(
        "lora-single/model.safetensors", config="lora-single/config", local_files_only=True
    )
    assert np.abs(draw(single) - trained).max() < 1 / 255
    assert np.abs(draw(DiffusionPipeline.from_pretrained("lora-merged")) - trained).max() < 1 / 255


CHANGED = [
    ("trainable=lora lora.alpha=11", "lora.alpha=11", "used lora.alpha=12", "write lora.alpha=12, or"),
    ("trainable=lora lora.alpha=null", "lora.alpha=4", "used lora.alpha=12", "write lora.alpha=12, or"),
    ("trainable=lora lora.alpha=12 lora.rank=3", "lora.rank=3", "used lora.rank=4", "write lora.rank=4, or"),
    (
        "trainable=lora lora.alpha=12 lora.target_modules=[to_q]",
        *("lora.target_modules=[to_q]", "write lora.target_modules=[to_k,to_out.0,to_q,to_v], or"),
    ),
    ("trainable=full", "trainable=full", "used trainable=lora", "write trainable=lora, or"),
    (
        "trainable=lora lora.alpha=12 learn_token=true placeholder_token=sks",
        *("learn_token=true", "used learn_token=false", "write learn_token=false, or"),
    ),
]


@pytest.mark.parametrize(("options", "words"), [(c, tuple(w)) for c, *w in CHANGED], ids=[c for c, *_ in CHANGED])
def test_adapters_are_not_resumed_as_others(
    options: str, words: tuple[str, ...], adapted: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is time spent on class images before: here all of them would be missing."""
    prior = f"{PRIOR.replace('=pictures', '=other')} num_class_images=4"
    command = f"{DREAMBOOTH} {prior} {options} model.pretrained=base max_train_steps=5 output_dir=lora resume=auto"
    words = ("resume=lora/checkpoints/step-00000004: ", *words, "start a new run from its pipeline with init_from=")
    refuse(command, words, folder, capfd)


def test_adapters_are_not_resumed_on_other_weights(
    adapted: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LatentDiffusion.build("tiny", seed=8).save_pretrained("else")
    before = contents(folder)
    assert call(f"{LORA} max_train_steps=5 model.pretrained=else output_dir=lora resume=auto") == 2
    error = capfd.readouterr().err.splitlines()[-1]
    for word in ("error: resume=lora/checkpoints/step-00000004: ", "frozen weights of text_encoder, unet are not"):
        assert word in error
    assert "give the model.pretrained= that stands in that run's config.yaml" in error
    assert contents(folder) == before


def test_8bit_adam_trains(full: Path, folder: Path) -> None:
    options = f"{PRIOR} num_class_images=4 use_8bit_adam=true max_train_steps=1 output_dir=8bit init_from=base"
    assert call(f"{DREAMBOOTH} {options}") == 0
    assert "AdamW8bit" in Path("8bit/config.yaml").read_text()


@pytest.mark.parametrize("preset", [pytest.param("dreambooth_8gb", marks=pytest.mark.slow), "dreambooth_lora_6gb"])
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
    assert "predicted peak of memory per process\n  device  0." in out and "\n  host " in out
    pipeline = LatentDiffusion.from_pretrained(f"{preset}/pipeline")
    weights, base = pipeline.denoiser.state_dict(), LatentDiffusion.from_pretrained("base").denoiser.state_dict()
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
    loaded: Any = base.pipeline()
    loaded.load_textual_inversion("token/pipeline", weight_name="learned_embeds.safetensors")
    assert torch.equal(loaded.text_encoder.get_input_embeddings().weight, words)
    pipeline.load_lora_weights("token/pipeline")
    ours = LatentDiffusion.from_pretrained("token/pipeline").pipeline()
    assert np.abs(draw(pipeline) - draw(ours)).max() < 1 / 255


def test_the_best_checkpoint_is_the_result(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_photos(folder / "apart")
    for part in ("apart/1_sks digit", "apart/1_two digits"):
        (folder / part).mkdir()
        for i in range(2):
            shutil.copy(f"photos/{i}.png", f"{part}/{i}.png")
    run = f"{DREAMBOOTH} trainable=lora init_from=base with_prior_preservation=false callbacks.samples=null "
    monitored = f"{run} data.val_data_dir=apart callbacks.checkpoint.monitor=val/loss callbacks.checkpoint.mode=max "
    every = "callbacks.checkpoint.every_n_steps=1 callbacks.checkpoint.keep=1 trainer.val_check_interval=1 "
    assert call(f"{monitored} {every} learning_rate=1 max_train_steps=3 output_dir=best") == 0
    losses = {step + 1: loss for step, loss in read_metrics(folder / "best/logs")["val/loss"]}
    summary = json.loads(Path("best/summary.json").read_text())
    best = summary["best_step"]
    assert best == max(losses, key=lambda step: losses[step]) < 3 and summary["monitor"] == "val/loss"
    assert summary["best_value"] == pytest.approx(losses[best])
    assert [checkpoint.step_of(path) for path in checkpoint.all_checkpoints("best")] == [best, 3]
    ours = Path("best/pipeline", WEIGHTS_NAME).read_bytes()
    assert ours == Path(f"best/checkpoints/step-{best:08d}/pipeline", WEIGHTS_NAME).read_bytes()
    assert ours != Path("best/checkpoints/step-00000003/pipeline", WEIGHTS_NAME).read_bytes()
    assert call("export run=best output_dir=best-exported format=non_ema") == 0
    assert f"step-{best:08d}" in capfd.readouterr().out
    for arguments, words in (
        (f"{run} callbacks.checkpoint.monitor=val/loss", ("nothing is validated; add data.val_data_dir=",)),
        (f"{run} data.val_data_dir=photos", ("got data.val_data_dir=photos", "is trained on; move photos")),
        (f"{monitored} callbacks.checkpoint.every_n_steps=7", ("not every checkpoint is validated", "interval=7")),
        (f"{monitored} trainer.check_val_every_n_epoch=2", ("trainer.check_val_every_n_epoch=null",)),
        (f"{run} data.val_data_dir=apart callbacks.checkpoint.monitor=val/los", ("expected val/caption_gap or val/l",)),
        (f"{run} {every} data.val_data_dir=apart callbacks.checkpoint.monitor=val/caption_gap", ("are the same",)),
    ):
        assert call(f"{arguments} max_train_steps=2 output_dir=new") == 2
        err = capfd.readouterr().err
        assert all(word in err for word in words), err
        assert not Path("new").exists(), "before images are encoded and the run is opened"
