"""The model definition: sizes of the released models, conditioning as in diffusers, and the pipeline folder."""

import fnmatch
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from torch import nn

from sd_lightning import LatentDiffusion
from sd_lightning._errors import UsageError
from sd_lightning.models import families
from sd_lightning.models.components import load_network
from sd_lightning.models.families import Architecture, Component, architecture, sampling
from sd_lightning.models.families.architecture import shipped_architectures
from sd_lightning.models.families.blocks import repeated_blocks
from sd_lightning.models.families.sampling import scheduler_class
from sd_lightning.models.latent_diffusion import load_model
from sd_lightning.models.loading import TINY_TOKENIZER, TINY_VAE, check_pretrained
from sd_lightning.models.meta import unused_parameters
from small_models import SMALL_SDXL

ARCHITECTURES = {"sd": "tiny", "sdxl": SMALL_SDXL}


@pytest.fixture(scope="module", params=["sd", "sdxl"])
def model(request: pytest.FixtureRequest) -> LatentDiffusion:
    built = LatentDiffusion.build(ARCHITECTURES[request.param], seed=4)
    for network in built.networks.values():
        network.requires_grad_(False).eval()
    return built


@pytest.fixture(scope="module")
def folder(model: LatentDiffusion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / model.pipeline_class
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "pipeline"
    LatentDiffusion.build("tiny").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sd15", {"unet": 859_520_964, "text_encoder": 123_060_480}),
        ("sd21", {"unet": 865_910_724, "text_encoder": 340_387_840}),
        ("sdxl", {"unet": 2_567_463_684, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840}),
    ],
)
def test_networks_have_as_many_parameters_as_the_released_ones(name: str, expected: dict[str, int]) -> None:
    built = LatentDiffusion.build(name, device="meta")
    parameters = {key: list(network.parameters()) for key, network in built.networks.items()}
    assert all(p.is_meta for group in parameters.values() for p in group)
    counts = {key: sum(p.numel() for p in group) for key, group in parameters.items()}
    assert counts == {"vae": 83_653_863, **expected}


