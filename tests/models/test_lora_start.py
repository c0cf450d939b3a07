"""Training goes on from a LoRA file: in each format the same bits, and files of other models are refused by name."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd_lightning import LatentDiffusion, SDLightningModule, UsageError
from sd_lightning.models.families.lora_names import FrontEnd
from sd_lightning.models.families.single_file import model_spec
from sd_lightning.models.lora import WEIGHTS_NAME, Lora, add_adapter, is_adapter, unscaled
from sd_lightning.models.lora_file import LoraFile
from sd_lightning.models.lora_formats import front_end_metadata, front_end_tensors
from sd_lightning.models.lora_start import going_on
from sd_lightning.models.meta import meta_twin
from sd_lightning.storage.safetensors_file import open_safetensors
from sd_lightning.storage.streamed_tensor import StreamedTensor, write_streamed
from small_models import SMALL_SDXL

FAMILIES = ["tiny", SMALL_SDXL, "tiny_flux", "tiny_klein", "tiny_sd3", "tiny_z_image", "tiny_qwen_image", "tiny_krea2"]
"""Each with text encoders, joined layers or names that the others have not."""
UNET_TARGETS = ("to_q", "to_v", "conv1", "time_emb_proj")


def trained(architecture: Any, file: Path, *, train_text_encoder: bool = False, **options: Any) -> LatentDiffusion:
    """Write the adapters of a training of which every value has moved, and return the model without them."""
    model = LatentDiffusion.build(architecture, seed=1)
    targets = UNET_TARGETS if model.family.denoiser == "unet" else None
    lora = Lora(**{"rank": 3, "alpha": 4.5, "target_modules": targets} | options)
    module = SDLightningModule(
        LatentDiffusion.build(architecture, seed=1), lora=lora, train_text_encoder=train_text_encoder
    )
    torch.manual_seed(2)
    for network in module.trained_networks().values():
        for parameter in (p for p in network.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=0.2)
    write(module, file)
    return model


def write(module: SDLightningModule, file: Path) -> None:
    networks = module.trained_networks()
    layers = {n: {k: v for k, v in network.state_dict().items() if is_adapter(k)} for n, network in networks.items()}
    assert module.lora is not None
    module.lora.write(file, layers, module.latent_diffusion.components)


def weights(model: LatentDiffusion) -> dict[str, dict[str, StreamedTensor]]:
    found = {}
    for name, network in model.networks.items():
        keys = model.components[name].file_keys(network.state_dict())
        found[name] = {keys[key]: StreamedTensor.of(value) for key, value in network.state_dict().items()}
    return found


def export(source: Path, target: Path, model: LatentDiffusion, format: str, dtype: torch.dtype | None = None) -> None:
    file, family = LoraFile.read(source), model.family
    if format == "diffusers":
        write_streamed(target, file.tensors, dtype=dtype, metadata=file.metadata)
        return
    front_end: Any = format
    tensors = front_end_tensors(file, weights(model), family, front_end)
    metadata = front_end_metadata(
        file, tensors, family, model.components, title="it", prediction_type="epsilon", dtype=dtype
    )
    metadata.pop("modelspec.date")  # of the source file
    write_streamed(target, tensors, dtype=dtype, metadata=metadata)


def gone_on(file: Path, model: LatentDiffusion, target: Path, *, train_text_encoder: bool = False) -> Lora:
    """Start a training from a file, and write its adapters before the first step."""
    lora = going_on(Lora(), file, meta_twin(model), train_text_encoder=train_text_encoder)
    module = SDLightningModule(model, lora=lora, train_text_encoder=train_text_encoder)
    write(module, target)
    return lora


@pytest.mark.parametrize("format", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("architecture", FAMILIES, ids=lambda each: each if isinstance(each, str) else "sdxl")
def test_an_export_is_the_same_bits_after_a_training_of_no_step(architecture: Any, format: str, tmp_path: Path) -> None:
    has_text = architecture in ("tiny", SMALL_SDXL)
    model = trained(architecture, tmp_path / "trained.safetensors", train_text_encoder=has_text)
    first, second, resaved = (tmp_path / f"{name}.safetensors" for name in ("first", "second", "resaved"))
    export(tmp_path / "trained.safetensors", first, model, format)
    lora = gone_on(first, LatentDiffusion.build(architecture, seed=1), resaved, train_text_encoder=has_text)
    assert (lora.rank, lora.alpha, lora.use_dora) == (3, 4.5, False)
    assert resaved.read_bytes() == (tmp_path / "trained.safetensors").read_bytes()
    export(resaved, second, model, format)
    assert first.read_bytes() == second.read_bytes()
    assert any(
        value.any() for key, value in load_file(first).items() if key.endswith(("lora_up.weight", "lora_B.weight"))
    )


RANKS = {"to_q": 2, "to_k": 5, "conv1": 6, "single_transformer_blocks": 1}
"""Of them are joined in Flux: ``to_q``, ``to_k`` and ``to_v``."""


@pytest.mark.parametrize("alpha", [None, {"text_encoder": 0.3, "unet.down_blocks": 0.7, "transformer_blocks": 0.1}])
@pytest.mark.parametrize("format", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("architecture", ["tiny", "tiny_klein"])
def test_layers_of_several_ranks_and_alphas_go_on_with_theirs(
    architecture: str, format: str, alpha: dict[str, float] | None, tmp_path: Path
) -> None:
    has_text = architecture == "tiny"
    names = ("unet", "text_encoder", "conv1") if has_text else ("transformer_blocks", "single_transformer_blocks")
    ranks = {
        key: rank
        for key, rank in RANKS.items()
        if key in (("to_q", "conv1") if has_text else ("to_q", "to_k", names[1]))
    }
    # Of joined layers with several scales, the weights include these, in other front ends' files.
    alphas = {
        k: v for k, v in (alpha or {}).items() if k.partition(".")[0] in names and (has_text or format == "diffusers")
    }
    options = {"rank_pattern": ranks, "alpha_pattern": alphas, "alpha": None, "train_text_encoder": has_text}
    model = trained(architecture, tmp_path / "trained.safetensors", **options)
    export(tmp_path / "trained.safetensors", tmp_path / "first.safetensors", model, format)
    base, resaved = LatentDiffusion.build(architecture, seed=1), tmp_path / "resaved.safetensors"
    lora = gone_on(tmp_path / "first.safetensors", base, resaved, train_text_encoder=has_text)
    stored = load_file(tmp_path / "trained.safetensors")
    again = load_file(resaved)
    assert {len(value) for key, value in stored.items() if ".lora_A." in key} == {3, *ranks.values()}
    assert stored.keys() == again.keys() and all(torch.equal(stored[key], again[key]) for key in stored)
    assert lora.rank_pattern
    old, new = LoraFile.read(tmp_path / "trained.safetensors"), LoraFile.read(resaved)
    layers = [key.removesuffix(".lora_A.weight") for key in stored if ".lora_A." in key]
    scales = {layer: old.trained_scale(layer) for layer in layers}
    assert (len(set(scales.values())) > 1) == bool(alphas)
    assert scales == pytest.approx({layer: new.trained_scale(layer) for layer in layers}, rel=1e-12)


def test_scales_of_joined_layers_that_differ_are_in_the_weights(tmp_path: Path) -> None:
    model = trained("tiny_klein", tmp_path / "trained.safetensors", alpha=0.5, rank_pattern={"to_q": 2, "to_k": 5})
    model.save_pretrained(tmp_path / "base")
    export(tmp_path / "trained.safetensors", tmp_path / "comfyui.safetensors", model, "comfyui")
    alphas = {key: value.item() for key, value in load_file(tmp_path / "comfyui.safetensors").items() if "alpha" in key}
    assert alphas["lora_unet_double_blocks_0_img_attn_qkv.alpha"] == 2 + 5 + 3
    ours, theirs = (
        LatentDiffusion.from_pretrained(tmp_path / "base", lora=tmp_path / f"{name}.safetensors").denoiser.state_dict()
        for name in ("trained", "comfyui")
    )
    before = model.denoiser.state_dict()
    assert any(not torch.equal(ours[key], before[key]) for key in ours)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("format", ["diffusers", "kohya"])
@pytest.mark.parametrize("architecture", ["tiny", "tiny_klein"])
def test_dora_goes_on_with_its_magnitudes(architecture: str, format: str, tmp_path: Path) -> None:
    model = trained(architecture, tmp_path / "trained.safetensors", use_dora=True)
    export(tmp_path / "trained.safetensors", tmp_path / "first.safetensors", model, format)
    base = LatentDiffusion.build(architecture, seed=1)
    assert gone_on(tmp_path / "first.safetensors", base, tmp_path / "resaved.safetensors").use_dora
    assert (tmp_path / "resaved.safetensors").read_bytes() == (tmp_path / "trained.safetensors").read_bytes()


def test_a_file_of_one_network_alone_goes_on(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.safetensors" for name in ("texts", "texts-again", "unet", "unet-again")]
    trained("tiny", files[0], train_text_encoder=True, target_modules=[])
    model = LatentDiffusion.build("tiny", seed=1)
    assert gone_on(files[0], model, files[1], train_text_encoder=True).target_modules == []
    assert files[1].read_bytes() == files[0].read_bytes(), "the denoiser gets no adapters"
    trained("tiny", files[2])
    gone_on(files[2], LatentDiffusion.build("tiny", seed=1), files[3], train_text_encoder=True)
    first, second = load_file(files[2]), load_file(files[3])
    new = second.keys() - first.keys()
    assert all(torch.equal(second[key], first[key]) for key in first)
    assert new and all(key.startswith("text_encoder.") for key in new), "they begin at zero"
    assert not any(second[key].any() for key in new if ".lora_B." in key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_export_in_16_bits_is_the_same_after_a_training_of_no_step(dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained("tiny_klein", tmp_path / "trained.safetensors", alpha=0.3)
    first, second, resaved = (tmp_path / f"{name}.safetensors" for name in ("first", "second", "resaved"))
    export(tmp_path / "trained.safetensors", first, model, "kohya", dtype)
    assert gone_on(first, LatentDiffusion.build("tiny_klein", seed=1), resaved).alpha == 0.3
    export(resaved, second, model, "kohya", dtype)
    assert first.read_bytes() == second.read_bytes()


def test_a_header_that_records_no_alpha_leaves_that_of_the_layers(tmp_path: Path) -> None:
    """kohya's tools write "None" if they were given none."""
    model = trained("tiny_sd3", tmp_path / "trained.safetensors")
    export(tmp_path / "trained.safetensors", tmp_path / "kohya.safetensors", model, "kohya")
    save_file(load_file(tmp_path / "kohya.safetensors"), tmp_path / "none.safetensors", {"ss_network_alpha": "None"})
    assert going_on(Lora(), tmp_path / "none.safetensors", meta_twin(model)).alpha == 4.5


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 0.75, 1.5, 2.0, 7.3])
def test_what_scaled_weights_were_is_found_exactly(scale: float) -> None:
    torch.manual_seed(0)
    scaled = torch.randn(10_000) * scale
    found = unscaled(scaled, scale)
    assert torch.equal(found * scale, scaled)
    assert torch.equal(unscaled(found * scale, scale), found)


