"""The ladder: its rungs are configurations, each with one change; what a machine cannot run is told and taken back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import ladder
import ladder_forecast as forecast
import ladder_runs as runs
import report
from places import REPO

BENCHMARKS = REPO / "benchmarks"
CPU = (False, 2, False, False)
GPUS = (True, 8, True, True)


def a_climb() -> Any:
    return ladder.Climb(("data.resolution=32",), "photos", "latents", (16, 64))


def settings(options: list[str]) -> dict[str, Any]:
    """Return the configuration as dotted keys; without the run's name."""
    found = OmegaConf.to_container(forecast.composed(options))
    return {
        key: value for key, value in _flat(found) if key not in ("name", "output_dir", "callbacks.loss_guard.run_dir")
    }


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


CHANGES = {
    "tf32": {"speed.allow_tf32"},
    "bf16": {"trainer.precision", "module.encoder_dtype"},
    "loader": {"data.num_workers"},
    "adamw": {"optimizer.fused"},
    "fused_layers": {"speed.compile_blocks"},
    "flash": {"speed.attention"},
    "batch": {"data.batch_size"},
    "compile": {"speed.inductor_mode"},
}
"""Rung -> all settings in which it differs from the one below; others exchange a group."""
GROUPS = {
    "ema": ("callbacks.ema.", "callbacks.weight_averaging"),
    "zero2": "strategy.",
    "fsdp": "strategy.",
    "latents": "data.",
}
"""Rung -> beginning of the settings that it changes, which are parts of a whole."""


@pytest.mark.slow
def test_each_rung_changes_one_thing_of_the_rung_below() -> None:
    way = a_climb()
    found = {rung.name: settings(way.command(rung, [])) for rung in ladder.RUNGS}
    below = {rung.name: under.name for under, rung in zip(ladder.RUNGS, ladder.RUNGS[1:])} | {"fsdp": "ema"}
    for name, other in below.items():
        keys = found[name].keys() | found[other].keys()
        differing = {key for key in keys if found[name].get(key) != found[other].get(key)}
        local = {key for key in differing if ".run_dir" in key or key.endswith(("save_dir", "default_root_dir"))}
        if name in GROUPS:
            assert differing - local and all(key.startswith(GROUPS[name]) for key in differing - local), name
        else:
            assert differing - local == CHANGES[name]
    assert CHANGES.keys() | GROUPS.keys() == below.keys()


def test_what_is_left_out_is_taken_back_above() -> None:
    way = a_climb()
    of = {rung.name: rung for rung in ladder.RUNGS}
    machine = ladder.Machine(*CPU)
    left_out = [rung for rung in ladder.RUNGS if rung.lacks(machine)]
    assert {rung.name for rung in left_out} == {"tf32", "bf16", "compile"}
    plain, above = (settings(way.command(of[name], left_out)) for name in ("baseline", "adamw"))
    differing = {key for key in plain if plain[key] != above.get(key) and not key.endswith(("run_dir", "save_dir"))}
    assert differing == {"data.num_workers", "optimizer.fused"}
    alone = ladder.Machine(True, 1, True, True)
    left_out = [rung for rung in ladder.RUNGS if rung.lacks(alone)]
    assert {rung.name for rung in left_out} == {"zero2", "fsdp"}
    assert settings(way.command(of["latents"], left_out))["strategy._target_"].endswith("DDPStrategy")
    assert settings(way.command(of["latents"], []))["strategy._target_"].endswith("FSDPStrategy")
    assert not [rung.name for rung in ladder.RUNGS if rung.lacks(ladder.Machine(*GPUS))]


def test_each_rung_says_what_it_changes_and_how_to_run_it() -> None:
    for rung in ladder.RUNGS:
        assert rung.change and "\n" not in rung.change
        assert f"python -m sd_lightning.train experiment=ladder_{rung.name} " in rung.file.read_text()
    files = {path.stem.removeprefix("ladder_") for path in ladder.EXPERIMENTS.glob("ladder_*.yaml")}
    assert files == {rung.name for rung in ladder.RUNGS}


