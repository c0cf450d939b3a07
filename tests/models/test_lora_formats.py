"""LoRA files for other front ends: every key is one that they read, nothing is missing, and the sum is ours."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_keys import clip_layers, denoiser_layers, read_changes
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.models.families import Component
from sd_lightning.models.families.flux1 import Flux1
from sd_lightning.models.families.flux2 import Flux2Klein
from sd_lightning.models.families.krea2 import Krea2
from sd_lightning.models.families.lora_names import FrontEnd, LoraNames
from sd_lightning.models.families.qwen_image import QwenImage
from sd_lightning.models.families.sd3 import StableDiffusion3
from sd_lightning.models.families.z_image import ZImage
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, is_adapter, merged_state_dict
from sd_lightning.models.lora_file import LoraFile
from sd_lightning.models.lora_formats import front_end_tensors
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed
from small_models import SMALL_SDXL

RANK, ALPHA = 3, 4.5
FRONT_ENDS: tuple[FrontEnd, ...] = ("kohya", "comfyui")
UNET_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "conv1", "ff.net.2", "time_emb_proj"]
FLUX2_TARGETS = ["to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out"]
"""Of diffusers' `train_dreambooth_lora_flux2_klein.py`."""
FLUX1_TARGETS = [
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj"),
    *("attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
]
"""Of diffusers' `train_dreambooth_lora_flux.py`."""
MORE_FLUX1_TARGETS = ["attn.to_v", "proj_mlp", "single_transformer_blocks.*.proj_out", "norm1.linear"]


def flux1() -> nn.Module:
    return FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), guidance_embeds=True,
    )  # fmt: skip


def flux2() -> nn.Module:
    return Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False,
    )  # fmt: skip


def z_image() -> nn.Module:
    return ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=24, axes_dims=[2, 2, 4],
        axes_lens=[16, 16, 16],
    )  # fmt: skip


def sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=8, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=16, pos_embed_max_size=8,
        dual_attention_layers=(0, 1), qk_norm="rms_norm",
    )  # fmt: skip


def qwen_image() -> nn.Module:
    return QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip


def krea2() -> nn.Module:
    return Krea2Transformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=3, text_num_attention_heads=2,
        text_num_key_value_heads=1, text_intermediate_size=16, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip


KREA2_TARGETS = ["img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"]
KREA2_TARGETS += ["ff.gate", "text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"]
KREA2_TARGETS += ["time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"]
"""Of diffusers' `train_dreambooth_lora_krea2.py`, and `ff.gate`: all linear layers."""
TRANSFORMERS: dict[str, tuple[Any, LoraNames, list[str], Any]] = {
    "flux1": (flux1, Flux1.lora_names, FLUX1_TARGETS, FluxPipeline),
    "flux1 more": (flux1, Flux1.lora_names, MORE_FLUX1_TARGETS, FluxPipeline),
    "flux2": (flux2, Flux2Klein.lora_names, FLUX2_TARGETS, Flux2KleinPipeline),
    "flux2 more": (
        flux2,
        Flux2Klein.lora_names,
        ["to_q", "add_v_proj", "to_add_out", "linear_in", "linear_out"],
        Flux2KleinPipeline,
    ),
    "z_image": (z_image, ZImage.lora_names, ["to_k", "to_q", "to_v", "to_out.0"], ZImagePipeline),
    "z_image more": (z_image, ZImage.lora_names, ["to_v", "w1", "w2", "w3"], ZImagePipeline),
    "sd3": (sd3, StableDiffusion3.lora_names, list(StableDiffusion3.lora_targets), StableDiffusion3Pipeline),
    "sd3 more": (
        sd3,
        StableDiffusion3.lora_names,
        ["attn2.to_k", "attn2.to_v", "attn2.to_out.0", "net.0.proj", "net.2", "add_v_proj"],
        StableDiffusion3Pipeline,
    ),
    "qwen_image": (qwen_image, QwenImage.lora_names, list(QwenImage.lora_targets), QwenImagePipeline),
    "qwen_image more": (qwen_image, QwenImage.lora_names, ["add_k_proj", "net.0.proj", "net.2"], QwenImagePipeline),
    "krea2": (krea2, Krea2.lora_names, ["to_k", "to_q", "to_v", "to_out.0"], Krea2Pipeline),
    "krea2 all": (krea2, Krea2.lora_names, KREA2_TARGETS, Krea2Pipeline),
}
READ_BY_DIFFUSERS = [
    (name, format)
    for name in TRANSFORMERS
    for format in ("diffusers", *FRONT_ENDS)
    if format == "diffusers" or not name.startswith(("sd3", "flux1", "krea2"))
]
"""diffusers reads no names of layers of Stable Diffusion 3.5 and Krea 2 but its own; for Flux.1, see below."""