def test_tiny_model_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first, again, other = (LatentDiffusion.build("tiny", seed=seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    for name in first.networks:
        ours, same, different = (flat(m.networks[name]) for m in (first, again, other))
        assert torch.equal(ours, same)
        assert torch.equal(ours, different) == (name == "vae")  # the VAE is the trained one that ships


FILM_VAE, RGBA_VAE = (TINY_VAE.with_name(name) for name in ("film_vae", "rgba_vae"))


def test_shipped_files_are_small_and_their_folders_complete() -> None:
    files = [f for folder in (TINY_VAE, FILM_VAE, RGBA_VAE, TINY_TOKENIZER) for f in folder.rglob("*") if f.is_file()]
    assert {"config.json", "diffusion_pytorch_model.safetensors", "tokenizer.json"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) <= 680 * 1024


def test_tokenize_gives_one_row_per_text_encoder_padded_and_truncated(model: LatentDiffusion) -> None:
    captions = ["a handwritten three", "", "a handwritten three", "three " * 20]
    ids = model.tokenize(captions)
    length = ids["text_encoder"].shape[-1]
    assert model.truncated(["a " * (length - 2), "a " * (length - 1), *captions[:1]]) == [False, True, False]
    assert {name: (each.shape, each.dtype) for name, each in ids.items()} == dict.fromkeys(
        model.text_encoders, ((4, 8), torch.int64)
    )
    tokenizer = model.tokenizers["tokenizer"]
    expected = tokenizer(captions, padding="max_length", truncation=True, max_length=8, return_tensors="pt").input_ids
    assert torch.equal(ids["text_encoder"], expected)


def test_tiny_vocabulary_reads_any_text_without_unknown_tokens() -> None:
    tokenizer = LatentDiffusion.build("tiny", device="meta").tokenizers["tokenizer"]
    for text in ("a handwritten three", "sks", "Zürich 東京 🙂"):
        ids = tokenizer(text, truncation=False).input_ids[1:-1]
        assert ids and tokenizer.unk_token_id not in ids, text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LatentDiffusion.build("sd4"), "got architecture='sd4'; expected one of tiny, sd15, sd21, "),
        (lambda: load_model(architecture="tiny", variant="fp16"), "model got variant=fp16 without pretrained weights"),
        (lambda: scheduler_class("dpm"), "scheduler=dpm: diffusers has no such scheduler; expected ddim, ddpm"),
        (
            lambda: LatentDiffusion({}, tokenizers={}, components={}, pipeline_class="SanaPipeline"),
            "got a SanaPipeline; expected StableDiffusionPipeline or StableDiffusionInpaintPipeline or ",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


CAPTIONS = ["a handwritten three", "", "the digit 7, much longer than the model can read at once"]


def test_sd_conditioning_equals_that_of_the_diffusers_pipeline() -> None:
    model = LatentDiffusion.build("tiny")
    batch = {"input_ids": model.tokenize(CAPTIONS)}
    with torch.no_grad():
        ours = model.condition(model.text_encoders, batch)
        theirs, empty = model.pipeline().encode_prompt(CAPTIONS, torch.device("cpu"), 1, True)
    assert ours.keys() == {"encoder_hidden_states"}
    torch.testing.assert_close(ours["encoder_hidden_states"], theirs, rtol=0, atol=0)
    torch.testing.assert_close(ours["encoder_hidden_states"][1], empty[1], rtol=0, atol=1e-6)


SIZES = {
    "original_size": torch.tensor([[1023, 767], [32, 32], [480, 640]]),
    "crop_top_left": torch.tensor([[0, 129], [0, 0], [3, 5]]),
    "target_size": torch.tensor([[32, 32], [32, 32], [1024, 1024]]),
}


def test_sdxl_conditioning_equals_that_of_the_diffusers_pipeline() -> None:
    model = LatentDiffusion.build(SMALL_SDXL)
    pipeline: Any = model.pipeline()
    with torch.no_grad():
        ours = model.condition(model.text_encoders, {"input_ids": model.tokenize(CAPTIONS), **SIZES})
        embeddings, _, pooled, _ = pipeline.encode_prompt(CAPTIONS, device=torch.device("cpu"))
    assert ours["encoder_hidden_states"].shape == (3, 8, 32 + 48)
    torch.testing.assert_close(ours["encoder_hidden_states"], embeddings, rtol=0, atol=0)
    torch.testing.assert_close(ours["added_cond_kwargs"]["text_embeds"], pooled, rtol=0, atol=0)
    width = model.text_encoders["text_encoder_2"].config.projection_dim
    expected = [
        pipeline._get_add_time_ids(tuple(o), tuple(c), tuple(t), torch.float32, text_encoder_projection_dim=width)
        for o, c, t in zip(*(sizes.tolist() for sizes in SIZES.values()))
    ]
    assert torch.equal(ours["added_cond_kwargs"]["time_ids"], torch.cat(expected))


def test_sizes_stay_exact_when_encoders_compute_in_bfloat16() -> None:
    model = LatentDiffusion.build(SMALL_SDXL)
    for network in model.text_encoders.values():
        network.to(torch.bfloat16)
    batch = {"input_ids": model.tokenize(CAPTIONS), **SIZES}
    time_ids = model.condition(model.text_encoders, batch)["added_cond_kwargs"]["time_ids"]
    assert torch.equal(time_ids.long(), torch.cat(list(SIZES.values()), dim=1))  # bfloat16 would make 1024 of 1023


def test_unused_parameters_are_those_without_a_gradient(model: LatentDiffusion) -> None:
    encoders = LatentDiffusion.build("tiny" if len(model.text_encoders) == 1 else SMALL_SDXL).text_encoders
    conditioning = model.condition(encoders, {"input_ids": model.tokenize(CAPTIONS), **SIZES})
    pooled = conditioning.get("added_cond_kwargs", {}).get("text_embeds", torch.zeros(()))
    (conditioning["encoder_hidden_states"].square().sum() + pooled.square().sum()).backward()
    without = {n: [k for k, p in e.named_parameters() if p.grad is None] for n, e in encoders.items()}
    assert unused_parameters(model) == without
    assert bool(without["text_encoder"]) == (len(encoders) == 2)  # SDXL leaves the last layer of the first one out


def test_saved_pipeline_is_loaded_by_diffusers_and_by_us_with_equal_weights(
    model: LatentDiffusion, folder: Path
) -> None:
    from diffusers import DiffusionPipeline

    theirs: Any = DiffusionPipeline.from_pretrained(folder)
    assert type(theirs).__name__ == model.pipeline_class
    ours = LatentDiffusion.from_pretrained(folder)
    assert ours.networks.keys() == model.networks.keys()
    for name, network in model.networks.items():
        for loaded in (getattr(theirs, name), ours.networks[name]):
            assert type(loaded) is type(network)
            assert_same_tensors(loaded.state_dict(), network.state_dict())
    for name, ids in model.tokenize(CAPTIONS).items():
        assert torch.equal(ours.tokenize(CAPTIONS)[name], ids)
    for name, tokenizer in model.tokenizers.items():
        assert getattr(theirs, name)(CAPTIONS).input_ids == tokenizer(CAPTIONS).input_ids
    for scheduler in (theirs.scheduler, ours.sampling_scheduler()):
        assert type(scheduler).__name__ == model.components["scheduler"].class_name
        stored = dict(scheduler.config) | {"_class_name": type(scheduler).__name__}  # only files hold it
        assert {key: stored[key] for key in model.scheduler_config} == model.scheduler_config
    assert ours.pipeline_options == model.pipeline_options


def test_second_save_writes_the_same_files_as_the_first(folder: Path, tmp_path: Path) -> None:
    LatentDiffusion.from_pretrained(folder).save_pretrained(tmp_path)
    files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file()) == files
    for name in files:
        if name.endswith(".safetensors") or name == "model_index.json":
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


def test_text_encoder_files_have_the_keys_that_every_front_end_knows(model: LatentDiffusion, folder: Path) -> None:
    from transformers import CLIPTextModel

    for name in model.text_encoders:
        keys = set(load_file(folder / name / "model.safetensors"))
        assert "text_model.embeddings.token_embedding.weight" in keys
        assert {key.split(".")[0] for key in keys} <= {"text_model", "text_projection"}
    loaded = CLIPTextModel.from_pretrained(folder / "text_encoder")
    assert_same_tensors(loaded.state_dict(), model.networks["text_encoder"].state_dict())


class FSDPModule:
    """Stands in for the class that fully_shard mixes into the class of every network and block."""


@pytest.fixture
def engine_classes(model: LatentDiffusion) -> Iterator[None]:
    """Give networks and blocks the classes that a sharding engine would, and take them away again."""
    swapped: list[tuple[nn.Module, type]] = []
    for network in model.networks.values():
        for module in (network, *repeated_blocks(network).values()):
            cls = type(module)
            module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
            swapped.append((module, cls))
    yield
    for module, cls in swapped:
        module.__class__ = cls


def test_export_names_the_true_classes_though_an_engine_renamed_them(
    model: LatentDiffusion, folder: Path, engine_classes: None, tmp_path: Path
) -> None:
    assert type(model.denoiser).__name__ == "FSDPUNet2DConditionModel"
    model.save_pretrained(tmp_path)
    for name in ("model_index.json", *(f"{n}/{f}" for n in model.networks for f in ("config.json", "*.safetensors"))):
        (ours,), (before,) = tmp_path.glob(name), folder.glob(name)
        assert ours.read_bytes() == before.read_bytes(), name


def test_blocks_are_found_under_the_classes_of_an_engine(model: LatentDiffusion, engine_classes: None) -> None:
    blocks = repeated_blocks(model.denoiser)
    assert {type(block).__name__ for block in blocks.values()} == {"FSDPResnetBlock2D", "FSDPTransformer2DModel"}
    model.pipeline()


def test_skipped_networks_are_saved_without_weights(model: LatentDiffusion, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, skip=("unet",))
    assert [f.name for f in (tmp_path / "unet").iterdir()] == ["config.json"]
    assert (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.parametrize("in_index", [True, False, None])
def test_what_sdxl_puts_in_place_of_an_empty_prompt_survives_training(tmp_path: Path, in_index: bool | None) -> None:
    key = "force_zeros_for_empty_prompt"
    model = LatentDiffusion.build(SMALL_SDXL)
    assert model.pipeline().config[key] is False  # captions were dropped to "", not to zeros
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "model_index.json", {key: in_index})
    loaded = LatentDiffusion.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    assert loaded.pipeline().config[key] is (in_index is not False)  # diffusers' default is true
    assert json.loads((tmp_path / "again" / "model_index.json").read_text())[key] is (in_index is not False)


def test_another_vae_replaces_that_of_the_pipeline(tiny_folder: Path, tmp_path: Path) -> None:
    vae, _ = load_network(Component("diffusers", "AutoencoderKL"), tiny_folder / "vae")
    vae.register_to_config(scaling_factor=0.5)  # type: ignore[operator]
    nn.init.zeros_(vae.get_parameter("decoder.conv_out.bias"))
    vae.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = LatentDiffusion.from_pretrained(tiny_folder, vae=tmp_path)
    assert_same_tensors(loaded.vae.state_dict(), vae.state_dict())
    loaded.save_pretrained(tmp_path / "pipeline")
    assert json.loads((tmp_path / "pipeline" / "vae" / "config.json").read_text())["scaling_factor"] == 0.5


def remove(name: str) -> Callable[[Path], None]:
    def break_(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return break_


def cut(name: str) -> Callable[[Path], None]:
    """Keep the first half of a file, as an interrupted copy does."""

    def break_(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return break_


def change_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def break_(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return break_


def index(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "model_index.json", changes)


def empty_tokenizer(folder: Path) -> None:
    for path in (folder / "tokenizer").iterdir():
        path.unlink()


UNET, TEXT_ENCODER = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
TOKENS = "text_model.embeddings.token_embedding.weight"
AGAIN = "copy or download that folder again"

BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no index": (remove("model_index.json"), ("the folder has no model_index.json; expected a pipeline in the",)),
    "index no JSON": (cut("model_index.json"), ("model_index.json: not a JSON object", "download that file again")),
    "index a list": (
        lambda folder: (folder / "model_index.json").write_text("[1]"),
        ("model_index.json: not a JSON object",),
    ),
    "no unet folder": (remove("unet"), ("model_index.json names unet/, which is missing; copy the whole pipeline",)),
    "no vae weights": (
        remove("vae/diffusion_pytorch_model.safetensors"),
        ("/vae: cannot load AutoencoderKL: ", "needs config.json and complete safetensors weights", AGAIN),
    ),
    "no text encoder weights": (remove(TEXT_ENCODER), ("/text_encoder: cannot load CLIPTextModel: ", AGAIN)),
    "no unet config": (remove("unet/config.json"), ("/unet/config.json: missing; copy the whole pipeline folder",)),
    "no scheduler": (remove("scheduler"), ("scheduler_config.json: missing; copy the whole pipeline folder",)),
    "no tokenizer folder": (remove("tokenizer"), ("model_index.json names tokenizer/, which is missing",)),
    "no tokenizer files": (empty_tokenizer, ("/tokenizer: neither tokenizer.json nor vocab.json nor",)),
    "half a tokenizer": (cut("tokenizer/tokenizer.json"), ("/tokenizer: cannot load the tokenizer: ", AGAIN)),
    "half the unet": (cut(UNET), (f"/{UNET}: not a complete safetensors file", "copy or download that file")),
    "half the text encoder": (cut(TEXT_ENCODER), (f"/{TEXT_ENCODER}: not a complete safetensors file",)),
    "unet lacks a tensor": (
        change_tensors(UNET, lambda tensors: tensors.pop("conv_in.weight")),
        ("/unet: conv_in.weight of UNet2DConditionModel missing or of another shape in the weights", AGAIN),
    ),
    "text encoder lacks a tensor": (
        change_tensors(TEXT_ENCODER, lambda tensors: tensors.pop(TOKENS)),
        ("/text_encoder: embeddings.token_embedding.weight of CLIPTextModel missing or of another shape", AGAIN),
    ),
    "tensor of another shape": (
        change_tensors(TEXT_ENCODER, lambda tensors: tensors.update({TOKENS: torch.zeros(3, 64)})),
        ("/text_encoder: embeddings.token_embedding.weight of CLIPTextModel missing or of another shape", AGAIN),
    ),
    "another pipeline": (
        index(_class_name="SanaPipeline"),
        ("got a SanaPipeline; expected StableDiffusionPipeline or StableDiffusionInpaintPipeline or ",),
    ),
    "no class": (index(_class_name=None), ("got a None; expected StableDiffusionPipeline or",)),
    "no text encoder": (index(text_encoder=[None, None]), ("the pipeline has no text_encoder; copy the whole",)),
    "SD weights said to be SDXL": (
        index(_class_name="StableDiffusionXLPipeline"),
        ("the pipeline has no text_encoder_2",),
    ),
    "a class from anywhere": (
        index(unet=["subprocess", "Popen"]),
        ("model_index.json names subprocess.Popen as unet; expected diffusers.UNet2DConditionModel",),
    ),
    "a class of another part": (
        index(unet=["diffusers", "AutoencoderKL"]),
        ("model_index.json names diffusers.AutoencoderKL as unet; expected diffusers.UNet2DConditionModel",),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pipeline_folder_is_refused_in_one_line(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    break_, messages = BROKEN[name]
    copy = tmp_path / "pipeline"
    shutil.copytree(tiny_folder, copy)
    break_(copy)
    with pytest.raises(UsageError) as error:
        LatentDiffusion.from_pretrained(copy)
    for message in messages:
        assert message in str(error.value)
    assert str(copy) in str(error.value)
    assert "\n" not in str(error.value)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_never_unpickled(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pipeline"
    shutil.copytree(tiny_folder, copy)
    exploded = tmp_path / "exploded"
    for weights, pickled in ((UNET, "diffusion_pytorch_model.bin"), (TEXT_ENCODER, "pytorch_model.bin")):
        (copy / weights).rename(tmp_path / "kept")
        (copy / weights).with_name(pickled).write_bytes(pickle.dumps(Bomb(exploded)))
        with pytest.raises(UsageError, match="complete safetensors weights"):
            LatentDiffusion.from_pretrained(copy)
        (tmp_path / "kept").rename(copy / weights)
    assert not exploded.exists()


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./no/where", "a/b/c", Path("no/where")])
def test_what_is_neither_folder_nor_hub_id_is_refused(name: str | Path) -> None:
    with pytest.raises(UsageError, match=r"model\.pretrained=.*: no such folder; expected a folder in the diffusers"):
        LatentDiffusion.from_pretrained(name)


def test_hub_id_without_a_network_says_why_and_what_to_do() -> None:
    with pytest.raises(UsageError) as error:
        LatentDiffusion.from_pretrained("nobody-at-all/no-such-model")
    message = str(error.value)
    assert message.startswith("model.pretrained=nobody-at-all/no-such-model: cannot be downloaded from the hub")
    assert "offline mode is enabled" in message
    assert message.endswith("check the id, the network and your access, or give a local folder")
    assert "\n" not in message


@pytest.mark.parametrize("load", [LatentDiffusion.from_pretrained, LatentDiffusion.describe])
def test_a_gated_repository_says_where_to_accept_its_licence(
    load: Callable[[str], LatentDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the library passes the hub's error on or raises its own."""

    def refuse(*_: Any, **__: Any) -> str:
        response: Any = SimpleNamespace(headers={}, request=None)
        gated = GatedRepoError("401 Client Error\nAccess is restricted.", response=response)
        if load == LatentDiffusion.describe:
            raise gated
        raise OSError("Cannot load model some/model") from gated

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", refuse)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UsageError) as error:
        load("some/model")
    assert str(error.value) == (
        "model.pretrained=some/model: a gated repository, and no token that may read it was found; accept its licence "
        "at https://huggingface.co/some/model, then run hf auth login or set HF_TOKEN"
    )


def test_the_licence_is_said_once_when_published_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sd_lightning")
    LatentDiffusion.build("tiny").save_pretrained(tmp_path)
    load_model(architecture="tiny", pretrained=str(tmp_path))
    assert "licence" not in caplog.text
    known: Any = families.FAMILIES["StableDiffusionPipeline"].architectures
    monkeypatch.setitem(known, "tiny", replace(known["tiny"], licence="Some Licence"))
    monkeypatch.setattr(sampling, "_said", set())
    for rank in ("1", "0", "0"):  # other processes say nothing
        monkeypatch.setenv("LOCAL_RANK", rank)
        load_model(architecture="tiny", pretrained=str(tmp_path))
        assert ("licence" in caplog.text) is (rank == "0")
    assert caplog.text.count("model=tiny: the licence of the published weights is Some Licence") == 1


def test_every_shipped_architecture_has_a_family() -> None:
    known = [name for family in families.FAMILIES.values() for name in family.architectures]
    assert sorted(known) == sorted(shipped_architectures()) and {"tiny", "sd15"} <= {*known}


def test_every_published_architecture_has_a_licence() -> None:
    for family in families.FAMILIES.values():
        for name, each in family.architectures.items():
            assert bool(each.licence) is not each.is_tiny, name


def _variant(name: str, **unet: Any) -> Architecture:
    whole = architecture(name)
    changed = replace(whole.networks["unet"], config=whole.networks["unet"].config | unet)
    return replace(whole, networks={**whole.networks, "unet": changed})


HELD: dict[str, tuple[Any, set[str]]] = {
    **{name: (name, {name}) for name in ("tiny", "sd15", "sd21", "sdxl")},
    "small sdxl": (SMALL_SDXL, {"sdxl"}),
    "fewer blocks of sd15": (_variant("sd15", block_out_channels=[64, 96, 128, 128], layers_per_block=1), {"sd15"}),
    "a width of its own": (_variant("tiny", cross_attention_dim=48), {"tiny", "sd15", "sd21"}),
}
"""What a folder holds -> the names that it may be called."""


@pytest.mark.parametrize("held", HELD)
def test_model_names_what_the_folder_holds_or_is_refused_with_the_right_name(held: str, tmp_path: Path) -> None:
    model, right = LatentDiffusion.build(HELD[held][0], device="meta"), HELD[held][1]
    model.save_pretrained(tmp_path, skip=list(model.networks))
    for name in ("tiny", "sd15", "sd21", "sdxl"):
        if name in right:
            check_pretrained(name, str(tmp_path))
            continue
        with pytest.raises(UsageError) as error:
            check_pretrained(name, str(tmp_path))
        with pytest.raises(UsageError, match=re.escape(str(error.value))):  # there are no weights to complain about
            load_model(architecture=name, pretrained=str(tmp_path))
        start, remedy = str(error.value).split("; write model=")
        same_class = (name == "sdxl") == ("sdxl" in right)
        found = (
            f"a unet with cross_attention_dim={model.denoiser.config.cross_attention_dim}" if same_class else "a Stable"
        )
        assert start.startswith(f"model={name}, but {tmp_path} holds {found}")
        assert remedy == ("sd15" if len(right) > 1 else min(right))


def test_a_wrong_name_for_a_pipeline_of_the_hub_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LatentDiffusion.build(SMALL_SDXL, device="meta")
    model.save_pretrained(tmp_path, skip=list(model.networks))
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        UsageError, match="model=sd21, but me/my-sdxl holds a StableDiffusionXLPipeline; write model=sdxl"
    ):
        load_model(architecture="sd21", pretrained="me/my-sdxl", revision="v2")
    assert (asked["name"], asked["revision"]) == ("me/my-sdxl", "v2")
    files = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    unet = "unet/diffusion_pytorch_model.safetensors"
    for file in (*files, unet):
        assert any(fnmatch.fnmatch(file, pattern) for pattern in asked["allow_patterns"]) == (file != unet), file
    assert LatentDiffusion.describe("me/my-sdxl").denoiser.config.cross_attention_dim == 80


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def assert_same_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    differing = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    assert not differing


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON object; None removes a key, except for the class."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None or k == "_class_name"}))
