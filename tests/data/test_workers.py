"""`data.num_workers=auto`: what is measured, what is chosen from it, and that samples do not depend on it."""

import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_lightning._errors import UsageError
from sd_lightning.data import loading, workers
from sd_lightning.data.builders import digits_data
from sd_lightning.data.datamodule import SDDataModule
from sd_lightning.data.loading import LoaderOptions, LookAhead
from sd_lightning.data.transform import ImageOptions
from sd_lightning.data.workers import BatchCost, choose, cores_per_process, measure, reading_threads, settle
from square_data import NUM, Recorder, Squares, datamodule, trainer

AUTO = LoaderOptions()
FIXED = ImageOptions(16, center_crop=True)
MIB = 2**20


class SlowSquares(Squares):
    """Each image takes 3 ms to read, a batch of eight 24 ms."""

    def image(self, index: int) -> Image.Image:
        time.sleep(0.003)
        return super().image(index)


class Timed:
    """Stands in for a dataset: each read takes its time, on a clock of its own, and returns 1 KiB for each sample."""

    def __init__(self, *seconds_per_sample: float, fetch_seconds: float | None = None) -> None:
        self.now = 100.0
        self.fetch_seconds = fetch_seconds
        self.seconds = list(seconds_per_sample)
        self.read: list[int] = []
        self.fetched: list[int] = []
        self.source = self

    def files(self, index: np.ndarray) -> list[int]:
        return [] if self.fetch_seconds is None else np.unique(index // 5).tolist()

    def fetch(self, file: int) -> None:
        self.now += self.fetch_seconds or 0
        self.fetched.append(file)

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, Any]:
        self.now += len(keys) * self.seconds[min(len(self.read), len(self.seconds) - 1)]
        self.read.append(len(keys))
        return {"pixels": torch.zeros(len(keys), 128), "ids": {"a": torch.zeros(len(keys), 64, dtype=torch.int64)}}


def timed(monkeypatch: pytest.MonkeyPatch, *seconds_per_sample: float, fetch_seconds: float | None = None) -> Any:
    data = Timed(*seconds_per_sample, fetch_seconds=fetch_seconds)
    monkeypatch.setattr(workers, "time", SimpleNamespace(perf_counter=lambda: data.now))
    return data


def cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)), raising=False)
    monkeypatch.setattr(workers, "_room", lambda processes: sys.maxsize)


def keys(*sizes: int) -> list[list[tuple[int, int]]]:
    return [[(0, index) for index in range(size)] for size in sizes]


@pytest.mark.parametrize(
    ("number", "processes", "expected"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 2), (16, 1, 15), (16, 8, 2), (16, 4, 3), (2, 2, 1), (2, 4, 0)],
)
def test_a_process_has_its_share_of_the_cores_less_one_for_itself(
    monkeypatch: pytest.MonkeyPatch, number: int, processes: int, expected: int
) -> None:
    cores(monkeypatch, number)
    assert cores_per_process(processes) == expected
    assert processes * expected <= number


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "most", "expected"),
    [
        (0.004, MIB, 4, (0, None)),  # in memory
        (0.005, MIB, 4, (4, 8)),
        (0.2, MIB, 4, (4, 5)),  # one second
        (0.9, MIB, 4, (4, 2)),
        (30.0, MIB, 4, (4, 2)),
        (0.1, 64 * MIB, 4, (4, 4)),  # 1 GiB
        (0.1, 600 * MIB, 4, (4, 1)),  # more than that: one for each worker
        (0.1, MIB, 0, (0, None)),  # more processes than cores
    ],
)
def test_slow_batches_get_workers_that_keep_a_second_or_a_gibibyte_ready(
    seconds: float, num_bytes: int, most: int, expected: tuple[int, int | None]
) -> None:
    chosen = settle(AUTO, BatchCost(16, seconds, num_bytes), most=most)
    assert (chosen.num_workers, chosen.prefetch_factor) == expected


def test_what_the_user_gives_beside_auto_stays() -> None:
    given = LoaderOptions(pin_memory=True, persistent_workers=True, prefetch_factor=3, val_batch_size=7)
    slow, fast = (settle(given, BatchCost(16, seconds, MIB), most=4) for seconds in (0.1, 0.001))
    assert slow == LoaderOptions(4, True, True, 3, 7)
    assert fast == LoaderOptions(0, True, False, None, 7)


