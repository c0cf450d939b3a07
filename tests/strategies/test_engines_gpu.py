"""What of the engines only a GPU proves beside plain training: other precisions, host steps, deferred weights, ends."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from places import SUPPORT
from ranks import free_port, run_jobs
from sd_lightning.storage.checkpoint import checkpoint_path
from small_models import few_blocks
from small_training import stored
from strategy_jobs import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 4
JOBS: dict[str, dict[str, Any]] = {
    "zero2_cpu_adam": {},
    "zero2_fp16": {"strategy": "zero2", "precision": "16-mixed"},
    "zero3_fp16": {"strategy": "zero3", "precision": "16-mixed"},
    "zero3_offload": {},
    "fsdp_bf16": {},
    "gemini_auto": {"strategy": "gemini_auto_gpu"},
    "ddp_bf16": {},
}
IN_HALF_PRECISION = ("zero2_fp16", "zero3_fp16", "fsdp_bf16")
"""ddp_bf16 is none of them: it rounds gradients alone, which AdamW hardly sees."""
DRY = ("fsdp_bf16", "gemini_offload_signalled")
SIGNALLED = ("fsdp_offload", "gemini_offload")


def job(folder: Path, name: str, accelerator: str, **options: Any) -> dict[str, Any]:
    common = {"do": "save", "accelerator": accelerator, "devices": 1, "steps": STEPS, "save_at": STEPS}
    return common | {"strategy": name, "run_dir": str(folder / name)} | options


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def single(folder: Path, gpu_accelerator: str) -> dict[str, Any]:
    """What one process without a strategy does."""
    return run(job(folder, "single", gpu_accelerator, steps=6))


@pytest.fixture(scope="module", params=[*JOBS, *(f"{name}_signalled" for name in SIGNALLED)])
def found(request: pytest.FixtureRequest, folder: Path, gpu_accelerator: str) -> tuple[str, dict[str, Any]]:
    """Name of a job, and what it found."""
    name = request.param
    if gpu_accelerator == "cpu" and name not in DRY:
        pytest.skip("dry run: the CPU's own tests train under these")
    chosen = JOBS.get(name, {"strategy": name.removesuffix("_signalled"), "steps": 6, "signal_at": 3})
    jobs = {name: job(folder, name, gpu_accelerator, **chosen)}
    return name, run_jobs("strategy_jobs", jobs, folder, world_size=1, accelerator=gpu_accelerator)[name]


def test_each_trains_as_one_plain_process_or_stops_at_a_signal(
    found: tuple[str, dict[str, Any]], single: dict[str, Any]
) -> None:
    name, result = found
    losses, expected = result["losses"], single["losses"]
    if name.endswith("_signalled"):
        assert len(losses) < 6 and Path(result["checkpoint"]) == checkpoint_path(
            Path(result["checkpoint"]).parents[1], len(losses)
        )
        assert losses == pytest.approx(expected[: len(losses)], rel=1e-4)
    elif name in IN_HALF_PRECISION:
        assert losses[0] == pytest.approx(expected[0], rel=2e-2) and all(map(math.isfinite, losses))
        assert losses != pytest.approx(expected[:STEPS], rel=1e-5), "the precision has an effect"
    else:
        assert losses == pytest.approx(expected[:STEPS], rel=1e-4)


def test_deferred_weights_are_offloaded_from_their_files(folder: Path, gpu_accelerator: str) -> None:
    few_blocks(seed=4).save_pretrained(folder / "tiny")
    jobs = {
        kind: {
            "do": "train",
            "strategy": "fsdp_offload",
            "deferred": kind == "files",
            "folder": str(folder / "tiny"),
            "run_dir": str(folder / kind),
            "accelerator": gpu_accelerator,
            "devices": 1,
        }
        for kind in ("files", "memory")
    }
    done = run_jobs("loading_driver", jobs, folder, world_size=1, accelerator=gpu_accelerator)
    ours, theirs = (stored(Path(done[kind]["checkpoint"])) for kind in ("files", "memory"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu(dry=False)
def test_a_rank_whose_kernel_never_ends_is_named_and_the_run_ends(folder: Path, gpu_accelerator: str) -> None:
    begin, port = time.monotonic(), str(free_port())
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "hung_kernel.py"), gpu_accelerator]
    ranks = [
        subprocess.Popen([*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1], told
    assert "hangs now" in told[1] and time.monotonic() - begin < 240
    assert all("error: rank 1 (" in each and "wait_for_a_kernel" in each for each in told), told
