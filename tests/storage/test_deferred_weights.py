"""Weights that stay in their files: the values, messages and checkpoints are those of loading everything at once."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import small_training as small
from sd_lightning import LatentDiffusion, SDLightningModule, _conf
from sd_lightning._errors import UsageError
from sd_lightning.apps import train
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.models.families import Architecture
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.train import PROGRAM
from small_models import SMALL_SDXL

PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")
UNET, TEXT_ENCODER = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("tiny", tmp_path_factory)


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(SMALL_SDXL, tmp_path_factory)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "pipeline"))


def saved(architecture: str | Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "pipeline"
    LatentDiffusion.build(architecture, seed=4).save_pretrained(path)
    return path


def assert_loads_alike(folder: Path, **options: Any) -> None:
    """Compare networks, buffers and records that were filled from files with those that were loaded at once."""
    ours = LatentDiffusion.from_pretrained(folder, deferred=PARTS, **options)
    assert ours.deferred.keys() == ours.networks.keys()
    assert all(p.is_meta for network in ours.networks.values() for p in network.parameters())
    theirs = LatentDiffusion.from_pretrained(folder, **options)
    assert ours.components == theirs.components
    for name, network in ours.networks.items():
        ours.deferred[name].fill_(network, CPU)
        assert_same(network, theirs.networks[name])


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = tensors_of(theirs)
    assert tensors_of(ours).keys() == expected.keys()
    for key, tensor in tensors_of(ours).items():
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]), key


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def test_all_values_are_those_of_loading_at_once(tiny: Path, sdxl: Path) -> None:
    assert_loads_alike(tiny)
    assert_loads_alike(sdxl)


def test_a_half_precision_variant_in_several_files_is_found_and_converted(copy: Path) -> None:
    halves(copy / UNET)
    halves(copy / TEXT_ENCODER)
    halves(copy / "vae/diffusion_pytorch_model.safetensors")
    assert_loads_alike(copy, variant="fp16")


def halves(path: Path) -> None:
    """Replace a file by two in float16 and their index, named as both libraries name a variant's."""
    tensors = {key: tensor.half() for key, tensor in load_file(path).items()}
    path.unlink()
    parts = sorted(tensors)[::2], sorted(tensors)[1::2]
    weight_map = {}
    for number, keys in enumerate(parts, 1):
        name = f"{path.stem}-{number:05d}-of-00002.fp16.safetensors"
        save_file({key: tensors[key] for key in keys}, path.with_name(name), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    path.with_name(f"{path.name}.index.fp16.json").write_text(json.dumps(index))


def test_a_text_encoder_without_the_prefix_and_with_position_ids_is_read(copy: Path) -> None:
    tensors = {key.removeprefix("text_model."): tensor for key, tensor in load_file(copy / TEXT_ENCODER).items()}
    save_file(tensors, copy / TEXT_ENCODER, metadata={"format": "pt"})
    assert_loads_alike(copy)
    tensors["embeddings.position_ids"] = torch.arange(8)[None]
    save_file(tensors, copy / TEXT_ENCODER, metadata={"format": "pt"})
    assert_loads_alike(copy)


def test_attention_layers_of_old_files_are_renamed(copy: Path) -> None:
    path = copy / "vae/diffusion_pytorch_model.safetensors"
    new_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(path)
    count = 0
    for key in list(tensors):
        for new, old in new_names.items():
            if f"attentions.0.{new}." in key:
                tensors[key.replace(new, old)] = tensors.pop(key)
                count += 1
    assert count == 16
    save_file(tensors, path, metadata={"format": "pt"})
    assert_loads_alike(copy)


def change(name: str, edit: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def break_(folder: Path) -> None:
        tensors = load_file(folder / name)
        edit(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return break_


def cut(folder: Path) -> None:
    content = (folder / UNET).read_bytes()
    (folder / UNET).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (
            lambda folder: (folder / UNET).unlink(),
            "diffusion_pytorch_model.safetensors: no such file; expected weights",
        ),
        (
            lambda folder: (folder / "unet/config.json").unlink(),
            "/unet/config.json: missing; copy the whole pipeline folder",
        ),
        (cut, "diffusion_pytorch_model.safetensors: not a complete safetensors file .it ends within '"),
        (
            change(UNET, lambda tensors: tensors.pop("conv_in.weight")),
            "/unet: conv_in.weight of UNet2DConditionModel missing or of another shape in the weights; it needs",
        ),
        (
            change(TEXT_ENCODER, lambda tensors: tensors.update({TOKENS: torch.zeros(3, 64)})),
            "/text_encoder: embeddings.token_embedding.weight of CLIPTextModel missing or of another shape",
        ),
        (
            change(UNET, lambda tensors: tensors.update(adapter=torch.zeros(3))),
            "/unet: the weights hold adapter, for which UNet2DConditionModel of this config.json has no place",
        ),
    ],
    ids=["no weights", "no config", "half a file", "tensor missing", "other shape", "unknown tensor"],
)
def test_a_broken_folder_is_refused_before_anything_is_read(
    break_: Callable[[Path], None], message: str, copy: Path
) -> None:
    break_(copy)
    with pytest.raises(UsageError, match=message) as error:
        LatentDiffusion.from_pretrained(copy, deferred=PARTS)
    assert "\n" not in str(error.value)


TOKENS = "text_model.embeddings.token_embedding.weight"


def deferred_unet(folder: Path) -> tuple[nn.Module, DeferredWeights, dict[str, Tensor]]:
    model = LatentDiffusion.from_pretrained(folder, deferred=("unet",))
    return model.denoiser, model.deferred["unet"], load_file(folder / UNET)


def test_any_flat_range_can_be_read(tiny: Path) -> None:
    _, weights, expected = deferred_unet(tiny)
    values = expected["conv_in.weight"].reshape(-1)
    for begin, end in ((0, 1), (5, 77), (100, len(values))):
        out = torch.empty(end - begin)
        weights.read("conv_in.weight", out, begin, end)
        assert torch.equal(out, values[begin:end])


def test_one_parameter_at_a_time_is_made_in_the_type_that_is_asked_for(tiny: Path) -> None:
    unet, weights, expected = deferred_unet(tiny)
    unet.get_parameter("conv_in.bias").requires_grad_(False)
    names = [name for name, _ in unet.named_parameters()]
    seen = []
    for filled in weights.fill_in_turn(unet, CPU, torch.bfloat16, reading=True):
        name = next(name for name, parameter in unet.named_parameters() if parameter is filled)
        assert torch.equal(filled, expected[name].bfloat16())
        assert filled.requires_grad == (name != "conv_in.bias")
        filled.data = torch.empty(0)  # as ZeRO-3 leaves it
        seen.append(name)
    assert sorted(seen) == sorted(names)


def test_memory_layout_and_trained_state_are_kept(tiny: Path) -> None:
    unet, weights, expected = deferred_unet(tiny)
    unet.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    unet.get_parameter("conv_in.bias").requires_grad_(False)
    weights.fill_(unet, CPU)
    weight = unet.get_parameter("conv_in.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert torch.equal(weight, expected["conv_in.weight"])
    assert [name for name, p in unet.named_parameters() if not p.requires_grad] == ["conv_in.bias"]


def test_a_frozen_network_cannot_be_deferred(tiny: Path) -> None:
    model = LatentDiffusion.from_pretrained(tiny, deferred=("unet", "text_encoder"))
    with pytest.raises(UsageError, match=r"deferred weights of text_encoder, which it does not train; defer trained"):
        SDLightningModule(model)


def test_a_model_without_its_weights_neither_draws_nor_saves(tiny: Path, tmp_path: Path) -> None:
    model = LatentDiffusion.from_pretrained(tiny, deferred=("unet",))
    with pytest.raises(UsageError, match=r"pipeline: the weights of unet are still in files; .* call quantize_"):
        model.pipeline()
    with pytest.raises(UsageError, match=r"save_pretrained: the weights of unet are still in files"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("arguments", "deferred"),
    [
        ("model=tiny model.pretrained=FOLDER", {"unet", "text_encoder"}),
        ("model=tiny_frozen init_from=FOLDER", {"unet"}),
        ("model=tiny", set()),
    ],
)
def test_the_main_job_leaves_the_weights_of_trained_networks_in_their_files(
    arguments: str, deferred: set[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.replace("FOLDER", str(tiny)).split()])
    received: list[Any] = []
    _conf.main(replace(PROGRAM, task=received.append))
    module: Any = train.build_module(train.preflight(RunSpec.of(received[0])))
    assert module.latent_diffusion.deferred.keys() == deferred
    for name, network in module.latent_diffusion.networks.items():
        assert all(p.is_meta == (name in deferred) for p in network.parameters())


def test_the_main_job_refuses_broken_weights_before_it_makes_a_folder_or_joins_other_processes(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process looks at the files it will read, also where each machine has its own."""
    cut(copy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", f"model.pretrained={copy}", "output_dir=run", "strategy=fsdp"])
    received: list[Any] = []
    _conf.main(replace(PROGRAM, task=received.append))
    with pytest.raises(UsageError, match=r"diffusion_pytorch_model.safetensors: not a complete safetensors file"):
        train.train(received[0])
    assert not (tmp_path / "run").exists()
    assert not torch.distributed.is_initialized()


def test_a_training_ends_with_the_same_checkpoint(tiny: Path, tmp_path: Path) -> None:
    checkpoints = [trained(tiny, tmp_path / name, deferred) for name, deferred in (("whole", ()), ("files", PARTS))]
    small.assert_bitwise_equal(*checkpoints)


def test_weights_that_are_frozen_in_a_trained_network_are_saved(sdxl: Path, tmp_path: Path) -> None:
    """The last layer of SDXL's first text encoder has no gradient, and yet is a part of the pipeline."""
    whole, files = (trained(sdxl, tmp_path / name, deferred) for name, deferred in (("whole", ()), ("files", PARTS)))
    small.assert_bitwise_equal(whole, files)
    exported = load_file(files / "pipeline" / TEXT_ENCODER)
    key = "text_model.encoder.layers.2.mlp.fc1.weight"
    assert torch.equal(exported[key], load_file(sdxl / TEXT_ENCODER)[key])


def trained(folder: Path, run_dir: Path, deferred: tuple[str, ...]) -> Path:
    names = {name for name in deferred if name != "vae"}
    model = LatentDiffusion.from_pretrained(folder, deferred=tuple(names))
    module = SDLightningModule(model, optimizer=small.adamw, train_text_encoder=True)
    assert {name for name, network in module.trained_networks().items() if next(network.parameters()).is_meta} == (
        names & model.networks.keys()
    )
    saving = small.Saving(run_dir)
    small.fit(module, small.data(), 2, saving)
    assert not model.deferred
    assert saving.last_saved is not None
    return saving.last_saved
