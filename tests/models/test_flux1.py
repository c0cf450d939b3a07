"""Flux.1: guidance that is an input of the denoiser, and what CLIP and T5 are to it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import T5EncoderModel

import small_training as small
from sd_lightning import LatentDiffusion, Objective, SamplingOptions, SDLightningModule
from sd_lightning._errors import UsageError
from sd_lightning.apps.generate import GenerationRequest, checked_options
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.families import architecture
from sd_lightning.models.generation import generate
from sd_lightning.quantization.int8 import Int8, quantize_

PROMPTS = ["a handwritten three", "a drawing of a eight"]
TIMES = torch.tensor([100.0, 900.0])


def built(*, guidance_embeds: bool) -> LatentDiffusion:
    """Return `tiny_flux` with the guidance as an input of its denoiser, as FLUX.1-dev, or without."""
    tiny = architecture("tiny_flux")
    transformer = tiny.networks["transformer"]
    transformer = replace(transformer, config={**transformer.config, "guidance_embeds": guidance_embeds})
    model = LatentDiffusion.build(replace(tiny, networks={**tiny.networks, "transformer": transformer}), seed=3)
    for network in model.networks.values():
        network.requires_grad_(False).eval()
    return model


@pytest.fixture(scope="module")
def dev() -> LatentDiffusion:
    return built(guidance_embeds=True)


def encoded(model: LatentDiffusion) -> dict[str, Tensor]:
    return model.condition(model.text_encoders, {"input_ids": model.tokenize(PROMPTS)})


def pixels(images: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(image, dtype=int) for image in images])


def ours(model: LatentDiffusion, scale: float, negative_prompt: str = "") -> np.ndarray:
    options = SamplingOptions(num_inference_steps=3, guidance_scale=scale)
    return pixels(generate(model, PROMPTS, seeds=[5, 6], options=options, negative_prompt=negative_prompt))


def theirs(model: LatentDiffusion, **options: Any) -> np.ndarray:
    pipeline: Any = model.pipeline()
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    fixed = {"num_inference_steps": 3, "height": 32, "width": 32, "max_sequence_length": 16}
    return pixels(pipeline(prompt=list(PROMPTS), generator=generators, **fixed, **options).images)


def test_the_guidance_scale_is_the_denoisers_input_where_it_has_one(dev: LatentDiffusion) -> None:
    passes: list[int] = []
    hook = dev.denoiser.register_forward_hook(lambda *_: passes.append(1))
    drawn = ours(dev, 3.5)
    hook.remove()
    assert len(passes) == 3, "one pass per step"
    assert np.abs(drawn - theirs(dev, guidance_scale=3.5)).max() <= 1
    assert (drawn != ours(dev, 30.0)).any()


def test_the_guidance_scale_is_classifier_free_where_the_denoiser_has_none() -> None:
    model, negative = built(guidance_embeds=False), "a handwritten one"
    expected = theirs(model, true_cfg_scale=3.5, negative_prompt=[negative] * 2)
    assert np.abs(ours(model, 3.5, negative) - expected).max() <= 1
    assert np.abs(ours(model, 3.5) - theirs(model, true_cfg_scale=3.5, negative_prompt=[""] * 2)).max() <= 1
    assert np.abs(ours(model, 1.0) - theirs(model)).max() <= 1


@pytest.mark.parametrize("guidance", [None, 3.5])
def test_training_tells_the_denoiser_the_guidance(dev: LatentDiffusion, guidance: float | None) -> None:
    calls: list[Any] = []
    hook = dev.denoiser.register_forward_hook(lambda _, args, given, out: calls.append((given, out)), with_kwargs=True)
    module = SDLightningModule(dev, objective=Objective(guidance_scale=guidance), seed=3)
    batch = {"latents": torch.randn(2, 4, 8, 12), "conditioning": encoded(dev)}
    batch |= {"epoch": torch.zeros(2, dtype=torch.int64), "index": torch.arange(2)}
    module.training_loss(batch).backward()  # type: ignore[arg-type]
    assert all(parameter.grad is not None for parameter in dev.denoiser.parameters())
    module._losses.held_out(module.trained_networks(), batch)  # type: ignore[arg-type]
    hook.remove()
    assert [given["guidance"].tolist() for given, _ in calls] == [[guidance or 1.0] * 2] * 2


def test_the_denoiser_gets_what_the_pipeline_gives_it(dev: LatentDiffusion) -> None:
    calls: list[Any] = []
    hook = dev.denoiser.register_forward_hook(lambda _, args, given, out: calls.append((given, out)), with_kwargs=True)
    pipeline: Any = dev.pipeline()
    latents = torch.randn(2, 4, 8, 12)
    packed = pipeline._pack_latents(latents, 2, 4, 8, 12)
    options = {"height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 16}
    pipeline(prompt=list(PROMPTS), guidance_scale=2.5, latents=packed, output_type="latent", **options)
    hook.remove()
    known = {**encoded(dev), "guidance": torch.full((2,), 2.5)}
    for given, (output, *_) in calls:
        inputs, expected = (pipeline._unpack_latents(each, 32, 48, 4) for each in (given["hidden_states"], output))
        made = dev.family.denoise(dev.denoiser, inputs, 1000 * given["timestep"], known)
        torch.testing.assert_close(made, expected)
    assert len(calls) == 2 and torch.equal(pipeline._unpack_latents(packed, 32, 48, 4), latents)


def test_a_guidance_that_the_denoiser_does_not_take_is_refused() -> None:
    for name in ("tiny_flux", "tiny"):
        with pytest.raises(UsageError, match=r"guidance_scale=3.5.* does not take it; set objective.guidance_scale=n"):
            SDLightningModule(LatentDiffusion.build(name), objective=Objective(guidance_scale=3.5))
    with pytest.raises(UsageError, match="guidance_scale=-1; expected a number >= 0"):
        Objective(guidance_scale=-1)


def test_a_negative_prompt_that_the_denoiser_ignores_is_refused_before_weights_are_read(
    dev: LatentDiffusion, tmp_path: Path
) -> None:
    dev.save_pretrained(tmp_path)
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UsageError, match="negative_prompt='x'.* in one pass .*; leave negative_prompt out"):
        checked_options(GenerationRequest(run=str(tmp_path), prompts=PROMPTS, negative_prompt="x"), tmp_path)
    with pytest.raises(UsageError, match="negative_prompt='x'.* in one pass"):
        ours(dev, 3.5, "x")


def test_clip_is_trained_and_t5_is_not(tmp_path: Path) -> None:
    model = LatentDiffusion.build("tiny_flux")
    before = {n: [p.detach().clone() for p in network.parameters()] for n, network in model.networks.items()}
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True, seed=3)
    small.fit(module, small.data(), 2)
    changed = {
        n: [bool((p != q).any()) for p, q in zip(each.parameters(), before[n])] for n, each in model.networks.items()
    }
    assert {name for name, each in changed.items() if any(each)} == {"transformer", "text_encoder"}
    assert all(changed["text_encoder"]) and all(changed["transformer"])
    model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["text_encoder_2"] == ["transformers", "T5EncoderModel"] and index["image_encoder"] == [None, None]


@pytest.fixture
def overflowing() -> LatentDiffusion:
    """A model whose T5 has activations beyond 65504, as the published one has in its feed-forward layers."""
    model = LatentDiffusion.build("tiny_flux", seed=3)
    t5: Any = model.networks["text_encoder_2"]
    with torch.no_grad():
        for block in t5.encoder.block:
            block.layer[-1].DenseReluDense.wo.weight.mul_(1e6)
    return model


def captions_of(model: LatentDiffusion) -> Any:
    with torch.no_grad():
        return model.family.embed(model.text_encoders, model.tokenize(["a red digit", "two"]))["encoder_hidden_states"]


def test_t5_in_float16_encodes_as_transformers_does(overflowing: LatentDiffusion, tmp_path: Path) -> None:
    exact = captions_of(overflowing)
    overflowing.save_pretrained(tmp_path)
    half = T5EncoderModel.from_pretrained(tmp_path / "text_encoder_2", dtype=torch.float16)
    encoder = LatentEncoder(overflowing, dtype="float16").to(torch.device("cpu"))
    ids = overflowing.tokenize(["a red digit", "two"])
    made = encoder.embed(ids)["encoder_hidden_states"]
    with torch.no_grad():
        assert torch.equal(made, half(ids["text_encoder_2"])[0].float())
    assert (made - exact).norm() < 0.01 * exact.norm()  # type: ignore[operator]


def test_t5_in_int8_and_float16_does_not_overflow(overflowing: LatentDiffusion) -> None:
    exact = captions_of(overflowing)
    made = captions_of(quantize_(overflowing, Int8(dtype="float16")))
    assert (made - exact).norm() < 0.05 * exact.norm()


def test_autocast_to_float16_does_not_reach_t5_when_drawing(overflowing: LatentDiffusion) -> None:
    family: Any = overflowing.family
    pipeline = overflowing.pipeline()
    with torch.no_grad():
        exact = family.encode_prompts(pipeline, ["two"])["prompt_embeds"]
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(family.encode_prompts(pipeline, ["two"])["prompt_embeds"], exact)
