"""The comparing program: what it reads from runs' folders, prints and writes, and what it refuses."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from made_runs import config, facts, make_run
from places import REPO
from refusals import refuse
from sd_lightning import compare as program
from sd_lightning.apps.compare import comparison, lines, scalings
from sd_lightning.apps.compared_run import read_run, read_runs
from sd_lightning.apps.settings import differences, preset_name
from sd_lightning.planner.devices import load_device

Main = Callable[..., tuple[int, str]]


def compared(*folders: Path, price: float | None = None) -> dict[str, Any]:
    return comparison(read_runs([str(folder) for folder in folders]), price=price)


def text_of(*folders: Path, price: float | None = None) -> str:
    return "\n".join(lines(compared(*folders, price=price)))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """On one device and on two: 1.5 times as fast, in half of the memory."""
    one = make_run(tmp_path / "one", config=config(), summary=facts())
    more = {"rates": (20, 140, 150, 160, 170), "peak": 1.0}
    return one, make_run(tmp_path / "two", config=config("fsdp", devices=2), summary=facts(), **more)  # type: ignore[arg-type]


def test_the_table_sets_runs_against_the_first(two: tuple[Path, Path]) -> None:
    table = [line.split("  ") for line in text_of(*two).splitlines()]
    head, one, other = ([cell.strip() for cell in line if cell.strip()] for line in table if len(line) > 12)
    rows = [dict(zip(head, line, strict=True)) for line in (one, other)]
    assert rows[0] == {
        "run": "one",
        "strategy": "single",
        "devices": "1",
        "precision": "32-true",
        "batch": "64",
        "img/s": "100",
        "per device": "100",
        "speed-up": "1.00 x",
        "peak GiB": "2.00",
        "memory": "1.00 x",
        "loss": "0.5488",
        "at step": "40",
        "$/million": "2.24",
    }
    assert rows[1]["img/s"] == "155 ± 7.5" and rows[1]["per device"] == "77.5", "the first value is of the warm-up"
    assert (rows[1]["speed-up"], rows[1]["memory"], rows[1]["at step"]) == ("1.55 x", "0.50 x", "50")


def test_every_number_is_in_the_json_file(two: tuple[Path, Path], call_main: Main) -> None:
    code, printed = call_main(program, *map(str, two), "output=numbers.json")
    assert code == 0 and printed.endswith("written to numbers.json\n")
    data = json.loads(Path("numbers.json").read_text())
    assert data == json.loads(json.dumps(compared(*two)))
    other = data["runs"][1]
    assert other["images_per_second"] == 155 and other["quartiles"] == [147.5, 162.5]
    assert other["speedup"] == 1.55 and other["memory_ratio"] == 0.5 and other["rates"][0] == [10, 20.0]
    price = load_device("l4").price_per_hour
    assert price and other["dollars_per_million"] == pytest.approx(1e6 / 155 / 3600 * 2 * price)


def test_the_title_says_what_is_the_same_and_what_is_not(tmp_path: Path) -> None:
    def title(name: str, **sections: Any) -> str:
        return compared(tmp_path / "base", make_run(tmp_path / name, config=config(**sections), summary=facts()))[
            "title"
        ]

    make_run(tmp_path / "base", config=config(), summary=facts())
    assert title("same") == "2 runs: tiny; digits; 32 x 32 pixels; batch of 64; NVIDIA L4"
    assert "; different batch sizes: 32, 64; " in title("batch", batch_size=32)
    assert title("model", model={"architecture": "sd21"}).startswith("2 runs: different models: tiny, sd21; digits;")
    assert "; different resolutions: 32 x 32 pixels, 16 x 16 pixels; " in title("small", data={"resolution": 16})
    images = {"_target_": "sd_lightning.data.builders.image_folder_data", "train_data_dir": "photos"}
    assert "; different data: digits, images photos; " in title("photos", data=images)
    other = make_run(tmp_path / "gpu", config=config(), summary=facts("Tesla T4"))
    assert compared(tmp_path / "base", other)["title"].endswith("; different hardware: NVIDIA L4, Tesla T4")


def test_settings_that_differ_are_told_once_and_by_name(tmp_path: Path) -> None:
    lora = {"_target_": "sd_lightning.models.lora.LoRA", "rank": 8}
    changed = config("gemini", devices=2, lora=lora, seed=3, model={"seed": 3}, optimizer={"lr": 2e-3})
    changed["strategy"]["offload_optim_frac"] = 0.5
    one = make_run(tmp_path / "one", config=config("ddp"), summary=facts())
    other = make_run(tmp_path / "other", config=changed, summary=facts())
    assert compared(one, other)["settings"] == {
        "seed": ["0", "3"],
        "optimizer.lr": ["0.001", "0.002"],
        "strategy": ["ddp", "gemini offload_optim_frac=0.5"],
        "trainer.devices": ["1", "2"],
        "lora": ["null", "LoRA"],
    }
    assert differences([changed, config("gemini", devices=2)])["strategy.offload_optim_frac"] == ["0.5", "0.0"]


def test_many_settings_are_cut_and_counted(tmp_path: Path) -> None:
    many = {f"key{i}": i for i in range(20)}
    one = make_run(tmp_path / "one", config=config(trainer=many), summary=facts())
    other = make_run(tmp_path / "other", config=config(trainer=dict.fromkeys(many, 99)), summary=facts())
    text = text_of(one, other)
    assert text.count("  trainer.key") == 15 and "  and 5 more; output=compare.json holds all" in text
    assert "  trainer.key3   3 (one)   99 (other)" in text
    names = [letter * 50 for letter in "abc"]
    runs = [make_run(tmp_path / n, config=config(trainer={"key": i}), summary=facts()) for i, n in enumerate(names)]
    shown = [line.split() for line in text_of(*runs).splitlines() if line.endswith(")")]
    assert shown == [["trainer.key", "0", f"({names[0]})"], *([str(i), f"({names[i]})"] for i in (1, 2))]


@pytest.mark.parametrize("name", sorted(file.stem for file in (REPO / "conf/strategy").glob("*.yaml")))
def test_every_strategy_of_the_configuration_is_known_by_its_name(name: str) -> None:
    section = yaml.safe_load((REPO / f"conf/strategy/{name}.yaml").read_text())
    assert preset_name("strategy", {**section, "timeout_seconds": 3}) == name
    own = {"_target_": "mine.Strategy"}
    assert preset_name("strategy", own) == "Strategy" and preset_name("strategy", None) is None


def test_scaling_is_told_where_only_the_devices_differ(tmp_path: Path) -> None:
    def make(name: str, strategy: str, devices: int, rate: float, batch_size: int = 64, **more: Any) -> Path:
        made = config(strategy, devices=devices, batch_size=batch_size, **more)
        return make_run(tmp_path / name, rates=[rate], config=made, summary=facts())

    runs = [
        make("one", "single", 1, 100),
        make("two", "ddp", 2, 183),
        make("four", "ddp", 4, 300, batch_size=256),
        make("faster", "fsdp", 2, 150),
        make("again", "fsdp", 2, 170),
        make("small", "fsdp", 4, 500, data={"resolution": 16}),
    ]
    text = text_of(*runs)
    assert "ddp, against 1 device, batch of 64 in all:\n  2 devices: 1.83 x, 92 % of linear" in text
    assert "ddp, against 1 device, batch of 64 per device:\n  4 devices: 3.00 x, 75 % of linear" in text
    assert "fsdp, against 1 device, batch of 64 in all:\n  2 devices: 1.60 x, 80 % of linear" in text, (
        "the median of two"
    )
    assert text.count("of linear") == 3, "another resolution is another curve"
    again = [make(f"small-{n}", "ddp", n, 100 * n, data={"resolution": 16}) for n in (1, 2)]
    found = [line for line in text_of(*runs, *again).splitlines() if line.startswith("ddp, against 1 device")]
    assert len(found) == len(set(found)) and "ddp, against 1 device, batch of 64 in all, data.resolution=16:" in found
    elsewhere = make_run(tmp_path / "t4", rates=[9.0], config=config("ddp", devices=2), summary=facts("Tesla T4"))
    assert not scalings(read_runs([str(runs[0]), str(elsewhere)]))


def test_dollars_come_from_the_command_line_or_the_gpus_table(two: tuple[Path, Path], tmp_path: Path) -> None:
    table = load_device("l4")
    assert f"dollars: {table.price_per_hour:g} per hour and device, {table.price_source}" in text_of(*two)
    given = compared(*two, price=3.6)["runs"]
    assert [each["dollars_per_million"] for each in given] == pytest.approx([10.0, 1e6 / 155 * 2 * 0.001])
    assert "dollars: 3.6 per hour and device, given" in text_of(*two, price=3.6)
    home = make_run(tmp_path / "home", config=config(), summary=facts("a CPU"))
    assert compared(*two, home)["runs"][2]["dollars_per_million"] is None
    away = make_run(tmp_path / "away", config=config(), summary=facts("a CPU"))
    assert "$/million" not in text_of(home, away) and "no price is known of this hardware; price=" in text_of(
        home, away
    )


def test_runs_of_before_are_compared_by_their_configuration(tmp_path: Path) -> None:
    new = make_run(tmp_path / "new", config=config(), summary=facts())
    old = make_run(tmp_path / "old", config=config("gemini", devices=2), summary={})
    run = read_run(old, "old")
    assert (run.strategy, run.devices, run.batch_size, run.precision) == ("gemini", 2, 64, "32-true")
    assert run.is_finished and (run.hardware, run.date, run.torch) == (None, None, None)
    assert "different hardware: NVIDIA L4, unknown" in text_of(new, old)
    for devices, count in (("0,1,", 2), ([0, 1, 2], 3), ("4", 4), ("auto", None), (-1, None)):
        changed = config(trainer={"devices": devices, "num_nodes": 2})
        name = f"{count}-{devices}"
        assert read_run(make_run(tmp_path / name, config=changed, summary={}), "").devices == (count and 2 * count)


def test_an_old_run_with_a_plan_tells_its_hardware(tmp_path: Path) -> None:
    run = make_run(tmp_path / "planned", config=config(), summary={})
    (run / "plan.json").write_text('{"device": "Tesla T4"}')
    assert read_run(run, "planned").hardware == "Tesla T4"


def test_a_killed_run_is_compared_by_what_it_logged(tmp_path: Path, two: tuple[Path, Path]) -> None:
    killed = make_run(tmp_path / "killed", rates=(1, 70, 80, 90), config=config(), summary=None)
    with (killed / "logs/csv/version_0/metrics.csv").open("a") as file:
        file.write("49,0.4,3")  # cut in the middle of a line
    text = text_of(two[0], killed)
    assert "killed is not finished, and compared by what was logged so far" in text
    run = compared(two[0], killed)["runs"][1]
    assert run["images_per_second"] == 75 and run["peak_gib"] == 2.0 and run["speedup"] == 0.75


def test_a_summary_alone_is_enough(tmp_path: Path, two: tuple[Path, Path]) -> None:
    run = make_run(tmp_path / "moved", rates=(), config=config(), summary=facts())
    assert compared(two[0], run)["runs"][1]["images_per_second"] == 90.0, "the mean of the run"


def test_a_run_without_metrics_is_shown_and_not_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    silent = make_run(tmp_path / "silent", rates=(), config=config(), summary=None)
    text = text_of(*two, silent)
    assert "silent: no metrics were logged" in text
    row = next(line for line in text.splitlines() if line.startswith("silent "))
    assert row.split() == ["silent", "single", "1", "32-true", "64", *"--------"]
    assert "silent, the baseline, has no img/s" in text_of(silent, *two)


def test_values_that_are_no_numbers_are_not_known(tmp_path: Path) -> None:
    odd = {"images_per_second": "fast", "peak_memory_gib": None, "devices": True, "batch_size": -3, "hardware": 7}
    run = read_run(make_run(tmp_path / "odd", rates=(), config=None, summary=odd), "odd")
    assert not run.is_measured and (run.devices, run.batch_size, run.hardware, run.model) == (None,) * 4
    zero = read_run(make_run(tmp_path / "0", rates=[0.0, 0.0], peak=0.0, config=config(), summary=odd), "zero")
    assert (zero.images_per_second, zero.peak_gib) == (None, None) and zero.is_measured, "its losses are"
    assert comparison([zero, zero])["runs"][1]["memory_ratio"] is None
    rates = [float("nan"), float("inf"), 10, 12]
    run = read_run(make_run(tmp_path / "nan", rates=rates, config=config(), summary={}), "nan")
    assert run.images_per_second == 12, "what is not finite is left out, then the first"


def test_runs_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    for name in ("a/run", "b/run", "c"):
        make_run(tmp_path / name, config=config(), summary=facts())
    data = compared(*(tmp_path / name for name in ("a/run", "b/run")))
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]
    assert compared(tmp_path / "a/run", tmp_path / "c")["runs"][0]["name"] == "run"


ODD = (
    "a b",
    "it's",
    'say "hi"',
    "lr=0.1,seed=2",
    "[x]",
    "${oc.env:HOME}",
    "null",
    "1e3",
    "ünï",
    "back\\",
    '\\"',
    "{a:b}",
)


def test_words_are_runs_whatever_their_names(call_main: Main, tmp_path: Path) -> None:
    for name in ODD:
        make_run(tmp_path / "runs" / name, config=config(), summary=facts())
    code, text = call_main(program, *(f"runs/{name}" for name in ODD), "output=all.json")
    assert code == 0, text
    assert [run["name"] for run in json.loads(Path("all.json").read_text())["runs"]] == [*ODD]
    (tmp_path / "here=1").symlink_to(tmp_path / "runs/null")
    code, text = call_main(program, "output=null", "here=1", "runs/1e3", "price=2")
    assert code == 0 and "written" not in text and "\nnull " in text
    code, text = call_main(program, "runs=[runs/null,runs/1e3]", "output=null")
    assert code == 0 and "2 runs: " in text
    code, text = call_main(program, "--cfg", "job", "runs/a b", "runs/it's")
    assert code == 0 and yaml.safe_load(text)["runs"] == ["runs/a b", "runs/it's"]


def test_a_page_and_a_picture_are_written_where_they_are_asked_for(call_main: Main, two: tuple[Path, Path]) -> None:
    code, _ = call_main(program, *map(str, two))
    assert code == 0 and "comparison of runs</title>" in Path("compare.html").read_text(encoding="utf-8")
    Path("sub").mkdir()
    code, _ = call_main(program, *map(str, two), "output=sub/compare.png")
    assert code == 0
    with Image.open("sub/compare.png") as image:
        assert image.width > 1500 and image.height > 800
    assert {path.name for path in Path("sub").iterdir()} == {"compare.png"}


def test_a_reader_that_has_seen_enough_does_not_end_the_program(two: tuple[Path, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sd_lightning.compare", *map(str, two), "output=all.json"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    assert program.stdout is not None
    program.stdout.close()
    _, errors = program.communicate(timeout=120)
    assert (program.returncode, errors) == (0, b"") and (tmp_path / "all.json").is_file()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs, good and bad, that is the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "json", "text", "yaml", "list", "csv", "binary"):
        make_run(tmp_path / "runs" / name, config=config(), summary=facts())
    for name in ("silent", "mute"):
        make_run(tmp_path / "runs" / name, rates=(), config=config(), summary=None)
    damage = {
        "json": ("summary.json", b'{"steps": 4'),
        "text": ("summary.json", b"3"),
        "list": ("config.yaml", b"- 1\n"),
    }
    damage |= {"yaml": ("config.yaml", b"a: [\n"), "csv": ("logs/csv/version_0/metrics.csv", b"hello\n1\n")}
    damage |= {"binary": ("logs/csv/version_0/metrics.csv", b"step,train/loss\n\xff\xfe,1\n")}
    for name, (file, content) in damage.items():
        (tmp_path / "runs" / name / file).write_bytes(content)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").touch()
    (tmp_path / "link").symlink_to("runs/one")
    return tmp_path


REFUSED = {
    "": ("compare got no runs; expected at least two; write python -m sd_lightning.compare runs/one runs/two",),
    "runs/one": ("compare got one run, runs/one; expected at least two",),
    "runs/one runs/tow": ("runs/tow, which does not exist", "write runs/two"),
    "runs/one nothing/there": ("nothing/there, which does not exist; expected a run; runs that exist are runs/",),
    "runs/one runs/xyz": ("runs/xyz, which does not exist", "runs that exist are runs/binary, runs/csv, "),
    "runs/one ''": ("an empty path",),
    "runs/one photos": ("photos, which is no run", "give the output_dir of a training"),
    "runs/one runs": ("runs, which is no run", "write runs/binary runs/csv runs/"),
    "runs/one runs/one/logs": ("runs/one/logs, which is no run", "write ", "runs/one"),
    "runs/one runs/one/summary.json": ("summary.json, which is no run", "write runs/one"),
    "runs/one link": ("compare got runs/one and link, which are the same run",),
    "runs/one runs/silent": ("found no metrics in runs/silent", "expected at least two runs with some"),
    "runs/mute runs/silent": ("found no metrics in runs/mute, runs/silent",),
    "runs/one runs/json": ("cannot read runs/json/summary.json", "expected what a run writes; copy it"),
    "runs/one runs/text": ("found a int in runs/text/summary.json",),
    "runs/one runs/yaml": ("cannot read runs/yaml/config.yaml",),
    "runs/one runs/list": ("found a list in runs/list/config.yaml",),
    "runs/one runs/csv": ("no 'step' column", "runs/csv/logs/csv/version_0/metrics.csv", "delete the damaged"),
    "runs/one runs/binary": ("cannot read a metrics.csv in runs/binary/logs", "delete the damaged"),
    "runs/one runs/two output=compare.pdf": (
        "output=compare.pdf; expected a file that ends with .html, .png or .json",
    ),
    "runs/one runs/two output=.html": ("output=.html; expected a file",),
    "runs/one runs/two output=no/compare.html": ("there is no folder no", "write output=compare.html"),
    "runs/one runs/two price=0": ("price=0", "above 0; write price=2.5"),
    "runs/one runs/two price=-1": ("price=-1",),
    "runs/one runs/two price=.inf": ("price=",),
    "runs/one runs/two price=cheap": ("price=cheap",),
    "runs/one runs/two runs=[runs/one]": ("compare got runs= twice, as words or as settings; write it once",),
    "runs/one runs/two prize=3": ("prize", "price"),
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_bad_input_ends_in_one_clear_line(arguments: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refuse(f"compare {arguments}", REFUSED[arguments], place, capfd)


@pytest.mark.full("kills")
def test_a_trained_run_is_compared_with_what_is_left_of_it_after_a_kill(trained_run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "logs"):
        copy = shutil.copytree if (trained_run / name).is_dir() else shutil.copy2
        (tmp_path / "left").mkdir(exist_ok=True)
        copy(trained_run / name, tmp_path / "left" / name)
    whole, left = compared(trained_run, tmp_path / "left")["runs"]
    assert whole["hardware"] and whole["torch"] and whole["date"] >= "2026" and whole["is_finished"]
    same = ("strategy", "devices", "batch_size", "precision", "images_per_second", "peak_gib", "final_loss", "data")
    assert {name: whole[name] for name in same} == {name: left[name] for name in same}
    assert not left["is_finished"] and left["hardware"] is None
    summary = json.loads((trained_run / "summary.json").read_text())
    assert whole["images_per_second"] == pytest.approx(summary["images_per_second"], rel=0.3)
    assert whole["final_loss"] == pytest.approx(summary["final_loss"], rel=0.3)


@pytest.mark.full("platform")
def test_trained_runs_on_one_and_on_two_processes_are_compared(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    short = "trainer.max_steps=12 trainer.log_every_n_steps=2 callbacks.samples=null trainer.val_check_interval=100"
    short += " trainer.limit_val_batches=0 logger=csv data.batch_size=16"
    for options in ("output_dir=runs/one", "output_dir=runs/two strategy=ddp trainer.devices=2"):
        run_python(
            "-m", "sd_lightning.train", *shlex.split(f"{short} {options}"), cwd=tmp_path, timeout=600, check=True
        )
    summaries = [json.loads((tmp_path / f"runs/{name}/summary.json").read_text()) for name in ("one", "two")]
    assert [(each["devices"], each["strategy"]) for each in summaries] == [(1, "single"), (2, "ddp")]
    for each in summaries:
        assert each["batch_size"] == 16 and each["precision"] == "32-true" and each["hardware"] and each["torch"]
        assert len(each["date"]) == 10 and each["date"][:2] == "20"
    shutil.copytree(tmp_path / "runs/two", tmp_path / "runs/killed", ignore=shutil.ignore_patterns("summary.json"))
    command = ("-m", "sd_lightning.compare", "runs/one", "runs/two", "runs/killed")
    printed = run_python(*command, "output=all.json", cwd=tmp_path, check=True).stdout
    assert "ddp, against 1 device, batch of 16 in all:\n  2 devices: " in printed
    assert "killed is not finished" in printed and "  trainer.devices  1 (one)   2 (two, killed)" in printed
    one, two, killed = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert two["images_per_second"] == killed["images_per_second"] and two["last_step"] == 12
    assert one["final_loss"] == pytest.approx(two["final_loss"], rel=1e-3), "the same samples in the same order"
    assert two["speedup"] == pytest.approx(two["images_per_second"] / one["images_per_second"])
