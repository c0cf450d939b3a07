"""The callbacks that measure and show a training run, driven by Lightning's own loop on a clock that tests set."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import square_data
from sd_lightning._errors import UsageError
from sd_lightning.callbacks import progress, throughput
from sd_lightning.callbacks.progress import TrainingProgress, clock_time
from sd_lightning.callbacks.steps import paused
from sd_lightning.callbacks.throughput import Throughput, peak_flops, peak_memory_bytes
from sd_lightning.report import read_metrics


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(throughput, "peak_flops", lambda device, precision: 1e6)
    return clock


class SlowData(Dataset):
    """Each sample takes its time to read."""

    def __init__(self, clock: Clock, seconds: float, size: int = 64) -> None:
        self.clock, self.seconds, self.size = clock, seconds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.clock.now += self.seconds
        return {"latents": torch.ones(3)}


class Model(LightningModule):
    """Every training step takes 1 s (the first 100 s), every validation step 50 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.clock = clock
        self.first = True

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.clock.now += 100.0 if self.first else 1.0
        self.first = False
        return self.layer(batch["latents"]).square().mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.clock.now += 50.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Counting(Model):
    def flops_per_sample(self, batch: dict[str, torch.Tensor]) -> int:
        self.clock.now += 1000.0
        return 25_000


def loader(clock: Clock, read_seconds: float = 0.0, size: int = 64) -> DataLoader:
    return DataLoader(SlowData(clock, read_seconds, size), batch_size=4)


def trainer(folder: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 12,
        "log_every_n_steps": 4,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "logger": CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1),
        "enable_progress_bar": any(isinstance(c, TrainingProgress) for c in callbacks),
    }
    return Trainer(callbacks=list(callbacks), **defaults | arguments)


