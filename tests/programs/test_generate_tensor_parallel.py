"""`python -m sd_lightning.generate tensor_parallel=…`: ranks that draw together, end together, and mistakes."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from launched_training import slurm_task
from ranks import run_program
from sd_lightning import LatentDiffusion, UsageError, generate
from sd_lightning.apps.tensor_parallel import check_size, num_ranks
from sd_lightning.planner.passes import weight_bytes
from sd_lightning.quantization import Int8, quantize_
from sd_lightning.quantization.tensor_parallel import TensorParallel
from suites import keep

QUICK = ["prompts=[three]", "num_inference_steps=2", "guidance_scale=3"]
LONG = ["prompts=[three]", "num_inference_steps=1000", "offload=blocks", "quantization=int8", "tensor_parallel=2"]
"""Draws for minutes, after a line on the output."""
PROGRAM = [sys.executable, "-m", "sd_lightning.generate"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline in floating point, in int8, and the picture that one device draws of it in int8."""
    root = tmp_path_factory.mktemp("pipelines")
    model = LatentDiffusion.build("tiny", seed=2)
    model.save_pretrained(root / "float")
    quantize_(model).save_pretrained(root / "int8")
    return {name: root / name for name in ("float", "int8")}


@pytest.fixture
def cli(call_main: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, str]]:
    return functools.partial(call_main, generate)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command in an empty folder; what is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        given = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
        interruptible = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # jobs of a shell are not
        options = {"start_new_session": True, "preexec_fn": interruptible, **pipes}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=given, **options))
        return started[-1]

    yield run
    for process in [*started, *ranks_in(tmp_path)]:
        process.kill()


def ranks_in(folder: Path) -> list[psutil.Process]:
    """Return the processes of the program that work in a folder, rank 0 first."""
    found = {}
    for process in psutil.process_iter(["cmdline", "cwd"]):
        is_program = "sd_lightning.generate" in (process.info["cmdline"] or []) and "-m" in process.info["cmdline"]
        if is_program and process.info["cwd"] == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
            found[int(process.environ().get("RANK", 0))] = process
    return [found[rank] for rank in sorted(found)]


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


def picture(folder: Path) -> np.ndarray:
    return np.asarray(Image.open(folder / "three-seed-0.png"), dtype=int)