@pytest.mark.parametrize("front_end", ["kohya", "comfyui"])
def test_other_programs_show_what_a_file_is(front_end: FrontEnd, tmp_path: Path) -> None:
    model = trained("tiny_klein", tmp_path / WEIGHTS_NAME)
    for name in ("one", "two"):
        export(tmp_path / WEIGHTS_NAME, tmp_path / name, model, front_end)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    header = open_safetensors(tmp_path / "one").header.metadata
    content = (tmp_path / "one").read_bytes()[8 + int.from_bytes((tmp_path / "one").read_bytes()[:8], "little") :]
    assert header["modelspec.hash_sha256"] == f"0x{hashlib.sha256(content).hexdigest()}"
    assert header["modelspec.sai_model_spec"] == "1.0.0" and header["modelspec.title"] == "it"
    assert header["modelspec.architecture"] == "Flux2KleinPipeline/lora"  # the tiny one is none that is published
    assert header["modelspec.resolution"] == f"{model.resolution}x{model.resolution}"
    assert (header["ss_network_dim"], header["ss_network_alpha"], header["ss_output_name"]) == ("3", "4.5", "it")


PUBLISHED = {
    "sd15": ("stable-diffusion-v1", "sd_v1"),
    "sdxl": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
    "flux1_dev": ("flux-1-dev", "flux1"),
    "klein_9b": ("Flux.2-klein-9b", "flux_2_klein_9b"),
    "z_image": ("Z-Image", "z_image"),
    "krea2": ("Krea-2", "krea2"),
    "sd35_large": ("stable-diffusion-3-5-large", "sd3.5_large"),
}
"""`library/sai_model_spec.py` and `get_model_version_str_for_sd1_sd2` of sd-scripts; of musubi-tuner
`utils/sai_model_spec.py` and `dataset/architectures.py`."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_names_of_kohyas_tools(name: str) -> None:
    model = LatentDiffusion.build(name, device="meta")
    found = model_spec(model.family, model.components, title="it", prediction_type="epsilon")
    assert (found[0]["modelspec.architecture"], found[1]) == PUBLISHED[name]


def test_lycoris_adds_doras_adapters_as_we_do(tmp_path: Path) -> None:
    """LyCORIS f49d30d, `modules/locon.py`: `(W + d) * dora_scale / (norm of the rows of W + d, plus eps)`."""
    model = trained("tiny_klein", tmp_path / WEIGHTS_NAME, use_dora=True)
    export(tmp_path / WEIGHTS_NAME, tmp_path / "kohya", model, "kohya")
    written, ours, num = load_file(tmp_path / "kohya"), LoraFile.read(tmp_path / WEIGHTS_NAME), 0
    base = {key: value.double() for key, value in model.denoiser.state_dict().items()}
    for key in [key for key in written if key.endswith(".dora_scale")]:
        down, up, alpha = (
            written[key.replace("dora_scale", e)].double() for e in ("lora_down.weight", "lora_up.weight", "alpha")
        )
        change = alpha / len(down) * (up @ down)
        block = int(key.split("_blocks_")[1].split("_")[0])
        names = {
            "img_attn_qkv": [f"transformer_blocks.{block}.attn.to_{part}" for part in "qkv"],
            "linear1": [f"single_transformer_blocks.{block}.attn.to_qkv_mlp_proj"],
        }
        for end, layers in names.items():
            if end not in key:
                continue
            changed = torch.cat([base[f"{layer}.weight"] for layer in layers]) + change
            theirs = (
                changed * written[key].double() / (changed.norm(dim=1, keepdim=True) + torch.finfo(torch.float32).eps)
            )
            for layer, part in zip(layers, theirs.chunk(len(layers)), strict=True):
                each = next(e for e in ours.layers(weights(model)) if e.layer == layer)
                assert each.magnitude is not None
                own = add_adapter(
                    each.weight.read(), each.down.read(), each.up.read(), each.scale, each.magnitude.read()
                )
                torch.testing.assert_close(part.float(), own, atol=1e-5, rtol=1e-5)
                num += 1
    assert num >= 4


def test_comfyui_divides_dora_by_other_norms_and_gets_none(tmp_path: Path) -> None:
    """ComfyUI (v0.3.77), `comfy/weight_adapter/base.py`: `(W + d) * dora_scale / (norm of the rows of W)`."""
    model = trained("tiny_klein", tmp_path / WEIGHTS_NAME, use_dora=True)
    each = next(iter(LoraFile.read(tmp_path / WEIGHTS_NAME).layers(weights(model))))
    base, magnitude = each.weight.read(), each.magnitude
    assert magnitude is not None
    changed = base + each.up.read() @ each.down.read()
    theirs = changed * magnitude.read().view(-1, 1) / base.norm(dim=1, keepdim=True)
    ours = add_adapter(base, each.down.read(), each.up.read(), 1, magnitude.read())
    assert not torch.allclose(theirs, ours, rtol=1e-2)
    with pytest.raises(UsageError, match="ComfyUI divides by the norms of the original weights.*or format=kohya"):
        export(tmp_path / WEIGHTS_NAME, tmp_path / "out", model, "comfyui")


def test_generate_draws_with_kohyas_dora_and_with_names_that_diffusers_does_not_know(tmp_path: Path) -> None:
    for name, options in (("tiny", {"use_dora": True}), ("tiny_sd3", {}), ("tiny_krea2", {})):
        folder = tmp_path / name
        model = trained(name, tmp_path / WEIGHTS_NAME, **options)
        model.save_pretrained(folder)
        export(tmp_path / WEIGHTS_NAME, tmp_path / f"{name}.safetensors", model, "kohya")
        theirs = LatentDiffusion.from_pretrained(folder, lora=tmp_path / f"{name}.safetensors").denoiser.state_dict()
        ours = LatentDiffusion.from_pretrained(folder, lora=tmp_path / WEIGHTS_NAME).denoiser.state_dict()
        before = {key: value.clone() for key, value in model.denoiser.state_dict().items()}
        assert any(not torch.equal(before[key], ours[key]) for key in ours)
        pipeline: Any = model.pipeline()
        pipeline.load_lora_weights(tmp_path / WEIGHTS_NAME)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(value, model.denoiser.state_dict()[key], atol=1e-6, rtol=1e-5)


def kohya_of_sdxl(model: LatentDiffusion) -> dict[str, Tensor]:
    """Adapters of sd-scripts' SDXL: its UNet has the names of Stability AI's code."""
    weight = model.denoiser.state_dict()["down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"]
    name = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"
    return {
        f"{name}.lora_down.weight": torch.randn(2, weight.shape[1]),
        f"{name}.lora_up.weight": torch.randn(weight.shape[0], 2),
        f"{name}.alpha": torch.tensor(1.0),
    }


def test_names_that_only_diffusers_reads_are_read_through_it(tmp_path: Path) -> None:
    model = LatentDiffusion.build(SMALL_SDXL, seed=1)
    stored = kohya_of_sdxl(model)
    save_file(stored, tmp_path / "theirs.safetensors")
    lora = gone_on(tmp_path / "theirs.safetensors", model, tmp_path / WEIGHTS_NAME)
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    assert (lora.rank, lora.alpha, lora.target_modules) == (2, 1.0, [layer])
    written = load_file(tmp_path / WEIGHTS_NAME)
    down, up = (written[f"unet.{layer}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(up @ down, 0.5 * _up(stored) @ _down(stored))
    assert len(written) == 2


def test_dora_that_diffusers_reads_without_its_magnitudes_is_refused(tmp_path: Path) -> None:
    model = LatentDiffusion.build(SMALL_SDXL, seed=1)
    model.save_pretrained(tmp_path / "base")
    stored, file = kohya_of_sdxl(model), tmp_path / "theirs.safetensors"
    key = next(iter(stored)).partition(".")[0]
    save_file(stored | {f"{key}.dora_scale": torch.ones(len(_up(stored)), 1)}, file)
    with pytest.raises(UsageError, match="theirs.safetensors: .*DoRA with names that diffusers reads without"):
        LatentDiffusion.from_pretrained(tmp_path / "base", lora=file)
    with pytest.raises(UsageError, match="init_lora=.*theirs.safetensors: .*DoRA with names that diffusers reads"):
        going_on(Lora(), file, meta_twin(model))


def test_adapters_of_several_files_are_added_after_each_other(tmp_path: Path) -> None:
    """DoRA in the folder, and plain adapters with names that only diffusers knows beside it."""
    model = trained(SMALL_SDXL, tmp_path / WEIGHTS_NAME, use_dora=True)
    stored = kohya_of_sdxl(model)
    save_file(stored, tmp_path / "theirs.safetensors")
    for name in ("base", "both"):
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / WEIGHTS_NAME).write_bytes((tmp_path / WEIGHTS_NAME).read_bytes())
    one = LatentDiffusion.from_pretrained(tmp_path / "base").denoiser.state_dict()
    two = LatentDiffusion.from_pretrained(tmp_path / "both", lora=tmp_path / "theirs.safetensors").denoiser.state_dict()
    key = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    torch.testing.assert_close(two[key], one[key] + 0.5 * _up(stored) @ _down(stored))
    assert all(torch.equal(one[name], two[name]) for name in one if name != key)


def _down(stored: dict[str, Tensor]) -> Tensor:
    return next(value for key, value in stored.items() if key.endswith("lora_down.weight"))


def _up(stored: dict[str, Tensor]) -> Tensor:
    return next(value for key, value in stored.items() if key.endswith("lora_up.weight"))


def test_files_of_other_models_are_refused_by_name(tmp_path: Path) -> None:
    klein = trained("tiny_klein", tmp_path / "klein.safetensors")
    export(tmp_path / "klein.safetensors", tmp_path / "kohya.safetensors", klein, "kohya")
    z_image = meta_twin(LatentDiffusion.build("tiny_z_image"))
    for file in ("klein", "kohya"):
        with pytest.raises(
            UsageError, match=rf"init_lora=.*{file}.safetensors: these are adapters of model=tiny_klein; "
        ):
            going_on(Lora(), tmp_path / f"{file}.safetensors", meta_twin(z_image))
    down, up = torch.zeros(2, 3), torch.zeros(3, 2)
    unknown = {"lora_unet_x.lora_down.weight": down, "lora_unet_x.lora_up.weight": up}
    save_file(unknown, tmp_path / "told.safetensors", {"modelspec.architecture": "hunyuan-video/lora"})
    with pytest.raises(UsageError, match="told.safetensors: its header says hunyuan-video/lora; expected adapters"):
        going_on(Lora(), tmp_path / "told.safetensors", meta_twin(z_image))
    save_file({"weight": down}, tmp_path / "none.safetensors")
    with pytest.raises(UsageError, match="none.safetensors: it has no adapters of a model that is known here"):
        going_on(Lora(), tmp_path / "none.safetensors", meta_twin(z_image))


def test_settings_that_contradict_a_file_are_named_with_it(tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    model = meta_twin(trained("tiny", file, train_text_encoder=True))
    for lora, words in (
        (
            Lora(rank=8),
            r"lora.rank=8 and init_lora=.*some.safetensors, whose adapters have rank=3; leave",
        ),
        (Lora(alpha=1), r"lora.alpha=1 and .* have alpha=4.5; leave lora.alpha out"),
        (Lora(target_modules=["to_k"]), r"lora.target_modules=\[to_k\] and .* have target_modules=\[to_q,to_v,"),
    ):
        given = [name for name, value in vars(lora).items() if value != vars(Lora())[name]]
        with pytest.raises(UsageError, match=words):
            going_on(lora, file, model, given=given, train_text_encoder=True)
    same = Lora(rank=3, target_modules=UNET_TARGETS)
    assert going_on(same, file, model, given=["rank", "target_modules"], train_text_encoder=True).alpha == 4.5
    with pytest.raises(UsageError, match=r"adapters of text_encoder, and the run trains none.*train_text_encoder=true"):
        going_on(Lora(), file, model)