def test_speed_and_data_wait_are_logged_at_the_logging_interval(tmp_path: Path, clock: Clock) -> None:
    speed = Throughput()
    trainer(tmp_path, speed).fit(Model(clock), loader(clock, read_seconds=0.75))
    metrics = read_metrics(tmp_path)
    # 4 samples of 0.75 s and a step of 1 s; the step of 100 s, which is the first, is left out.
    assert metrics["perf/images_per_second"] == [(step, pytest.approx(1.0)) for step in (3, 7, 11)]
    assert metrics["perf/data_wait"] == [(step, pytest.approx(0.75)) for step in (3, 7, 11)]
    assert metrics["perf/peak_memory_gib"][-1][1] == pytest.approx(
        (peak_memory_bytes(torch.device("cpu")) or 0) / 2**30, rel=0.2
    )
    assert "perf/mfu" not in metrics
    assert speed.summary()["images_per_second"] == pytest.approx(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the process that started this one counts, too")
def test_peak_memory_is_that_of_the_process_itself_not_of_the_one_that_started_it() -> None:
    own = "from sd_lightning.gemini.memory import peak_resident; print(peak_resident())"
    starts = (
        f"import subprocess, sys; held = bytearray(2**31); subprocess.run([sys.executable, '-c', {own!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=True, timeout=120)
    assert 0 < int(done.stdout) < 2**30


def test_without_a_logging_interval_nothing_is_logged_and_the_summary_stands(tmp_path: Path, clock: Clock) -> None:
    speed = Throughput()
    trainer(tmp_path, speed, log_every_n_steps=0).fit(Model(clock), loader(clock, read_seconds=0.75))
    assert speed.summary()["images_per_second"] == pytest.approx(1.0) and not list(tmp_path.rglob("metrics.csv"))


def test_the_peak_is_that_of_the_whole_fit_though_an_engine_resets_the_devices(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed, gib = Throughput(), 2**30
    peaks = iter([3 * gib, 8 * gib])
    monkeypatch.setattr(throughput, "peak_memory_bytes", lambda device: next(peaks, 2 * gib))
    trainer(tmp_path / "first", speed).fit(Model(clock), loader(clock, read_seconds=0.75))
    assert read_metrics(tmp_path / "first")["perf/peak_memory_gib"] == [(step, 8.0) for step in (3, 7, 11)]
    trainer(tmp_path / "second", speed).fit(Model(clock), loader(clock, read_seconds=0.75))
    assert speed.summary()["peak_memory_gib"] == 2.0


class Sampling(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step % 3 == 0:
            with paused(trainer, "sampling"), paused(trainer, "encoding"):
                self.clock.now += 500.0


class SlowSave(ModelCheckpoint):
    def __init__(self, clock: Clock, folder: Path) -> None:
        super().__init__(folder, every_n_train_steps=4)
        self.clock = clock

    def on_save_checkpoint(self, *args: Any) -> None:
        self.clock.now += 300.0


def test_validation_sampling_saving_and_counting_change_no_number(tmp_path: Path, clock: Clock) -> None:
    speed = Throughput()
    run = trainer(
        tmp_path,
        Sampling(clock),
        speed,
        SlowSave(clock, tmp_path / "checkpoints"),
        limit_val_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
    )
    run.fit(Counting(clock), loader(clock, read_seconds=0.75), loader(clock))
    assert list((tmp_path / "checkpoints").glob("*.ckpt"))
    assert clock.now > 1000 + 4 * 500 + 3 * 300 + 12 * 50 + 1000
    metrics = read_metrics(tmp_path)
    assert metrics["perf/images_per_second"] == [(step, pytest.approx(1.0)) for step in (3, 7, 11)]
    assert metrics["perf/data_wait"] == [(step, pytest.approx(0.75)) for step in (3, 7, 11)]
    # 25 kFLOP by sample and one sample a second on a device of 1 MFLOP/s
    assert metrics["perf/mfu"] == [(step, pytest.approx(0.025)) for step in (3, 7, 11)]


def test_accumulated_batches_are_one_step(tmp_path: Path, clock: Clock) -> None:
    speed = Throughput()
    trainer(tmp_path, speed, accumulate_grad_batches=4, max_steps=4, log_every_n_steps=1).fit(
        Model(clock), loader(clock)
    )
    assert read_metrics(tmp_path)["perf/images_per_second"] == [(s, pytest.approx(4.0)) for s in (1, 2, 3)]


@pytest.mark.parametrize(("is_ours", "expected"), [(True, 32.0), (False, 4.0)])
def test_a_global_batch_size_counts_and_that_of_another_datamodule_does_not(
    tmp_path: Path, clock: Clock, is_ours: bool, expected: float
) -> None:
    class Data(LightningDataModule):
        batch_size = 32

        def train_dataloader(self) -> DataLoader:
            return loader(clock)

    class Resumable(Data):
        train_sampler = None

        def resume(self, epoch: int, batches_done: int) -> None: ...

    speed = Throughput()
    trainer(tmp_path, speed).fit(Model(clock), datamodule=Resumable() if is_ours else Data())
    assert speed.summary()["images_per_second"] == pytest.approx(expected)


@pytest.mark.parametrize(("window", "expected"), [(1, 4 / 9), (4, 16 / 12), (20, 44 / 19)])
def test_window_is_the_number_of_steps_averaged(tmp_path: Path, clock: Clock, window: int, expected: float) -> None:
    class LateStall(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.clock.now += 8.0 if batch_idx == 11 else 0.0

    trainer(tmp_path, Throughput(window)).fit(LateStall(clock), loader(clock))
    assert read_metrics(tmp_path)["perf/images_per_second"][-1][1] == pytest.approx(expected)


def test_a_run_of_one_step_measures_no_speed(tmp_path: Path, clock: Clock) -> None:
    speed = Throughput()
    trainer(tmp_path, speed, max_steps=1, log_every_n_steps=1).fit(Model(clock), loader(clock))
    assert "images_per_second" not in speed.summary() and speed.images_per_second is None
    assert "perf/images_per_second" not in read_metrics(tmp_path)


def test_the_trainers_own_profiler_still_works_and_is_put_back(tmp_path: Path, clock: Clock) -> None:
    profiler = SimpleProfiler()
    run = trainer(tmp_path, Throughput(), profiler=profiler)
    run.fit(Model(clock), loader(clock))
    assert run.profiler is profiler
    assert len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 12

    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("broken")

    run = trainer(tmp_path, Throughput())
    with pytest.raises(RuntimeError, match="broken"):
        run.fit(Broken(clock), loader(clock))
    assert type(run.profiler) is PassThroughProfiler


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989e12),
        ("NVIDIA H200", "16-mixed", 989e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "64-true", None),
        ("A GPU without a table", "bf16-true", None),
    ],
)
def test_gpus_with_a_table_have_its_dense_peak_and_others_none(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert peak_flops(torch.device("cuda", 0), precision) == peak
    assert peak_flops(torch.device("cpu"), precision) is None


@pytest.mark.gpu
def test_on_a_gpu_memory_is_the_devices_and_utilisation_below_one(tmp_path: Path) -> None:
    class Large(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4096, 4096, bias=False)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.layer(batch["latents"]).square().mean()

        def flops_per_sample(self, batch: dict[str, torch.Tensor]) -> int:
            return 3 * 2 * 4096**2

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    data = [{"latents": torch.ones(2048, 4096)} for _ in range(40)]
    speed = Throughput()
    run = trainer(tmp_path, speed, accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=40)
    run.fit(Large(), DataLoader(data, batch_size=None))
    values = speed.summary()
    assert 0.0 < values["mfu"] < 1.0
    assert values["peak_memory_gib"] == pytest.approx(torch.cuda.max_memory_allocated() / 2**30)


def test_throughput_refuses_an_empty_window() -> None:
    with pytest.raises(UsageError, match="Throughput got window=0; expected a whole number of steps of at least 1"):
        Throughput(window=0)


def test_outside_a_terminal_a_plain_line_is_printed_now_and_then(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, TrainingProgress(refresh_seconds=5), Throughput(), log_every_n_steps=2).fit(
        Model(clock), loader(clock)
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in lines] == ["step 1/12", "step 6/12", "step 11/12", "step 12/12"]
    pattern = r"step 11/12 \| loss [\d.e-]+ \| 4 img/s \| left 0:01 \| elapsed 1:50"
    assert re.fullmatch(pattern, lines[2]), lines[2]


def test_refresh_seconds_sets_the_distance_of_the_lines(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for refresh_seconds, count in ((0, 12), (1e6, 1)):
        trainer(tmp_path, TrainingProgress(refresh_seconds)).fit(Model(clock), loader(clock))
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
        assert len(lines) == count
        assert lines[-1].startswith("step 12/12 | loss ") and "steps/s" in lines[-1]


def test_metrics_of_the_progress_bar_are_shown(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Logging(Model):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            self.log("train/loss", 0.123456, prog_bar=True)
            self.log("train/hidden", 7.0)
            return super().training_step(batch, batch_idx)

    trainer(tmp_path, TrainingProgress()).fit(Logging(clock), loader(clock))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("step 12/12 | loss 0.1235 | ") and "hidden" not in last


@pytest.mark.parametrize("automatic", [True, False])
def test_the_loss_shown_is_that_of_the_step_before_and_not_a_part_of_it(
    automatic: bool, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Constant(Model):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx) * 0 + 1.0702
            self.log("train/loss", loss)
            return loss

    model = Constant(clock)
    model.automatic_optimization = automatic
    bounds = {"accumulate_grad_batches": 4, "max_steps": 3} if automatic else {"max_steps": -1, "max_epochs": 1}
    run = trainer(tmp_path, TrainingProgress(), log_every_n_steps=1, **bounds)
    run.fit(model, loader(clock))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    first, *others = lines
    assert others and all(" | loss 1.07 | " in line for line in others), lines
    assert "loss" not in first, "nobody waits for it"
    assert float(run.logged_metrics["train/loss"]) == pytest.approx(1.0702)


def test_a_run_bounded_by_epochs_knows_its_steps(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, TrainingProgress(), max_steps=-1, max_epochs=2).fit(Model(clock), loader(clock, size=20))
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 10/10 | ")


class Waiting(LightningDataModule):
    """Data with a given share of waiting, and a remedy or none."""

    def __init__(self, clock: Clock, read_seconds: float) -> None:
        super().__init__()
        self.clock, self.read_seconds = clock, read_seconds

    def train_dataloader(self) -> DataLoader:
        return loader(self.clock, self.read_seconds)


class Tunable(Waiting):
    def bottleneck_remedy(self) -> str | None:
        return "data.num_workers=4"


class Exhausted(Waiting):
    def bottleneck_remedy(self) -> str | None:
        return None


@pytest.mark.parametrize(
    ("kind", "read_seconds", "shown"),
    [
        (Tunable, 0.06, "data wait 19% (data.num_workers=4)"),  # 0.24 s of 1.24 s
        (Waiting, 0.06, "data wait 19%"),
        (Exhausted, 0.06, "data wait 19%"),
        (Tunable, 0.02, None),  # 7 %
    ],
)
def test_a_long_wait_for_data_is_shown_with_its_remedy(
    kind: type[Waiting],
    read_seconds: float,
    shown: str | None,
    tmp_path: Path,
    clock: Clock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = trainer(tmp_path, Throughput(), TrainingProgress(refresh_seconds=0))
    run.fit(Model(clock), datamodule=kind(clock, read_seconds))
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    found = [next((part for part in line if part.startswith("data wait")), None) for line in lines]
    assert found == [None, None] + 10 * [shown], "two steps are measured first"
    if shown is not None:
        assert lines[5][2:4] == ["3.23 img/s", shown]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("read_ms", "is_slow"), [(15, True), (0, False)])
def test_a_slow_data_set_shows_a_wait_and_a_fast_one_does_not(
    read_ms: int, is_slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the real clock: eight images a step, and 100 ms of computing."""

    class Images(square_data.Squares):
        def image(self, index: int) -> Image.Image:
            time.sleep(read_ms / 1000)
            return super().image(index)

    class Computing(square_data.Recorder):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            time.sleep(0.1)
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, Throughput(), TrainingProgress(refresh_seconds=0), max_steps=6, max_epochs=-1)
    run.fit(Computing(), square_data.datamodule(num_workers=0, source=Images()))
    last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 6/6")][-1]
    wait = re.search(r"data wait (\d+)% \((data.num_workers=\d|data.cache_latents=true|python .*precompute)\)", last)
    assert (wait is not None) == is_slow == ("data wait" in last), last
    if wait is not None:
        assert 35 <= int(wait[1]) <= 75, "120 ms of 220"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return lambda: re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


class Notes(Callback):
    """Print and remember what the bar says during validation, where Lightning's own bars would flicker."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def note(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        assert isinstance(bar, TrainingProgress) and bar._bar is not None
        self.seen.append((bar._bar.tasks[0].description, len(bar._bar.tasks)))

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)
        trainer.progress_bar_callback.print("a word from [validation]")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with paused(trainer, "sampling"):
            self.note(trainer)


def test_in_a_terminal_one_bar_covers_the_run_and_names_what_goes_on(
    tmp_path: Path, clock: Clock, terminal: Any
) -> None:
    notes = Notes()
    run = trainer(tmp_path, notes, TrainingProgress(), Throughput(), limit_val_batches=1, val_check_interval=6)
    run.fit(Model(clock), loader(clock), loader(clock))
    assert [text for text, _ in notes.seen] == ["validating", "sampling"] * 2
    assert all(tasks == 1 for _, tasks in notes.seen)
    shown = terminal()
    assert shown.count("a word from [validation]\n") == 2, "text is printed above the bar, brackets and all"
    assert re.search(r"training .*12/12 loss [\d.e-]+  4 img/s  left 0:00  elapsed 3:31", shown)
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_the_bar_is_closed_when_training_fails(tmp_path: Path, clock: Clock, terminal: Any) -> None:
    class Broken(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("broken")

    bar = TrainingProgress()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, bar).fit(Broken(clock), loader(clock))
    assert bar._bar is None
    assert terminal().rstrip().endswith("\x1b[?25h")


def test_other_ranks_stay_silent(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "is_global_zero", property(lambda self: False))
    trainer(tmp_path, TrainingProgress(refresh_seconds=0)).fit(Model(clock), loader(clock))
    assert "step" not in capsys.readouterr().out


def test_progress_refuses_a_negative_distance() -> None:
    with pytest.raises(UsageError, match="TrainingProgress got refresh_seconds=-1; expected 0 or more seconds"):
        TrainingProgress(refresh_seconds=-1)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (36610, "10:10:10")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
