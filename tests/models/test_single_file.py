"""The original one-file layout, checked against diffusers' own readers of it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.families import FAMILIES, Component
from sd_lightning.models.families.single_file import Origin, layout_of, model_spec, original_names
from sd_lightning.storage.safetensors_file import SLICE_BYTES
from sd_lightning.storage.streamed_tensor import StreamedTensor, file_tensors, joined, write_streamed


def files_of(model: LatentDiffusion) -> dict[str, dict[str, Tensor]]:
    """The tensors of each network by their keys in its weight file."""
    return {
        name: {model.components[name].file_keys([key])[key]: value for key, value in network.state_dict().items()}
        for name, network in model.networks.items()
    }


def in_original_layout(files: dict[str, dict[str, Tensor]], names: dict[str, Origin]) -> dict[str, Tensor]:
    """Apply the map to meta tensors; a tensor that only changes its name stays the same object."""
    result = {}
    for original, origin in names.items():
        parts = [files[origin.network][name] for name in origin.names]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if origin.change != "none":
            tensor = tensor.T if origin.change == "transpose" else tensor[:, :, None, None]
        result[original] = tensor
    return result


def assert_converted(converted: dict[str, Tensor], expected: dict[str, Tensor], *, moved: int) -> None:
    """Compare names, shapes and, by identity, which tensor went where; `moved` are made from others."""
    assert converted.keys() == expected.keys()
    assert {k: v.shape for k, v in converted.items()} == {k: v.shape for k, v in expected.items()}
    assert sum(converted[key] is not expected[key] for key in expected) == moved


@pytest.mark.parametrize(
    ("architecture", "family", "model_type", "num_tensors"),
    # As many tensors as the published files, less position ids, noise schedule and, of open_clip, the layer and the
    # scale that the UNet never sees.
    [("sd15", "v1", "v1", 686 + 248 + 196), ("sd21", "v2", "v2", 1214), ("sdxl", "xl", "xl_base", 2513)],
)
def test_diffusers_converts_the_names_of_real_architectures_back(
    architecture: str, family: Any, model_type: str, num_tensors: int
) -> None:
    from diffusers.loaders import single_file_utils as diffusers_own

    model = LatentDiffusion.build(architecture, device="meta")
    files = files_of(model)
    assert layout_of(model.family, model.components, who="test") == family
    original = in_original_layout(files, original_names(files, family, who="test"))
    assert len(original) == num_tensors
    # This is how from_single_file recognises a published model.
    assert diffusers_own.infer_diffusers_model_type(original) == model_type

    unet = diffusers_own.convert_ldm_unet_checkpoint(original, dict(model.denoiser.config))
    assert_converted(unet, files["unet"], moved=0)
    vae = diffusers_own.convert_ldm_vae_checkpoint(original, dict(model.vae.config))
    assert_converted(vae, files["vae"], moved=8)  # weights of the two attention layers
    if family == "v2":
        network = model.networks["text_encoder"]
        encoder = diffusers_own.convert_open_clip_checkpoint(network, original)
        assert_converted(encoder, files["text_encoder"], moved=23 * 6)
    else:
        encoder = diffusers_own.convert_ldm_clip_checkpoint(original)
        assert_converted(encoder, files["text_encoder"], moved=0)
    if family == "xl":
        network = model.networks["text_encoder_2"]
        encoder = diffusers_own.convert_open_clip_checkpoint(network, original, prefix="conditioner.embedders.1.model.")
        assert_converted(encoder, files["text_encoder_2"], moved=32 * 6 + 1)


def test_vae_of_before_diffusers_0_12_gets_the_same_names() -> None:
    model = LatentDiffusion.build("sd15", device="meta")
    new = list(files_of(model)["vae"])
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = new
    for name, old_name in old_names.items():
        old = [key.replace(f"attentions.0.{name}.", f"attentions.0.{old_name}.") for key in old]
    assert old != new
    assert original_names({"vae": old}, "v1", who="t").keys() == original_names({"vae": new}, "v1", who="t").keys()


def resnet(block: str, index: int) -> list[str]:
    return [f"{block}.resnets.{index}.{part}.weight" for part in ("norm1", "conv1", "norm2", "conv2")]


@pytest.mark.parametrize(
    ("network", "names", "message"),
    [
        ("unet", ["encoder_hid_proj.weight"], "test: the one-file layout has no name for encoder_hid_proj.weight"),
        ("unet", ["mid_block.resnets.2.conv1.weight"], "no name for mid_block.resnets.2.conv1.weight"),
        ("unet", ["conv_in.lora_A.weight"], "no name for conv_in.lora_A.weight"),
        # The second block has more layers than the first: numbers in a row would say which is which no more.
        ("unet", [*resnet("down_blocks.0", 0), *resnet("down_blocks.1", 0), *resnet("down_blocks.1", 1)], "no name"),
        ("vae", ["encoder.mid_block.attentions.1.to_q.weight"], "no name for encoder.mid_block.attentions.1.to_q"),
        ("unet", ["up_blocks.weight"], "no name for up_blocks.weight"),
        ("unet", ["down_blocks.0.resnets.x.norm1.weight"], "no name for down_blocks.0.resnets.x.norm1.weight"),
        ("vae", ["decoder.up_blocks.x.resnets.0.conv1.weight"], "no name for decoder.up_blocks.x"),
        ("vae", ["mid_block.resnets.0.conv1.weight"], "no name for mid_block.resnets.0.conv1.weight of the vae"),
        ("text_encoder", ["text_model.encoder.layers.23.mlp.fc1.bias"], "no name for text_model.encoder.layers.23"),
        (
            "text_encoder",
            [f"text_model.encoder.layers.0.self_attn.{part}_proj.weight" for part in "qk"],
            "would be cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight",
        ),
    ],
)
def test_tensor_without_a_name_is_refused(network: str, names: Iterable[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        original_names({network: names}, "v2", who="test")
    assert str(refused.value).endswith("write format=diffusers")


def test_text_encoder_decides_between_1_and_2() -> None:
    family = FAMILIES["StableDiffusionPipeline"]

    def layout(**config: Any) -> str:
        return layout_of(family, {"text_encoder": Component("transformers", "CLIPTextModel", config)}, who="test")

    assert layout() == "v1"  # transformers' default activation
    assert layout(hidden_act="gelu") == "v2"
    with pytest.raises(UsageError, match=r"test: this StableDiffusionPipeline cannot be one file; expected .*\(a text"):
        layout(hidden_act="silu")


def test_model_spec_tells_v_prediction() -> None:
    model = LatentDiffusion.build("sd21", device="meta")
    spec, version = model_spec(model.family, model.components, title="mine", prediction_type="v_prediction")
    assert (spec["modelspec.architecture"], version) == ("stable-diffusion-v2-768-v", "sd_v2_v")
    side = model.resolution
    assert (spec["modelspec.prediction_type"], spec["modelspec.resolution"]) == ("v", f"{side}x{side}")
    spec, version = model_spec(model.family, model.components, title="mine", prediction_type="epsilon")
    assert (spec["modelspec.architecture"], version) == ("stable-diffusion-v2-512", "sd_v2")
    assert spec["modelspec.prediction_type"] == "epsilon"


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = SLICE_BYTES // 4 + 5  # more than one slice
    made = {
        "large": torch.randn(large, generator=generator),
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(2, 4, generator=generator),
        "half": torch.randn(SLICE_BYTES // 2 + 3, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    save_file(made, tmp_path / "source.safetensors")
    return made


def written(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def test_streams_give_the_bits_of_the_file(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    streams = file_tensors(tmp_path / "source.safetensors")
    made = {
        **streams,
        "joined": joined([streams["a"], streams["b"]]),
        "transposed": streams["a"].transposed(),
        "reshaped": streams["a"].reshaped((3, 4, 1, 1)),
    }
    expected = {
        **tensors,
        "joined": torch.cat([tensors["a"], tensors["b"]]),
        "transposed": tensors["a"].T,
        "reshaped": tensors["a"][:, :, None, None],
    }
    write_streamed(tmp_path / "out.safetensors", made, metadata={"title": "x"})
    result = written(tmp_path / "out.safetensors")
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[key], value) and result[key].dtype == value.dtype for key, value in expected.items())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "title": "x"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_streams_convert_floating_point_values_alone(
    dtype: torch.dtype, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    write_streamed(tmp_path / "out.safetensors", file_tensors(tmp_path / "source.safetensors"), dtype=dtype)
    result = written(tmp_path / "out.safetensors")
    for key, value in tensors.items():
        assert torch.equal(result[key], value.to(dtype) if value.is_floating_point() else value)


def test_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, 7e4])}, tmp_path / "source.safetensors")
    streams = file_tensors(tmp_path / "source.safetensors")
    with pytest.raises(UsageError, match="w holds 7e.04, which is too large for float16; write dtype=bfloat16"):
        write_streamed(tmp_path / "out.safetensors", streams, dtype=torch.float16)


def test_weights_in_several_files_are_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.full((2,), float(ord(name)))}, tmp_path / f"part-{name}.safetensors")
    index = '{"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    streams = file_tensors(tmp_path / "model.safetensors")
    assert {name: stream.read().tolist() for name, stream in streams.items()} == {"a": [97, 97], "b": [98, 98]}


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match="model.safetensors: no such file; expected weights in safetensors files"):
        file_tensors(path)
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="not a complete safetensors file .it ends within 'w'.; copy or download"):
        file_tensors(path)
    path.write_bytes(b"not at all what it should be")
    with pytest.raises(UsageError, match="not a complete safetensors file"):
        file_tensors(path)
    path.unlink()
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UsageError, match="index.json: cannot be read"):
        file_tensors(path)


def test_only_what_fits_can_be_joined_and_reshaped() -> None:
    one, other = (StreamedTensor(torch.float32, shape, lambda: iter(())) for shape in ((2, 3), (2, 4)))
    with pytest.raises(ValueError, match="Cannot join"):
        joined([one, other])
    with pytest.raises(ValueError, match="cannot be reshaped"):
        one.reshaped((5,))
