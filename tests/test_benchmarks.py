"""The benchmark runner and its report; the figures themselves are not a matter of tests."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """(run, report, timing) of the benchmarks folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    modules = [importlib.import_module(name) for name in ("run", "report", "timing")]
    for module in modules:
        monkeypatch.delitem(sys.modules, module.__name__)
    return modules[0], modules[1], modules[2]


def test_every_case_says_what_it_measures_and_its_bars(tools: tuple[ModuleType, ...]) -> None:
    run = tools[0]
    assert {"import_time"} <= set(run.case_names())
    for name in run.case_names():
        case = run.load_case(name)
        assert case.__doc__
        assert callable(case.measure)
        for bar in case.BARS.values():
            sign, limit = bar.split()
            assert sign in run.COMPARE and float(limit) > 0


def test_unknown_case_is_one_line(tools: tuple[ModuleType, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert tools[0].main(["import_tme"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks/run.py: no case import_tme; there are ")
    assert "import_time" in error and error.count("\n") == 1


def test_a_run_appends_a_line_with_all_fields(
    tools: tuple[ModuleType, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tools[0]
    case = ModuleType("probe")
    case.measure, case.BARS = lambda: {"ratio": 1.25}, {"ratio": "<= 1.1"}  # type: ignore[attr-defined]
    monkeypatch.setattr(run, "load_case", lambda name: case)
    monkeypatch.setattr(run, "case_names", lambda: ["probe"])
    assert run.main(["probe", "--results", str(tmp_path)]) == 0
    assert run.main(["probe", "--results", str(tmp_path), "--check"]) == 1
    assert "probe: bar missed: ratio is 1.25; the bar is <= 1.1" in capsys.readouterr().err
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0].keys() == {"case", "metrics", "hardware", "versions", "commit", "date"}
    assert rows[0]["metrics"] == {"ratio": 1.25}
    assert {"cpu", "cores", "memory_gib"} <= rows[0]["hardware"].keys()
    assert file.stem == run.hardware_slug(rows[0]["hardware"])


def test_report_shows_the_newest_line_of_each_machine(
    tools: tuple[ModuleType, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tools[1]

    def line(date: str, ratio: float, **machine: str | int) -> str:
        hardware = {"cpu": "Intel(R) Xeon(R) CPU @ 2.2GHz", "cores": 2, "memory_gib": 8.0} | machine
        row = {"case": "import_time", "metrics": {"ratio": ratio}, "hardware": hardware, "date": date}
        return json.dumps(row | {"versions": {"torch": "2.13.0"}, "commit": "0123456789abcdef-dirty"})

    (tmp_path / "a.jsonl").write_text(
        line("2026-01-01T00:00:00", 1.5) + "\n" + line("2026-02-01T00:00:00", 1.02) + "\n"
    )
    (tmp_path / "b.jsonl").write_text(line("2026-01-15T00:00:00", 1.3, gpu="NVIDIA H100", gpus=1) + "\n")
    assert report.main(["--results", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 2
    assert "| 1x-nvidia-h100 |" in rows[0] and "ratio 1.3 |" in rows[0] and "| no |" in rows[0]
    assert "| 2-cores-intel-xeon |" in rows[1] and "ratio 1.02 |" in rows[1] and "| yes |" in rows[1]
    assert "0123456789-dirty" in rows[1]
    first = (tmp_path / "import_time.svg").read_bytes()
    assert b"<svg" in first
    report.main(["--results", str(tmp_path)])
    assert (tmp_path / "import_time.svg").read_bytes() == first
    assert "import_time.svg" in (tmp_path / "README.md").read_text()


def test_sides_take_turns_and_warm_up_is_dropped(tools: tuple[ModuleType, ...]) -> None:
    timing = tools[2]
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    taken = timing.interleaved({"a": side("a"), "b": side("b")}, rounds=3, warm_up=1)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert taken == {"a": [4, 5, 8], "b": [3, 6, 7]}
    assert timing.medians(taken) == {"a": 5, "b": 6}