def test_rungs_take_turns_and_a_failing_one_is_told_and_taken_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def trained(options: list[str], folder: Path) -> dict[str, float] | str:
        ran.append(options)
        if options[0] == "experiment=ladder_loader":
            return "failed: error: no more memory"
        return {"images_per_second": float(len(ran)), "gb": 1.0, "data_wait": 0.0}

    monkeypatch.setattr(runs, "trained", trained)
    rungs = [rung for rung in ladder.RUNGS if rung.name in ("baseline", "bf16", "loader", "adamw", "flash")]
    *first, (found, left_out) = runs.climb(ladder.Machine(*CPU), a_climb(), tmp_path, rounds=2, rungs=rungs)
    assert len(first) == len(ran), "figures are given after each run"
    assert [options[0].removeprefix("experiment=ladder_") for options in ran] == [
        *("baseline", "loader", "adamw", "flash"),
        *("flash", "adamw", "baseline"),
    ]
    assert found["baseline_images_per_second"] == [1.0, 7.0] and found["adamw_images_per_second"] == [3.0, 6.0]
    assert "tf32_skipped" not in found, "only what was to run is told"
    assert found["bf16_skipped"] == "this CPU has no arithmetic in bfloat16"
    assert found["loader_skipped"] == "failed: error: no more memory"
    assert {rung.name for rung in left_out} == {"tf32", "bf16", "loader", "compile", "fused_layers"}
    assert {"speed.compile_blocks=false", "speed.allow_tf32=false"} <= {*ran[3]}, "a CPU compiles for the one rung only"
    assert (
        "data.num_workers=0" in ran[2] and "trainer.precision=32-true" in ran[2] and "data.num_workers=0" not in ran[1]
    )
    assert found["adamw_command"].startswith("python -m sd_lightning.train experiment=ladder_adamw speed.allow_tf32=")
    assert runs.gained(found, rungs) == {"gained": pytest.approx(4.5 / 4)}
    assert runs.gained({"adamw_images_per_second": [3.0]}, rungs) == {}, "figures are kept if the first rung fails"
    ran.clear()
    done = {"baseline_images_per_second": 1.0, "bf16_skipped": "no", "loader_skipped": "failed"}
    *_, (again, _) = runs.climb(ladder.Machine(*CPU), a_climb(), tmp_path, rounds=1, rungs=rungs, done=done)
    assert [options[0].removeprefix("experiment=ladder_") for options in ran] == ["adamw", "flash"]
    assert again.items() >= done.items() and "data.num_workers=0" in ran[0], "what was left out still is"
    assert runs.gained(again, rungs) == {"gained": 2.0}


def test_several_gpus_are_also_measured_from_one_to_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def trained(options: list[str], folder: Path) -> dict[str, float] | str:
        ran.append(options)
        return "failed" if len(ran) == 2 else {"images_per_second": 10.0 * len(ran), "gb": 1.0, "data_wait": 0.0}

    def way(count: int) -> Any:
        return ladder.Climb((f"trainer.devices={count}",), "photos", "latents", (4 * count, 16 * count))

    monkeypatch.setattr(runs, "trained", trained)
    found = runs.scaling(way, [], 6, tmp_path)
    assert [[word for word in words if "devices" in word or "batch" in word] for words in ran] == [
        [f"trainer.devices={count}", f"data.batch_size={16 * count}"] for count in (1, 2, 4, 6)
    ]
    assert {words[0] for words in ran} == {"experiment=ladder_latents"}
    assert found == {
        "scaling_1_images_per_second": 10.0,
        "scaling_2_skipped": "failed",
        "scaling_4_images_per_second": 30.0,
        "scaling_6_images_per_second": 40.0,
    }


def test_a_failing_run_is_told_by_its_own_last_line(tmp_path: Path) -> None:
    found = runs.trained(["experiment=ladder_baseline", "data.train_data_dir=nowhere"], tmp_path / "run")
    assert isinstance(found, str) and found.startswith("failed: error: ") and "nowhere" in found


@pytest.mark.slow
def test_the_planner_knows_attention_batch_average_sharding_and_stored_latents() -> None:
    from sd_lightning.planner.calibration import hardware

    device, speeds = hardware("a100-80gb")
    way, of = a_climb(), {rung.name: rung for rung in ladder.RUNGS}

    def of_rung(name: str) -> tuple[float, float]:
        rate, memory = forecast.predicted(way.command(of[name], []), forecast.Hardware(device, speeds, 2))
        return float(rate), float(memory)

    found = {name: of_rung(name) for name in ("adamw", "flash", "batch", "fsdp", "latents")}
    assert found["flash"][1] < found["adamw"][1]
    assert found["batch"][0] > 1.5 * found["flash"][0] and found["batch"][1] > found["flash"][1]
    assert found["fsdp"][1] < found["batch"][1]
    assert found["latents"][0] > 1.05 * found["fsdp"][0]


def a_line(case: str, metrics: dict[str, float], notes: dict[str, str], **more: Any) -> dict[str, Any]:
    hardware = {"system": "Linux", "cpu": "Some CPU", "cores": 2, "memory_gib": 8.0}
    return {
        "case": case,
        "metrics": metrics,
        "notes": notes,
        "spread": {},
        "rounds": 3,
        "hardware": hardware,
        "versions": {"torch": "2.13.0"},
        "commit": "c" * 40,
        "date": "2026-11-25T01:00:00+00:00",
        **more,
    }


