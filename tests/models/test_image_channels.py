"""Inpainting and depth: the denoiser gets of images what diffusers' own pipelines give it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

import sd_lightning.models.encoder as encoder_module
import small_training as small
from sd_lightning import LatentDiffusion, SamplingOptions
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import EMA
from sd_lightning.data.sources.digits import Digits
from sd_lightning.diffusion.randomness import Purpose, uniform
from sd_lightning.models import families
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families.inpainting_and_depth import random_masks
from sd_lightning.models.generation import generate
from sd_lightning.models.meta import training_flops_per_sample
from sd_lightning.planner.passes import inference_bytes, training_pass
from sd_lightning.planner.run import TrainingRun

CHANNELS = {"tiny_inpainting": 5, "tiny_depth": 1}
PARAMETERS = {
    "sd2_inpainting": {"unet": 865_925_124},
    "sd2_depth": {"unet": 865_913_604, "depth_estimator": 122_377_985},
}
"""Those of the UNet of Stable Diffusion 2.1, 865,910,724, and its first convolution's for more channels."""
PROMPTS = ["a handwritten three", "a drawing of a eight"]
OPTIONS = SamplingOptions(num_inference_steps=3, guidance_scale=3.0)


@pytest.fixture(scope="module", params=CHANNELS)
def model(request: pytest.FixtureRequest) -> LatentDiffusion:
    return LatentDiffusion.build(request.param, seed=3)


def tiny_name(model: LatentDiffusion) -> str:
    return next(name for name in model.family.architectures if name.startswith("tiny"))


def batch_of(model: LatentDiffusion, indices: list[int], epoch: int = 0) -> Any:
    source = Digits("train")
    pixels = np.stack([np.asarray(source.image(index)) for index in indices])
    return {
        "pixel_values": torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1,
        "epoch": torch.full((len(indices),), epoch),
        "index": torch.tensor(indices),
        "input_ids": model.tokenize([PROMPTS[0]] * len(indices)),
    }


def drawn(model: LatentDiffusion, seeds: list[int], **inputs: Any) -> np.ndarray:
    images = generate(model, PROMPTS[: len(seeds)], seeds=seeds, options=OPTIONS, inputs=inputs)
    return np.stack([np.asarray(image, dtype=int) for image in images])


def test_the_denoiser_gets_what_the_pipeline_gives_it(model: LatentDiffusion, monkeypatch: pytest.MonkeyPatch) -> None:
    source, indices = Digits("train"), [3, 4, 5, 6]
    monkeypatch.setattr(encoder_module, "normal", lambda *_: torch.zeros(()))  # of posteriors
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    ours = LatentEncoder(model)(batch_of(model, indices), seed=7)
    mask = random_masks(
        partial(uniform, 7, torch.zeros(4, dtype=torch.int64), torch.tensor(indices), Purpose.MASK), 32, 32
    )
    given: dict[str, Any] = {"image": [source.image(index) for index in indices]}
    if "mask" in model.family.drawn_from:
        given["mask_image"] = [Image.fromarray(each.numpy().astype(np.uint8) * 255) for each in mask.squeeze(1)]
    calls: list[tuple[Any, ...]] = []
    hook = model.denoiser.register_forward_hook(
        lambda _, args, kwargs, out: calls.append((args, out[0])), with_kwargs=True
    )
    pipeline: Any = model.pipeline()
    pipeline(prompt=[PROMPTS[0]] * 4, **given, guidance_scale=1.0, num_inference_steps=2, output_type="latent")
    hook.remove()
    (inputs, times), prediction = calls[-1]
    assert torch.equal(inputs[:, 4:], ours["image_channels"])
    torch.testing.assert_close(
        model.family.denoise(model.denoiser, inputs[:, :4], times, ours["conditioning"]), prediction
    )


def test_masks_depend_on_the_sample_alone(model: LatentDiffusion) -> None:
    def channels(indices: list[int], epoch: int = 0) -> Tensor:
        return LatentEncoder(model)(batch_of(model, indices, epoch), seed=7)["image_channels"]

    together = channels([3, 4, 5, 6])
    assert together.shape == (4, CHANNELS[tiny_name(model)], 8, 8)
    apart = torch.cat([channels([6, 5]), channels([4]), channels([3])]).flip(0)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)
    assert torch.equal(apart[:, 0], together[:, 0]) or "mask" not in model.family.drawn_from
    assert torch.equal(channels([3, 4]), channels([3, 4]))
    assert torch.equal(channels([3, 4], epoch=1), channels([3, 4])) == ("mask" not in model.family.drawn_from)


