"""A run takes no folder that is not its own: nothing of the user's is replaced, removed or trained on by accident."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from sd_lightning import UsageError
from sd_lightning.callbacks import PortableCheckpoint
from sd_lightning.callbacks.checkpoint import writer
from sd_lightning.data.sources.images import ImageFolder
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.atomic import check_new_folder, check_place
from sd_lightning.storage.runs import RunFolder


def write(root: Path, **files: str) -> None:
    """Write files by path; a path that ends in "/" is a folder."""
    for name, text in files.items():
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)


def finished_run(root: Path) -> None:
    """Write what a run leaves, with its results."""
    with checkpoint.saving(root, 240) as tmp:
        (tmp / "trainer.json").write_text("{}")
    write(root, **dict.fromkeys(("frozen/vae/config.json", "pipeline/vae/config.json", "report.html"), "x"))
    write(
        root, **{"pipeline/model_index.json": '{"_class_name": "P", "vae": []}', "logs/csv/version_0/metrics.csv": "x"}
    )
    write(root, **{"config.yaml": "name: 1", "summary.json": '{"steps": 240}', "samples/step-00000240.png": "x"})
    runs.mark(root)


def snapshot(root: Path) -> dict[str, tuple[int, str]]:
    """Names, times of change and contents of everything below a folder."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        content = os.readlink(path) if path.is_symlink() else content
        found[str(path)] = (path.lstat().st_mtime_ns, content)
    return found


def open_by_callback(run_dir: Path, *loggers: Any, step: int = 0) -> None:
    """Do what a fit with PortableCheckpoint does before its first write."""
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=loggers, strategy=strategy)
    folder = RunFolder(run_dir)
    try:
        writer.take_folder(trainer, folder)
        writer.refuse_another_run(trainer, run_dir, goes_on=step > 0)
    finally:
        folder.unlock()


def open_by_program(run_dir: Path, *, resuming: bool = False, overwrite: bool = False, **reads: Path) -> None:
    """Do what a program does before its first write."""
    given = {name.replace("__", "."): str(path) for name, path in reads.items()}
    runs.check_output_dir(run_dir, resuming=resuming, overwrite=overwrite, reads=given)
    folder = RunFolder(run_dir)
    try:
        folder.open(overwrite=overwrite)
    finally:
        folder.unlock()


WAYS: dict[str, Callable[[Path], None]] = {
    "new": open_by_program,
    "resume": lambda run_dir: open_by_program(run_dir, resuming=True),
    "overwrite": lambda run_dir: open_by_program(run_dir, overwrite=True),
    "prepare": lambda run_dir: RunFolder(run_dir).open(overwrite=True),
    "callback": open_by_callback,
    "callback that resumes": lambda run_dir: open_by_callback(run_dir, step=1),
}
FOREIGN = {
    "a base model": {"model_index.json": "{}", "unet/config.json": "{}"},
    "a folder around one": {"pipeline/model_index.json": "{}"},
    "frozen/": {"frozen/penguins.png": "x"},
    "another program's config": {"config.yaml": "model: 1\ntrainer: 2\n"},
    "a summary": {"summary.json": "{}"},
    "photos": {"0.png": "x", "0.txt": "x"},
    "one hidden file": {".netrc": "secret"},
    "a folder in it": {"thesis/": ""},
    "another program's checkpoints": {"checkpoints/step-00000010/model.pt": "x"},
    "its own lock": {".lock": "combination: 1234"},
    "a mark that is none": {".sd_lightning": "my notes"},
    "a checkpoint of ours": {"checkpoints/step-00000010/manifest.json": '{"sha256": "", "files": {}}'},
    "our names alone": {"checkpoints/": "", "frozen/": "", "logs/": ""},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_of_others_is_refused_and_left_as_it_was(case: str, way: str, tmp_path: Path) -> None:
    write(tmp_path / "mine", **FOREIGN[case])
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"run_?dir=|output_dir=") as refused:
        WAYS[way](tmp_path / "mine")
    assert snapshot(tmp_path) == before
    name = next(iter(FOREIGN[case])).partition("/")[0]
    told = str(refused.value)
    assert "holds what no run of sd_lightning wrote" in told and name in told, told
    setting, _, remedy = told.rpartition("write ")[2].partition("=")
    assert setting == ("run_dir" if "callback" in way else "output_dir")
    open_by_program(Path(remedy))


