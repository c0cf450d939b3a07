"""Qwen-Image 2.1: what is silent when it is wrong, compared with diffusers' two pipelines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ClassifierFreeGuidance, ModularPipeline, QwenImage21Pipeline, QwenImage21TurboModularPipeline
from diffusers.modular_pipelines.qwenimage21.encoders import get_qwenimage21_prompt_embeds
from PIL import Image
from torch import Tensor

from sd_lightning import LatentDiffusion, SamplingOptions
from sd_lightning._errors import UsageError
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models.families.qwen_image21 import PREFIX_TOKENS, TextProcessor
from sd_lightning.models.generation import generate
from sd_lightning.models.loading import check_pretrained

PROMPTS = ["a handwritten three", "", "a drawing of a eight"]
TIMES = torch.tensor([100.0, 500.0, 900.0])
SIGMAS = [1.0, 0.5, 0.2]


@pytest.fixture(scope="module")
def model() -> LatentDiffusion:
    made = LatentDiffusion.build("tiny_qwen_image_21", seed=3)
    for network in made.networks.values():
        network.requires_grad_(False)
    return made


def encoded(model: LatentDiffusion, captions: list[str]) -> dict[str, Tensor]:
    return model.condition(model.text_encoders, {"input_ids": model.tokenize(captions)})


def pixels(images: list[Any]) -> np.ndarray:
    """Return what one sees of pictures on white."""
    whites = [Image.new("RGBA", image.size, "white") for image in images]
    seen = [Image.alpha_composite(*pair).convert("RGB") for pair in zip(whites, images, strict=True)]
    return np.stack([np.asarray(image, dtype=int) for image in seen])


def ours(
    model: LatentDiffusion, scale: float | None = 3.0, negative_prompt: str = "", steps: int | None = 3
) -> np.ndarray:
    options = SamplingOptions(num_inference_steps=steps, guidance_scale=scale)
    images = generate(model, PROMPTS, seeds=[5, 6, 7], options=options, negative_prompt=negative_prompt)
    return np.stack([np.asarray(image, dtype=int) for image in images])


def theirs(pipeline: Any, **options: Any) -> np.ndarray:
    """Draw each caption alone."""
    options = {"num_inference_steps": 3, "height": 32, "width": 32, **options}
    images = []
    for seed, prompt in enumerate(PROMPTS, start=5):
        images += pipeline(prompt=prompt, generator=torch.Generator().manual_seed(seed), **options).images
    return pixels(images)


def test_a_caption_is_encoded_as_the_pipelines_encode_it_whatever_else_is_in_the_batch(model: LatentDiffusion) -> None:
    pipeline: Any = model.pipeline()
    assert pipeline._drop_idx == PREFIX_TOKENS
    known = encoded(model, PROMPTS)
    processor = TextProcessor(model.tokenizers["processor"])
    for i, prompt in enumerate(PROMPTS):
        kept = known["encoder_hidden_states"][i][known["encoder_hidden_states_mask"][i].bool()]
        both = (
            get_qwenimage21_prompt_embeds(model.text_encoders["text_encoder"], processor, prompt),  # type: ignore
            pipeline._get_qwen_prompt_embeds(prompt),
        )
        for embeds, *_ in both:
            torch.testing.assert_close(kept, embeds[0], rtol=0, atol=1e-5)
    batch = pipeline._get_qwen_prompt_embeds(PROMPTS)[0]
    made = model.family.prompt_options(known)  # type: ignore[attr-defined]
    kept = made["prompt_embeds_mask"].bool()
    torch.testing.assert_close(made["prompt_embeds"][kept], batch[kept], rtol=0, atol=1e-5)
    assert made["prompt_embeds"].shape == batch.shape


def test_pictures_are_those_of_the_pipeline_for_each_caption_alone(model: LatentDiffusion) -> None:
    pipeline = model.pipeline()
    for scale, negative in ((3.0, ""), (3.0, "a handwritten one"), (1.0, "")):
        guided = {"true_cfg_scale": scale, "negative_prompt": negative} if scale > 1 else {}
        assert np.abs(ours(model, scale, negative) - theirs(pipeline, **guided)).max() <= 1


@pytest.mark.parametrize("size", [(2, 2), (2, 4), (6, 4)])
def test_each_image_has_the_positions_that_it_would_have_alone(model: LatentDiffusion, size: tuple[int, int]) -> None:
    calls: list[tuple[Any, Any, Any]] = []
    known, latents = encoded(model, PROMPTS), torch.randn(3, 16, *size)
    assert len({*known["encoder_hidden_states_mask"].sum(1).tolist()}) > 1
    made = model.family.denoise(model.denoiser, latents, TIMES, known)
    hook = model.denoiser.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    pipeline: Any = model.pipeline()
    sides = {"height": 16 * size[0], "width": 16 * size[1], "num_inference_steps": 1}
    for i, prompt in enumerate(PROMPTS):
        pipeline(prompt=prompt, latents=latents[i : i + 1].flatten(2).mT, output_type="latent", **sides)
    hook.remove()
    for i, (_, given, _) in enumerate(calls):
        given |= {"timestep": TIMES[i : i + 1] / 1000, "kv_cache": None, "kv_cache_mode": None}
        alone: Any = model.denoiser(**given)
        expected = alone[0][:, -size[0] * size[1] :].mT.reshape(latents[i].shape)
        torch.testing.assert_close(made[i], expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 3 and "pos_embed" not in vars(model.denoiser)


def test_what_is_masked_changes_no_prediction(model: LatentDiffusion) -> None:
    known, latents = encoded(model, PROMPTS), torch.randn(3, 16, 2, 4)
    longest = int(known["encoder_hidden_states_mask"].sum(1).max())
    known["encoder_hidden_states"][known["encoder_hidden_states_mask"] == 0] = 7.0
    trimmed = {key: each[:, :longest] for key, each in known.items()}
    made = [model.family.denoise(model.denoiser, latents, TIMES, each) for each in (known, trimmed)]
    assert longest < known["encoder_hidden_states"].shape[1]
    torch.testing.assert_close(*made)


def test_gradients_are_those_of_recomputed_blocks() -> None:
    found = []
    for is_recomputed in (False, True):
        model = LatentDiffusion.build("tiny_qwen_image_21", seed=3)
        if is_recomputed:
            model.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
            model.denoiser.train()
        latents = torch.linspace(-1, 1, 3 * 16 * 8).view(3, 16, 2, 4)
        model.family.denoise(model.denoiser, latents, TIMES, encoded(model, PROMPTS)).square().mean().backward()
        found.append({name: each.grad for name, each in model.denoiser.named_parameters()})
    torch.testing.assert_close(*found)


def test_pictures_are_opaque_to_the_vae_and_normalised_as_the_pipeline_does(model: LatentDiffusion) -> None:
    images, pipeline, space = torch.rand(2, 3, 32, 64) * 2 - 1, model.pipeline(), model.latent_space
    raw = model.family.encode(model.vae, images)
    assert raw.shape[1:] == space.encoded_shape(32, 64)
    latents = space.latents(raw, lambda shape: torch.zeros(2, *shape))
    assert latents.shape[1:] == space.shape(32, 64) == (16, 2, 4)
    pictures = [Image.fromarray(np.full((32, 32, 3), shade, dtype=np.uint8)).convert("RGBA") for shade in (0, 99)]
    rgba = pipeline.image_processor.preprocess(pictures)  # type: ignore[attr-defined]
    ready = model.family.encode(model.vae, rgba[:, :3])
    torch.testing.assert_close(ready, model.vae.encode(rgba.unsqueeze(2)).latent_dist.parameters.squeeze(2))


@pytest.mark.parametrize("is_modular", [False, True])
def test_an_exported_model_draws_prompts_in_diffusers_as_here(
    model: LatentDiffusion, is_modular: bool, tmp_path: Path
) -> None:
    """Of the processor, which cannot be built without torchvision, there is the part that reads text."""
    model.save_pretrained(tmp_path)
    loaded = LatentDiffusion.from_pretrained(tmp_path)
    processor = TextProcessor(loaded.tokenizers["processor"])
    if is_modular:
        modular: Any = ModularPipeline.from_pretrained(str(tmp_path))
        modular.load_components(names=["transformer", "vae", "text_encoder", "scheduler"])
        modular.update_components(processor=processor, guider=ClassifierFreeGuidance(guidance_scale=3.0))
        found = theirs(lambda **options: modular(negative_prompt="", **options))
    else:
        parts = {name: getattr(loaded.pipeline(), name) for name in ("transformer", "vae", "text_encoder", "scheduler")}
        index = json.loads((tmp_path / "model_index.json").read_text())
        assert {*index} == {*parts, "processor", "sample_sigmas", "_class_name", "_diffusers_version"}
        pipeline = QwenImage21Pipeline(**parts, processor=processor)  # type: ignore[arg-type]
        found = theirs(pipeline, true_cfg_scale=3.0, negative_prompt="")
    assert np.abs(ours(model) - found).max() <= 1


def test_files_of_a_processor_are_kept(model: LatentDiffusion, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "a")
    kept = {"processor_config.json": '{"merge": 1}', "preprocessor_config.json": '{"patch_size": 7}'}
    for name, content in kept.items():
        (tmp_path / "a" / "processor" / name).write_text(content)
    LatentDiffusion.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    first, second = (
        {file.name: file.read_text() for file in (tmp_path / name / "processor").iterdir()} for name in "ab"
    )
    own = {"tokenizer.json", "tokenizer_config.json"}
    assert first.keys() == second.keys() == {*own, *kept, "chat_template.jinja", "video_preprocessor_config.json"}
    assert {name for name in first if first[name] != second[name]} <= own


def test_a_turbo_checkpoint_draws_with_its_own_sigmas_and_is_not_trained(
    model: LatentDiffusion, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "a")
    index = tmp_path / "a" / "model_index.json"
    check_pretrained("tiny_qwen_image_21", str(tmp_path / "a"))
    index.write_text(json.dumps({**json.loads(index.read_text()), "sample_sigmas": SIGMAS}))
    turbo = LatentDiffusion.from_pretrained(tmp_path / "a")
    turbo.save_pretrained(tmp_path / "b")
    assert type(ModularPipeline.from_pretrained(str(tmp_path / "b"))) is QwenImage21TurboModularPipeline
    own = theirs(model.pipeline(), sigmas=SIGMAS)
    said = SamplingOptions().resolve(turbo.family, turbo.pipeline_options, {})
    assert said.num_inference_steps == len(SIGMAS)
    for steps in (3, None):
        assert np.abs(ours(turbo, None, steps=steps) - own).max() <= 1
    for steps in (5, model.family.num_inference_steps):
        expected = theirs(model.pipeline(), num_inference_steps=steps)
        assert np.abs(ours(turbo, None, steps=steps) - expected).max() <= 1 < np.abs(expected - own).max()
    with pytest.raises(UsageError, match="sample_sigmas.*train the base checkpoint, Qwen/Qwen-Image-2.1"):
        check_pretrained("tiny_qwen_image_21", str(tmp_path / "a"))


def test_steps_guidance_and_sizes_are_the_familys() -> None:
    model = LatentDiffusion.build("qwen_image_21", device="meta")
    found = SamplingOptions().resolve(model.family, model.pipeline_options, {})
    assert (found.num_inference_steps, found.guidance_scale, model.resolution) == (40, 1.0, 1024)
    assert model.latent_space.shape(1024, 512) == (64, 64, 32)
    assert model.family.image_tokens(64, 32) == 2048
    with pytest.raises(
        UsageError, match=r"data\.resolution=528: .* multiples of 32 pixels; write data\.resolution=512"
    ):
        ImageOptions(resolution=528).check_model(model)
