"""Every strategy on one GPU over nccl, against one plain process there; two processes run on CPU in other tests."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sd_lightning.train
from comparing import rms
from ranks import run_jobs
from sd_lightning.callbacks.checkpoint.trainer_state import read_trainer_state
from sd_lightning.storage import checkpoint
from shaped_data import TINY, paint
from strategy_jobs import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ENGINES = {
    "ddp": ("ddp",),
    "fsdp": ("fsdp", "fsdp_offload"),
    "deepspeed": ("zero1", "zero2", "zero3", "zero2_offload"),
    "gemini": ("gemini", "gemini_offload"),
}
"""Strategies that share a process: each engine makes its own process group."""
SAVED_AT, STEPS = 2, 4
SAMPLED = {"sample_every": 2, "trainer": {"limit_val_batches": 1, "val_check_interval": 2}}
BAD_AT = 2
Results = dict[str, dict[str, Any]]


def job(folder: Path, name: str, variation: str, accelerator: str, **options: Any) -> dict[str, Any]:
    common = {"do": "save", "accelerator": accelerator, "devices": 1, "steps": STEPS, "save_at": SAVED_AT}
    return common | {"strategy": name, "run_dir": str(folder / f"{name}-{variation}")} | options


def variations_of(folder: Path, name: str, accelerator: str) -> dict[str, dict[str, Any]]:
    """Return what is trained under a strategy, with the options of its job; in a dry run the least."""
    first = checkpoint.checkpoint_path(folder / f"{name}-plain", SAVED_AT)
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "resumed": {"resume": str(first)},
        "bad": {"bad_at": BAD_AT, "save_at": 1},
    }
    if accelerator == "cuda":
        found |= {"sampled": SAMPLED, "bf16": {"precision": "bf16-mixed"}}
    if accelerator == "cuda" and name == "ddp":
        found["fp16"] = {"precision": "16-mixed", "steps": 8}
    if name == "gemini":
        found["buckets"] = {"images": buckets_of(folder)}
    return found


def buckets_of(folder: Path) -> dict[str, Any]:
    """Return the options of pictures in buckets, which are loaded into pinned memory."""
    if not (folder / "pictures").exists():
        paint(folder / "pictures")
    sizes = {"batch_size": 4, "val_batch_size": 2, "resolution": 32, "num_workers": 0}
    return {"train_data_dir": str(folder / "pictures"), "val_data_dir": str(folder / "pictures"), **sizes, **TINY}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, gpu_accelerator: str) -> dict[str, dict[str, Any]]:
    """What one process without a strategy does."""
    folder = tmp_path_factory.mktemp("single")
    images = {"images": buckets_of(folder)}
    return {
        "plain": run(job(folder, "single", "plain", gpu_accelerator)),
        "buckets": run(job(folder, "single", "buckets", gpu_accelerator, **images)),
    }


@pytest.fixture(scope="module", params=ENGINES)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gpu_accelerator: str
) -> dict[str, Results]:
    """What an engine's strategies did: strategy -> variation -> losses, metrics and checkpoint."""
    if request.param == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    names = ENGINES[request.param][: None if gpu_accelerator == "cuda" else 1]
    jobs = {
        (name, kind): job(folder, name, kind, gpu_accelerator, **options)
        for name in names
        for kind, options in variations_of(folder, name, gpu_accelerator).items()
    }
    done = run_jobs("strategy_jobs", jobs, folder, world_size=1, accelerator=gpu_accelerator)
    found: dict[str, Results] = {name: {} for name in names}
    for (name, variation), result in done.items():
        found[name][variation] = result | {"run_dir": str(folder / f"{name}-{variation}")}
    return found


def test_losses_and_average_are_those_of_one_plain_process(results: dict[str, Results], single: dict[str, Any]) -> None:
    for name, found in results.items():
        assert found["plain"]["losses"] == pytest.approx(single["plain"]["losses"], rel=1e-5), name
        for kind in ("master", "ema"):
            assert rms(found["plain"]["checkpoint"], single["plain"]["checkpoint"], kind) <= 1e-5, name


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(results: dict[str, Results]) -> None:
    """Its optimizer's states lie where the first steps left them."""
    for name, found in results.items():
        assert found["resumed"]["losses"] == pytest.approx(found["plain"]["losses"][SAVED_AT:], rel=1e-5), name
        for kind in ("master", "exp_avg_sq", "ema"):
            assert rms(found["resumed"]["checkpoint"], found["plain"]["checkpoint"], kind) <= 1e-5, name