def randomize(networks: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Make the adapters do something, and return them."""
    torch.manual_seed(0)
    for network in networks.values():
        for key, parameter in network.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.2)
    return {name: {k: v for k, v in n.state_dict().items() if is_adapter(k)} for name, n in networks.items()}


def expected_changes(network: nn.Module) -> dict[str, Tensor]:
    """What peft adds to the weights of the adapted layers."""
    adapted = {name: layer for name, layer in network.named_modules() if hasattr(layer, "lora_A")}
    return {name: layer.get_delta_weight("default").double().flatten(1) for name, layer in adapted.items()}  # type: ignore


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys(), "an adapter is missing"
    for name, change in found.items():
        assert torch.allclose(change, expected.get(name, torch.zeros_like(change)), atol=1e-6, rtol=1e-6), name


class Adapted:
    """A tiny transformer with adapters that do something, and its LoRA file."""

    def __init__(self, name: str, folder: Path) -> None:
        build, names, targets, self.pipeline_class = TRANSFORMERS[name]
        torch.manual_seed(1)
        self.network: nn.Module = build()
        self.before = {key: value.clone() for key, value in self.network.state_dict().items()}
        lora = Lora(rank=RANK, alpha=ALPHA, target_modules=targets)
        lora.apply_({"transformer": self.network})
        layers = randomize({"transformer": self.network})
        component = Component("diffusers", type(self.network).__name__)
        lora.write(folder / WEIGHTS_NAME, layers, {"transformer": component})
        self.file = LoraFile.read(folder / WEIGHTS_NAME)
        self.base = {"transformer": {key: StreamedTensor.of(value) for key, value in self.before.items()}}
        self.family: Any = SimpleNamespace(denoiser="transformer", text_encoders=("text_encoder",), lora_names=names)

    def fused_by_diffusers(self, file: Path) -> dict[str, Tensor]:
        """Return the weights with the adapters of a file, as the family's pipeline reads it."""
        network = type(self.network)(**self.network.config)  # type: ignore
        network.load_state_dict(self.before)
        state, metadata = self.pipeline_class.lora_state_dict(file, use_safetensors=True, return_lora_metadata=True)
        load = self.pipeline_class.load_lora_into_transformer
        alphas = {"network_alphas": None} if "network_alphas" in inspect.signature(load).parameters else {}
        load(state, transformer=network, adapter_name="x", metadata=metadata, **alphas)
        network.fuse_lora()
        network.unload_lora()
        return {key: value for key, value in network.state_dict().items() if not is_adapter(key)}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_front_ends_read_all_of_a_transformers_adapters(name: str, front_end: FrontEnd, tmp_path: Path) -> None:
    adapted = Adapted(name, tmp_path)
    tensors = front_end_tensors(adapted.file, adapted.base, adapted.family, front_end)
    write_streamed(tmp_path / "other.safetensors", tensors)
    written = load_file(tmp_path / "other.safetensors")
    plain = type(adapted.network)(**adapted.network.config)  # type: ignore
    found = read_changes(written, "lora_unet_", denoiser_layers(plain, front_end))
    assert not written, "keys that nothing reads"
    assert_same(found, expected_changes(adapted.network))


@pytest.mark.parametrize(("name", "format"), READ_BY_DIFFUSERS)
def test_diffusers_fuses_what_we_merge_into_transformers(name: str, format: Any, tmp_path: Path) -> None:
    adapted = Adapted(name, tmp_path)
    file = tmp_path / WEIGHTS_NAME
    if format != "diffusers":
        file = tmp_path / "other.safetensors"
        write_streamed(file, front_end_tensors(adapted.file, adapted.base, adapted.family, format))
    ours, theirs = merged_state_dict(adapted.network), adapted.fused_by_diffusers(file)
    assert ours.keys() == theirs.keys()
    assert any(not torch.equal(ours[key], adapted.before[key]) for key in ours)
    for key, value in ours.items():
        assert torch.allclose(value, theirs[key], atol=1e-6, rtol=0), key


@pytest.mark.parametrize("targets", [FLUX1_TARGETS, MORE_FLUX1_TARGETS])
def test_diffusers_reads_adapters_of_flux1_for_other_front_ends(targets: list[str], tmp_path: Path) -> None:
    """It knows the published width alone, so this has it, without the network's weights."""
    lora = Lora(rank=RANK, alpha=RANK, target_modules=targets)
    with torch.device("meta"):
        network = FluxTransformer2DModel(num_layers=1, num_single_layers=1)
        base = {"transformer": {key: StreamedTensor.of(value) for key, value in network.state_dict().items()}}
        lora.apply_({"transformer": network})
    torch.manual_seed(0)
    layers = {key: torch.randn(value.shape) for key, value in network.state_dict().items() if is_adapter(key)}
    component = Component("diffusers", "FluxTransformer2DModel")
    lora.write(tmp_path / WEIGHTS_NAME, {"transformer": layers}, {"transformer": component})
    adapters = load_file(tmp_path / WEIGHTS_NAME)
    family: Any = SimpleNamespace(denoiser="transformer", text_encoders=(), lora_names=Flux1.lora_names)
    tensors = front_end_tensors(LoraFile.read(tmp_path / WEIGHTS_NAME), base, family, "kohya")
    write_streamed(tmp_path / "other.safetensors", tensors)
    read: Any = FluxPipeline.lora_state_dict(tmp_path / "other.safetensors", use_safetensors=True)
    ones = {key: torch.randn(adapters[key].shape[1]) for key in adapters if ".lora_A." in key}
    for key, values in ones.items():
        up = key.replace("lora_A", "lora_B")
        torch.testing.assert_close(read[up] @ (read[key] @ values), adapters[up] @ (adapters[key] @ values))
    assert all(not read[key].any() for key in read.keys() - adapters.keys() if ".lora_B." in key)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_comfyui_draws_diffusers_files_of_transformers_at_their_strength(name: str, tmp_path: Path) -> None:
    """ComfyUI knows `transformer.<layer of diffusers>`, but not the metadata that hold diffusers' alpha."""
    adapted = Adapted(name, tmp_path)
    written = load_file(tmp_path / WEIGHTS_NAME)
    plain = type(adapted.network)(**adapted.network.config)  # type: ignore
    known = denoiser_layers(plain, "comfyui")
    found = {}
    for key in [key for key in written if ".lora_A." in key]:
        layer = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        assert layer in known
        down, up = written.pop(key), written.pop(key.replace("lora_A", "lora_B"))
        found[layer] = up.double() @ down.double()
    assert not written
    assert_same(found, expected_changes(adapted.network))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("architecture", ["tiny", SMALL_SDXL], ids=["sd", "sdxl"])
def test_front_ends_and_diffusers_read_all_adapters_of_unets_and_clip(
    architecture: Any, front_end: FrontEnd, tmp_path: Path
) -> None:
    lora = Lora(rank=RANK, alpha=ALPHA, target_modules=UNET_TARGETS)
    module = SDLightningModule(LatentDiffusion.build(architecture, seed=1), train_text_encoder=True, lora=lora)
    model, base = module.latent_diffusion, LatentDiffusion.build(architecture, seed=1)
    networks = module.trained_networks()
    lora.write(tmp_path / WEIGHTS_NAME, randomize(networks), model.components)
    files: dict[str, dict[str, StreamedTensor]] = {}
    for name, network in base.networks.items():
        keys = base.components[name].file_keys(network.state_dict())
        files[name] = {keys[key]: StreamedTensor.of(value) for key, value in network.state_dict().items()}
    tensors = front_end_tensors(LoraFile.read(tmp_path / WEIGHTS_NAME), files, model.family, front_end)
    write_streamed(tmp_path / "other.safetensors", tensors)
    written = load_file(tmp_path / "other.safetensors")
    numbered = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
    prefixes = numbered if len(model.family.text_encoders) > 1 else {"text_encoder": "lora_te_"}
    found = read_changes(written, "lora_unet_", denoiser_layers(base.denoiser, front_end))
    assert_same(found, expected_changes(model.denoiser))
    for name, prefix in prefixes.items():
        found = read_changes(written, prefix, clip_layers(base.networks[name]))
        assert_same(found, expected_changes(networks[name]))
    assert not written, "keys that nothing reads"

    pipeline: Any = base.pipeline()
    pipeline.load_lora_weights(tmp_path, weight_name="other.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name, network in networks.items():
        theirs = getattr(pipeline, name).state_dict()
        for key, value in merged_state_dict(network).items():
            assert torch.allclose(value, theirs[key], atol=1e-6, rtol=0), f"{name}.{key}"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_adapters_that_diffusers_leaves_out_are_told(front_end: FrontEnd, tmp_path: Path) -> None:
    """Those of another family, all or a few of a file."""
    files = {}
    for name in ("tiny_klein", "tiny_z_image"):
        model = LatentDiffusion.build(name, seed=1)
        model.save_pretrained(tmp_path / name)
        lora = Lora(rank=RANK).of_family(model.family)
        base = {"transformer": {k: StreamedTensor.of(v.clone()) for k, v in model.denoiser.state_dict().items()}}
        lora.apply_({"transformer": model.denoiser})
        layers = randomize({"transformer": model.denoiser})
        lora.write(tmp_path / WEIGHTS_NAME, layers, model.components)
        files[name] = tmp_path / f"{name}.safetensors"
        tensors = front_end_tensors(LoraFile.read(tmp_path / WEIGHTS_NAME), base, model.family, front_end)
        write_streamed(files[name], tensors)
        LatentDiffusion.from_pretrained(tmp_path / name, lora=files[name])
    for name, file in zip(files, reversed(files.values()), strict=True):
        with pytest.raises(UsageError, match=r"safetensors: .*; expected adapters of layers of this"):
            LatentDiffusion.from_pretrained(tmp_path / name, lora=file)
    for name, file in files.items():
        more = load_file(file)
        prefix = "lora_te_" if front_end == "kohya" else "text_encoders."
        for end in ("_down", "_up"):
            more[f"{prefix}model_layers_0_mlp_up_proj.lora{end}.weight"] = torch.ones(RANK, RANK)
        save_file(more, file)
        with pytest.raises(UsageError, match=r"safetensors: .*; expected adapters of layers of this"):
            LatentDiffusion.from_pretrained(tmp_path / name, lora=file)


def test_a_layer_without_a_name_is_refused(tmp_path: Path) -> None:
    adapted = Adapted("flux2", tmp_path)
    network = flux2()
    lora = Lora(target_modules=["x_embedder"])
    lora.apply_({"transformer": network})
    layers = randomize({"transformer": network})
    lora.write(tmp_path / WEIGHTS_NAME, layers, {"transformer": Component("diffusers", "Flux2Transformer2DModel")})
    with pytest.raises(UsageError, match=r"kohya has no name for the adapter of transformer.x_embedder; train without"):
        front_end_tensors(LoraFile.read(tmp_path / WEIGHTS_NAME), adapted.base, adapted.family, "kohya")