def test_two_ranks_draw_what_one_device_draws_and_one_of_them_tells(
    cli: Any, start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    given = [f"model.pretrained={folders['float']}", "quantization=int8", *QUICK]
    assert cli(*given, "output_dir=one")[0] == 0
    out, err = start(*PROGRAM, *given, "output_dir=two", "tensor_parallel=2").communicate(timeout=200)
    assert err == ""
    assert np.abs(picture(tmp_path / "one") - picture(tmp_path / "two")).max() <= 1
    settings = [json.loads(Image.open(tmp_path / name / "three-seed-0.png").text["sd_lightning"])  # type: ignore[attr-defined]
                for name in ("one", "two")]  # fmt: skip
    assert settings[0] == settings[1], "the picture does not depend on the number of ranks, but for rounding"
    weights, peak, each, last = out.splitlines()
    assert weights.startswith("weights 1.14 MB in int8") and peak.startswith("computed peak, 1 picture")
    found = re.fullmatch(
        r"on each of 2 devices: weights ([\d.]+) MB, ([\d.]+) MB \((\d+)%\) the same on all; computed peak ([\d.]+) MB",
        each,
    )
    assert found is not None, each
    held, same, share, at_peak = map(float, found.groups())
    structure = quantize_(LatentDiffusion.describe(folders["float"]), tensor_parallel=TensorParallel(0, 2))
    assert held == pytest.approx(sum(map(weight_bytes, structure.networks.values())) / 1e6, rel=0.01)
    assert same == pytest.approx(2 * held - 1.14, rel=0.02) and share == pytest.approx(100 * same / held, abs=1)
    assert held < 1.14 < at_peak
    assert last == "1 picture in two/, all in two/grid.png"
    assert not ranks_in(tmp_path)


@pytest.mark.parametrize("vae", ["int8", "float"])
def test_auto_on_a_cpu_is_one_process_also_of_an_int8_folder(
    vae: str, cli: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("started a process"))
    for name, more in (("plain", []), ("auto", ["tensor_parallel=auto"])):
        given = [f"model.pretrained={folders['int8']}", f"model.vae={folders['float'] / 'vae'}", *QUICK, *more]
        code, out = cli(*[each for each in given if vae == "float" or "vae" not in each], f"output_dir={name}")
        assert code == 0 and (" MB in int8, " in out) and ("weights 1.14 MB" in out) == (vae == "int8"), out
    assert (picture(tmp_path / "plain") == picture(tmp_path / "auto")).all()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", keep(["forks"], ["forks", "torchrun", "slurm"], "exits"))
def test_processes_of_a_launcher_are_used(
    launcher: str, cli: Any, start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    given = [f"model.pretrained={folders['int8']}", *QUICK]
    assert cli(*given, "output_dir=one")[0] == 0
    if launcher == "forks":  # as torchrun starts them
        printed = run_program("generate", *given, "output_dir=two", "tensor_parallel=auto")
        assert printed.count("1 picture in two/, all in two/grid.png") == 1, printed
        assert np.abs(picture(tmp_path / "one") - picture(tmp_path / "two")).max() <= 1
        return
    command = [*(TORCHRUN if launcher == "torchrun" else PROGRAM[:2]), "sd_lightning.generate", *given]
    tasks = [{}] if launcher == "torchrun" else [slurm_task(rank, os.getpid() * 10) for rank in (0, 1)]
    size = "auto" if launcher == "torchrun" else "2"
    more = {"SLURM_STEP_NUM_TASKS": "2"} if launcher == "slurm" else {}
    arguments = [*command, "output_dir=two", f"tensor_parallel={size}"]
    ended = [each.communicate(timeout=200) for each in [start(*arguments, env=task | more) for task in tasks]]
    assert "".join(out for out, _ in ended).count("1 picture in two/, all in two/grid.png") == 1, ended
    assert np.abs(picture(tmp_path / "one") - picture(tmp_path / "two")).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", keep([1], [0, 1], "exits"))
def test_a_rank_that_dies_ends_the_others_with_one_line(
    victim: int, start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    process = start(*PROGRAM, f"model.pretrained={folders['float']}", *LONG)
    assert "computed peak on the device" in process.stdout.readline()  # all have joined
    ranks_in(tmp_path)[victim].kill()
    begin = time.monotonic()
    err = process.stderr.read()  # until the last rank has ended
    assert time.monotonic() - begin < 20
    assert process.wait() == (1 if victim else -signal.SIGKILL)
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1, err
    reason = rf"error: rank {victim} died \(process \d+.*\); rank {1 - victim} ends the run, start it again"
    assert re.fullmatch(reason, lines[0])
    wait_for(lambda: not ranks_in(tmp_path), 10)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.full("exits")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_the_others_have_joined_ends_them(
    victim: int, start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    process = start(*PROGRAM, f"model.pretrained={folders['float']}", *LONG)
    wait_for(lambda: len(ranks_in(tmp_path)) == 2, 100)
    ranks_in(tmp_path)[victim].kill()
    err = process.communicate(timeout=100)[1]
    assert "Traceback" not in err
    if victim == 1:
        assert process.returncode == 2
        assert re.fullmatch(r"error: rank 1 \(process \d+\) ended with code -9 before it joined.*\n", err), err
    wait_for(lambda: not ranks_in(tmp_path), 60)


@pytest.mark.full("exits")
def test_ctrl_c_leaves_nothing_behind(start: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    process = start(*PROGRAM, f"model.pretrained={folders['float']}", *LONG)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not ranks_in(tmp_path) and not list(tmp_path.rglob("*.png"))


@pytest.mark.full("exits")
def test_a_mistake_that_shows_when_weights_are_read_is_one_line(
    start: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = LatentDiffusion.from_pretrained(folders["float"])
    with torch.no_grad():
        next(p for name, p in model.denoiser.named_parameters() if name.endswith("to_q.weight"))[-1, -1] = torch.nan
    model.save_pretrained(tmp_path / "damaged")
    arguments = ["model.pretrained=damaged", "quantization=int8", "tensor_parallel=2", *QUICK]
    process = start(*PROGRAM, *arguments)
    err = process.communicate(timeout=100)[1]
    assert process.returncode == 2
    assert len(err.splitlines()) == 1 and err.startswith("error: ") and "to_q.weight" in err, err
    assert not ranks_in(tmp_path) and not (tmp_path / "generated").exists()


@pytest.mark.gpu
def test_two_gpus_draw_what_one_draws(start: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for size in (1, 2):
        given = [f"model.pretrained={folders['float']}", "quantization=int8", "quantization.dtype=float32", *QUICK]
        process = start(*PROGRAM, *given, f"tensor_parallel={size}", f"output_dir=by-{size}")
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "measured peak on the GPU" in out
    assert np.abs(picture(tmp_path / "by-1") - picture(tmp_path / "by-2")).max() <= 1


OF_INT8: dict[str, str] = {
    "tensor_parallel=0": "got tensor_parallel=0; expected at least 1, or auto; write tensor_parallel=2",
    "tensor_parallel=-1": "got tensor_parallel=-1; expected at least 1, or auto; write tensor_parallel=2",
    "tensor_parallel=two": "tensor_parallel=two: expected",
    "tensor_parallel=3": "3 processes cannot divide the 4 attention heads of unet; expected one of 2, 4",
    "tensor_parallel=8": "8 processes cannot divide the 4 attention heads of unet; expected one of 2, 4",
    "tensor_parallel=2 save_to=small": "save first, with quantization=int8 save_to=small alone, and then draw with",
    "tensor_parallel=2 device=cuda:1": "got device=cuda:1 and tensor_parallel=2, with which each process has a device",
}
MISTAKES = {f"quantization=int8 {words}": message for words, message in OF_INT8.items()}
MISTAKES["tensor_parallel=2"] = (
    "got tensor_parallel=2 and weights that are not in int8; add quantization=int8, or give a"
)


@pytest.mark.parametrize(("words", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistake_is_one_line_before_processes_start(
    words: str, message: str, cli: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("started a process"))
    code, err = cli(f"model.pretrained={folders['float']}", *QUICK, *words.split())
    assert code == 2
    assert err.startswith("error: ") and message in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("started", "size", "message"),
    [
        ("3", "2", "a launcher started 3 processes, but tensor_parallel=2; write tensor_parallel=3, or start the"),
        ("1", "2", "a launcher started 1 process, but tensor_parallel=2; write tensor_parallel=1, or start the"),
        ("2", "1", "a launcher started 2 processes, but tensor_parallel=1; write tensor_parallel=2, or start the"),
    ],
)
def test_a_launcher_with_another_number_of_processes_is_refused(
    started: str, size: str, message: str, cli: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": started}.items():
        monkeypatch.setenv(name, value)
    code, err = cli(f"model.pretrained={folders['float']}", "quantization=int8", f"tensor_parallel={size}", *QUICK)
    assert code == 2 and message in err


def test_more_gpus_than_there_are_is_refused(
    cli: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    code, err = cli(f"model.pretrained={folders['float']}", "quantization=int8", "tensor_parallel=4", *QUICK)
    assert code == 2
    assert "got tensor_parallel=4, for which this machine needs 4 GPUs; expected at most the 3 that are here" in err


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_PER_TASK": "1"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({}, 8),
    ],
    ids=["srun", "own GPUs", "torchrun in SLURM", "unknown"],
)
def test_gpus_are_needed_for_the_processes_of_this_machine(
    given: dict[str, str], needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"SLURM_STEP_NUM_TASKS": "8"} | given).items():
        monkeypatch.setenv(name, value)
    for size in (8, "auto"):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: needed)
        check_size(size, device="cuda", save_to=None)  # type: ignore[arg-type]
        if needed > 1:
            monkeypatch.setattr(torch.cuda, "device_count", lambda: needed - 1)
            with pytest.raises(UsageError, match=f"this machine needs {needed} GPUs"):
                check_size(size, device="cuda", save_to=None)  # type: ignore[arg-type]


def test_auto_is_the_fewest_gpus_with_room(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(rank: TensorParallel | None) -> int:
        model = quantize_(LatentDiffusion.describe(folders["float"]), Int8(), tensor_parallel=rank)
        return sum(map(weight_bytes, model.networks.values()))

    model, gpu = LatentDiffusion.describe(folders["float"]), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    peaks = {size: peak(TensorParallel(0, size)) for size in (1, 2, 4)}
    for size in (1, 2, 4):
        properties = SimpleNamespace(total_memory=peaks[size] / 0.97 + 2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        assert num_ranks("auto", model, gpu, peak) == size
        assert f"tensor_parallel={size}: computed peak" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=peaks[4] - 1))
    with pytest.raises(ValueError, match="on each of 4 GPUs, of which .* can be used; write offload=blocks"):
        num_ranks("auto", model, gpu, peak)
    assert num_ranks("auto", model, torch.device("cpu"), peak) == 1, "processes would share the memory"
