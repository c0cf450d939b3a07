"""The queue of jobs: one at a time per card, whatever dies."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sd_lightning import UsageError
from sd_lightning.ui import jobs
from sd_lightning.ui.jobs import CPU, Job, Queue

PROGRAM = """
import os, signal, sys, time
def stop(*_):
    print("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("begin", sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
open(sys.argv[1], "a").write("begin\\n")
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.02)
open(sys.argv[1], "a").write("end\\n")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """A queue whose jobs run `sd_lightning.fake <file> <exit code>`, which ends when `<file>.go` is there."""
    place = tmp_path / "modules/sd_lightning/ui"
    place.mkdir(parents=True)
    (place.parent / "fake.py").write_text(PROGRAM)
    own = Path(jobs.__file__).parents[2]
    init = f"__path__.append({str(own / 'sd_lightning')!r})\n"
    (place.parent / "__init__.py").write_text(init)
    place.rmdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'modules'}{os.pathsep}{own}")
    return Queue(tmp_path / "jobs")


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return value


def state(queue: Queue, job: Job) -> str:
    return next(each.state for each in queue.jobs() if each.id == job.id)


def test_jobs_of_a_card_run_one_after_the_other_and_are_stopped_as_programs_save(queue: Queue, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    first, second, third = (queue.add("fake", [str(each), "0"], CPU, each) for each in (one, two, three))
    until(one.exists)
    assert [job.state for job in queue.jobs()] == ["running", "queued", "queued"]
    queue.stop(second.id)
    queue.stop(first.id)
    until(three.exists)
    assert not two.exists()
    done = {job.id: job for job in queue.jobs()}
    assert (done[first.id].code, done[second.id].state, done[third.id].state) == (75, "cancelled", "running")
    assert queue.log(first).read_text().split() == ["begin", str(one), "saved"]  # no GPU for a job of the CPU
    Path(f"{three}.go").touch()
    until(lambda: state(queue, third) == "ended")
    until(lambda: not queue.is_busy(CPU))


def test_a_job_outlives_the_process_that_started_it_and_keeps_its_card(queue: Queue, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    first = queue.add("fake", [str(one), "0"], CPU, one)
    until(one.exists)
    parent = int(Path(f"/proc/{next(each.pid for each in queue.jobs())}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGKILL)
    second = queue.add("fake", [str(two), "0"], CPU, two)
    time.sleep(1.5)
    assert state(queue, first) == "running" and state(queue, second) == "queued"
    Path(f"{one}.go").touch()
    until(lambda: not queue.is_busy(CPU))
    queue._started = 0.0
    until(lambda: state(queue, first) == "ended")  # who looks starts the card's process again
    assert next(each for each in queue.jobs() if each.id == first.id).note == "it was killed"
    until(two.exists)
    Path(f"{two}.go").touch()
    until(lambda: state(queue, second) == "ended")


def test_a_run_whose_waiting_process_was_killed_has_finished_if_it_wrote_its_summary(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "start", lambda card: None)
    for name, code in (("done", 0), ("killed", None)):
        (tmp_path / name).mkdir()
        job = queue.add("fake", [], CPU, tmp_path / name)
        queue._write(replace(job, state="running"))
        if code == 0:
            (tmp_path / name / "summary.json").touch()
        queue.work(CPU)
        assert (queue.jobs()[-1].state, queue.jobs()[-1].code) == ("ended", code)


def test_a_folder_has_one_open_job_and_damaged_files_are_left_out(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "start", lambda card: None)
    job = queue.add("fake", [], CPU, tmp_path / "one")
    with pytest.raises(UsageError, match="output_dir=one: a job writes there already"):
        queue.add("fake", [], CPU, tmp_path / "one")
    for number, wrong in enumerate(({"folder": None}, {"card": "a/b"}, {"card": 7}, {"extra": 1})):
        (queue.folder / f"{number}.json").write_text(json.dumps({**asdict(job), "id": str(number), **wrong}))
    assert queue.jobs() == [job]


def test_a_job_whose_card_is_gone_says_so(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "start", lambda card: None)
    with pytest.raises(UsageError, match=r"card=\.\./3 is not there; expected one of cpu"):
        queue.add("fake", [], "../3", tmp_path)
    with monkeypatch.context() as context:
        context.setattr(jobs, "cards", lambda: {"3": ("a GPU", 24.0)})
        job = queue.add("fake", ["x", "0"], "3", tmp_path)
    queue.work("3")
    (queue.folder / "1.json").write_text((queue.folder / f"{job.id}.json").read_text())
    (ended,) = queue.jobs()
    assert ended.id == job.id and ended.state == "ended" and "card=3 is not there; expected one of cpu" in ended.note
    queue.add("fake", ["x" * 200_000], CPU, tmp_path)
    queue.work(CPU)
    assert queue.jobs()[-1].state == "ended" and "too long" in queue.jobs()[-1].note


def test_cards_are_those_that_the_driver_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jobs.cards() == {CPU: ("CPU", None)}
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '0, NVIDIA L4, 23034'\necho '1, NVIDIA L4, [N/A]'\necho $* > {tool}.called")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert jobs.cards() == {"0": ("NVIDIA L4", pytest.approx(24.15, abs=0.01)), "1": ("NVIDIA L4", None)}
    assert "--id=0,1" in Path(f"{tool}.called").read_text(), "others are not ours"
    assert jobs.environment("1")["CUDA_VISIBLE_DEVICES"] == "1"
    assert sys.executable
