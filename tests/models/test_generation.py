"""Drawing pictures: the same whatever the batch, scheduler, precision or program that draws them."""

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import small_training
from sd_lightning import LatentDiffusion, SamplingOptions, SDLightningModule
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint, SampleGrid
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families import sampling
from sd_lightning.models.families.sampling import scheduler_class
from sd_lightning.models.generation import generate
from small_models import SMALL_SDXL

PROMPTS = ["a handwritten three", "a handwritten one", "the digit 7"]
SEEDS = [5, 6, 7]
SCHEDULERS = ["ddim", "ddpm", "pndm", "lms", "euler", "euler_a", "heun", "dpmsolver++", "unipc", "deis"]


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    """A model that has learnt a little, so that its pictures are not saturated noise."""
    module = small_training.module()
    small_training.fit(module, small_training.data(), 20)
    return module.latent_diffusion


def draw(model: LatentDiffusion, rows: slice = slice(None), *, negative_prompt: str = "", **options: Any) -> np.ndarray:
    """Draw the prompts; pixels (N, H, W, 3) as int."""
    sampling = SamplingOptions(**{"num_inference_steps": 4, "guidance_scale": 3.0, **options})
    images = generate(model, PROMPTS[rows], seeds=SEEDS[rows], options=sampling, negative_prompt=negative_prompt)
    return pixels(images)


def pixels(images: list[Image.Image]) -> np.ndarray:
    return np.stack([np.asarray(image, dtype=int) for image in images])


def difference(ours: np.ndarray, theirs: np.ndarray) -> int:
    """The largest difference, in steps of 1/255."""
    return int(np.abs(ours - theirs).max())


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_every_scheduler_draws_the_same_picture_in_any_batch(model: LatentDiffusion, scheduler: str | None) -> None:
    together = draw(model, scheduler=scheduler, batch_size=3)
    assert difference(draw(model, scheduler=scheduler, batch_size=3), together) == 0
    assert difference(draw(model, scheduler=scheduler, batch_size=2), together) <= 1
    assert difference(draw(model, slice(2, 3), scheduler=scheduler), together[2:]) <= 1
    assert difference(together[:1], together[1:2]) > 8


def test_short_names_and_class_names_of_schedulers_mean_the_same(model: LatentDiffusion) -> None:
    import diffusers

    for name in SCHEDULERS:
        class_name = scheduler_class(name)
        assert scheduler_class(class_name) == class_name
        scheduler = model.sampling_scheduler(name)
        assert type(scheduler) is getattr(diffusers, class_name)
        assert scheduler.config.prediction_type == "v_prediction"
        assert scheduler.config.beta_start == model.scheduler_config["beta_start"]


def test_prompts_guidance_and_negative_prompt_have_an_effect(model: LatentDiffusion) -> None:
    plain = draw(model)
    assert difference(draw(model, guidance_scale=6.0), plain) > 1
    assert difference(draw(model, negative_prompt="a handwritten one"), plain) > 1
    assert difference(draw(model, num_inference_steps=5), plain) > 1
    with pytest.raises(UsageError, match="got negative_prompt='a handwritten one' .* draws without guidance"):
        draw(model, guidance_scale=1.0, negative_prompt="a handwritten one")


def test_size_can_be_chosen(model: LatentDiffusion) -> None:
    assert draw(model, slice(1), height=48, width=16).shape == (1, 48, 16, 3)


@pytest.mark.parametrize("zeros", [True, False])
def test_sdxl_pictures_without_a_negative_prompt_are_those_of_the_pipeline(zeros: bool) -> None:
    model = LatentDiffusion.build(SMALL_SDXL)
    model.pipeline_options["force_zeros_for_empty_prompt"] = zeros
    pipeline: Any = model.pipeline()
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    theirs = pipeline(PROMPTS, num_inference_steps=4, guidance_scale=3.0, generator=generators).images
    assert difference(draw(model), pixels(theirs)) <= 1