def test_a_quarter_of_the_masks_hide_everything_and_the_others_boxes() -> None:
    numbers = partial(uniform, 0, 0, torch.arange(4000), Purpose.MASK)
    masks = random_masks(numbers, 32, 48)
    hidden = masks.mean((1, 2, 3))
    assert masks.shape == (4000, 1, 32, 48) and set(masks.unique().tolist()) == {0.0, 1.0}
    assert (hidden == 1).float().mean() == pytest.approx(0.25, abs=0.02)
    assert 0.3 < hidden[hidden < 1].mean() < 0.6
    assert (masks.mean(0) > 0.3).all()  # corners, too


def test_training_learns_and_a_resumed_one_ends_with_the_same_bits(model: LatentDiffusion, tmp_path: Path) -> None:
    def train(folder: str, steps: int, resume: Path | None = None) -> tuple[Path, list[float]]:
        module = small.module(LatentDiffusion.build(tiny_name(model), seed=1))
        fixed = module.encoder(batch_of(model, list(range(32))), seed=3)
        losses = [module.training_loss(fixed).item()]
        saving = small.Saving(tmp_path / folder, (12,), resume=resume)
        small.fit(module, small.data(cache_latents=False), steps, EMA(0.9), saving)
        assert saving.last_saved is not None
        return saving.last_saved, [*losses, module.training_loss(fixed).item()]

    whole, (before, after) = train("whole", 20)
    assert after < 0.9 * before
    part, _ = train("part", 12)
    small.assert_bitwise_equal(train("resumed", 20, resume=part)[0], whole)


def test_pictures_are_those_of_diffusers_with_the_saved_pipeline(model: LatentDiffusion, tmp_path: Path) -> None:
    picture = Digits("val").image(0)
    model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    pipeline: Any = DiffusionPipeline.from_pretrained(tmp_path)
    if "feature_extractor" in model.family.parts:  # as published, which diffusers reads with transformers 4 alone
        assert index["feature_extractor"] == ["transformers", "DPTImageProcessor"]
        index["feature_extractor"][1] = "DPTFeatureExtractor"
        (tmp_path / "model_index.json").write_text(json.dumps(index))
    loaded = LatentDiffusion.from_pretrained(tmp_path)
    half = Image.new("L", (32, 32))
    half.paste(255, (16, 0, 32, 32))
    inputs: dict[str, Any] = (
        {"image": picture, "mask": half} if "mask" in model.family.drawn_from else {"image": picture}
    )
    given = {{"mask": "mask_image"}.get(name, name): [each] * 2 for name, each in inputs.items()}
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    settings = {"guidance_scale": 3.0, "num_inference_steps": 3, "strength": 0.7}
    images = pipeline(prompt=list(PROMPTS), generator=generators, **settings, **given).images
    theirs = np.stack([np.asarray(image, dtype=int) for image in images])
    ours = drawn(loaded, [5, 6], strength=0.7, **inputs)
    assert np.abs(ours - theirs).max() <= 1
    assert np.abs(drawn(model, [5, 6], strength=0.7, **inputs) - ours).max() <= 1
    other = drawn(loaded, [5, 6], strength=1.0, **inputs)
    assert (other != ours).any(), "strength has an effect"


def test_a_single_step_from_a_picture_is_drawn(model: LatentDiffusion) -> None:
    inputs = dict.fromkeys(model.family.drawn_from, Digits("val").image(0))

    def pixels(steps: int, **strength: float) -> np.ndarray:
        options = SamplingOptions(num_inference_steps=steps)
        return np.asarray(generate(model, PROMPTS[:1], seeds=[5], options=options, inputs=inputs | strength)[0])

    assert np.array_equal(pixels(1), pixels(1, strength=1.0))
    own = 1.0 if "mask" in inputs else 0.8
    assert np.array_equal(pixels(5), pixels(5, strength=own))


