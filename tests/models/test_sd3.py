"""Stable Diffusion 3.5: CLIP may be trained beside a frozen T5, and a pipeline may lack T5."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5TokenizerFast

import small_training as small
from sd_lightning import LatentDiffusion, SamplingOptions, SDLightningModule, UsageError
from sd_lightning.data.store.texts import text_kind
from sd_lightning.models.generation import generate
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.loading import check_pretrained
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, is_adapter, merged_state_dict
from sd_lightning.models.meta import meta_batch, meta_networks, training_flops_per_sample
from sd_lightning.planner.passes import inference_bytes

PROMPTS = ["a handwritten three", "a drawing of a eight"]
CLIPS = {"text_encoder", "text_encoder_2"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with T5, in 16 bits as published."""
    folder = tmp_path_factory.mktemp("sd3")
    model = LatentDiffusion.build("tiny_sd3", seed=3)
    model.networks["text_encoder_3"].to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lacking(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline that diffusers wrote without T5, but with its tokenizer."""
    folder = tmp_path_factory.mktemp("without")
    StableDiffusion3Pipeline.from_pretrained(whole, text_encoder_3=None).save_pretrained(folder)
    return folder


def changed(model: LatentDiffusion, before: dict[str, dict[str, torch.Tensor]]) -> set[str]:
    return {
        name
        for name, network in model.networks.items()
        if any(not torch.equal(value, before[name][key]) for key, value in network.state_dict().items())
    }


@pytest.mark.parametrize("offload", [False, True])
def test_clip_is_trained_beside_a_frozen_t5(whole: Path, offload: bool) -> None:
    model = LatentDiffusion.from_pretrained(whole, deferred=["trainable"])
    assert model.deferred.keys() == {"transformer", *CLIPS}
    model = LatentDiffusion.from_pretrained(whole)
    before = {name: {k: v.clone() for k, v in n.state_dict().items()} for name, n in model.networks.items()}
    module = SDLightningModule(
        model, optimizer=small.adamw, train_text_encoder=True, encoder_dtype="bfloat16", offload_encoders=offload
    )
    assert module.trained_networks().keys() == {"transformer", *CLIPS}
    small.fit(module, small.data(), 2)
    t5 = model.networks["text_encoder_3"]
    assert not t5.training and not any(p.requires_grad for p in t5.parameters())
    assert changed(model, before) - {"vae"} == {"transformer", *CLIPS}
    assert all(p.grad is None for p in t5.parameters())


def test_operations_of_trained_clip_are_counted_and_those_of_a_frozen_t5_are_not() -> None:
    model = LatentDiffusion.build("tiny_sd3", device="meta")
    batch = meta_batch(model, 1)
    networks = meta_networks(model, tuple(model.text_encoders))
    with torch.no_grad(), FlopCounterMode(display=False) as clip:
        for name in sorted(CLIPS):
            networks[name](batch["input_ids"][name])
    conditioning = model.condition(networks, batch)
    frozen, trained = (training_flops_per_sample(model, batch["latents"], each) for each in (conditioning, None))
    assert trained - frozen == 3 * clip.get_total_flops() > 0


def test_losses_with_trained_encoders_begin_as_those_with_frozen_ones(whole: Path) -> None:
    losses = []
    for trains in (False, True):
        module = SDLightningModule(
            LatentDiffusion.from_pretrained(whole), optimizer=small.adamw, train_text_encoder=trains, seed=3
        )
        small.fit(module, small.data(), 1)
        losses.append(float(module.last_loss))  # type: ignore[arg-type]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_adapters_of_text_encoders_are_those_of_clip() -> None:
    model = LatentDiffusion.build("tiny_sd3")
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True, lora=Lora(rank=2))
    adapted = {name.partition(".")[0] for name, p in module.named_parameters() if p.requires_grad}
    assert adapted == {"transformer", *CLIPS}
    assert not any("lora" in name for name, _ in model.networks["text_encoder_3"].named_parameters())


def test_diffusers_loads_adapters_of_denoiser_and_clip(whole: Path, tmp_path: Path) -> None:
    model, lora = LatentDiffusion.from_pretrained(whole), Lora(rank=2)
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True, lora=lora)
    networks = module.trained_networks()
    torch.manual_seed(0)
    layers: dict[str, Any] = {}
    for name, network in networks.items():
        for key, parameter in network.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        layers[name] = {key: value for key, value in network.state_dict().items() if is_adapter(key)}
    lora.of_family(model.family).write(tmp_path / WEIGHTS_NAME, layers, model.components)
    pipeline: Any = LatentDiffusion.from_pretrained(whole).pipeline()
    pipeline.load_lora_weights(tmp_path)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name, network in networks.items():
        theirs = getattr(pipeline, name).state_dict()
        for key, value in merged_state_dict(network).items():
            torch.testing.assert_close(value, theirs[key], atol=1e-6, rtol=0)
    loaded = LatentDiffusion.from_pretrained(whole, lora=tmp_path / WEIGHTS_NAME)
    torch.testing.assert_close(loaded.denoiser.state_dict(), merged_state_dict(model.denoiser), atol=1e-6, rtol=0)


def test_a_token_is_not_learned_beside_a_frozen_encoder() -> None:
    model = LatentDiffusion.build("tiny_sd3", device="meta")
    with pytest.raises(
        UsageError, match="got a learned_token and .*whose text_encoder_3 .*stays frozen; leave out lea"
    ):
        SDLightningModule(model, optimizer=small.adamw, learned_token=LearnedToken("S*"))


def test_t5_is_read_in_its_files_precision_and_clip_in_float32(whole: Path) -> None:
    model = LatentDiffusion.from_pretrained(whole)
    dtypes = {name: next(network.parameters()).dtype for name, network in model.networks.items()}
    assert dtypes.pop("text_encoder_3") == torch.bfloat16 and set(dtypes.values()) == {torch.float32}


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_zeros_take_the_place_of_t5(lacking: Path, scale: float) -> None:
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained(lacking, text_encoder_3=None)
    pipeline.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    given = {"height": 32, "width": 32, "num_inference_steps": 3, "guidance_scale": scale, "generator": generators}
    theirs = [np.asarray(image, dtype=int) for image in pipeline(prompt=list(PROMPTS), **given).images]
    options = SamplingOptions(num_inference_steps=3, guidance_scale=scale)
    ours = generate(LatentDiffusion.from_pretrained(lacking), PROMPTS, seeds=[5, 6], options=options)
    assert np.abs(np.stack(theirs) - np.stack([np.asarray(each, dtype=int) for each in ours])).max() <= 1


def test_a_pipeline_without_t5_is_described_trained_and_saved_without_it(
    whole: Path, lacking: Path, tmp_path: Path
) -> None:
    check_pretrained("tiny_sd3", str(lacking))
    described, model = LatentDiffusion.describe(lacking), LatentDiffusion.from_pretrained(lacking)
    assert described.networks.keys() == model.networks.keys() == {"transformer", "vae", *CLIPS}
    assert model.tokenize(PROMPTS).keys() == CLIPS and model.truncated([*PROMPTS, "a " * 100]) == [False, False, True]
    assert text_kind(model) != text_kind(LatentDiffusion.from_pretrained(whole))
    assert inference_bytes(described, height=32, width=32) < inference_bytes(
        LatentDiffusion.describe(whole), height=32, width=32
    )
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True)
    small.fit(module, small.data(), 1)
    model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None]
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == sorted(
        ("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
    )
    assert LatentDiffusion.from_pretrained(tmp_path).networks.keys() == model.networks.keys()
    StableDiffusion3Pipeline.from_pretrained(tmp_path, text_encoder_3=None, tokenizer_3=None)


def test_a_clip_encoder_is_not_optional(whole: Path, tmp_path: Path) -> None:
    LatentDiffusion.from_pretrained(whole).save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "text_encoder_2": [None, None]}))
    with pytest.raises(UsageError, match="the pipeline has no text_encoder_2; copy the whole pipeline"):
        LatentDiffusion.from_pretrained(tmp_path)


def test_the_published_tokenizer_of_t5_keeps_its_class_and_the_pipelines_length(tmp_path: Path) -> None:
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -3.0), ("▁handwritten", -3.0), ("▁three", -3.0)]
    model = LatentDiffusion.build("tiny_sd3")
    model.tokenizers["tokenizer_3"] = T5TokenizerFast(vocab=words, extra_ids=0, model_max_length=512)
    model.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["tokenizer_3"] == ["transformers", "T5TokenizerFast"]
    ids = LatentDiffusion.from_pretrained(tmp_path).tokenize(PROMPTS[:1])["text_encoder_3"]
    assert ids.shape == (1, 256) and ids[0, :5].tolist() == [3, 4, 5, 1, 0]