RATES = {"baseline_images_per_second": 50.0, "adamw_images_per_second": 100.0, "baseline_gb": 1.0, "adamw_gb": 0.5}
TOLD = {
    "baseline_predicted_images_per_second": 55.0,
    "adamw_predicted_images_per_second": 55.0,  # as lines have it that were written before
    "flash_predicted_images_per_second": 90.0,
}


def write(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "machine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_shows_what_is_measured_what_is_predicted_and_what_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = {"model": "tiny at 32 x 32", "speeds": "calibrated on 2026-11-25", "tf32_skipped": "a CPU has no TF32"}
    command = "python -m sd_lightning.train experiment=ladder_adamw data.train_data_dir=photos"
    write(
        tmp_path,
        a_line("ladder", {**RATES, "devices": 2}, {**notes, "adamw_command": command}),
        a_line("ladder_forecast", {**TOLD, "devices": 2}, {"speeds": "calibrated on 2026-11-26"}),
    )
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    page, picture = (Path(line) for line in capsys.readouterr().out.split())
    text = page.read_text()
    assert "tiny at 32 x 32, 2 processes on 2 cores of Some CPU" in text
    assert "measured on 2 processes on 2 cores of Some CPU (cccccccc, 2026-11-25," in text
    assert "Marks are predicted by the planner, speeds calibrated on 2026-11-26" in text
    assert "<td>100</td><td>2.00</td><td>not predicted</td><td>0.5</td>" in text, "no memory is predicted"
    assert "skipped: a CPU has no TF32" in text and command in text
    assert "$ per million" not in text and "<td>2.00</td>" in text and "https://" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_cost_where_a_price_is_known_and_scaling_where_it_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = {f"scaling_{count}_predicted_images_per_second": 40.0 * count * 0.9 ** (count > 1) for count in (1, 4)}
    notes = {"model": "sd21 at 512 x 512", "gpu": "NVIDIA A100-SXM4-80GB"}
    network = {f"ema_{name}_predicted_images_per_second": rate for name, rate in (("tcp", 400.0), ("efa", 500.0))}
    write(tmp_path, a_line("ladder_plan", {**TOLD, **scaling, **network, "devices": 4}, notes))
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    text = Path(capsys.readouterr().out.split()[0]).read_text()
    from sd_lightning.planner.devices import load_device

    assert "<td>fused AdamW</td><td>not predicted</td><td>—</td>" in text and text.count("<td>55</td>") == 1
    price = load_device("a100-80gb").price_per_hour
    assert price is not None and f"<td>{1e6 / 55 / 3600 * price * 4:,.2f}</td>" in text
    assert "DDP 400 img/s over TCP, 500 over EFA (+25%)." in text
    assert "90% of linear on 4" in text and "speeds assumed from the data sheet" in text
    assert "measured" not in text
    both = {f"scaling_{count}_images_per_second": 30.0 * count * 0.8 ** (count > 1) for count in (1, 4)}
    write(tmp_path, a_line("ladder_plan", {**TOLD, **scaling, **both, "devices": 4}, notes))
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    text = Path(capsys.readouterr().out.split()[0]).read_text()
    assert "80% of linear on 4" in text and "Circles are measured, diamonds predicted" in text
    unknown = a_line("ladder_plan", {**TOLD, "devices": 4}, {**notes, "gpu": "Some GPU"})
    write(tmp_path, unknown)
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    assert "$ per million" not in Path(capsys.readouterr().out.split()[0]).read_text()


def test_a_ladder_without_a_forecast_shows_what_is_measured(tmp_path: Path) -> None:
    write(tmp_path, a_line("ladder", {**RATES, "devices": 2}, {"model": "tiny at 32 x 32"}))
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    text = (tmp_path / "index.html").read_text()
    assert "<td>100</td><td>2.00</td><td>0.5</td>" in text and "predicted" not in text


def test_a_page_of_other_cases_says_how_to_measure_a_ladder(tmp_path: Path) -> None:
    write(tmp_path, a_line("import_time", {"ratio": 1.0}, {}))
    assert report.main(["--html", "--results", str(tmp_path)]) == 0
    assert "python benchmarks/run.py ladder ladder_plan" in (tmp_path / "index.html").read_text()


def test_no_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--html", "--results", str(tmp_path)]) == 2
    assert "run benchmarks/run.py CASE first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_the_planner_has_no_price_for_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "predicted", lambda options, hardware: (1.0, 2.0))
    *_, found = forecast.forecasts(a_climb(), [], forecast.Hardware(None, None, 1))
    without = {rung.name for rung in ladder.RUNGS} - {name.partition("_predicted")[0] for name in found}
    assert without == {"loader", "adamw", "fused_layers", "ema", "compile"}
