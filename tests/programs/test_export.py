"""`python -m sd_lightning.export`: weights bit for bit from any checkpoint, and files that plain diffusers loads."""

import errno
import functools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import small_training
from sd_lightning import LatentDiffusion, export
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.models.families import Architecture
from sd_lightning.models.learned_token import WEIGHTS_NAME
from sd_lightning.state.shards import TensorRange
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.tensor_store import merge_index, write_shards
from small_models import SMALL_SD2, SMALL_SDXL

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT_ENCODER = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an EMA and two checkpoints, hardly trained."""
    path = tmp_path_factory.mktemp("runs") / "averaged"
    saving = PortableCheckpoint(path, every_n_steps=3)
    small_training.fit(small_training.module(), small_training.data(), 6, EMA(0.5), saving)
    assert saving.last_saved is not None
    runs.publish_pipeline(path, saving.last_saved)
    return path


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished run without EMA whose text encoder is frozen."""
    path = tmp_path_factory.mktemp("runs") / "plain"
    module = small_training.module(train_text_encoder=False)
    small_training.fit(module, small_training.data(), 2, PortableCheckpoint(path, every_n_steps=0))
    return path


@pytest.fixture(scope="module")
def small_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the pipelines sd2 and sdxl, untrained."""
    root = tmp_path_factory.mktemp("pipelines")
    architectures: dict[str, Architecture] = {"sd2": SMALL_SD2, "sdxl": SMALL_SDXL}
    for name, architecture in architectures.items():
        LatentDiffusion.build(architecture, seed=5).save_pretrained(root / name)
    return root


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, export)


def newest(run: Path) -> Path:
    return checkpoint.all_checkpoints(run)[-1]


def trained(kind: str, path: Path) -> dict[str, Tensor]:
    """The stored `master` or `ema` weights of a checkpoint by the module's names."""
    stored = small_training.stored(path)
    return {key.removeprefix(f"{kind}/"): value for key, value in stored.items() if key.startswith(f"{kind}/")}


def exported(folder: Path) -> dict[str, Tensor]:
    """The weights that diffusers and transformers load from a pipeline folder, by the module's names."""
    model = LatentDiffusion.from_pretrained(folder)
    networks = {"unet": model.denoiser, **model.text_encoders}
    return {f"{name}.{key}": value for name, n in networks.items() for key, value in n.state_dict().items()}