def test_pictures_without_images_are_of_the_models_size_and_do_not_depend_on_the_batch(model: LatentDiffusion) -> None:
    both = drawn(model, [5, 6])
    assert both.shape == (2, 32, 32, 3) and both[0].std() > 0
    assert np.abs(drawn(model, [5]) - both[:1]).max() <= 1
    wide = generate(model, PROMPTS[:1], seeds=[0], options=SamplingOptions(num_inference_steps=1, height=32, width=48))
    assert wide[0].size == (48, 32)


def test_latents_alone_are_refused_before_anything_is_encoded(model: LatentDiffusion) -> None:
    with pytest.raises(UsageError, match=f"data.cache_latents=true: a {model.pipeline_class}.*cache_latents=false"):
        small.data().check_model(model, train_text_encoder=True)
    small.data(cache_latents=False).check_model(model, train_text_encoder=True)
    LatentDiffusion.build("tiny").family.check_latents("data=latents")


def test_frozen_estimators_go_where_the_encoders_go() -> None:
    model = LatentDiffusion.build("tiny_depth", seed=3)
    encoder = LatentEncoder(model, dtype="bfloat16").to(torch.device("cpu"))
    assert model.networks["depth_estimator"].dtype == torch.bfloat16
    made = encoder.portable().encode(batch_of(model, [3, 4]), seed=0)
    again = encoder.encode(batch_of(model, [3, 4]), seed=1)  # of depth, nothing is random
    assert torch.equal(made["image_channels"], again["image_channels"])
    assert made["image_channels"].amin((1, 2, 3)).tolist() == [-1, -1]
    assert made["image_channels"].amax((1, 2, 3)).tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_random_estimators_tell_images_apart_in_half_precision(seed: int) -> None:
    model = LatentDiffusion.build("tiny_depth", seed=seed)
    batch = batch_of(model, [3, 4, 5, 6])
    exact = LatentEncoder(model).encode(batch, seed=0)["image_channels"]
    encoder = LatentEncoder(model, dtype="float16").to(torch.device("cpu"))
    half = encoder.encode(batch, seed=0)["image_channels"]
    torch.testing.assert_close(half, exact, rtol=0, atol=0.05)
    assert exact.std(0).mean() > 0.1


@pytest.mark.parametrize("offload", [False, True])
def test_estimators_see_as_many_images_at_a_time_as_the_vae(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LatentDiffusion.build("tiny_depth", seed=3)
    together = LatentEncoder(model).encode(batch_of(model, [3, 4, 5]), seed=0)["image_channels"]
    monkeypatch.setattr(encoder_module, "images_per_call", lambda *_: 2)
    counts: list[int] = []
    model.networks["depth_estimator"].register_forward_pre_hook(lambda _, inputs: counts.append(len(inputs[0])))
    apart = LatentEncoder(model, offload=offload).encode(batch_of(model, [3, 4, 5]), seed=0)["image_channels"]
    assert counts == ([1, 1, 1] if offload else [2, 1])
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PARAMETERS)
def test_architectures_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        networks = {key: part.instantiate() for key, part in families.architecture(name).networks.items()}
    found = {key: sum(p.numel() for p in networks[key].parameters()) for key in PARAMETERS[name]}
    assert found == PARAMETERS[name]


@pytest.mark.parametrize("name", CHANNELS)
def test_plans_count_the_additional_channels(name: str) -> None:
    wide, plain = (LatentDiffusion.build(each, device="meta") for each in (name, "tiny"))
    run = TrainingRun(batch_size=4, resolution=64)  # another than the model's own
    traces = [training_pass(each, run, torch.float32, None) for each in (wide, plain)]
    inputs = 4 * CHANNELS[name] * 16 * 16 * 4
    assert traces[0].live(4).max() >= traces[1].live(4).max() + inputs
    flops = [training_flops_per_sample(each, torch.empty(1, 4, 16, 16), None) for each in (wide, plain)]
    assert flops[0] - flops[1] == 3 * 2 * CHANNELS[name] * 9 * 32 * 16 * 16  # of the first convolution
    assert inference_bytes(wide, height=32, width=32, dtype=torch.float16)[1] > 0
