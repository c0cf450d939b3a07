"""`python -m sd_lightning.export` of runs that trained adapters: beside the weights, or added to them; and resuming."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import small_training as small
from sd_lightning import LatentDiffusion, export
from sd_lightning.callbacks import EMA
from sd_lightning.models.lora import WEIGHTS_NAME, Lora
from sd_lightning.storage import checkpoint, runs
from small_models import SMALL_SDXL

RANK, ALPHA = 2, 3.0
WEIGHTS = {"unet": "unet/diffusion_pytorch_model.safetensors", "text_encoder": "text_encoder/model.safetensors"}
METADATA = "lora_adapter_metadata"


def train(path: Path, steps: int, *, merge: bool = False, resume: Path | None = None) -> Path:
    """Train adapters of linear layers and convolutions, and return the last checkpoint."""
    lora = Lora(rank=RANK, alpha=ALPHA, target_modules=["to_q", "to_v", "conv1", "proj_in"], merge=merge)
    saving = small.Saving(path, resume=resume)
    small.fit(small.module(lora=lora), small.data(), steps, EMA(0.5), saving)
    assert saving.last_saved is not None
    return saving.last_saved


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an average and its adapters beside the weights."""
    path = tmp_path_factory.mktemp("runs") / "lora"
    runs.publish_pipeline(path, train(path, 3))
    return path


@pytest.fixture(scope="module")
def resumed(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, continued with merge_lora=true."""
    path = tmp_path_factory.mktemp("runs") / "resumed"
    shutil.copytree(run_dir, path)
    train(path, 4, merge=True, resume=checkpoint.all_checkpoints(path)[-1])
    return path


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, export)


def newest(run: Path) -> Path:
    return checkpoint.all_checkpoints(run)[-1]


def adapters(kind: str, path: Path) -> dict[str, Tensor]:
    """The adapters that a checkpoint's state holds, by the keys that diffusers gives them, alpha / rank in lora_B."""
    prefix = f"{kind}/"
    stored = {k.removeprefix(prefix): v for k, v in small.stored(path).items() if k.startswith(prefix)}
    assert stored and all(".lora_" in key for key in stored)
    return {
        key.replace(".default.", ".").replace("text_encoder.", "text_encoder.text_model."): (
            value * (ALPHA / RANK) if ".lora_B." in key else value
        )
        for key, value in stored.items()
    }


def merged(kind: str, path: Path, base: Path) -> dict[str, dict[str, Tensor]]:
    """W + (alpha / rank B) A for every adapted layer, from the files of the base and the state of a checkpoint."""
    pairs = adapters(kind, path)
    found = {name: load_file(base / file) for name, file in WEIGHTS.items()}
    for key, down in pairs.items():
        name, _, layer = key.partition(".")
        if layer.endswith(".lora_A.weight"):
            up, weight = pairs[key.replace("lora_A", "lora_B")], layer.replace("lora_A.", "")
            added = up.double().flatten(1) @ down.double().flatten(1)
            assert added.abs().max() > 1e-6, "the adapters do something"
            before = found[name][weight]
            found[name][weight] = (before.double() + added.view(before.shape)).float()
    return found


def assert_close(folder: Path, expected: dict[str, dict[str, Tensor]]) -> None:
    for name, file in WEIGHTS.items():
        ours = load_file(folder / file)
        assert ours.keys() == expected[name].keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, expected[name][key], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("format", "kind"), [("diffusers", "ema"), ("ema", "ema"), ("non_ema", "master")])
def test_folder_has_the_adapters_that_the_format_names(
    format: str, kind: str, cli: Any, run_dir: Path, tmp_path: Path
) -> None:
    code, out = cli(f"run={run_dir}", f"format={format}", "output_dir=out")
    assert code == 0
    assert "pipeline = from_pretrained('out'), then pipeline.load_lora_weights('out')" in out
    assert small.same(load_file(tmp_path / "out" / WEIGHTS_NAME), adapters(kind, newest(run_dir)))
    source = newest(run_dir) / "pipeline"
    assert (tmp_path / "out" / WEIGHTS_NAME).samefile(source / WEIGHTS_NAME) == (kind == "ema")
    for file in WEIGHTS.values():
        assert (tmp_path / "out" / file).samefile(source / file), "the base is shared, not copied"


