"""int8 models divided among processes: outputs of one device, bytes as computed, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from sd_lightning import LatentDiffusion, UsageError
from sd_lightning.models.families import FAMILIES, Architecture, architecture
from sd_lightning.quantization import Int8, dequantize_, quantize_
from sd_lightning.quantization.int8 import int8_configs
from sd_lightning.quantization.tensor_parallel import Division, TensorParallel, check_division, layer_styles
from small_models import SMALL_SD2, SMALL_SDXL, TINY_TRANSFORMERS
from tensor_parallel_jobs import write_lora, write_model, write_random


def _divisible(name: str) -> Architecture:
    """Return a tiny architecture whose attentions two processes divide, all of them."""
    known = architecture(name)
    if name != "tiny_krea2":
        return known
    denoiser = known.networks["transformer"]
    config = {**denoiser.config, "num_key_value_heads": 2}
    return replace(known, networks={**known.networks, "transformer": replace(denoiser, config=config)})


MODELS: dict[str, str | Architecture] = {
    "tiny": "tiny",
    "small_sd2": SMALL_SD2,
    "small_sdxl": SMALL_SDXL,
    **{name: _divisible(name) for name in TINY_TRANSFORMERS},
}
BY_FOUR = ("tiny", "tiny_sd3", "tiny_flux", "tiny_klein", "tiny_z_image", "tiny_qwen_image")
"""The models with four heads."""
ROUNDING = 5e-6
"""Of float32, relative: the products are the same, added in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every model in float32, and in int8."""
    place = tmp_path_factory.mktemp("models")
    for name, known in MODELS.items():
        quantize_(write_model(known, place / name)).save_pretrained(place / f"{name}-int8")
    return place


def check(found: list[dict[str, Any]], name: str, bound: float = ROUNDING) -> None:
    """Check what every rank found for a job."""
    for rank in found:
        each = rank[name]
        assert all(value < bound for value in each["errors"].values()), (name, each["errors"])
        assert each["bytes"] == each["predicted"], name
        assert each["digest"] == found[0][name]["digest"], "all ranks have the same outputs"


def test_two_processes_compute_what_one_device_computes(folder: Path) -> None:
    jobs = {f"{name}{kind}": {"folder": str(folder / f"{name}{kind}")} for name in MODELS for kind in ("", "-int8")}
    found = ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, folder, world_size=2)
    for name in jobs:
        check(found, name)
        whole = found[0][name]["whole"]
        shares = {network: each / whole[network] for network, each in found[0][name]["bytes"].items()}
        assert shares.pop("vae") == 1 and max(shares.values()) < 0.95, (name, shares)


@pytest.mark.slow
@pytest.mark.parametrize("names", [BY_FOUR[::2], pytest.param(BY_FOUR[1::2], marks=pytest.mark.full("platform"))])
def test_four_processes_compute_what_one_device_computes(folder: Path, names: tuple[str, ...]) -> None:
    jobs = {f"{name}{kind}": {"folder": str(folder / f"{name}{kind}")} for name in names for kind in ("", "-int8")}
    found = ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, folder, world_size=4)
    for name in jobs:
        check(found, name)


def test_options_of_int8_and_adapters_work_divided(folder: Path, tmp_path: Path) -> None:
    """Float layers are divided too; activations in int8 are rounded by other scales; adapters are merged first."""
    llm_int8 = {"linear": "bitsandbytes", "float_inputs": []}
    write_lora(folder / "tiny_klein", tmp_path / "klein.safetensors")
    write_lora(folder / "tiny", tmp_path / "tiny.safetensors")
    own = {"unet": Int8(layers=["linear"]), "vae": Int8(dtype="float32")}
    quantize_(LatentDiffusion.from_pretrained(folder / "tiny"), own).save_pretrained(tmp_path / "own")
    jobs: dict[str, dict[str, Any]] = {
        "own": {"folder": str(tmp_path / "own")},
        "float": {"folder": str(folder / "tiny_sd3"), "config": {"layers": ["embedding"]}},
        "excluded": {"folder": str(folder / "tiny_flux"), "config": {"exclude": ["proj_out", "to_q", "add_k_proj"]}},
        "bfloat16": {"folder": str(folder / "tiny_z_image"), "config": {"dtype": "bfloat16"}},
        "activations": {"folder": str(folder / "tiny_klein"), "config": llm_int8, "exact": True},
        "lora": {"folder": str(folder / "tiny"), "lora": str(tmp_path / "tiny.safetensors")},
        "lora of klein": {"folder": str(folder / "tiny_klein"), "lora": str(tmp_path / "klein.safetensors")},
    }
    found = ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, folder, world_size=2)
    # A step of int8 changes where merging rounds a weight otherwise: tests/models/test_lora.py compares the merge.
    bounds = {"bfloat16": 3e-2, "activations": 1e-1, "lora": 1e-3, "lora of klein": 1e-3}
    for name in jobs:
        check(found, name, bounds.get(name, ROUNDING))
    for ours, theirs in found[0]["activations"]["exact"].values():
        assert ours < 1.1 * theirs, "scales of a part of a row round no worse than those of a whole one"


def test_a_weight_that_is_not_finite_is_named_by_every_process(folder: Path, tmp_path: Path) -> None:
    model = LatentDiffusion.from_pretrained(folder / "tiny")
    with torch.no_grad():
        model.denoiser.mid_block.attentions[0].transformer_blocks[0].ff.net[2].weight[-1, 2] = float("inf")
    model.save_pretrained(tmp_path)
    jobs = {"inf": {"folder": str(tmp_path), "raises": True}}
    for rank in ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, tmp_path, world_size=2):
        assert "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.2.weight holds NaN" in rank["inf"]["message"]
        assert rank["inf"]["deferred"] == ["text_encoder", "unet", "vae"], "nothing has changed"


def _cut(name: str, network: str, **config: Any) -> Architecture:
    """Return a real architecture with fewer layers, and the text encoder of the tiny one."""
    known, tiny = architecture(name), architecture("tiny_klein")
    cut = replace(known.networks[network], config={**known.networks[network].config, **config})
    return replace(known, networks={**known.networks, network: cut, "text_encoder": tiny.networks["text_encoder"]})


@pytest.mark.full("platform")
@pytest.mark.parametrize(
    ("known", "world_size"),
    [
        pytest.param("sd21", 2, id="sd21"),
        pytest.param(_cut("klein_4b", "transformer", num_layers=1, num_single_layers=3), 4, id="klein"),
    ],
)
def test_no_process_has_much_more_than_its_part(known: str | Architecture, world_size: int, tmp_path: Path) -> None:
    """From float16 files and from int8 files, of which each process reads what it keeps."""
    write_random(known, tmp_path / "float16")
    config = Int8(dtype="float16")
    quantize_(LatentDiffusion.from_pretrained(tmp_path / "float16", deferred=["all"]), config).save_pretrained(
        tmp_path / "int8"
    )
    jobs = {
        kind: {"folder": str(tmp_path / kind), "measure": True, "config": {"dtype": "float16"}}
        for kind in ("int8", "float16")
    }
    found = ranks.run_jobs_of_all("tensor_parallel_jobs", jobs, tmp_path, world_size=world_size)
    for rank in found:
        for kind, each in rank.items():
            assert each["peak"] <= 1.1 * each["own"] + each["layer"], (kind, each)


@pytest.mark.full("platform")
def test_a_plan_that_forgets_a_layer_is_seen(folder: Path) -> None:
    """For every layer of every plan but those that may stay whole, because they are gathered or summed themselves."""
    jobs = {
        (name, pattern): {"folder": str(folder / name), "without": pattern}
        for name in ("tiny", *TINY_TRANSFORMERS)
        for pattern in _patterns(name)
    }
    found = ranks.run_jobs("tensor_parallel_jobs", jobs, folder, world_size=2)
    assert {key: each["error"] for key, each in found.items() if each["error"] < 1e-2} == {}


def _patterns(name: str) -> Iterator[str]:
    model = LatentDiffusion.build(_divisible(name), device="meta")
    for network, each in model.networks.items():
        plan = model.tensor_parallel_plan(network)
        for pattern, style in plan.styles.items():
            forgetful = replace(plan, styles={key: s for key, s in plan.styles.items() if key != pattern})
            is_there = layer_styles(each, plan, 2).keys() != layer_styles(each, forgetful, 2).keys()
            if is_there and style.name in ("colwise", "rowwise"):
                yield pattern


REAL = [name for family in FAMILIES.values() for name, each in family.architectures.items() if not each.is_tiny]


@pytest.mark.parametrize("name", REAL)
def test_real_architectures_are_divided_by_two(name: str) -> None:
    """No layer of a plan is left out, and little of a transformer is replicated."""
    model = LatentDiffusion.build(name, device="meta")
    check_division(model, 2)
    plan = model.tensor_parallel_plan(model.family.denoiser)
    division = Division.of(model.denoiser, plan, TensorParallel(1, 2))
    divided = sum(model.denoiser.get_submodule(key).weight.numel() for key in division.styles)  # type: ignore
    whole = sum(each.numel() for each in model.denoiser.parameters())
    assert divided > (0.25 if model.family.denoiser == "unet" else 0.95) * whole
    for text_encoder in model.text_encoders.values():
        language: Any = text_encoder.get_decoder() if hasattr(text_encoder, "lm_head") else text_encoder
        styles = layer_styles(text_encoder, model.tensor_parallel_plan("text_encoder"), 2)
        divided = sum(text_encoder.get_submodule(key).weight.numel() for key in styles)  # type: ignore
        assert divided > 0.98 * sum(each.numel() for name, each in language.named_parameters() if "visual" not in name)


def test_numbers_that_do_not_divide_the_heads_are_refused() -> None:
    model = LatentDiffusion.build("sd35_large", device="meta")
    with pytest.raises(
        UsageError,
        match=r"=4: 4 processes cannot divide the 38 attention heads of transformer; expected one of 2, 19, 38; write",
    ):
        quantize_(model, tensor_parallel=TensorParallel(0, 4))
    with pytest.raises(UsageError, match=r"128 processes cannot divide the 24 attention heads"):
        check_division(LatentDiffusion.build("flux1_dev", device="meta"), 128)
    with pytest.raises(UsageError, match=r"the 1 and 4 attention heads of transformer; .*leave tensor_parallel out"):
        check_division(LatentDiffusion.build("tiny_krea2", device="meta"), 2)
    with pytest.raises(UsageError, match=r"rank=2, size=2; expected a rank in \[0, size\)"):
        TensorParallel(2, 2)


def test_what_cannot_be_done_with_a_part_is_refused(tmp_path: Path) -> None:
    model = quantize_(LatentDiffusion.build("tiny", device="meta"), tensor_parallel=TensorParallel(0, 2))
    for who, attempt in {
        "quantize_": lambda: quantize_(model, tensor_parallel=TensorParallel(0, 2)),
        "dequantize_": lambda: dequantize_(model),
        "LatentDiffusion.save_pretrained": lambda: model.save_pretrained(tmp_path / "never"),
    }.items():
        with pytest.raises(
            UsageError, match=f"{who} got unet, text_encoder divided among processes.*load the model again"
        ):
            attempt()
    assert not (tmp_path / "never").exists()
    whole = LatentDiffusion.build("tiny")
    with pytest.raises(UsageError, match="for a UNet2DConditionModel; expected a LatentDiffusion"):
        quantize_(whole.denoiser, tensor_parallel=TensorParallel(0, 2))
    from peft import LoraConfig

    whole.denoiser.add_adapter(LoraConfig(target_modules=["to_q"]))  # type: ignore[operator]
    with pytest.raises(UsageError, match="tensor_parallel for unet with LoRA on top; expected weights alone; save"):
        quantize_(whole, tensor_parallel=TensorParallel(0, 2))


def test_processes_that_have_not_joined_are_refused_before_anything_changes() -> None:
    model = LatentDiffusion.build("tiny")
    with pytest.raises(UsageError, match=r"rank=0, size=2, but no process group; expected .*; call torch.distributed"):
        quantize_(model, tensor_parallel=TensorParallel(0, 2))
    assert {each.dtype for each in model.denoiser.parameters()} == {torch.float32}


def test_networks_have_their_own_settings_or_stay_as_they_are() -> None:
    own = {"unet": Int8(layers=["linear"]), "vae": Int8(dtype="float16")}
    model = quantize_(LatentDiffusion.build("tiny"), own)
    assert int8_configs(model) == own
    assert {each.dtype for each in model.networks["text_encoder"].parameters()} == {torch.float32}
    for wrong in ({"unte": Int8()}, {"unet": "int8"}):
        with pytest.raises(UsageError, match="expected an Int8, or one for some of .*text_encoder"):
            quantize_(model, wrong)  # type: ignore[arg-type]


def test_one_process_is_one_device() -> None:
    ours = quantize_(LatentDiffusion.build("tiny", seed=1), Int8(), tensor_parallel=TensorParallel(0, 1))
    theirs = quantize_(LatentDiffusion.build("tiny", seed=1))
    ids = torch.tensor([[1, 7, 300, 2]])
    with torch.no_grad():
        assert torch.equal(ours.networks["text_encoder"](ids)[0], theirs.networks["text_encoder"](ids)[0])
