"""The case `costs`, and the tables of the pages that are made of its lines and of those of GPU cases."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import cost_tables
import run
from cases import costs
from training_runs import Run

GPUS = ("rtx-3060", "a100-80gb")


def machine(gpu: str, count: int) -> Any:
    return next(each for each in costs.machines([gpu]) if each.count == count)


def a_line(case: str, metrics: dict[str, float], *, date: str = "2026-03-01", gpu: str | None = None) -> dict[str, Any]:
    hardware = {"cpu": "Xeon", "cores": 2} | ({} if gpu is None else {"gpu": gpu, "gpus": 1})
    line = {"case": case, "metrics": metrics, "hardware": hardware, "machine": gpu or "2-cores"}
    return line | {"date": f"{date}T00:00:00", "commit": "0123456789abcdef"}


A100 = "NVIDIA A100-SXM4-80GB"


def test_costs_predicts_memory_and_speed_of_what_suits_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(costs.TWO_PHASES, images={32: 1e6, 64: 1e6}, batch_size=64)
    monkeypatch.setattr(costs, "TWO_PHASES", recipe)
    found = costs.measure(models={"tiny": 32}, gpus=GPUS, pre_trained="tiny")
    alone = {key.removeprefix("tiny_1x_rtx-3060_") for key in found if "rtx-3060" in key}
    names = {"single", "gemini", "gemini_offload", "deepspeed_zero2_offload"}
    figures = {f"{name}_{what}" for name in names for what in ("gb", "images_per_second", "batch")}
    assert alone == figures | {"gemini_offload_host_gb", "deepspeed_zero2_offload_host_gb"}
    assert "tiny_8x_a100-80gb_ddp_gb" in found and "tiny_8x_a100-80gb_single_gb" not in found
    assert found["tiny_8x_a100-80gb_gemini_images_per_second"] > found["tiny_1x_a100-80gb_gemini_images_per_second"]
    for size in recipe.images:
        prefix = f"tiny_{size}_8x_a100-80gb"
        stored, online = (found[f"{prefix}_{kind}_images_per_second"] for kind in ("stored", "online"))
        assert stored > online > 0 and found[f"{prefix}_encoding_images_per_second"] > online
    assert all(value == float(f"{value:.4g}") for value in found.values())


def test_costs_says_what_a_strategy_needs_that_does_not_fit() -> None:
    from sd_lightning import LatentDiffusion

    model, large = LatentDiffusion.build("tiny", device="meta"), machine("rtx-3060", 1)
    small = replace(large, device=replace(large.device, memory_gib=0.5))
    found = costs.cells(model, "x", small, 32)
    assert found["x_single_needs_gb"] > 0.97 * 0.5 * 2**30 / 1e9
    assert not any(key.endswith(("images_per_second", "_needs_host_gb")) for key in found)
    without_host = replace(large, device=replace(large.device, host_memory_gib=1))
    assert costs.cells(model, "x", without_host, 32)["x_single_needs_host_gb"] > 2


def test_gemini_offloads_a_part_where_it_does_not_fit_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    from sd_lightning import LatentDiffusion

    monkeypatch.setattr(costs, "STRATEGIES", ("gemini",))
    model, large = LatentDiffusion.build("tiny", device="meta"), machine("rtx-3060", 1)
    resident = costs.cells(model, "x", replace(large, device=replace(large.device, memory_gib=0.1)), 32)
    just_less = resident["x_gemini_needs_gb"] - 5e-3
    small = replace(large, device=replace(large.device, memory_gib=just_less * 1e9 / 2**30 / 0.97))
    found = costs.cells(model, "x", small, 32)
    assert found["x_gemini_offloaded"] in (0.25, 0.5, 0.75, 1.0) and found["x_gemini_gb"] <= just_less
    assert "x_gemini_needs_gb" not in found


def test_gpus_with_links_are_taken_eight_at_a_time_and_unknown_ones_are_named() -> None:
    assert [str(each) for each in costs.machines(GPUS)] == ["1x_rtx-3060", "1x_a100-80gb", "8x_a100-80gb"]
    assert machine("t4", 1).precision == "16-mixed" and machine("l4", 1).precision == "bf16-mixed"
    assert list(costs.suited(1)) == ["single", "gemini", "gemini_offload", "deepspeed_zero2_offload"]
    assert "single" not in costs.suited(8) and {"ddp", "fsdp"} < set(costs.suited(8))
    with pytest.raises(SystemExit, match="costs: got gpus with a1000; expected names of rtx-3060, "):
        costs.machines(["a1000"])


def test_a_cell_is_memory_speed_and_dollars_or_a_dash() -> None:
    eight, alone = machine("a100-80gb", 8), machine("rtx-3060", 1)
    metrics = {"sd15_8x_a100-80gb_ddp_gb": 82.98, "sd15_8x_a100-80gb_ddp_batch": 50}
    metrics |= {"sd15_8x_a100-80gb_ddp_images_per_second": 274.2, "sd15_1x_rtx-3060_single_needs_gb": 20.06}
    metrics |= {"sd15_1x_rtx-3060_gemini_gb": 9.0, "sd15_1x_rtx-3060_gemini_images_per_second": 2.5}
    metrics |= {"sd15_1x_rtx-3060_gemini_batch": 4, "sd15_1x_rtx-3060_gemini_offloaded": 0.5}
    metrics |= {"sd15_1x_rtx-3060_gemini_host_gb": 12.0}
    metrics |= {"sd15_1x_rtx-3060_gemini_offload_needs_gb": 13, "sd15_1x_rtx-3060_gemini_offload_needs_host_gb": 40}
    table = cost_tables.Table(metrics, [])
    price = 1e6 / 274.2 / 3600 * 8 * eight.device.price_per_hour
    assert table.cell("sd15", eight, "ddp", details=True) == f"83.0 · 274 · ${price:.1f} · 50"
    assert table.cell("sd15", eight, "ddp", details=False) == f"83.0 · 274 · ${price:.1f}"
    assert table.cell("sd15", alone, "single", details=True) == "needs 20.1"
    assert table.cell("sd15", alone, "single", details=False) == "–"
    assert table.cell("sd15", alone, "gemini", details=True) == "9.0 + 12.0 · 2.50 · – · 4 (50%)", (
        "no price, no dollars"
    )
    assert table.cell("sd15", alone, "gemini_offload", details=True) == "needs 13.0, needs 40.0 host"
    assert table.cell("of another line", eight, "ddp", details=True) == "–"


def test_a_measured_run_takes_the_place_of_the_prediction_if_its_settings_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    like = Run("sd15", 512, "single", batch_size=8)
    case = ModuleType("probe")
    vars(case)["MEASURED"] = {
        "plain": like,
        "slow": like,
        "cached": replace(like, encoders="text"),
        "without": replace(like, averages=False),
        "not_run": like,
    }
    monkeypatch.setattr(cost_tables, "case_names", lambda: ["probe"])
    monkeypatch.setattr(cost_tables, "load_case", lambda name: case)
    metrics = {"plain_images_per_second": 30.0, "plain_gb": 40.0, "slow_images_per_second": 20.0, "slow_gb": 30.0}
    metrics |= {"cached_images_per_second": 60.0, "without_images_per_second": 31.0}
    lines = [
        a_line("probe", metrics, gpu=A100),
        a_line("probe", metrics | {"plain_images_per_second": 99.0}, gpu=A100, date="2026-01-01"),
        a_line("probe", metrics),
    ]
    runs = cost_tables.measured_runs(lines)
    assert len(runs) == 8, "those of two lines, without the one of a CPU"
    table = cost_tables.Table({"sd15_1x_a100-80gb_single_images_per_second": 1.0}, runs)
    one = machine("a100-80gb", 1)
    price = 1e6 / 30 / 3600 * one.device.price_per_hour
    assert table.cell("sd15", one, "single", details=True) == f"**40.0 · 30.0 · ${price:.1f} · 8**<sup>1</sup>"
    text = table.text(["a"], [["b"]])
    note = "batch 1 x 8, bf16-mixed, with EMA, images and captions encoded in the step; 2026-03-01, 01234567, `probe`."
    assert text.endswith(f"| b |\n\n<sup>1</sup> Measured: {note}\n")
    assert table.cell("sd15", machine("a100-80gb", 8), "single", details=False) == "–"
    others = cost_tables.other_settings(runs)
    assert others.count("latents cached") == others.count("no EMA") == 2 and "**– · 60.0 · $" in others
    assert "with EMA, images" not in others, "which is in the table"


def test_a_line_of_a_gpu_without_a_table_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"plain_images_per_second": 30.0, "plain_gb": 40.0}
    assert cost_tables.measured_runs([a_line("train_step_gpu", metrics, gpu="NVIDIA X1")]) == []
    told = "cost tables: the line of train_step_gpu of 2026-03-01 is of NVIDIA X1, which no table in conf/devices has"
    assert capsys.readouterr().err.startswith(told)
    (found,) = cost_tables.measured_runs([a_line("train_step_gpu", metrics, gpu=A100), a_line("a past case", {})])
    assert (found.machine.gpu, found.machine.count, found.gb) == ("a100-80gb", 1, 40.0)


def test_runs_of_gpu_cases_name_what_the_planner_and_the_models_know() -> None:
    from sd_lightning.models import families
    from sd_lightning.strategies.presets import candidates

    cases = {name: load.MEASURED for name in run.case_names() if hasattr(load := run.load_case(name), "MEASURED")}
    assert {"train_step_gpu", "gemini_gpu", "planner_gpu"} <= cases.keys()
    for each in (each for runs in cases.values() for each in runs.values()):
        assert families.architecture(each.model) and each.resolution % 8 == 0 and each.gpus > 0
        assert each.strategy in {candidate.name for candidate in candidates()}
    with pytest.raises(ValueError, match="Run got encoders=some; expected one of all, text, none"):
        Run("sd15", 512, "single", 8, encoders="some")


def test_two_phases_are_days_and_dollars_beside_the_published_ones() -> None:
    metrics = {}
    for gpu in ("a100-80gb", "mi300x"):
        for size, speeds in ((256, (2000.0, 1000.0, 4000.0)), (512, (400.0, 200.0, 800.0))):
            for kind, speed in zip(("stored", "online", "encoding"), speeds, strict=True):
                metrics[f"sd21_{size}_8x_{gpu}_{kind}_images_per_second"] = speed
    metrics["sd21_256_8x_h100_stored_images_per_second"] = 1.0  # the other phase does not fit
    rows = [line.split(" | ") for line in cost_tables.two_phases(metrics).splitlines() if "8 x" in line]
    assert [row[0] for row in rows] == ["| 8 x `a100-80gb`", "| 8 x `mi300x`", "| 8 x A100, published"]
    days = 1126.4e6 / 2000 / 86400, 1740.8e6 / 400 / 86400, 790e6 / 4000 / 86400 + 300e6 / 800 / 86400
    price = cost_tables.machines(["a100-80gb"])[1].device.price_per_hour
    assert rows[0][1] == f"{days[2]:.1f} · ${24 * 8 * price * days[2]:,.0f}"
    assert rows[0][2] == f"{days[0]:.1f} · ${24 * 8 * price * days[0]:,.0f}"
    assert rows[0][4].startswith(f"{sum(days):.1f} · $") and rows[0][8].startswith("2.00 ×; ")
    assert rows[1][1] == f"{days[2]:.1f} · –" and rows[1][9] == "–; – |"
    # 8 A100 at $2 an hour: 81.33 days and $31,230 without encoding, as published.
    assert rows[2][1:4] == ["19.7 · $7,568", "11.9 · $4,551", "69.5 · $26,679"]
    assert rows[2][5:7] == ["–", "–"] and rows[2][8].startswith("1.40 ×; ")
    took = (1126.4e6 / 1100 + 1740.8e6 / 290) / (1126.4e6 / 2000 + 1740.8e6 / 400)
    assert f" are predicted: {1 / took:.2f} of them on `a100-80gb`.\n" in cost_tables.two_phases(metrics)
    assert f"took {took:.1f} times the days that are predicted so" in cost_tables.summary_table(metrics, [])


def test_without_a_line_of_costs_the_pages_say_how_to_get_one() -> None:
    found = cost_tables.tables(None, [])
    assert found["summary"] == found["two-phases"] == cost_tables.NOT_MEASURED
    assert found["other-settings"] == cost_tables.NO_RUNS and "| `h100` | $" in found["prices"]
    of_older = cost_tables.tables(a_line("costs", {}), [])
    assert "| `sd15`, 512 | 8 x `h100` | – | – |" in of_older["summary"]
    assert "published" in of_older["two-phases"] and "`h100`" not in of_older["two-phases"]


def test_the_readme_names_the_fastest_strategy_or_that_nothing_is_measured() -> None:
    import report

    speeds = {"sdxl_8x_h100_ddp_images_per_second": 10.0, "sdxl_8x_h100_fsdp_images_per_second": 20.0}
    price = cost_tables.dollars(cost_tables.per_million(machine("h100", 8), 20.0))
    sentence = (
        f"A million images of 1024 x 1024 pixels train `sdxl` for **{price}** on 8 `h100`, under `fsdp`: predicted"
    )
    assert cost_tables.headline(speeds).startswith(sentence) and cost_tables.headline({}) is None
    rows = [a_line("costs", speeds), a_line("gemini", {"gathered_vs_fsdp2": 0.5})]
    for row, case in zip(rows, (costs, report.load_case("gemini")), strict=True):
        row["revision"] = report.revision_of(case)
    overhead, gemini, money = report.headlines(rows).splitlines()
    assert overhead == "- `step_overhead`: not measured yet."
    assert "takes **0.500 ×** FSDP2" in gemini and gemini.endswith("(01234567, 2026-03-01, 2-cores.)")
    assert money.startswith(f"- {sentence}")
