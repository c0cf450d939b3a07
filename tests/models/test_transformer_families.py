"""Transformer families: what is silent when it is wrong, compared with diffusers' own pipelines."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Krea2Pipeline, QwenImagePipeline
from PIL import Image
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import small_training as small
from sd_lightning import LatentDiffusion, SamplingOptions, SDLightningModule
from sd_lightning._errors import UsageError
from sd_lightning.data.sources.digits import Digits
from sd_lightning.data.store.texts import text_kind
from sd_lightning.data.transform import ImageOptions
from sd_lightning.models import families, loading
from sd_lightning.models.families import sampling
from sd_lightning.models.families.blocks import execution_position, repeated_blocks
from sd_lightning.models.families.qwen import PREFIX, PREFIX_TOKENS, SUFFIX
from sd_lightning.models.families.transformer import to_latents, to_tokens
from sd_lightning.models.generation import generate
from sd_lightning.models.learned_token import LearnedToken
from sd_lightning.models.loading import check_pretrained
from small_models import TINY_TRANSFORMERS

TINY = TINY_TRANSFORMERS
CHAT = [
    name for name in TINY if families.family_of(families.architecture(name).pipeline_class, who="").has_attention_masks
]
QWEN = (QwenImagePipeline, Krea2Pipeline)
"""With films as images, tokens of 2 x 2 latents, masks of captions and negative prompts."""
SHARED = [name for name in TINY if name != "tiny_qwen_image_21"]
"""Qwen-Image 2.1 has alpha and longer captions, and its pipeline counts their padding: test_qwen_image21.py."""
AS_THE_PIPELINE = pytest.mark.parametrize("model", SHARED, indirect=True)
UNPACKED = [name for name in SHARED if name != "tiny_flux"]
"""The latents of Flux.1 are packed otherwise: test_flux1.py."""
PROMPTS = ["a handwritten three", "a drawing of a eight"]
TIMES = torch.tensor([100.0, 900.0])
SD35 = {"vae": 83_819_683, "text_encoder": 123_650_304, "text_encoder_2": 694_659_840, "text_encoder_3": 4_762_310_656}
PARAMETERS = {
    "sd35_medium": {"transformer": 2_243_171_520, **SD35},
    "sd35_large": {"transformer": 8_056_627_520, **SD35},
    "flux1_dev": {
        "transformer": 11_901_408_320,
        "vae": 83_819_683,
        "text_encoder": 123_060_480,
        "text_encoder_2": 4_762_310_656,
    },
    "klein_4b": {"transformer": 3_875_544_576, "vae": 84_046_115, "text_encoder": 4_022_468_096},
    "klein_9b": {"transformer": 9_078_581_248, "vae": 84_046_115, "text_encoder": 8_190_735_360},
    "z_image": {"transformer": 6_154_908_736, "vae": 83_819_683, "text_encoder": 4_022_468_096},
    "qwen_image": {"transformer": 20_430_401_088, "vae": 126_892_531, "text_encoder": 8_292_166_656},
    "krea2": {"transformer": 12_820_073_036, "vae": 126_892_531, "text_encoder": 4_437_815_808},
    "qwen_image_21": {"transformer": 7_115_124_736, "vae": 337_740_404, "text_encoder": 8_767_123_696},
}
"""Of the published checkpoints."""


@pytest.fixture(scope="module", params=TINY)
def model(request: pytest.FixtureRequest) -> LatentDiffusion:
    made = LatentDiffusion.build(request.param, seed=3)
    for network in made.networks.values():
        network.requires_grad_(False)
    return made


@pytest.fixture(scope="module")
def z_image() -> LatentDiffusion:
    return LatentDiffusion.build("z_image", device="meta")


def encoded(model: LatentDiffusion, captions: list[str]) -> dict[str, Tensor]:
    return model.condition(model.text_encoders, {"input_ids": model.tokenize(captions)})


def theirs(pipeline: Any, captions: list[str]) -> Any:
    """Return what the pipeline makes of captions; where it gives a mask, without padding."""
    known = inspect.signature(pipeline.encode_prompt).parameters
    others = {name: None for name in ("prompt_2", "prompt_3") if name in known}
    found, mask, *_ = pipeline.encode_prompt(list(captions), **others, max_sequence_length=16)
    is_masked = isinstance(pipeline, QWEN) and mask is not None
    return [each[kept.bool()] for each, kept in zip(found, mask)] if is_masked else found


def prompt_embeds(model: LatentDiffusion, captions: list[str]) -> Any:
    """Return what we give the pipeline, likewise."""
    found = model.family.prompt_options(encoded(model, captions))
    embeds, mask = found["prompt_embeds"], found.get("prompt_embeds_mask")
    return embeds if mask is None else [each[kept.bool()] for each, kept in zip(embeds, mask)]


def pixels(images: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(image, dtype=int) for image in images])


def ours(
    model: LatentDiffusion, scale: float | None, negative_prompt: str = "", prompts: list[str] = PROMPTS
) -> np.ndarray:
    options = SamplingOptions(num_inference_steps=3, guidance_scale=scale)
    return pixels(generate(model, prompts, seeds=[5, 6], options=options, negative_prompt=negative_prompt))


@AS_THE_PIPELINE
def test_captions_are_encoded_as_the_pipeline_encodes_them(model: LatentDiffusion) -> None:
    for one, other in zip(prompt_embeds(model, PROMPTS), theirs(model.pipeline(), PROMPTS), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_tokenizer_that_pads_in_front_changes_no_caption() -> None:
    for name in SHARED:
        model = LatentDiffusion.build(name, seed=3)
        model.tokenizers["tokenizer"].padding_side = "left"
        made = prompt_embeds(model, PROMPTS)
        if name == "tiny_krea2":  # its pipeline drops the first tokens, whatever they are
            model.tokenizers["tokenizer"].padding_side = "right"
        for one, other in zip(made, theirs(model.pipeline(), PROMPTS), strict=True):
            torch.testing.assert_close(one, other)


@AS_THE_PIPELINE
def test_the_batch_never_changes_an_embedding(model: LatentDiffusion) -> None:
    for captions in (["", PROMPTS[0]], [PROMPTS[0], "one two three four five"]):
        for caption, one in zip(captions, prompt_embeds(model, captions), strict=True):
            torch.testing.assert_close(one, prompt_embeds(model, [caption])[0])
    ids = model.tokenize(["three"])
    assert max(len(each[0]) for name, each in ids.items() if f"{name}_mask" not in ids) == 16


@AS_THE_PIPELINE
def test_pictures_are_the_pipelines(model: LatentDiffusion) -> None:
    pipeline: Any = model.pipeline()
    for scale, negative in ((3.0, ""), (3.0, "a handwritten one"), (0.0, "")):
        generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        given: dict[str, Any] = {"num_inference_steps": 3, "generator": generators}
        given[model.family.guidance_option] = scale  # type: ignore[attr-defined]
        if "negative_prompt" in inspect.signature(pipeline.__call__).parameters:
            given |= {"prompt": list(PROMPTS), "negative_prompt": [negative] * 2}
        elif negative:
            given["negative_prompt_embeds"] = theirs(pipeline, [negative] * 2)
            given["prompt_embeds"] = theirs(pipeline, PROMPTS)
        else:
            given["prompt"] = list(PROMPTS)
        images = pipeline(**given, height=32, width=32, max_sequence_length=16).images
        assert np.abs(ours(model, scale, negative) - pixels(images)).max() <= 1


def test_a_chat_model_in_half_precision_leaves_the_denoiser_in_float32() -> None:
    half, seen = LatentDiffusion.build(CHAT[0], seed=3), []
    half.networks["text_encoder"].to(torch.bfloat16)
    half.denoiser.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    ours(half, 1.0)
    assert seen and not any(seen)


def test_guidance_is_on_where_the_pipeline_has_it_on(model: LatentDiffusion) -> None:
    off = model.family.no_guidance
    expected = {"ZImagePipeline": 0.0, "Krea2Pipeline": 0.0}
    assert off == expected.get(model.pipeline_class, 1.0)
    with pytest.raises(UsageError, match="draws without guidance"):
        ours(model, off, "a handwritten one")
    assert (ours(model, off + 2) != ours(model, off + 2, "a handwritten one")).any()


def test_a_list_of_captions_stays_as_it_is(model: LatentDiffusion) -> None:
    prompts = list(PROMPTS)
    first, second = ours(model, 3.0, prompts=prompts), ours(model, 3.0, prompts=prompts)
    assert prompts == PROMPTS and (first == second).all()


@pytest.mark.parametrize("model", UNPACKED, indirect=True)
def test_the_denoiser_gets_what_the_pipeline_gives_it(model: LatentDiffusion) -> None:
    calls: list[tuple[Any, Any, Any]] = []
    hook = model.denoiser.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    pipeline: Any = model.pipeline()
    latents = torch.randn(2, *model.latent_space.shape(32, 48))
    known = encoded(model, PROMPTS)
    given = {"height": 32, "width": 48, model.family.guidance_option: 0.0, "num_inference_steps": 2}
    given |= model.family.prompt_options(known)
    packed = to_tokens(latents, 2) if isinstance(pipeline, QWEN) else latents
    pipeline(**given, latents=packed, output_type="latent")
    hook.remove()
    for args, kwargs, (output, *_) in calls:
        if args:  # Z-Image: lists of (C, 1, h, w), what is left of the time, the negative velocity
            inputs, times, velocity = torch.stack(args[0]).squeeze(2), 1000 - 1000 * args[1], -torch.stack(output)
        elif output.ndim == 4:
            inputs, times, velocity = kwargs["hidden_states"], kwargs["timestep"], output
        else:
            size = (*latents.shape[2:], 2 if isinstance(pipeline, QWEN) else 1)
            inputs = to_latents(kwargs["hidden_states"], *size)
            times, velocity = 1000 * kwargs["timestep"], to_latents(output, *size)
        expected = velocity.reshape(latents.shape)
        torch.testing.assert_close(
            model.family.denoise(model.denoiser, inputs, times, known), expected, rtol=1e-4, atol=1e-5
        )
    assert len(calls) == 2


@pytest.mark.parametrize("lengths", [(7, 7), (7, 9), (7, 40), (32, 33), (48, 33), (32, 5)])
def test_captions_of_any_length_are_denoised_as_a_list(lengths: tuple[int, int]) -> None:
    model = LatentDiffusion.build("tiny_z_image", seed=3)
    mask = torch.stack([torch.arange(48) < length for length in lengths]).float()
    known = {"cap_feats": torch.randn(2, 48, 32), "cap_mask": mask}
    latents = torch.randn(2, 4, 8, 12, requires_grad=True)
    made = model.family.denoise(model.denoiser, latents, TIMES, known)
    captions = [feats[:length] for feats, length in zip(known["cap_feats"], lengths, strict=True)]
    other: Any = model.denoiser
    expected = other(list(latents.unsqueeze(2)), (1000 - TIMES) / 1000, captions, return_dict=False)[0]
    assert torch.equal(made, -torch.stack(expected).squeeze(2))
    made.sum().backward()
    assert latents.grad is not None and "unpatchify" not in vars(other)


def test_padding_of_qwen_image_changes_no_prediction() -> None:
    model = LatentDiffusion.build("tiny_qwen_image", seed=3)
    known, latents = encoded(model, PROMPTS), torch.randn(2, *model.latent_space.shape(32, 48))
    longest = int(known["encoder_hidden_states_mask"].sum(1).max())
    assert longest < 16
    known["encoder_hidden_states"][known["encoder_hidden_states_mask"] == 0] = 7.0
    trimmed = {key: each[:, :longest] for key, each in known.items()}
    made = [model.family.denoise(model.denoiser, latents, TIMES, each) for each in (known, trimmed)]
    torch.testing.assert_close(*made)


def test_padding_of_krea_2_has_no_place() -> None:
    """The pipeline has it before the end of its template, we at the end; a store leaves it out."""
    model = LatentDiffusion.build("tiny_krea2", seed=3)
    prompts = [*PROMPTS, "one two three four five six seven eight nine ten eleven"]
    latents, times = torch.randn(3, *model.latent_space.shape(32, 48)), torch.tensor([100.0, 900.0, 500.0])
    known, (embeds, mask) = encoded(model, prompts), model.pipeline().encode_prompt(prompts, max_sequence_length=16)  # type: ignore[attr-defined]
    ours_mask = known["encoder_hidden_states_mask"].bool()
    assert mask.sum(1).tolist() == ours_mask.sum(1).tolist() == [8, 10, 16], "the last one is truncated, not its suffix"
    assert not torch.equal(mask, ours_mask)
    torch.testing.assert_close(known["encoder_hidden_states"][ours_mask], embeds[mask], rtol=0, atol=1e-5)
    mid = {"encoder_hidden_states": embeds, "encoder_hidden_states_mask": mask.float()}
    made = [model.family.denoise(model.denoiser, latents, times, each) for each in (known, mid)]
    torch.testing.assert_close(*made)
    known["encoder_hidden_states"][~ours_mask] = 7.0
    first = {key: each[:2] for key, each in known.items()}
    for cut in (16, 10):
        trimmed = {key: each[:, :cut] for key, each in first.items()}
        torch.testing.assert_close(model.family.denoise(model.denoiser, latents[:2], times[:2], trimmed), made[0][:2])


def test_options_of_a_krea_2_pipeline_are_kept_and_used(tmp_path: Path) -> None:
    LatentDiffusion.build("tiny_krea2", seed=3).save_pretrained(tmp_path / "a")
    index = tmp_path / "a" / "model_index.json"
    content = json.loads(index.read_text())
    assert content["text_encoder_select_layers"] == [1, 2, 3, 4]
    assert content["is_distilled"] is False
    check_pretrained("tiny_krea2", str(tmp_path / "a"))
    plain, layers = LatentDiffusion.from_pretrained(tmp_path / "a"), [*range(4)]
    index.write_text(json.dumps({**content, "text_encoder_select_layers": layers, "is_distilled": True}))
    LatentDiffusion.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    model, pipeline = LatentDiffusion.from_pretrained(tmp_path / "b"), Krea2Pipeline.from_pretrained(tmp_path / "b")
    assert pipeline.config.is_distilled is True and pipeline.text_encoder_select_layers == tuple(layers)
    for one, other, before in zip(
        prompt_embeds(model, PROMPTS), theirs(pipeline, PROMPTS), prompt_embeds(plain, PROMPTS), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert not torch.equal(one, before)
    assert text_kind(model) != text_kind(plain), "stores keep them apart"
    found = SamplingOptions().resolve(model.family, model.pipeline_options, {})
    assert (found.num_inference_steps, found.guidance_scale) == (8, 0.0)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    images = pipeline(PROMPTS, num_inference_steps=3, guidance_scale=0.0, height=32, width=32, generator=generators)
    assert np.abs(ours(model, None) - pixels(images.images)).max() <= 1
    with pytest.raises(UsageError, match="has is_distilled.*train the Raw checkpoint"):
        check_pretrained("tiny_krea2", str(tmp_path / "b"))


def test_an_exported_qwen_image_draws_prompts_in_diffusers_as_here(tmp_path: Path) -> None:
    """Its template is as long with the tokenizer of the tiny one as with the published one."""
    model = LatentDiffusion.build("tiny_qwen_image", seed=3)
    model.save_pretrained(tmp_path)
    pipeline = QwenImagePipeline.from_pretrained(tmp_path)
    template = pipeline.prompt_template_encode
    assert template.partition("{}") == (PREFIX, "{}", SUFFIX)
    assert pipeline.tokenizer_max_length == 1024 and pipeline.prompt_template_encode_start_idx == PREFIX_TOKENS
    found = [pipeline.tokenizer.tokenize(part) for part in (PREFIX, SUFFIX)]
    assert [len(each) for each in found] == [34, 5]
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    options = {"true_cfg_scale": 3.0, "num_inference_steps": 3, "height": 32, "width": 32}
    images = pipeline(list(PROMPTS), [""] * 2, **options, generator=generators).images
    assert np.abs(ours(model, 3.0) - pixels(images)).max() <= 1


def test_half_precision_keeps_the_lengths_of_captions() -> None:
    mask = (torch.arange(512) < torch.tensor([[301], [257]])).bfloat16()
    found: Any = families.FAMILIES["ZImagePipeline"]
    kept = found.prompt_options({"cap_feats": torch.zeros(2, 512, 1), "cap_mask": mask})["prompt_embeds"]
    assert [len(each) for each in kept] == [301, 257]


@AS_THE_PIPELINE
def test_latents_are_normalised_as_the_pipeline_does(model: LatentDiffusion) -> None:
    images, pipeline = torch.rand(2, 3, 32, 48) * 2 - 1, model.pipeline()
    space, vae = model.latent_space, model.vae
    raw = model.family.encode(vae, images)
    assert raw.shape[1:] == space.encoded_shape(32, 48)
    latents = space.latents(raw, lambda shape: torch.zeros(2, *shape))
    assert latents.shape[1:] == space.shape(32, 48)
    takes_films = isinstance(pipeline, QWEN)  # of one frame
    posterior = vae.encode(images.unsqueeze(2) if takes_films else images).latent_dist
    mean, std = posterior.mode(), posterior.std
    if takes_films:
        mean, std = mean.squeeze(2), std.squeeze(2)
        shift, scale = (torch.tensor(vae.config[key]).view(4, 1, 1) for key in ("latents_mean", "latents_std"))
        expected = (mean - shift) / scale
    elif hasattr(pipeline, "_encode_vae_image"):
        expected = pipeline._encode_vae_image(images, None)
    else:
        expected = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    torch.testing.assert_close(latents, expected)
    torch.testing.assert_close(space.decodable(latents), mean)
    noise = torch.randn(2, *mean.shape[1:])
    drawn = space.decodable(space.latents(raw, lambda shape: noise))
    torch.testing.assert_close(drawn, mean + noise * std, rtol=1e-4, atol=1e-5)


def test_the_shipped_vae_of_films_keeps_digits_and_decodes_large_pictures_in_tiles() -> None:
    model, source = LatentDiffusion.build("tiny_qwen_image"), Digits("train")
    vae: Any = model.vae
    pictures = [source.image(index) for index in range(200)]
    images = torch.stack([torch.from_numpy(np.array(each)) for each in pictures]).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        films = vae.decode(vae.encode(images.unsqueeze(2)).latent_dist.mode()).sample
        wide = vae.encode(torch.cat(list(images[:20]), dim=2)[None, :, None]).latent_dist.mode()
        whole = vae.decode(wide).sample
        with model.family.decoding_in_tiles(vae, True):
            tiled = vae.decode(wide).sample
        assert not vae.use_tiling and torch.equal(vae.decode(wide).sample, whole)
    kept = ((films.squeeze(2) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    read = zip(source.classifier(pictures), source.classifier([Image.fromarray(each) for each in kept]), strict=True)
    assert sum(one == other for one, other in read) >= 198
    assert tiled.shape == whole.shape and 0 < (tiled - whole).abs().mean() < 0.05


def test_shift_and_scale_of_z_image_are_undone_in_the_pipelines_order() -> None:
    model = LatentDiffusion.build("tiny_z_image")
    model.vae.register_to_config(shift_factor=0.25, scaling_factor=0.5)
    latents = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(model.latent_space.decodable(latents), latents / 0.5 + 0.25)


@pytest.mark.parametrize("name", ["tiny_klein", "tiny_qwen_image"])
def test_the_shipped_statistics_give_latents_of_unit_variance(name: str) -> None:
    model = LatentDiffusion.build(name)
    source = Digits("train")
    images = torch.stack([torch.from_numpy(np.array(source.image(i))) for i in range(256)])
    images = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        latents = model.latent_space.latents(
            model.family.encode(model.vae, images), lambda shape: torch.randn(256, *shape)
        )
    assert latents.mean().abs() < 0.1 and 0.9 < latents.std() < 1.1


def test_blocks_are_in_the_order_in_which_they_run(model: LatentDiffusion) -> None:
    blocks, order = repeated_blocks(model.denoiser), []
    hooks = [b.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, b in blocks.items()]
    latents = torch.randn(2, *model.latent_space.shape(32, 32))
    model.family.denoise(model.denoiser, latents, TIMES, encoded(model, PROMPTS))
    for hook in hooks:
        hook.remove()
    assert order == sorted(blocks, key=execution_position) and len(order) > 2


@pytest.mark.parametrize("name", PARAMETERS)
def test_architectures_have_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        networks = {key: part.instantiate() for key, part in families.architecture(name).networks.items()}
    assert {key: sum(p.numel() for p in each.parameters()) for key, each in networks.items()} == PARAMETERS[name]


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_less_than_a_million_parameters(name: str) -> None:
    model = LatentDiffusion.build(name)
    assert sum(p.numel() for network in model.networks.values() for p in network.parameters()) < 1e6


@pytest.mark.parametrize("name", TINY)
def test_sharded_weights_are_read_by_either_loader(name: str, tmp_path: Path) -> None:
    model = LatentDiffusion.build(name, seed=1)
    model.save_pretrained(tmp_path)
    for network in ("transformer", *model.text_encoders):
        for file in (tmp_path / network).glob("*.safetensors"):
            file.unlink()
        model.networks[network].save_pretrained(tmp_path / network, max_shard_size="100KB")
        assert len(list((tmp_path / network).glob("*.safetensors"))) > 1
    if model.components["text_encoder"].class_name == "Qwen3Model":  # published files are of the language model
        whole = Qwen3ForCausalLM(
            Qwen3Config(**{**model.components["text_encoder"].config, "tie_word_embeddings": False})
        )
        whole.model.load_state_dict(model.networks["text_encoder"].state_dict())
        for file in (tmp_path / "text_encoder").iterdir():
            file.unlink()
        whole.save_pretrained(tmp_path / "text_encoder", max_shard_size="60KB")
    deferred, loaded = (LatentDiffusion.from_pretrained(tmp_path, deferred=names) for names in (("all",), ()))
    assert deferred.deferred.keys() == deferred.networks.keys()
    deferred.read_deferred("cpu")
    for network, each in model.networks.items():
        for key, value in each.state_dict().items():
            assert torch.equal(deferred.networks[network].state_dict()[key], value), key
            assert torch.equal(loaded.networks[network].state_dict()[key], value), key
    assert loaded.tokenize(PROMPTS).keys() == model.tokenize(PROMPTS).keys()
    assert all(torch.equal(ids, model.tokenize(PROMPTS)[key]) for key, ids in loaded.tokenize(PROMPTS).items())


@pytest.mark.parametrize("name", ["tiny_klein", "tiny_z_image"])
def test_a_missing_chat_template_is_told_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LatentDiffusion.build(name).save_pretrained(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    monkeypatch.setattr(loading, "load_network", None)
    for load in (LatentDiffusion.from_pretrained, LatentDiffusion.describe):
        with pytest.raises(
            UsageError, match=r"tokenizer: the tokenizer has no chat template.*copy its chat_template\.j"
        ):
            load(tmp_path)


def test_a_distilled_checkpoint_stays_distilled_and_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sampling, "_said", set())
    LatentDiffusion.build("tiny_klein").save_pretrained(tmp_path / "a")
    index = tmp_path / "a" / "model_index.json"
    check_pretrained("tiny_klein", str(tmp_path / "a"))
    index.write_text(json.dumps({**json.loads(index.read_text()), "is_distilled": True}))
    model = LatentDiffusion.from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "model_index.json").read_text())["is_distilled"] is True
    assert model.pipeline().config.is_distilled is True
    _draws_without_guidance(model, caplog)
    with pytest.raises(UsageError, match="has is_distilled.*train the base checkpoint"):
        check_pretrained("tiny_klein", str(tmp_path / "a"))


def _draws_without_guidance(model: LatentDiffusion, caplog: pytest.LogCaptureFixture) -> None:
    """Guidance that is asked for is ignored with one warning, a negative prompt is refused."""
    own = ours(model, None)
    assert not caplog.messages
    assert all((ours(model, 4.0) == own).all() for _ in range(2))
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "sampling got guidance_scale=4 and a distilled Flux2KleinPipeline, which draws without guidance"
    ]
    with pytest.raises(UsageError, match="negative_prompt='a handwritten one' .* leave negative_prompt out"):
        ours(model, None, "a handwritten one")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", (25, 7.5)),
        ("tiny_sd3", (28, 7.0)),
        ("tiny_krea2", (28, 4.5)),
        ("tiny_flux", (28, 3.5)),
        *((name, (50, 4.0)) for name in ("tiny_klein", "tiny_z_image", "tiny_qwen_image")),
    ],
)
def test_steps_and_guidance_are_the_familys_where_none_are_given(name: str, expected: tuple[int, float]) -> None:
    model = LatentDiffusion.build(name, device="meta")

    def resolved(**options: Any) -> tuple[int | None, float | None]:
        found = SamplingOptions(**options).resolve(model.family, model.pipeline_options, {})
        return found.num_inference_steps, found.guidance_scale

    assert resolved() == expected
    assert resolved(num_inference_steps=3, guidance_scale=0.0) == (3, 0.0)


def test_a_pipeline_of_another_size_is_told(tmp_path: Path) -> None:
    LatentDiffusion.build("tiny_klein").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="holds a transformer with num_attention_heads=4, not 32; write model=tiny_kl"):
        check_pretrained("klein_9b", str(tmp_path))
    with pytest.raises(UsageError, match="holds a Flux2KleinPipeline; write model=tiny_klein"):
        check_pretrained("z_image", str(tmp_path))


@pytest.mark.parametrize("pipeline_class", families.FAMILIES)
def test_architectures_of_a_family_are_told_apart(pipeline_class: str) -> None:
    """By whole configurations, as files have them."""
    known = families.FAMILIES[pipeline_class].architectures
    for other in known:
        model = LatentDiffusion.build(other, device="meta")
        config: Any = model.denoiser.config
        for name in known:
            found = families.contradiction(name, pipeline_class, config)
            assert (found and found[1]) == (None if name == other else other)
        configs = {"vae_config": model.vae.config, "denoiser_config": model.denoiser.config}
        model.family.check_sizes(model.resolution, **configs, setting="resolution")


def test_sides_beyond_the_known_positions_are_refused(z_image: LatentDiffusion) -> None:
    tiny, klein = (LatentDiffusion.build(name, device="meta") for name in ("tiny_z_image", "tiny_klein"))
    for model, most in ((tiny, 512), (z_image, 8192)):
        SamplingOptions(height=most, width=most).check(model)
        with pytest.raises(
            UsageError, match=rf"sampling got width={2 * most}: .* up to {most} pixels; write width={most}"
        ):
            SamplingOptions(width=2 * most).check(model)
    SamplingOptions(height=1024).check(klein)
    buckets = ImageOptions(resolution=512, enable_bucket=True, max_bucket_reso=1024)
    with pytest.raises(UsageError, match=r"data\.max_bucket_reso=1024: .*; write data\.max_bucket_reso=512"):
        buckets.check_model(tiny)
    latents = torch.zeros(1, *tiny.latent_space.shape(512, 32))
    real = LatentDiffusion.build("tiny_z_image")
    known = encoded(real, PROMPTS[:1])
    assert real.family.denoise(real.denoiser, latents, TIMES[:1], known).shape == latents.shape
    with pytest.raises(IndexError):
        real.family.denoise(real.denoiser, torch.cat([latents, latents], dim=2), TIMES[:1], known)


def test_sides_that_patches_cannot_divide_are_refused(z_image: LatentDiffusion) -> None:
    with pytest.raises(
        UsageError, match=r"data\.resolution=520: .* multiples of 16 pixels; write data\.resolution=512"
    ):
        ImageOptions(resolution=520).check_model(z_image)
    ImageOptions(resolution=528).check_model(z_image)
    with pytest.raises(UsageError, match="sampling got height=1000: .* multiples of 16"):
        SamplingOptions(height=1000).check(z_image)
    assert z_image.family.image_tokens(*z_image.latent_space.shape(1024, 512)[1:]) == 64 * 32


def test_only_the_scheduler_of_flow_matching_samples(model: LatentDiffusion, z_image: LatentDiffusion) -> None:
    with pytest.raises(UsageError, match="cannot sample with it; choose another, such as FlowMatchEulerDiscreteSched"):
        SamplingOptions(scheduler="ddim").check(model)
    z_image.use_scheduler({"use_dynamic_shifting": True})
    SamplingOptions().check(z_image)


def test_a_model_whose_scheduler_draws_no_flow_is_not_trained() -> None:
    model = LatentDiffusion.build("tiny_klein")
    model.use_scheduler({"_class_name": "DDIMScheduler"})
    with pytest.raises(UsageError, match=r"DDIMScheduler: Flux2KleinPipeline cannot .*scheduler_config.json .*copy"):
        SDLightningModule(model, optimizer=small.adamw)


@pytest.mark.parametrize("options", [{"train_text_encoder": True}, {"learned_token": LearnedToken("S*")}])
def test_chat_models_are_not_trained(options: Any) -> None:
    model = LatentDiffusion.build("tiny_z_image")
    with pytest.raises(UsageError, match="whose text_encoder is a language model that stays frozen; leave"):
        SDLightningModule(model, optimizer=small.adamw, **options)


@pytest.mark.parametrize("name", TINY)
def test_a_run_trains_the_denoiser_alone(name: str) -> None:
    model = LatentDiffusion.build(name)
    before = {n: [p.detach().clone() for p in network.parameters()] for n, network in model.networks.items()}
    module = SDLightningModule(model, optimizer=small.adamw, seed=3)
    small.fit(module, small.data(), 3)
    assert module.last_loss is not None and module.last_loss.isfinite()
    changed = {
        n for n, each in model.networks.items() if any((p != q).any() for p, q in zip(each.parameters(), before[n]))
    }
    assert changed == {"transformer"}
    unused = {key for key, parameter in model.denoiser.named_parameters() if not parameter.requires_grad}
    pairs = zip(model.denoiser.named_parameters(), before["transformer"], strict=True)
    assert {key for (key, now), then in pairs if torch.equal(now, then)} == unused


def test_a_run_is_resumed_with_its_chat_model_in_half_precision_as_published(tmp_path: Path) -> None:
    """Weights are compared in the precision of their file; a later fit has them in that of the encoder."""
    for seed in (3, 4):
        saved = LatentDiffusion.build("tiny_z_image", seed=3)
        saved.networks["text_encoder"] = LatentDiffusion.build("tiny_z_image", seed=seed).networks["text_encoder"]
        saved.networks["text_encoder"].to(torch.bfloat16)
        saved.save_pretrained(tmp_path / f"{seed}")

    def module(seed: int) -> SDLightningModule:
        model = LatentDiffusion.from_pretrained(tmp_path / f"{seed}")
        assert next(model.networks["text_encoder"].parameters()).dtype == torch.bfloat16
        return SDLightningModule(model, optimizer=small.adamw, seed=3)

    first, saving = module(3), small.Saving(tmp_path / "run")
    small.fit(first, small.data(), 1, saving)
    small.fit(first, small.data(), 2, small.Saving(tmp_path / "run", resume=saving.last_saved))
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(UsageError, match=r"frozen weights of text_encoder in bfloat16 are not .* model.pretrained="):
        small.fit(module(4), small.data(), 3, small.Saving(tmp_path / "other", resume=newest))
    small.fit(module(3), small.data(), 3, small.Saving(tmp_path / "next", resume=newest))
