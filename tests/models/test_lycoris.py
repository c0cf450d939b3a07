"""LoHa and LoKr: what ComfyUI adds by an exported file is what was trained, and files go on as the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.models.families.lora_names import FrontEnd
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, is_adapter, merged_state_dict
from sd_lightning.models.lora_file import LoraFile
from sd_lightning.models.lora_formats import front_end_metadata, front_end_tensors
from sd_lightning.models.lora_start import going_on
from sd_lightning.models.meta import meta_twin
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed

KINDS = ("loha", "lokr")
TARGETS = ["to_q", "to_out.0", "conv1", "proj_in", "time_emb_proj"]
RANKS = {"mid_block": 2, "up_blocks": 40}
"""With 40, both factors of LoKr are whole."""
Lycoris = tuple[SDLightningModule, Path]


def write(module: SDLightningModule, file: Path) -> None:
    networks, lora = module.trained_networks(), module.lora
    assert lora is not None
    layers = {n: {k: v for k, v in network.state_dict().items() if is_adapter(k)} for n, network in networks.items()}
    lora.write(file, layers, module.latent_diffusion.components)


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lycoris:
    """A module whose adapters do something, of the UNet and CLIP, and its file."""
    lora = Lora(type=request.param, rank=3, alpha=4.5, rank_pattern=RANKS, target_modules=TARGETS)
    module = SDLightningModule(LatentDiffusion.build("tiny", seed=1), lora=lora, train_text_encoder=True)
    torch.manual_seed(0)
    for network in module.trained_networks().values():
        for parameter in (p for p in network.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=0.2)
    file = tmp_path_factory.mktemp(request.param) / WEIGHTS_NAME
    write(module, file)
    return module, file


def deltas(module: SDLightningModule) -> dict[tuple[str, str], Tensor]:
    """What peft adds to each layer's weight."""
    return {
        (name, key): layer.get_delta_weight("default").detach()  # type: ignore[operator]
        for name, network in module.trained_networks().items()
        for key, layer in network.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


def export(file: Path, front_end: FrontEnd, target: Path) -> Path:
    """Write a front end's file."""
    model = LatentDiffusion.build("tiny", seed=1)
    keys = {name: model.components[name].file_keys(each.state_dict()) for name, each in model.networks.items()}
    weights = {
        name: {keys[name][key]: StreamedTensor.of(value) for key, value in each.state_dict().items()}
        for name, each in model.networks.items()
    }
    lora = LoraFile.read(file)
    tensors = front_end_tensors(lora, weights, model.family, front_end)
    metadata = front_end_metadata(
        lora, tensors, model.family, model.components, title="it", prediction_type="epsilon", dtype=None
    )
    assert metadata["ss_network_module"] == "lycoris.kohya"
    write_streamed(target, tensors, metadata=metadata)
    return target


def added_by_comfyui(left: dict[str, Tensor], key: str, weight: Tensor) -> Tensor:
    """Take a layer's tensors, and return what ``calculate_weight`` of ComfyUI's LoHaAdapter and LoKrAdapter adds."""
    v = {name.removeprefix(f"{key}."): left.pop(name) for name in list(left) if name.startswith(f"{key}.")}
    alpha = v["alpha"].item()
    if "hada_w1_b" in v:
        product = (v["hada_w1_a"] @ v["hada_w1_b"]) * (v["hada_w2_a"] @ v["hada_w2_b"])
        return (alpha / len(v["hada_w1_b"]) * product).reshape(weight.shape)
    scale, w1 = 1.0, v["lokr_w1"]
    if "lokr_w2" in v:
        w2 = v["lokr_w2"]
    else:
        w2, scale = v["lokr_w2_a"] @ v["lokr_w2_b"], alpha / len(v["lokr_w2_b"])
    if w2.dim() == 4:
        w1 = w1[:, :, None, None]
    return (scale * torch.kron(w1, w2)).reshape(weight.shape)


@pytest.mark.parametrize("front_end", ["kohya", "comfyui"])
def test_comfyui_adds_what_was_trained(trained: Lycoris, front_end: FrontEnd, tmp_path: Path) -> None:
    module, file = trained
    left = load_file(export(file, front_end, tmp_path / "lora.safetensors"))
    expected = deltas(module)
    assert {name for name, _ in expected} == {"unet", "text_encoder"}
    for (name, layer), delta in expected.items():
        path = layer if name == "unet" else f"text_model.{layer.removeprefix('text_model.')}"
        key = f"{'lora_unet' if name == 'unet' else 'lora_te'}_{path.replace('.', '_')}"
        torch.testing.assert_close(added_by_comfyui(left, key, delta), delta, atol=1e-6, rtol=1e-5)
    assert not left, "keys of no layer"


def test_merged_weights_have_what_was_trained(trained: Lycoris) -> None:
    module, file = trained
    plain = LatentDiffusion.build("tiny", seed=1)
    expected, networks = deltas(module), module.trained_networks()
    ours = {name: merged_state_dict(network) for name, network in networks.items()}
    keys = {name: plain.components[name].file_keys(plain.networks[name].state_dict()) for name in networks}
    base = {n: {keys[n][k]: StreamedTensor.of(v) for k, v in plain.networks[n].state_dict().items()} for n in networks}
    files = LoraFile.read(file).merged(base)
    assert sum(map(len, files.values())) == len(expected)
    for (name, layer), delta in expected.items():
        weight = plain.networks[name].get_parameter(f"{layer}.weight")
        for found in (ours[name][f"{layer}.weight"], files[name][keys[name][f"{layer}.weight"]].read()):
            torch.testing.assert_close(found, weight + delta, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_a_share_of_the_change_is_added_to_a_pipeline(trained: Lycoris, weight: float | None, tmp_path: Path) -> None:
    module, file = trained
    LatentDiffusion.build("tiny", seed=1).save_pretrained(tmp_path)
    plain = LatentDiffusion.build("tiny", seed=1)
    read = LatentDiffusion.from_pretrained(str(tmp_path), lora=file, lora_weight=weight)
    for (name, layer), delta in deltas(module).items():
        before, after = (each.networks[name].get_parameter(f"{layer}.weight") for each in (plain, read))
        torch.testing.assert_close(after, before + (weight or 1) * delta, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("front_end", [None, "kohya", "comfyui"])
def test_a_training_of_no_step_writes_the_same_bits(trained: Lycoris, front_end: Any, tmp_path: Path) -> None:
    module, file = trained
    assert module.lora is not None
    first = file if front_end is None else export(file, front_end, tmp_path / "first.safetensors")
    base = LatentDiffusion.build("tiny", seed=1)
    lora = going_on(Lora(), first, meta_twin(base), train_text_encoder=True)
    assert lora.type == module.lora.type
    write(SDLightningModule(base, lora=lora, train_text_encoder=True), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
    if front_end is not None:
        again = export(tmp_path / "again.safetensors", front_end, tmp_path / "second.safetensors")
        mine, theirs = load_file(again), load_file(first)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_outputs_begin_as_those_of_the_model_and_factors_are_trained() -> None:
    for kind in KINDS:
        model = LatentDiffusion.build("tiny", seed=1)
        width = model.denoiser.config.cross_attention_dim  # type: ignore[union-attr]
        arguments = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 5, width)
        before = model.denoiser(*arguments).sample
        Lora(type=kind, target_modules=TARGETS).apply_({"unet": model.denoiser})  # type: ignore[arg-type]
        after = model.denoiser(*arguments).sample
        assert torch.equal(before, after)
        after.square().mean().backward()
        for key, parameter in model.denoiser.named_parameters():
            assert (parameter.grad is not None) == is_adapter(key), key


@pytest.mark.parametrize("kind", KINDS)
def test_joined_layers_are_refused(kind: Any, tmp_path: Path) -> None:
    model = LatentDiffusion.build("tiny_klein", seed=1)
    module = SDLightningModule(model, lora=Lora(type=kind, target_modules=["attn.to_q"]))
    write(module, tmp_path / WEIGHTS_NAME)
    file = LoraFile.read(tmp_path / WEIGHTS_NAME)
    with pytest.raises(UsageError, match=r"comfyui joins .*merge_lora=true"):
        front_end_tensors(file, {}, model.family, "comfyui")


@pytest.mark.parametrize("options", [{"base": "int8"}, {"use_dora": True}, {"dropout": 0.1}])
def test_what_only_lora_has_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"lokr and {next(iter(options))}=.*lora.type=lora"):
        Lora(type="lokr", **options)
    with pytest.raises(UsageError, match="expected lora, loha or lokr"):
        Lora(type="oft")  # type: ignore[arg-type]


def test_factors_of_another_split_are_read_but_not_trained_on(tmp_path: Path) -> None:
    base = LatentDiffusion.build("tiny", seed=1)
    layer = next(k.removesuffix(".weight") for k, _ in base.denoiser.named_parameters() if k.endswith("to_q.weight"))
    key, change = f"unet.{layer}", torch.randn_like(base.denoiser.get_parameter(f"{layer}.weight"))
    save_file({f"{key}.lokr_w1": torch.ones(1, 1), f"{key}.lokr_w2": change}, tmp_path / "other.safetensors")
    base.save_pretrained(tmp_path / "base")
    read = LatentDiffusion.from_pretrained(str(tmp_path / "base"), lora=tmp_path / "other.safetensors")
    before, after = (each.denoiser.get_parameter(f"{layer}.weight") for each in (base, read))
    torch.testing.assert_close(after, before + change)
    lora = going_on(Lora(), tmp_path / "other.safetensors", meta_twin(base))
    with pytest.raises(UsageError, match="as of LyCORIS with factor=-1"):
        SDLightningModule(base, lora=lora)
