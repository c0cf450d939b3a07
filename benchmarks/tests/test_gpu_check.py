"""`make gpu-check`: every test for a GPU is in one part, a part fits into a call, and all of it runs dry on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import gpu_check
import gpu_wheels
import lines
from places import REPO, SUPPORT

BENCHMARKS = REPO / "benchmarks"


@pytest.mark.full("platform")
@pytest.mark.timeout(600)
def test_all_parts_run_dry_without_packages_that_they_do_not_need(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(REPO / "src"), str(SUPPORT)])
    environment = {"PYTHONPATH": paths, "PYTEST_ARGS": "-p no:hypothesispytest -p without_packages"}
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "all", "--dry", f"--results={tmp_path}"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    parts = re.findall(r"^part (\w+): (\d+) tests and .*, about (\d+) of (\d+) s$", done.stdout, re.MULTILINE)
    assert {name for name, *_ in parts} == gpu_check.PARTS.keys()
    for name, tests, seconds, limit in parts:
        assert int(tests) > 0 and int(seconds) <= int(limit), f"part {name} takes too long: give some to another part"
    log = [json.loads(line) for line in (tmp_path / "tests-all.log").read_text().splitlines()]
    assert sum(int(tests) for _, tests, *_ in parts) == len(log), "each test leaves a line and is in one part"
    assert {line["outcome"] for line in log} == {"passed", "skipped"}
    others = [line for line in log if line["outcome"] == "skipped" and "dry run: " not in line["reason"]]
    assert all(re.search("is not installed", line["reason"]) for line in others), others
    passed = {line["test"].partition("[")[0] for line in log if line["outcome"] == "passed"}
    assert len(passed) >= 8 and any("gemini" in test for test in passed)
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == [case for part in gpu_check.PARTS.values() for case, _ in part.cases]
    assert not any(row.get("unfinished") for row in rows) and all(row["arguments"] == {"dry": True} for row in rows)
    metrics = {row["case"]: row["metrics"] for row in rows}
    assert metrics["planner_gpu"]["auto_to_best"] > 0 and metrics["planner_gpu"]["gemini_4_bf16_mixed_auto_time"] > 0
    notes = {row["case"]: row["notes"] for row in rows}
    assert metrics["ladder_gpu"]["baseline_images_per_second"] > 0 and notes["ladder_gpu"]["tf32_skipped"]
    assert metrics["ladder_gpu"]["baseline_predicted_images_per_second"] > 0
    assert metrics["offload_gpu"]["gemini_offload_declared_gb"] > 0
    assert metrics["families_gpu"]["tiny_z_image_full_gemini_2_32_true_32px_images_per_second"] > 0
    sweep = metrics["gemini_gpu"]
    assert all(sweep[f"tiny_b2_{name}_fits"] == 1 for name in ("autocast", "resident", "half_optim", "optim", "all"))
    # Half of the gradients go to the host as bfloat16, and half of the weights come back.
    assert 0 < sweep["tiny_b2_half_optim_fast_to_slow_gib"] < sweep["tiny_b2_optim_fast_to_slow_gib"]
    assert "tiny_b2_resident_fast_to_slow_gib" not in sweep


def test_cases_for_a_gpu_are_in_one_part_each() -> None:
    cases = [case for part in gpu_check.PARTS.values() for case, _ in part.cases]
    assert sorted(cases) == sorted(path.stem for path in (BENCHMARKS / "cases").glob("*_gpu.py"))


def test_a_test_that_no_row_names_is_in_the_default_part() -> None:
    assert gpu_check.part_of("tests/new/test_new.py::test_new") == gpu_check.DEFAULT
    assert gpu_check.part_of("tests/training/test_speed.py::test_cuda_tf32") == ("1", 4)
    assert gpu_check.part_of("tests/training/test_speed.py::test_cuda_compiled_blocks")[0] == "4"
    assert gpu_check.DEFAULT[0] in gpu_check.PARTS and {row[1] for row in gpu_check.TESTS} <= gpu_check.PARTS.keys()


def test_a_case_that_takes_too_long_is_stopped_and_the_next_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.py"
    script.write_text("import sys, time; print(sys.argv[1], flush=True); time.sleep(60 * (sys.argv[1] == 'long'))")
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    monkeypatch.setattr(gpu_check, "LEAST", 1)
    call = gpu_check.Call(time.monotonic() + 3)
    gpu_check.run_cases(call, ["short", "long", "after"], tmp_path, dry=False)
    told = capfd.readouterr().out
    assert "==> short: exit code 0" in told and "==> long: stopped: the time is over; its lines hold" in told
    assert "==> after: not started, 0 s are left; run PART=after" in told and call.failed


def test_a_machine_without_a_gpu_or_a_commit_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    assert gpu_check.main(["smoke", "--results", str(tmp_path)]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lines, "_commit", lambda: "unknown")
    assert gpu_check.main(["smoke", "--results", str(tmp_path)]) == 2
    assert "set GPU_COMMIT=$(git rev-parse HEAD)" in capsys.readouterr().err
    assert gpu_check.main([]) == 2 and "PART=smoke" in capsys.readouterr().out


def test_the_list_of_wheels_names_what_they_need(tmp_path: Path) -> None:
    wheels, sources, there = gpu_wheels.listed()
    assert {"diffusers", "bitsandbytes", "hydra-core"} <= set(wheels) and "deepspeed" in sources and "torch" in there
    assert gpu_wheels.unusable(["a-1-py3-none-any.whl", "b-1-cp312-cp312-manylinux2014_x86_64.whl"]) == []
    assert gpu_wheels.unusable(["c-1-cp311-cp311-manylinux2014_x86_64.whl"]) != []
    path = tmp_path / "d-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        needs = "Requires-Dist: torch\nRequires-Dist: nowhere\nRequires-Dist: old; python_version < '3.9'\n"
        archive.writestr("d-1.dist-info/METADATA", f"Name: d\n{needs}Requires-Dist: more; extra == 'all'\n")
        archive.writestr("d/libbitsandbytes_cuda118.so", "large")
        archive.writestr("d/libbitsandbytes_cuda130.so", "small")
    other = tmp_path / "thesis.tex"
    other.write_text("mine")
    with pytest.raises(SystemExit, match="thesis.tex, which is no wheel"):
        gpu_wheels.empty(tmp_path)
    assert path.exists()
    other.unlink()
    assert gpu_wheels.missing([path]) == ["d-1-py3-none-any.whl needs nowhere"]
    gpu_wheels.slim(path, gpu_wheels.SLIMMED["bitsandbytes"])
    assert zipfile.ZipFile(path).namelist() == ["d-1.dist-info/METADATA", "d/libbitsandbytes_cuda130.so"]
    gpu_wheels.empty(tmp_path)
    assert not list(tmp_path.iterdir())