def test_diffusers_loads_the_exported_adapters(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    assert cli(f"run={run_dir}", "format=non_ema", "output_dir=out")[0] == 0
    pipeline: Any = DiffusionPipeline.from_pretrained(tmp_path / "out")
    pipeline.load_lora_weights(tmp_path / "out")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    expected = merged("master", newest(run_dir), newest(run_dir) / "pipeline")["unet"]
    for key, value in pipeline.unet.state_dict().items():
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=1e-5)


def test_dtype_converts_adapters_and_keeps_their_scale(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    assert cli(f"run={run_dir}", "dtype=float16", "output_dir=out")[0] == 0
    source = newest(run_dir) / "pipeline" / WEIGHTS_NAME
    half = {key: value.half() for key, value in load_file(source).items()}
    assert small.same(load_file(tmp_path / "out" / WEIGHTS_NAME), half)
    with safe_open(tmp_path / "out" / WEIGHTS_NAME, "pt") as ours, safe_open(source, "pt") as theirs:
        assert ours.metadata() == theirs.metadata()


@pytest.mark.parametrize(("format", "kind"), [("diffusers", "ema"), ("ema", "ema"), ("non_ema", "master")])
def test_merged_folder_is_a_plain_pipeline(format: str, kind: str, cli: Any, run_dir: Path, tmp_path: Path) -> None:
    source = newest(run_dir) / "pipeline"
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    code, out = cli(f"run={run_dir}", f"format={format}", "merge_lora=true", "output_dir=out")
    assert code == 0 and "load_lora_weights" not in out
    assert not (tmp_path / "out" / WEIGHTS_NAME).exists()
    assert_close(tmp_path / "out", merged(kind, newest(run_dir), source))
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_single_file_has_the_adapters_added(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    assert cli(f"run={run_dir}", "format=single_file", "output_dir=out")[0] == 0
    pipeline = StableDiffusionPipeline.from_single_file(
        str(tmp_path / "out/model.safetensors"), config=str(tmp_path / "out/config"), local_files_only=True
    )
    expected = merged("ema", newest(run_dir), newest(run_dir) / "pipeline")
    for key, value in pipeline.unet.state_dict().items():
        torch.testing.assert_close(value, expected["unet"][key], atol=1e-7, rtol=1e-6)
    for key, value in pipeline.text_encoder.state_dict().items():
        torch.testing.assert_close(value, expected["text_encoder"][f"text_model.{key}"], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_front_ends_get_one_file_of_the_adapters(format: str, cli: Any, run_dir: Path, tmp_path: Path) -> None:
    code, out = cli(f"run={run_dir}", f"format={format}", "dtype=float16", "output_dir=out")
    assert code == 0 and f"{format}: out/lora.safetensors, at strength 1" in out
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["lora.safetensors"]
    expected = {}
    for key, value in adapters("ema", newest(run_dir)).items():
        name, _, layer = key.partition(".")
        layer, _, part = layer.partition(".lora_")
        prefix = f"{'lora_te' if name == 'text_encoder' else 'lora_unet'}_{layer.replace('.', '_')}"
        scaled = value if part[0] == "A" else value / (ALPHA / RANK)  # as it was trained
        expected[f"{prefix}.lora_{'down' if part[0] == 'A' else 'up'}.weight"] = scaled.half()
        expected[f"{prefix}.alpha"] = torch.tensor(ALPHA).half()
    assert small.same(load_file(tmp_path / "out/lora.safetensors"), expected)
    ours = LatentDiffusion.from_pretrained(newest(run_dir) / "pipeline")
    (theirs_at := tmp_path / "base").mkdir()
    shutil.copytree(newest(run_dir) / "pipeline", theirs_at, dirs_exist_ok=True)
    (theirs_at / WEIGHTS_NAME).unlink()
    theirs = LatentDiffusion.from_pretrained(theirs_at, lora=tmp_path / "out/lora.safetensors")
    for name, network in ours.networks.items():
        for key, value in network.state_dict().items():
            torch.testing.assert_close(value, theirs.networks[name].state_dict()[key], atol=1e-4, rtol=1e-3)


def test_merged_is_what_our_loader_makes_of_the_pipeline(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    assert cli(f"run={run_dir}", "merge_lora=true", "output_dir=out")[0] == 0
    ours, theirs = (LatentDiffusion.from_pretrained(path) for path in (tmp_path / "out", run_dir / "pipeline"))
    for name, network in ours.networks.items():
        for key, value in network.state_dict().items():
            torch.testing.assert_close(value, theirs.networks[name].state_dict()[key], atol=1e-6, rtol=1e-5)


def test_what_cannot_be_merged_is_one_line_and_leaves_nothing(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    adapted = load_file(run_dir / "pipeline" / WEIGHTS_NAME)
    with safe_open(run_dir / "pipeline" / WEIGHTS_NAME, "pt") as file:
        told = file.metadata()
    patterns = json.loads(told[METADATA]) | {"unet.use_rslora": True}
    LatentDiffusion.build(SMALL_SDXL).save_pretrained(tmp_path / "other")
    save_file(adapted, tmp_path / "other" / WEIGHTS_NAME, told)
    for name, tensors, metadata in (
        ("plain", {}, {}),
        ("silent", adapted, {"format": "pt"}),
        ("stable", adapted, told | {METADATA: json.dumps(patterns)}),
        ("kohya", {"lora_unet_conv_in.lora_down.weight": torch.ones(2, 4)}, told),
        ("half", {key: value for key, value in adapted.items() if "lora_B" not in key}, told),
    ):
        folder = shutil.copytree(run_dir / "pipeline", tmp_path / name)
        (folder / WEIGHTS_NAME).unlink()
        if tensors:
            save_file(tensors, folder / WEIGHTS_NAME, metadata)
    before = set(tmp_path.rglob("*"))
    for arguments, words in (
        ("run=plain merge_lora=true", ["run=plain: got merge_lora=true, but plain has no", "leave merge_lora out"]),
        ("run=plain format=kohya", ["run=plain: got format=kohya, but plain has no", "leave format out"]),
        ("run=half format=comfyui", ["lora_A.weight does not fit a layer", "merged or converted"]),
        ("run=half format=kohya merge_lora=true", ["format=kohya, a file of the adapters alone", "format=single_file"]),
        ("run=silent format=single_file", ["does not tell the scale of the adapters of", "write format=diffusers"]),
        ("run=stable merge_lora=true", ["adapters of unet (they are not plain LoRA)", "write format=diffusers"]),
        ("run=kohya format=single_file", ["lora_unet_conv_in.lora_down.weight does not fit", "write format=diffusers"]),
        ("run=half merge_lora=true", ["lora_A.weight does not fit a layer", "write format=diffusers"]),
        ("run=other merge_lora=true", ["does not fit a layer of the pipeline", "write format=diffusers"]),
    ):
        code, err = cli(*arguments.split(), "output_dir=out")
        assert code == 2 and err.count("\n") == 1, err
        assert all(word in err for word in words), err
        assert set(tmp_path.rglob("*")) == before
    assert cli("run=silent", "output_dir=out")[0] == 0, "the remedy"
    assert (tmp_path / "out" / WEIGHTS_NAME).read_bytes() == (tmp_path / "silent" / WEIGHTS_NAME).read_bytes()


def test_a_run_resumed_with_merging_saves_merged_weights_and_leaves_the_shared_ones(
    run_dir: Path, resumed: Path
) -> None:
    first, last = checkpoint.all_checkpoints(resumed)
    assert checkpoint.verify(first) == checkpoint.verify(last) == []
    base = newest(run_dir) / "pipeline"
    for file in WEIGHTS.values():
        for shared in (resumed / "frozen" / file, first / "pipeline" / file):
            assert shared.read_bytes() == (base / file).read_bytes()
    assert not (last / "pipeline" / WEIGHTS_NAME).exists()
    assert_close(last / "pipeline", merged("ema", last, base))


def test_a_run_that_merged_an_average_has_no_other_weights(cli: Any, resumed: Path, tmp_path: Path) -> None:
    code, err = cli(f"run={resumed}", "format=non_ema", "output_dir=out")
    assert code == 2 and err.count("\n") == 1
    assert "the run had merge_lora=true" in err and "write format=ema, or resume the run with merge_lora=false" in err
    assert cli(f"run={resumed}", "format=ema", "output_dir=out")[0] == 0
    for file in WEIGHTS.values():
        assert (tmp_path / "out" / file).samefile(newest(resumed) / "pipeline" / file)