class DtypeSpy:
    """Notes what dtypes a network gets and computes in."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.handle = network.register_forward_hook(lambda module, args, output: self.dtypes.add(output.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pictures_of_half_precision_encoders_are_close_and_decoded_in_the_vaes_own_dtype(
    dtype: Any, model: LatentDiffusion
) -> None:
    exact = draw(model)
    half = copy.deepcopy(model)
    LatentEncoder(half, dtype=dtype).to(torch.device("cpu"))
    vae, unet = DtypeSpy(half.vae.decoder.conv_in), DtypeSpy(half.denoiser.conv_in)
    assert np.abs(draw(half) - exact).mean() < 12
    assert unet.dtypes == {getattr(torch, dtype)}
    assert vae.dtypes == {torch.float32 if dtype == "float16" else torch.bfloat16}  # float16 overflows: force_upcast


def test_vae_decodes_in_float32_while_the_trainer_samples_in_half_precision(model: LatentDiffusion) -> None:
    vae, unet = DtypeSpy(model.vae.decoder.conv_in), DtypeSpy(model.denoiser.conv_in)
    with torch.autocast("cpu", torch.bfloat16):
        draw(model)
    for spy in (vae, unet):
        spy.handle.remove()
    assert (unet.dtypes, vae.dtypes) == ({torch.bfloat16}, {torch.float32})
    assert "decode" not in vars(model.vae)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps=0; expected at least 1"),
        ({"batch_size": 0}, "batch_size=0; expected at least 1"),
        ({"height": 33}, "multiples of 8 pixels; write height=32"),
        ({"width": 4}, "multiples of 8 pixels; write width=8"),
        ({"guidance_scale": -0.5}, "guidance_scale=-0.5; expected at least 0"),
        ({"scheduler": "ddimm"}, "scheduler=ddimm: diffusers has no such scheduler"),
        (
            {"num_inference_steps": 1001},
            "num_inference_steps=1001, more than the 1000 steps that the model was trained",
        ),
        ({"num_inference_steps": 2000, "scheduler": "euler"}, "expected 1 to 1000, e.g. num_inference_steps=25"),
    ],
)
def test_impossible_options_are_refused(model: LatentDiffusion, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        draw(model, **options)
    assert message in str(error.value)


def test_pictures_that_cannot_be_drawn_are_refused_before_the_first_step(tmp_path: Path) -> None:
    samples = SampleGrid(tmp_path / "run", options=SamplingOptions(num_inference_steps=1001))
    module = small_training.module()
    with pytest.raises(UsageError, match="num_inference_steps=1001, more than the 1000 steps"):
        small_training.fit(module, small_training.data(), 1, samples)
    assert module.last_loss is None and not (tmp_path / "run").exists()


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.mark.parametrize("scheduler", ["ddim", "EDMEulerScheduler"])
def test_what_a_scheduler_warns_of_is_said_once(
    model: LatentDiffusion, scheduler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampling, "_said", set())
    heard, library = Heard(), logging.getLogger("diffusers")
    monkeypatch.setattr(library, "handlers", [heard])
    caplog.set_level(logging.WARNING, library.name)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            draw(model, scheduler=scheduler, batch_size=1)
    said = [str(each.message) for each in warned] + heard.said
    assert len([text for text in said if "config" in text]) == 1, said
    assert len(said) == len(set(said)), said


def test_number_of_seeds_must_be_that_of_the_prompts(model: LatentDiffusion) -> None:
    with pytest.raises(UsageError, match="generate got 3 prompts and 1 seeds; expected as many"):
        generate(model, PROMPTS, seeds=[1])


FRESH = """
import sys
sys.modules["sd_lightning"] = None  # whoever tries to import it gets an ImportError
import torch
from diffusers import DiffusionPipeline
for folder in sys.argv[1:]:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    generators = [torch.Generator().manual_seed(seed) for seed in SEEDS]
    images = pipeline(PROMPTS, num_inference_steps=4, guidance_scale=3.0, generator=generators).images
    for i, image in enumerate(images):
        image.save(f"{folder}-{i}.png")
assert not any(name.startswith("sd_lightning.") for name in sys.modules)
"""


def test_pipelines_saved_by_training_draw_alike_in_a_process_without_this_package(
    tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    folders, ours = [], []
    for family, architecture in {"sd": "tiny", "sdxl": SMALL_SDXL}.items():
        module = SDLightningModule(
            LatentDiffusion.build(architecture), train_text_encoder=True, optimizer=small_training.adamw
        )
        saving = PortableCheckpoint(tmp_path / family)
        small_training.fit(module, small_training.data(), 10, EMA(0.5), saving)
        assert saving.last_saved is not None
        folders.append(saving.last_saved / "pipeline")
        ours.append(draw(module.latent_diffusion))  # after fit the module holds the average, which is exported
    code = f"PROMPTS, SEEDS = {PROMPTS}, {SEEDS}\n{FRESH}"
    run_python("-W", "ignore", "-c", code, *folders, cwd=tmp_path, check=True)
    for folder, drawn in zip(folders, ours):
        theirs = pixels([Image.open(f"{folder}-{i}.png") for i in range(len(PROMPTS))])
        assert difference(theirs, drawn) <= 1