def test_what_would_be_lost_is_named_and_counted(tmp_path: Path) -> None:
    write(tmp_path, **{f"{i}.png": "x" for i in range(7)}, **{"a/b": "x"})
    with pytest.raises(
        UsageError, match=r"replace: 0.png, 1.png, 2.png, 3.png, 4.png and 3 more \(8 in all\); expected"
    ):
        open_by_program(tmp_path)


EMPTY = {
    "nothing": {},
    "files of systems": {".DS_Store": "x", "._x": "x", "lost+found/": "", "Thumbs.db": "x", "desktop.ini": "x"},
    "a killed run's lock": {".lock": "4711 node7"},
    "half a mark": {".lock": "", ".tmp-sd_lightning-00ff00ff": "{"},
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("way", ["new", "resume", "overwrite", "callback"])
def test_an_empty_folder_becomes_a_runs_and_a_run_killed_early_starts_again(
    case: str, way: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", **EMPTY[case])
    assert not runs.is_run(tmp_path / "run")
    WAYS[way](tmp_path / "run")
    assert json.loads((tmp_path / "run/.sd_lightning").read_text())["format"] == 1
    write(tmp_path / "run", **{"config.yaml": "", "frozen/x": "", "checkpoints/.tmp-step-00000001-00ff/x": "", "n": ""})
    for again in ("new", "resume", "callback", "overwrite"):
        WAYS[again](tmp_path / "run")
    assert set(EMPTY[case]) - {".lock", ".tmp-sd_lightning-00ff00ff"} <= {
        path.name + "/" * path.is_dir() for path in (tmp_path / "run").iterdir()
    }
    assert (tmp_path / "run/n").exists() and not (tmp_path / "run/frozen").exists()


def test_a_run_is_continued_or_overwritten_and_neither_touches_what_others_added(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finished_run(run_dir)
    added = ("notes.txt", "samples/best.png", "pipeline/README.md", "pipeline/.git/HEAD", "logs/mine/log", ".tmp-x/y")
    write(run_dir, **dict.fromkeys(added, "mine"))
    before = snapshot(tmp_path)
    for way in ("new", "callback"):
        with pytest.raises(UsageError, match="already holds a run"):
            WAYS[way](run_dir)
        if way == "new":
            assert snapshot(tmp_path) == before
    WAYS["resume"](run_dir)
    after = snapshot(run_dir)
    assert all(after[path] == state for path, state in before.items() if Path(path).is_file())
    WAYS["overwrite"](run_dir)
    left = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert left == {*added, ".sd_lightning"}
    WAYS["new"](run_dir)


def test_results_without_checkpoints_are_not_replaced(tmp_path: Path) -> None:
    finished_run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="holds the results of a run, whose checkpoints are gone; .* overwrite=true"):
        open_by_program(tmp_path)
    assert snapshot(tmp_path) == before
    open_by_program(tmp_path, resuming=True)
    runs.go_back(tmp_path, 0)  # as a run does before its first step
    assert len(list(tmp_path.glob("checkpoints/set-aside-*-pipeline/model_index.json"))) == 1


def test_a_run_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    write(tmp_path, **{".sd_lightning": '{"format": 2}'})
    for way in WAYS.values():
        with pytest.raises(UsageError, match="holds a run of a newer release; update sd-lightning, or write"):
            way(tmp_path)


def test_loggers_that_begin_before_the_callback_are_not_others(tmp_path: Path) -> None:
    for i, make in enumerate((CSVLogger, TensorBoardLogger)):
        for name in ("lightning_logs", "", "logs/x"):
            logger = make(tmp_path / f"{i}{name[:3]}", name=name)
            _ = logger.experiment
            open_by_callback(Path(logger.save_dir), logger)
    write(tmp_path / "other", **{"lightning_logs/x": "", "thesis": ""})
    with pytest.raises(UsageError, match="thesis"):
        open_by_callback(tmp_path / "other", CSVLogger(tmp_path / "other"))


@pytest.mark.parametrize("way", ["new", "resume", "overwrite"])
def test_an_input_inside_the_runs_folder_is_refused(way: str, tmp_path: Path) -> None:
    options = {"new": {}, "resume": {"resuming": True}, "overwrite": {"overwrite": True}}[way]
    finished_run(tmp_path / "run")
    write(tmp_path / "run", **{"photos/0.png": "x"})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "linked-run").symlink_to("run")
    (tmp_path / "linked-photos").symlink_to("run/photos")
    (tmp_path / "other").mkdir()
    runs.mark(tmp_path / "other")
    (tmp_path / "other/checkpoints").symlink_to(tmp_path / "checkpoints")
    before, remedies = snapshot(tmp_path), []
    for output, given in (
        ("run", "run"), ("run", "run/pipeline"), ("run", "run/photos"), ("run", "run/photos/../pipeline"),
        ("linked-run", "run/photos"), ("run", "linked-run"), ("run", "linked-photos"), ("run", "run/not-yet"),
        ("run/photos", "run/photos"), ("other", "checkpoints"),
    ):  # fmt: skip
        with pytest.raises(
            UsageError, match=rf"init_from={tmp_path / given} (is|lies in) output_dir=.*two folders"
        ) as no:
            open_by_program(tmp_path / output, init_from=tmp_path / given, **options)  # type: ignore[arg-type]
        assert snapshot(tmp_path) == before, (output, given)
        remedies.append((str(no.value).rpartition("write output_dir=")[2], tmp_path / given))
    for remedy, path in remedies:
        runs.check_output_dir(Path(remedy), resuming=False, overwrite=False, reads={"init_from": path})


def test_a_run_inside_a_folder_of_images_is_fine_and_is_never_data(tmp_path: Path) -> None:
    for name in ("a.png", "more/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("a picture")
    found = ImageFolder(tmp_path)
    for name, make in (("run", runs.mark), ("more/finished", finished_run)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        open_by_program(run_dir, data__train_data_dir=tmp_path)
        (run_dir / runs.MARK).unlink()
        make(run_dir)
        for folder in ("samples", "pipeline/pictures"):
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "a.png", run_dir / folder / "step-00000001.png")
            shutil.copy(tmp_path / "a.txt", run_dir / folder / "step-00000001.txt")
    again = ImageFolder(tmp_path)
    assert again._paths == found._paths and len(again) == 2 and not again.dropped


@pytest.mark.parametrize(
    "given", ["", " ", ".", "./", "x/..", "CWD", "to-cwd", "/", "/..", "~", "~/", "HOME", "to-home"]
)
def test_nothing_the_root_the_home_and_the_current_folder_are_no_place(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "cwd/x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("to-cwd").symlink_to(tmp_path / "cwd")
    Path("to-home").symlink_to(tmp_path / "home")
    name = {"CWD": str(tmp_path / "cwd"), "HOME": str(tmp_path / "home")}.get(given, given)
    before = snapshot(tmp_path)
    for key, check in (
        ("output_dir", lambda: check_place(name, key="output_dir")),
        ("PortableCheckpoint got run_dir", lambda: PortableCheckpoint(name)),
        ("save_to", lambda: check_new_folder(name, key="save_to")),
    ):
        with pytest.raises(UsageError, match=f"^{key}={name}.*expected a .*; write {key.split()[-1]}=") as refused:
            check()
        check_place(str(refused.value).rpartition("=")[2], key=key)
    assert snapshot(tmp_path) == before
    check_place("runs/new", key="output_dir")


def test_a_home_that_no_shell_has_filled_in_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match=f"output_dir=~/runs/a: only a shell .* write output_dir={tmp_path}/runs/a"):
        check_place("~/runs/a", key="output_dir")


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(
        UsageError, match=f"run: a link to a folder that is not there; write output_dir={tmp_path}/gone"
    ):
        open_by_program(tmp_path / "run")


def test_the_published_pipeline_keeps_what_others_put_there(tmp_path: Path) -> None:
    finished_run(tmp_path)
    write(tmp_path / "pipeline", **{"README.md": "card", "assets/a.png": "x", "vae/old.json": "x"})
    new = tmp_path / "checkpoints/step-00000240/pipeline"
    write(new, **{"model_index.json": '{"vae": []}', "vae/config.json": "new"})
    for _ in range(2):
        runs.publish_pipeline(tmp_path, new.parent)
        (tmp_path / "pipeline").rename(tmp_path / ".old-pipeline")  # killed between two renames
    runs.publish_pipeline(tmp_path, new.parent)
    files = {str(path.relative_to(tmp_path / "pipeline")) for path in (tmp_path / "pipeline").rglob("*.*")}
    assert files == {"README.md", "assets/a.png", "model_index.json", "vae/config.json"}
    assert (tmp_path / "pipeline/vae/config.json").read_text() == "new"