def test_a_step_whose_loss_is_not_a_number_changes_no_weight_and_is_not_saved(results: dict[str, Results]) -> None:
    for name, found in results.items():
        losses, last = found["bad"]["losses"], Path(found["bad"]["checkpoint"])
        assert [math.isfinite(loss) for loss in losses] == [step != BAD_AT for step in range(1, STEPS + 1)], name
        assert sorted(path.name for path in last.parent.iterdir()) == [f"step-{step:08d}" for step in (1, 3, 4)], name
        assert math.isfinite(rms(str(last), str(last.with_name("step-00000001")))), name


@pytest.mark.parametrize("results", ["gemini"], indirect=True)
def test_buckets_from_pinned_memory_train_as_in_one_plain_process(
    results: dict[str, Results], single: dict[str, Any]
) -> None:
    ours, theirs = results["gemini"]["buckets"], single["buckets"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert rms(ours["checkpoint"], theirs["checkpoint"]) <= 1e-5


def test_the_program_trains_a_step_and_draws(
    call_main: Callable[..., tuple[int, str]], tmp_path: Path, gpu_accelerator: str
) -> None:
    options = [f"trainer.accelerator={gpu_accelerator}", "trainer.devices=1", "trainer.max_steps=1", "output_dir=run"]
    code, message = call_main(sd_lightning.train, *options, "callbacks.samples.accuracy_samples=0")
    assert code == 0, message
    assert checkpoint.checkpoint_path(tmp_path / "run", 1).is_dir() and (tmp_path / "run/summary.json").is_file()


@pytest.mark.gpu(dry=False)
def test_drawing_and_validating_with_the_average_leaves_the_next_losses(results: dict[str, Results]) -> None:
    """Not bit for bit: CUDA's kernels may add in any order. Going on with the average moves a loss by 6e-3."""
    for name, found in results.items():
        assert found["sampled"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-5), name
        assert "val/caption_gap" in found["sampled"]["metrics"], name


@pytest.mark.gpu(dry=False)
def test_bfloat16_stays_near_float32(results: dict[str, Results], single: dict[str, Any]) -> None:
    for name, found in results.items():
        assert found["bf16"]["losses"] == pytest.approx(single["plain"]["losses"], rel=2e-2), name
        assert found["bf16"]["losses"] != pytest.approx(single["plain"]["losses"], rel=1e-5), name


def test_checkpoints_load_bit_equal_into_one_plain_process(results: dict[str, Results], gpu_accelerator: str) -> None:
    paths = {name: checkpoint.checkpoint_path(found["plain"]["run_dir"], SAVED_AT) for name, found in results.items()}
    load = {"do": "load", "strategy": "single", "checkpoints": {name: str(path) for name, path in paths.items()}}
    loaded = run(load | {"accelerator": gpu_accelerator, "devices": 1, "steps": SAVED_AT})["found"]
    assert loaded.keys() == results.keys()
    for name, found in loaded.items():
        assert found["differing"] == [], name
        assert found["loss"] == pytest.approx(results[name]["plain"]["losses"][SAVED_AT], rel=1e-5), name


@pytest.mark.gpu(dry=False)
@pytest.mark.parametrize("results", ["ddp"], indirect=True)
def test_float16_with_a_scaled_loss_trains_under_ddp(results: dict[str, Results]) -> None:
    """The first steps may be skipped, until the scale fits."""
    found = results["ddp"]["fp16"]
    assert found["losses"][0] == pytest.approx(results["ddp"]["plain"]["losses"][0], rel=1e-2)
    assert found["losses"][0] != results["ddp"]["bf16"]["losses"][0]
    parameters = read_trainer_state(Path(found["checkpoint"]))["parameters"].values()
    assert {float(parameter["scalars"]["step"]) > 0 for parameter in parameters} == {True}


def test_float16_is_refused_by_fsdp_beforehand(call_main: Callable[..., tuple[int, str]]) -> None:
    options = ("strategy=fsdp", "trainer.precision=16-mixed", "trainer.accelerator=cuda", "trainer.devices=1")
    code, message = call_main(sd_lightning.train, *options)
    assert code != 0
    assert "FSDP2 does not scale losses" in message and "write trainer.precision=bf16-mixed" in message