@pytest.mark.parametrize(("format", "kind"), [("diffusers", "ema"), ("ema", "ema"), ("non_ema", "master")])
def test_run_gives_the_weights_that_its_newest_checkpoint_stored(
    format: str, kind: str, cli: Any, run_dir: Path, tmp_path: Path
) -> None:
    code, out = cli(f"run={run_dir}", f"format={format}", "output_dir=out")
    assert code == 0
    assert out.startswith(f"{newest(run_dir)} -> out (")
    assert small_training.same(exported(tmp_path / "out"), trained(kind, newest(run_dir)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_checkpoint_gives_its_own_weights(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    first = checkpoint.all_checkpoints(run_dir)[0]
    for format, kind in {"ema": "ema", "non_ema": "master"}.items():
        assert cli(f"run={first}", f"format={format}")[0] == 0
        assert small_training.same(exported(tmp_path / "exported" / format), trained(kind, first))
    assert not small_training.same(trained("ema", first), trained("ema", newest(run_dir)))


def test_run_without_average_gives_what_was_trained_and_frozen(cli: Any, plain_dir: Path, tmp_path: Path) -> None:
    frozen = load_file(newest(plain_dir) / "pipeline" / TEXT_ENCODER)
    for format in ("diffusers", "non_ema"):
        assert cli(f"run={plain_dir}", f"format={format}")[0] == 0
        folder = tmp_path / "exported" / format
        unet = {name: value for name, value in exported(folder).items() if name.startswith("unet.")}
        assert small_training.same(unet, trained("master", newest(plain_dir)))
        assert small_training.same(load_file(folder / TEXT_ENCODER), frozen)


def test_state_written_by_other_processes_is_read(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    """The same checkpoint with its state as three ranks of a sharding strategy write it."""
    original = newest(run_dir)
    with checkpoint.saving(tmp_path / "sharded", 6) as tmp:
        shutil.copytree(original / "pipeline", tmp / "pipeline")
        shutil.copy(original / "trainer.json", tmp)
        (tmp / "state").mkdir()
        for rank in range(3):
            ranges = []
            for key, tensor in small_training.stored(original).items():
                begin, end = (tensor.numel() * r // 3 for r in (rank, rank + 1))
                ranges.append(TensorRange(key, tuple(tensor.shape), begin, end, tensor.reshape(-1)[begin:end]))
            write_shards(tmp / "state", rank, 3, ranges)
        merge_index(tmp / "state", 3)
    assert cli("run=sharded", "format=non_ema", "output_dir=out")[0] == 0
    assert small_training.same(exported(tmp_path / "out"), trained("master", original))


def test_a_learned_word_goes_along_but_for_the_weights_it_is_not_of(
    cli: Any, plain_dir: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "verify", lambda *_, **__: [])  # a file more than the run has written
    for name, format, has_word in (
        ("plain", "diffusers", True),
        ("plain", "non_ema", True),
        ("averaged", "diffusers", True),
        ("averaged", "ema", True),
        ("averaged", "non_ema", False),
    ):
        run = tmp_path / name
        if not run.exists():
            shutil.copytree(plain_dir if name == "plain" else run_dir, run)
        word = newest(run) / "pipeline" / WEIGHTS_NAME
        word.unlink(missing_ok=True)
        save_file({"S*": torch.ones(1, 4)}, word)
        assert cli(f"run={run}", f"format={format}", f"output_dir={name}-{format}")[0] == 0
        found = tmp_path / f"{name}-{format}" / WEIGHTS_NAME
        assert found.is_file() is has_word and (not has_word or found.read_bytes() == word.read_bytes())


def test_non_ema_keeps_what_was_frozen_inside_a_trained_network(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    """A run that trained only a part of the UNet stores only that part."""
    original, part = newest(run_dir), "unet.down_blocks."
    with checkpoint.saving(tmp_path / "partial", 6) as tmp:
        shutil.copytree(original / "pipeline", tmp / "pipeline")
        (tmp / "state").mkdir()
        stored = {k: v for k, v in small_training.stored(original).items() if part in k}
        write_shards(tmp / "state", 0, 1, [TensorRange(k, tuple(v.shape), 0, v.numel(), v) for k, v in stored.items()])
        merge_index(tmp / "state", 1)
    assert cli("run=partial", "format=non_ema", "output_dir=out")[0] == 0
    master = {name: value for name, value in trained("master", original).items() if name.startswith(part)}
    assert master
    assert small_training.same(exported(tmp_path / "out"), trained("ema", original) | master)


def test_frozen_weights_are_linked_and_what_people_edit_is_copied(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert cli(f"run={run_dir}", "format=non_ema", "output_dir=out")[0] == 0
    source, out = newest(run_dir) / "pipeline", tmp_path / "out"
    names = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file()) == names
    assert [str(name) for name in names if os.path.samefile(source / name, out / name)] == [VAE]
    for path in out.rglob("*"):  # writing into files that are not weights must not reach the run
        if path.is_file() and path.suffix != ".safetensors":
            path.write_text("edited")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_converts_all_weights(dtype: str, cli: Any, run_dir: Path, tmp_path: Path) -> None:
    assert cli(f"run={run_dir}", f"dtype={dtype}", "output_dir=out")[0] == 0
    for file in (UNET, VAE, TEXT_ENCODER):
        theirs = load_file(newest(run_dir) / "pipeline" / file)
        converted = {name: value.to(getattr(torch, dtype)) for name, value in theirs.items()}
        assert small_training.same(load_file(tmp_path / "out" / file), converted)
        assert os.path.samefile(tmp_path / "out" / file, newest(run_dir) / "pipeline" / file) == (dtype == "float32")


def test_dtype_in_a_configuration_follows_its_weights(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "pipeline", tmp_path / "pipeline")
    path = tmp_path / "pipeline" / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_dtype": "float32"}))
    assert cli("run=pipeline", "dtype=bfloat16", "output_dir=out")[0] == 0
    assert json.loads((tmp_path / "out" / "text_encoder" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def pipeline_parts(pipeline: Any) -> dict[str, Tensor]:
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, n in networks.items() for key, value in n.state_dict().items()}


@pytest.mark.parametrize("name", ["sd1", "sd2", "sdxl"])
def test_diffusers_loads_the_single_file_with_equal_weights(
    name: str, cli: Any, run_dir: Path, small_pipelines: Path, tmp_path: Path
) -> None:
    import diffusers

    source = run_dir if name == "sd1" else small_pipelines / name
    code, out = cli(f"run={source}", "format=single_file", "output_dir=my-model")
    assert code == 0
    assert "from_single_file('my-model/model.safetensors', config='my-model/config')" in out
    file = tmp_path / "my-model" / "model.safetensors"
    kind = diffusers.StableDiffusionXLPipeline if name == "sdxl" else diffusers.StableDiffusionPipeline
    loaded = kind.from_single_file(str(file), config=str(tmp_path / "my-model" / "config"), local_files_only=True)
    folder = run_dir / "pipeline" if name == "sd1" else source
    expected = kind.from_pretrained(folder, local_files_only=True)
    assert small_training.same(pipeline_parts(loaded), pipeline_parts(expected))
    assert loaded.scheduler.config == expected.scheduler.config
    assert loaded.tokenizer("a handwritten three").input_ids == expected.tokenizer("a handwritten three").input_ids

    prefixes = {"sd1": "cond_stage_model.transformer.", "sd2": "cond_stage_model.model.", "sdxl": "conditioner."}
    with safe_open(file, "pt") as opened:
        assert any(key.startswith(prefixes[name]) for key in opened.keys())
        metadata = opened.metadata()
    assert (metadata["format"], metadata["modelspec.title"]) == ("pt", "my-model")
    assert (metadata["modelspec.prediction_type"], metadata["modelspec.resolution"]) == ("v", "32x32")
    weights = [path for path in (tmp_path / "my-model").rglob("*") if path.suffix in (".safetensors", ".bin")]
    assert weights == [file]


def test_single_file_has_the_dtype_asked_for(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    assert cli(f"run={run_dir}", "format=single_file", "dtype=float16", "output_dir=out")[0] == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    unet = load_file(newest(run_dir) / "pipeline" / UNET)
    assert torch.equal(tensors["model.diffusion_model.input_blocks.0.0.weight"], unet["conv_in.weight"].half())


MEASURE = """
import re, sys
import hydra.main
import sd_lightning.apps.export
from sd_lightning import _conf, export
# Not ru_maxrss: that one counts what the process that started this one had in memory.
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
before = peak()
_conf.main(export.PROGRAM)
print(peak() - before)
assert not {"diffusers", "transformers", "lightning"} & sys.modules.keys()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and holes in files are cheap")
def test_memory_and_imports_stay_small_whatever_the_model(
    run_dir: Path, tmp_path: Path, run_python: Callable[..., Any]
) -> None:
    shutil.copytree(run_dir / "pipeline", tmp_path / "large")
    path = tmp_path / "large" / UNET
    path.unlink()
    shape = [16, 2**21]  # 128 MiB each, 384 MiB together
    size = math.prod(shape) * 4
    header: dict[str, Any] = {
        f"large{i}": {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(3)
    }
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 3 * size)  # a hole reads as zeros
    done = run_python("-c", MEASURE, "run=large", "dtype=bfloat16", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "exported" / "diffusers" / UNET).stat().st_size > 3 * size / 2
    grown_mib = int(done.stdout.splitlines()[-1]) / 1024
    assert grown_mib < 100, f"{grown_mib:.0f} MiB for a network of 384 MiB"


@pytest.fixture(scope="module")
def broken(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with things that cannot be exported."""
    root = tmp_path_factory.mktemp("broken")
    for name in ("empty", "taken", "other"):
        (root / name).mkdir()
    (root / "taken" / "file").write_text("mine")
    (root / "file").write_text("mine")
    (root / "other" / "model_index.json").write_text('{"_class_name": "SanaPipeline"}')
    for name in ("torn", "absent", "strange", "huge"):
        shutil.copytree(run_dir / "pipeline", root / name)
    weights = root / "torn" / UNET
    weights.write_bytes(weights.read_bytes()[:100_000])
    (root / "absent" / VAE).unlink()
    save_file(load_file(root / "strange" / UNET) | {"extra.weight": torch.ones(1)}, root / "strange" / UNET)
    save_file(load_file(root / "huge" / UNET) | {"conv_in.bias": torch.full((32,), 1e5)}, root / "huge" / UNET)
    shutil.copytree(newest(run_dir), root / "damaged")
    with open(root / "damaged" / "trainer.json", "a") as file:
        file.write(" ")
    return root


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("format=ema", ("run has no value and no default", "give one: run=<value>")),
    ("run=nowhere", ("run=nowhere: no such folder", "expected a run, a checkpoint or a pipeline folder")),
    ("run=empty", ("run=empty: neither a finished pipeline nor a valid checkpoint", "a folder with model_index.json")),
    ("run=file", ("run=file: neither a finished pipeline", "expected a run")),
    ("run=other", ("run=other: got a SanaPipeline", "expected StableDiffusionPipeline or", "give a pipeline of these")),
    ("run=damaged", ("run=damaged: the checkpoint is damaged: trainer.json has", "give an earlier one")),
    ("run=torn", ("torn/unet/diffusion_pytorch_model.safetensors: not a complete", "copy or download that file again")),
    ("run=absent", ("absent/vae/diffusion_pytorch_model.safetensors: no such file", "expected weights", "copy or")),
    ("run=RUN/pipeline format=ema", ("pipeline: a pipeline folder holds one set", "format=ema", "format=diffusers")),
    ("run=RUN/pipeline format=non_ema", ("a pipeline folder holds one set", "give the run or one of its checkpoints")),
    ("run=PLAIN format=ema", ("step-00000002 has no averaged weights", "callbacks.ema=null", "write format=non_ema")),
    ("run=strange format=single_file", ("run=strange", "has no name for extra.weight of the unet", "format=diffusers")),
    ("run=huge dtype=float16", ("conv_in.bias holds 1e+05", "too large for float16", "write dtype=bfloat16")),
    ("run=RUN format=ckpt", ("format=ckpt: expected one of diffusers, single_file", "write format=diffusers")),
    ("run=RUN dtype=int8", ("dtype=int8: expected one of float32", "or null; write dtype=")),
    ("run=3", ("run=3: expected str",)),
    ("run=RUN output=x", ("output=x: there is no key 'output'", "write output_dir=x")),
    ("run=RUN output_dir=taken", ("output_dir=taken is not empty", "choose another output_dir", "or delete it")),
    ("run=RUN output_dir=.", ("output_dir=.: it is the current folder", "write output_dir=runs/new")),
    ("run=RUN output_dir=file", ("output_dir=file: a file is in the way", "choose another output_dir")),
    ("run=RUN output_dir=file/x", ("output_dir=file/x cannot be written", "choose another output_dir")),
    ("run=RUN output_dir=/proc/x/y", ("output_dir=/proc/x/y cannot be written", "choose another output_dir")),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_mistake_is_one_line_and_leaves_nothing(
    arguments: str,
    words: tuple[str, ...],
    cli: Any,
    broken: Path,
    run_dir: Path,
    plain_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(broken)
    before = set(broken.rglob("*"))
    code, err = cli(*arguments.replace("RUN", str(run_dir)).replace("PLAIN", str(plain_dir)).split())
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    position = 0
    for word in words:
        found = err.find(word, position)
        assert found >= 0, f"no {word!r} after column {position} in: {err}"
        position = found + 1
    assert set(broken.rglob("*")) == before


def test_run_goes_back_to_its_newest_valid_checkpoint(cli: Any, run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir / "checkpoints", tmp_path / "run" / "checkpoints")
    first, last = checkpoint.all_checkpoints(tmp_path / "run")
    (last / "trainer.json").write_text("{}")
    code, out = cli("run=run", "output_dir=out")
    assert code == 0
    assert out.startswith(f"{first.relative_to(tmp_path)} -> out (")


@pytest.mark.parametrize("format", ["non_ema", "single_file"])
def test_full_disk_is_said_and_leaves_nothing(
    format: str, cli: Any, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        Path(path).write_bytes(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sd_lightning.apps.export.write_streamed", full)
    code, err = cli(f"run={run_dir}", f"format={format}", "output_dir=out")
    assert code == 2
    assert "output_dir=out cannot be written" in err and "No space left on device" in err and "free space" in err
    assert not list(tmp_path.iterdir())


def test_too_small_a_disk_is_refused_before_anything_is_written(
    cli: Any, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr("sd_lightning.apps.export.write_streamed", lambda *a, **k: pytest.fail("wrote"))
    code, err = cli(f"run={run_dir}", "format=single_file", "output_dir=out")
    assert code == 2
    assert "format=single_file needs 0.00 GB for the export, but out has 0.00 GB free" in err
    assert cli(f"run={run_dir}", "format=ema", "output_dir=out")[0] == 0  # linked, which takes no space