def test_batches_fit_the_memory_that_workers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 9)
    monkeypatch.setattr(workers, "_room", lambda processes: 10 * 16 * 1024 // processes)  # ten batches of 16 samples
    one, two, many = (choose(AUTO, timed(monkeypatch, 0.1), keys(16), processes=processes) for processes in (1, 2, 16))
    assert (one.num_workers, one.prefetch_factor) == (8, 1)
    assert (two.num_workers, two.prefetch_factor) == (3, 1)
    assert many.num_workers == 0


def test_the_fastest_of_three_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    data = timed(monkeypatch, 0.05, 0.01, 0.02)
    assert measure(data, keys(8, 8, 8, 8)) == BatchCost(8, pytest.approx(0.08), 8 * 1024)
    assert data.read == [8, 8, 8]


def test_fetching_the_files_of_a_far_store_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = timed(monkeypatch, 0.01, fetch_seconds=0.3)
    assert measure(data, keys(8, 8)) == BatchCost(8, pytest.approx(0.08), 8 * 1024)
    assert sorted(data.fetched) == [0, 0, 1, 1]
    data = timed(monkeypatch, 0.01, fetch_seconds=3)
    assert measure(data, keys(8, 8)) == BatchCost(8, pytest.approx(0.08), 8 * 1024)
    assert data.read == [8], "a run does not wait for more files than one batch needs"


def test_of_a_large_batch_a_part_is_read_and_of_slow_data_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = timed(monkeypatch, 0.2)
    assert measure(data, keys(2048, 2048)) == BatchCost(2048, pytest.approx(409.6), 2048 * 1024)
    assert data.read == [16]


def test_at_the_end_of_an_epoch_other_samples_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(timed(monkeypatch, 0.01), []) == BatchCost(16, pytest.approx(0.16), 16 * 1024)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (0.013125, "a batch of 16 loads in 210 ms; num_workers=2 prefetch_factor=5 (data.num_workers=auto)"),
        (0.1, "a batch of 16 loads in 1.6 s; num_workers=2 prefetch_factor=2 (data.num_workers=auto)"),
        (0.0002, "a batch of 16 loads in 3.2 ms; num_workers=0 (data.num_workers=auto)"),
    ],
)
def test_the_choice_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seconds: float, line: str
) -> None:
    cores(monkeypatch, 2)
    with caplog.at_level(logging.INFO, "sd_lightning"):
        choose(AUTO, timed(monkeypatch, seconds), keys(16, 16), processes=1)
    assert caplog.messages == [f"data: {line}"]


def test_a_given_number_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = timed(monkeypatch, 1.0)
    assert choose(LoaderOptions(3), data, keys(16), processes=1) == LoaderOptions(3)
    assert not data.read


def test_a_run_with_auto_sees_the_same_samples_and_counts_a_bad_one_once(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for options in (LoaderOptions(0), AUTO):
        module = Recorder()
        data = datamodule(source=SlowSquares(broken=(4, 5)), val=Squares(5), loader=options, max_bad_fraction=0.2)
        made = trainer(4, check_val_every_n_epoch=None, val_check_interval=2)
        with caplog.at_level(logging.INFO, "sd_lightning"):
            made.fit(module, data)
        runs.append((module.steps, data.bad.found, made))
    assert runs[0][:2] == runs[1][:2]
    assert runs[1][1] == {"square-4": "torn", "square-5": "torn"}
    chosen = [message for message in caplog.messages if "num_workers" in message]
    assert len(chosen) == 1 and chosen[0].startswith("data: a batch of 8 loads in "), chosen
    used = min(cores_per_process(1), 8)
    loaders = (runs[1][2].train_dataloader, runs[1][2].val_dataloaders)
    assert [loader.num_workers for loader in loaders] == [used, used], "validation follows the choice"


class StuckSquares(Squares):
    """One image is read only when a file is there."""

    def __init__(self, wait_for: Path) -> None:
        super().__init__()
        self.wait_for = wait_for

    def image(self, index: int) -> Image.Image:
        until = time.monotonic() + 60
        while index == 3 and not self.wait_for.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return super().image(index)


def test_a_worker_that_is_stuck_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log_file = tmp_path / "log"

    class ToFile(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log_file.write_text(record.getMessage())

    handler = ToFile()
    monkeypatch.setattr(loading, "_SLOW_SECONDS", 0.3)
    loading.log.addHandler(handler)
    try:
        trainer(4).fit(Recorder(), datamodule(source=StuckSquares(log_file), num_workers=1))
    finally:
        loading.log.removeHandler(handler)
    message = log_file.read_text()
    assert re.match(r"data: worker 0 has read one batch for \d+ s, and is at:\n", message), message
    assert "in image\n" in message and message.index("__getitems__") < message.index("in image\n"), message
    assert "in fit\n" not in message, "the frames of training, in which the worker was forked"


class CrashingSquares(Squares):
    def image(self, index: int) -> Image.Image:
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().image(index)


def test_a_worker_that_crashes_leaves_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        trainer(1).fit(Recorder(), datamodule(source=CrashingSquares(), num_workers=1))
    stack = capfd.readouterr().err
    assert re.search(r'Fatal Python error: Segmentation fault\n(.*\n)+.*test_workers.py", line \d+ in image', stack), (
        stack
    )


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_worker_does_not_collect_the_garbage_of_training(is_validation: bool) -> None:
    """Else the destructor of a process group would join threads that a fork does not have."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if os.getpid() != here:
                os.kill(os.getpid(), signal.SIGKILL)

    class CollectingSquares(Squares):
        def image(self, index: int) -> Image.Image:
            gc.collect()
            return super().image(index)

    here, was_enabled, frozen = os.getpid(), gc.isenabled(), gc.get_freeze_count()
    source = CollectingSquares()
    data = datamodule(2, Squares() if is_validation else source, source)
    gc.disable()
    try:
        Garbage()
        if is_validation:
            trainer(1).validate(Recorder(), data)
        else:
            trainer(2).fit(Recorder(), data)
        assert gc.get_freeze_count() == frozen
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_no_process_is_forked_in_the_middle_of_a_fetch() -> None:
    is_fetching, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def fetch(file: int) -> None:
        is_fetching.set()
        begun.set()
        time.sleep(0.3)
        is_fetching.clear()
        if file == 4:  # of the same thread as file 0
            ended.set()

    with LookAhead(lambda samples: 4 * samples, fetch, num_batches=1).running(lambda number: np.array([number]), 0, 2):
        assert begun.wait(20)
        child = os.fork()
        if not child:
            os._exit(is_fetching.is_set())
        assert os.waitpid(child, 0)[1] == 0
        assert ended.wait(20), "fetching did not go on"


def test_data_in_memory_are_neither_timed_nor_read_by_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "measure", lambda *_: pytest.fail("measured"))
    made = trainer(2)
    made.fit(Recorder(), datamodule(images=FIXED, loader=AUTO, cache_latents=True))
    assert made.train_dataloader.num_workers == 0
    assert digits_data(cache_latents=False).loader_options.num_workers == 0
    assert digits_data(cache_latents=False, num_workers=2).loader_options.num_workers == 2
    with pytest.raises(UsageError, match="data.prefetch_factor=4 has no effect with data.num_workers=0"):
        datamodule(images=FIXED, loader=LoaderOptions(prefetch_factor=4), cache_latents=True)


def test_images_to_cache_are_read_by_threads_on_the_cores_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, processes, expected in ((8, 1, 7), (8, 2, 3), (32, 1, 8), (2, 4, 1)):
        cores(monkeypatch, number)
        assert reading_threads(processes) == expected


def tuned(number: int, source: Any = None, images: ImageOptions = FIXED, **options: Any) -> SDDataModule:
    """Return the datamodule of a run that has begun."""
    data = datamodule(source=source, images=images, loader=LoaderOptions(number), **options)
    data.trainer = trainer(1)
    data.trainer.strategy.connect(Recorder())
    data.train_dataloader()
    return data


def test_the_remedy_is_workers_then_the_cache_then_precomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 32)
    assert [tuned(n).bottleneck_remedy() for n in (0, 3, 8, 16)] == [f"data.num_workers={n}" for n in (8, 8, 16, 31)]
    cores(monkeypatch, 2)
    assert tuned(1).bottleneck_remedy() == "data.num_workers=2"
    assert tuned(2).bottleneck_remedy() == "data.cache_latents=true"
    precompute = "python -m sd_lightning.precompute"
    assert tuned(2, images=ImageOptions(16, center_crop=False)).bottleneck_remedy() == precompute
    assert tuned(2, images=ImageOptions(16, center_crop=True, random_flip=True)).bottleneck_remedy() == precompute
    monkeypatch.setattr(workers, "_CACHE_BYTES", NUM * 16 * 16 // 2 - 1)
    assert tuned(2).bottleneck_remedy() == precompute, "the latents do not fit the memory"
    assert tuned(0, cache_latents=True).bottleneck_remedy() is None
    assert datamodule().bottleneck_remedy() is None, "before the run"
