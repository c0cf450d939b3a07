"""A resumed run ends with the bits of one that was never interrupted: weights, moments, average, position."""

import csv
import json
import logging
import math
import os
import pickle
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LRScheduler

import small_training as small
from places import SUPPORT
from sd_lightning import LatentDiffusion, SDLightningModule, UsageError, _conf, train
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.callbacks.checkpoint.trainer_state import RunPosition
from sd_lightning.storage import checkpoint, runs
from sd_lightning.storage.checkpoint import all_checkpoints, checkpoint_path
from suites import keep

E = small.STEPS_PER_EPOCH
SMALL = ("data.batch_size=8", "trainer.limit_val_batches=0", "callbacks.samples=null", "logger=csv")


class Seen(Callback):
    """Records (epoch, index) of all samples of every optimizer step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[int, int]]] = {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        keys = zip(batch["epoch"].tolist(), batch["index"].tolist())
        self.steps.setdefault(trainer.global_step + 1, []).extend(keys)


@pytest.mark.parametrize(
    ("options", "left_at"),
    [
        pytest.param({}, (3, E, E + 1), id="cached"),  # in an epoch, at its end, after the first step of the next
        pytest.param({"accumulate_grad_batches": 2}, (3, E), id="accumulated"),
        pytest.param({"limit_train_batches": 3}, (3, 4), id="limited"),
        pytest.param({"num_workers": 2, "cache_latents": False}, (E,), id="workers"),
        pytest.param({"lr_scheduler": schedulers.ReduceLROnPlateau}, (3,), id="plateau"),
        pytest.param({"cache_latents": False}, (3,), id="encoded on the fly", marks=pytest.mark.slow),
        pytest.param(
            {"train_text_encoder": False, "num_workers": 2}, (3, E), id="frozen text encoder", marks=pytest.mark.slow
        ),
        pytest.param(
            {"num_workers": 2, "cache_latents": False, "accumulate_grad_batches": 2},
            (1, E),
            id="workers and accumulation",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)}, (3,), id="SGD", marks=pytest.mark.slow
        ),
        pytest.param(
            {"optimizer": partial(torch.optim.Adafactor, lr=1e-2)}, (3,), id="Adafactor", marks=pytest.mark.slow
        ),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, options: dict[str, Any], left_at: tuple[int, ...]
) -> None:
    steps = E + 2
    straight = small.train(tmp_path / "straight", steps, save=left_at, **options)
    for step in left_at:
        resumed = small.train(
            tmp_path / f"from-{step}", steps, resume=checkpoint_path(tmp_path / "straight", step), **options
        )
        small.assert_bitwise_equal(resumed, straight)


def test_each_step_of_a_run_resumed_again_and_again_sees_its_own_samples(tmp_path: Path) -> None:
    straight, pieces = Seen(), Seen()
    run = tmp_path / "pieces"
    small.fit(small.module(), small.data(), 2 * E + 2, straight)
    for end in (2, E, 2 * E, 2 * E + 2):
        resume = (all_checkpoints(run) or [None])[-1]
        small.fit(small.module(), small.data(), end, pieces, PortableCheckpoint(run, every_n_steps=0, resume=resume))
    assert pieces.steps == straight.steps


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
def test_another_accumulation_continues_at_the_same_sample(tmp_path: Path, before: int, after: int) -> None:
    straight, resumed = Seen(), Seen()
    first = PortableCheckpoint(tmp_path / "a", every_n_steps=3)
    whole = small.fit(small.module(), small.data(), E + 3, straight, first, accumulate_grad_batches=before)
    second = PortableCheckpoint(tmp_path / "b", resume=checkpoint_path(tmp_path / "a", 3), every_n_steps=0)
    module = small.module()
    small.fit(module, small.data(), E + 3, resumed, second, accumulate_grad_batches=after)
    for step in range(4, E + 4):
        assert sorted(resumed.steps[step]) == sorted(straight.steps[step])
    assert first.last_saved is not None and second.last_saved is not None
    ours, theirs = small.trainer_state(first.last_saved), small.trainer_state(second.last_saved)
    assert ours["position"] == theirs["position"]
    for name, weight in small.weights(whole.lightning_module).items():
        # The same sums in another order; Adam makes the most of small differences.
        torch.testing.assert_close(small.weights(module)[name], weight, rtol=0, atol=5e-3)


def test_a_fit_longer_than_the_last_resumes_where_its_own_data_were(tmp_path: Path) -> None:
    """Lightning leaves the rest of an epoch out when ``max_steps`` ended a fit in it and the next fit begins."""
    steps = (4, 3 + E, 3 + E + 1)
    saving = small.Saving(tmp_path / "a", steps)
    module, ema = small.module(), EMA(0.9)
    trainer = small.fit(module, small.data(), 3, ema, saving)
    trainer.fit_loop.epoch_loop.max_steps = 3 + E + 2
    trainer.fit(module, trainer.datamodule)  # type: ignore[attr-defined]
    assert saving.last_saved is not None
    for step in steps:
        resumed = small.train(tmp_path / f"from-{step}", 3 + E + 2, resume=checkpoint_path(tmp_path / "a", step))
        small.assert_bitwise_equal(resumed, saving.last_saved)


def test_a_resumed_run_logs_at_the_steps_that_one_without_a_stop_logs(tmp_path: Path) -> None:
    """The checkpoint is of a step at which a validation is due; Lightning leaves it out after it."""

    def steps(name: str, max_steps: int, **more: Any) -> list[int]:
        logger = CSVLogger(tmp_path, name=name, version=0)
        validates = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
        options = validates | {"logger": logger, "log_every_n_steps": 2, "use_distributed_sampler": False} | more
        small.train(tmp_path / name, max_steps, **options)
        rows = csv.DictReader((tmp_path / name / "version_0" / "metrics.csv").open())
        return [int(row["step"]) for row in rows if row["train/loss"]]

    assert steps("whole", 8, save=(2,)) == [1, 3, 5, 7]
    assert steps("resumed", 8, resume=checkpoint_path(tmp_path / "whole", 2)) == [3, 5, 7]


def test_a_second_fit_does_not_restore_the_checkpoint_again(tmp_path: Path) -> None:
    small.train(tmp_path, 2)
    saving = PortableCheckpoint(tmp_path / "next", resume=checkpoint_path(tmp_path, 2), every_n_steps=0)
    module = small.module()
    trainer = small.fit(module, small.data(), 3, EMA(0.9), saving)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, trainer.datamodule)  # type: ignore[attr-defined]
    assert (
        trainer.global_step == 4 and [path.name for path in all_checkpoints(tmp_path / "next")][-1] == "step-00000004"
    )


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 5], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.3, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.7)], milestones=[4]
    ),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 8, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, total_iters=4), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 3e-3, step_size_up=2, cycle_momentum=True),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 3e-3, total_steps=10),
    "SWALR": lambda o: swa_utils.SWALR(o, 1e-4, anneal_epochs=6),
}  # fmt: skip


def test_the_table_has_every_scheduler_of_torch() -> None:
    public = {name for name in schedulers.__all__ if name not in ("LRScheduler",)}
    assert SCHEDULES.keys() == public | {"SWALR"}


@pytest.mark.slow
@pytest.mark.parametrize("name", keep(["SequentialLR", "ChainedScheduler", "OneCycleLR"], SCHEDULES))
def test_every_learning_rate_schedule_resumes_bitwise(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"lr_scheduler": SCHEDULES[name], "train_text_encoder": False}
    straight = small.train(tmp_path / "straight", 7, save=(3, 6), **options)
    resumed = small.train(tmp_path / "resumed", 7, resume=checkpoint_path(tmp_path / "straight", 3), **options)
    small.assert_bitwise_equal(resumed, straight)
    rates = {
        small.trainer_state(checkpoint_path(tmp_path / "straight", step))["optimizer_groups"][0][0]["lr"]
        for step in (3, 6, 7)
    }
    assert len(rates) > 1  # the schedule did something


class _Settings(Callback):
    """Records (lr, weight decay) of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.steps += [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups[:1]]


def _settings(run: Path, max_steps: int, schedule: Any, resume: Path | None = None, **options: Any) -> _Settings:
    settings = _Settings()
    factory = partial(torch.optim.AdamW, fused=True, **options)
    module = small.module(optimizer=factory, lr_scheduler=schedule)
    small.fit(module, small.data(), max_steps, settings, small.Saving(run, (2,), resume=resume))
    return settings


@pytest.mark.parametrize("name", [None, "LambdaLR", "ExponentialLR", "SequentialLR", "CosineAnnealingLR"])
def test_a_changed_learning_rate_and_weight_decay_apply_from_the_checkpoint_on_and_schedules_go_on(
    tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = None if name is None else SCHEDULES[name]
    old, new = {"lr": 1e-3, "weight_decay": 0.01}, {"lr": 1e-5, "weight_decay": 0.5}
    with caplog.at_level(logging.INFO, logger="sd_lightning"):
        _settings(tmp_path / "old", 2, schedule, **old)
        first = _settings(tmp_path / "new", 6, schedule, checkpoint_path(tmp_path / "old", 2), **new)
        second = _settings(tmp_path / "more", 8, schedule, checkpoint_path(tmp_path / "new", 6), **new)
    straight = _settings(tmp_path / "straight", 8, schedule, **new).steps
    assert first.steps + second.steps == [pytest.approx(step, rel=1e-9) for step in straight[2:]]
    (line,) = [record.getMessage() for record in caplog.records if "apply from here" in record.getMessage()]
    assert line.endswith("apply from here: lr 0.001 -> 1e-05, weight_decay 0.01 -> 0.5")


@pytest.mark.parametrize("damage", ["altered", pytest.param("truncated", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    straight = small.train(tmp_path / "straight", 5, save=(2, 4))
    run = tmp_path / "run"
    small.train(run, 4, save=(2, 4))
    shard = checkpoint_path(run, 4) / "state/shard-00000-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    if damage == "altered":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        shard.write_bytes(content[:-1000])
    with caplog.at_level(logging.WARNING):
        resume = runs.find_checkpoint("auto", run)
    assert resume == checkpoint_path(run, 2)
    ours = [r for r in caplog.records if r.name.startswith("sd_lightning") and r.levelno >= logging.WARNING]
    (warning,) = [r.getMessage() for r in ours]
    assert "step-00000004 is not used: state/shard-00000-of-00001.safetensors" in warning
    small.assert_bitwise_equal(small.train(run, 5, save=(2, 4), resume=resume), straight)
    assert [path.name for path in all_checkpoints(run)] == ["step-00000002", "step-00000004", "step-00000005"]


def _stop_early(run_dir: Path, patience: int, every: int, *, resume: Path | None = None, **options: Any) -> pl.Trainer:
    """Train up to 12 steps with a validation after every ``every`` of them, none of which counts as better."""
    stopping = EarlyStopping("val/loss", min_delta=10.0, patience=patience)
    saving = PortableCheckpoint(run_dir, every_n_steps=every, keep=20, resume=resume)
    options = {"limit_val_batches": 1, "val_check_interval": every} | options
    return small.fit(small.module(), small.data(), 12, EMA(0.9), stopping, saving, **options)


@pytest.mark.parametrize(
    ("every", "patience", "options"),
    [
        pytest.param(2, 2, {}, id="within epochs"),
        pytest.param(E, 1, {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}, id="after epochs"),
    ],
)
def test_early_stopping_ends_a_resumed_run_where_it_would_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, patience: int, options: dict[str, Any]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    straight, end = tmp_path / "straight", every * (patience + 1)  # the first validation is the best one
    trainer = _stop_early(straight, patience, every, **options)
    assert trainer.global_step == end < trainer.max_steps
    paths = all_checkpoints(straight)
    assert [checkpoint.step_of(path) for path in paths] == list(range(every, end + 1, every))
    key = next(c.state_key for c in trainer.callbacks if isinstance(c, EarlyStopping))  # type: ignore[attr-defined]
    states = [small.trainer_state(path)["callbacks"][key] for path in paths]
    assert [state["wait_count"] for state in states] == list(range(patience + 1))
    assert len({float(state["best_score"]) for state in states}) == 1 and math.isfinite(states[0]["best_score"])
    assert not any(checkpoint.verify(path) for path in paths)
    resumed = _stop_early(tmp_path / "resumed", patience, every, resume=paths[-2], **options)
    assert resumed.global_step == end
    small.assert_bitwise_equal(checkpoint_path(tmp_path / "resumed", end), paths[-1])
    assert sorted(os.listdir(straight / "checkpoints")) == [path.name for path in paths]  # nothing half-written stays


def test_a_checkpoint_is_written_once_where_a_validation_teaches_no_callback_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    saving = checkpoint.saving

    def counted(run_dir: Path, step: int, **options: Any) -> Any:
        saved.append(step)
        return saving(run_dir, step, **options)

    monkeypatch.setattr(checkpoint, "saving", counted)
    small.train(tmp_path, 4, save=(2,), limit_val_batches=1, val_check_interval=2)
    assert saved == [2, 4]


def test_the_state_of_a_callback_that_the_run_no_longer_has_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _stop_early(tmp_path / "first", 1, 1)
    with caplog.at_level(logging.WARNING):
        small.train(tmp_path / "next", 3, resume=checkpoint_path(tmp_path / "first", 2))
    assert "no callback takes the state of EarlyStopping{'monitor': 'val/loss', 'mode': 'min'}" in caplog.text


def _resume(tmp_path: Path, module: SDLightningModule | None = None, batch_size: int = 8) -> None:
    saving = PortableCheckpoint(tmp_path / "next", resume=checkpoint_path(tmp_path, 1), every_n_steps=0)
    small.fit(module or small.module(), small.data(batch_size=batch_size), 3, saving)


def test_another_model_batch_size_or_seed_is_refused_by_name(tmp_path: Path) -> None:
    small.train(tmp_path, 1)
    with pytest.raises(
        UsageError, match=r"data.batch_size=4, but the checkpoint's run used data.batch_size=8; .*init_from="
    ):
        _resume(tmp_path, batch_size=4)
    with pytest.raises(UsageError, match="seed=9, but the checkpoint's run used seed=3"):
        _resume(tmp_path, small.module(seed=9))
    frozen = small.module(train_text_encoder=False)
    with pytest.raises(
        UsageError, match=r"of another model; \d+ trained tensors differ: text_encoder.*absent in the model"
    ):
        _resume(tmp_path, frozen)
    other = LatentDiffusion.build("tiny")
    other.networks["unet"].conv_in = torch.nn.Conv2d(4, 32, 5, padding=2)
    module = SDLightningModule(other, train_text_encoder=True, seed=3)
    with pytest.raises(
        UsageError, match=r"unet.conv_in.weight: \(32, 4, 3, 3\) in the checkpoint, \(32, 4, 5, 5\) in the model"
    ):
        _resume(tmp_path, module)
    assert not (tmp_path / "next/checkpoints").exists()


def test_another_kind_of_scheduler_is_refused_by_name(tmp_path: Path) -> None:
    small.train(tmp_path, 1, lr_scheduler=SCHEDULES["StepLR"])
    for other, message in (
        (SCHEDULES["LinearLR"], "state of StepLR, but the run has LinearLR"),
        (None, "had the lr_scheduler StepLR, this run has none"),
    ):
        with pytest.raises(UsageError, match=message):
            _resume(tmp_path, small.module(lr_scheduler=other))


def test_the_command_that_started_a_run_from_weights_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    LatentDiffusion.build("tiny", seed=2).save_pretrained("base")
    quick = "data.cache_latents=false trainer.limit_val_batches=0 callbacks.samples=null logger=csv output_dir=run"
    for steps in (1, 2, 3):  # the second time, config.yaml says that the run was resumed
        command = f"train.py init_from=base resume=auto trainer.max_steps={steps} {quick}"
        monkeypatch.setattr(sys, "argv", command.split())
        _conf.main(train.PROGRAM)
        assert json.loads(Path("run/summary.json").read_text())["steps"] == steps
        assert ("resumed run/checkpoints" in caplog.text) is (steps > 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("resume=b output_dir=a", "output_dir=a already holds a run; continue it with resume=auto"),
        ("output_dir=c trainer.log_every_n_steps=-1", "trainer.log_every_n_steps=-1: expected at least 0"),
        ("output_dir=c trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0: expected at least 1"),
    ],
)
def test_what_would_end_amid_the_run_is_refused_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], given: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        with checkpoint.saving(name, 1) as tmp:
            mappings = ("parameters", "precision", "callbacks", "bad_samples", "trained_parts", "frozen")
            empty: dict[str, Any] = dict.fromkeys(mappings, {})
            empty |= dict.fromkeys(("optimizers", "optimizer_groups", "configured_groups", "schedulers"), [])
            empty["position"] = vars(RunPosition(1, 8, 0, 1, 8, 16, 0, order_version=2))
            empty |= {"format": 2, "train_seconds": 0.0, "data": None, "loss": None}
            (tmp / "trainer.json").write_text(json.dumps(empty))
        runs.mark(tmp_path / name)
    before = sorted(Path().rglob("*"))
    monkeypatch.setattr(sys, "argv", ["train.py", *given.split()])
    with pytest.raises(SystemExit, match="2"):
        _conf.main(train.PROGRAM)
    assert f"error: {told}" in capfd.readouterr().err and sorted(Path().rglob("*")) == before


def test_init_from_starts_a_new_run_at_step_0_with_the_exported_weights(tmp_path: Path) -> None:
    saved = small.train(tmp_path / "first", 4)
    pipeline = runs.find_pipeline(tmp_path / "first", who="init_from")
    assert pipeline == saved / "pipeline"
    averages = {k.removeprefix("ema/"): v for k, v in small.stored(saved).items() if k.startswith("ema/")}
    module = SDLightningModule(LatentDiffusion.from_pretrained(pipeline), train_text_encoder=True, seed=3)
    assert small.same(small.weights(module), averages)
    saving = PortableCheckpoint(tmp_path / "second", every_n_steps=0)
    trainer = small.fit(module, small.data(), 1, Seen(), saving)
    assert trainer.global_step == 1 and saving.last_saved == checkpoint_path(tmp_path / "second", 1)
    position = small.trainer_state(saving.last_saved)["position"]
    assert (position["epoch"], position["steps_in_epoch"], position["global_samples"]) == (0, 1, 8)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize(
    ("kills", "overrides"),
    [
        pytest.param(3, [], id="single"),
        pytest.param(10, [], id="single, often", marks=pytest.mark.full("kills")),
        pytest.param(
            4,
            ["strategy=gemini", "strategy.offload_optim_frac=0.5", "strategy.offload_param_frac=1"]
            + ["strategy.gathered_budget=500000"],
            id="gemini",
            marks=pytest.mark.full("kills"),
        ),
        *(
            pytest.param(
                3,
                ["strategy=gemini_offload", "trainer.precision=bf16-mixed", f"strategy.master={master}"]
                + ["strategy.step_in_backward=running_norm", "strategy.gradient_dtype=bfloat16"],
                id=f"gemini, {master} master, stepped in backward",
                marks=pytest.mark.full("kills"),
            )
            for master in ("split", "bfloat16")
        ),
    ],
)
def test_a_run_killed_at_random_moments_ends_bitwise_as_if_nothing_had_happened(
    tmp_path: Path, run_python: Callable[..., CompletedProcess[str]], kills: int, overrides: list[str]
) -> None:
    script = """
        import json, random, sys, time
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import forked_training as forked

        folder, dice = Path(sys.argv[1]), random.Random(0)
        wanted = int(sys.argv[3])
        options = ["trainer.max_steps=24", "callbacks.checkpoint.every_n_steps=2", "resume=auto", *sys.argv[4:]]
        began = time.monotonic()
        straight = forked.start(folder / "straight", *options)
        assert straight.wait() == 0, straight.output()
        whole = time.monotonic() - began
        kills, in_saves, finished, count = 0, 0, [], 0
        while kills < wanted or not finished:
            run = folder / f"run-{len(finished)}"
            command = forked.start(run, *options)
            if kills < wanted and kills % 2:  # in the middle of the second save from here
                saving = lambda: list((run / "checkpoints").glob(".tmp-step-*"))
                for condition in (saving, lambda: not saving(), saving):
                    command.wait_for(condition)
                time.sleep(dice.uniform(0, 0.3))
            elif kills < wanted:
                time.sleep(dice.uniform(0, whole / 2))
            if kills < wanted and command.kill():
                kills += 1
                in_saves += bool(list((run / "checkpoints").glob(".*-step-*")))
                continue
            assert command.wait() == 0, command.output()
            finished.append(run.name)
        print(json.dumps({"finished": finished, "in_saves": in_saves, "seconds": time.monotonic() - began}))
    """
    arguments = [tmp_path, SUPPORT, kills, *overrides]
    done = run_python("-c", textwrap.dedent(script), *arguments, check=True, timeout=900)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["in_saves"] >= kills // 5, "the kills missed the saves: they prove less than they should"
    for name in result["finished"]:
        small.assert_bitwise_equal(checkpoint_path(tmp_path / name, 24), checkpoint_path(tmp_path / "straight", 24))
        assert (tmp_path / name / "pipeline/model_index.json").exists()
        assert sorted(os.listdir(tmp_path / name / "checkpoints")) == [f"step-{step:08d}" for step in (20, 22, 24)]
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["steps"] == 24


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_run_killed_after_its_last_save_gets_its_results_when_it_is_resumed(
    tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    script = """
        import os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import forked_training as forked

        run = Path(sys.argv[1])
        pictures = "callbacks.samples={_target_: sd_lightning.callbacks.SampleGrid, run_dir: %s, accuracy_samples: 40}"
        options = ["trainer.max_steps=3", "trainer.limit_val_batches=1", "sampling.num_inference_steps=2"]
        options += [pictures % run]
        command = forked.start(run, *options)
        assert command.wait_for(lambda: (run / "checkpoints/step-00000003").exists()), command.output()
        assert command.kill()
        assert not (run / "summary.json").exists()
        for _ in range(2):
            command = forked.start(run, *options, "resume=auto")
            assert command.wait() == 0, command.output()
        assert "is complete; raise trainer.max_steps" in command.output(), command.output()
    """
    run = tmp_path / "run"
    run_python("-c", textwrap.dedent(script), run, SUPPORT, check=True)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3 and summary["prompted_accuracy_samples"] == 40
    assert summary["caption_gap"] is not None and summary["prompted_accuracy"] is not None
    assert summary["final_loss"] == small.trainer_state(checkpoint_path(run, 3))["loss"] > 0
    assert summary["checkpoint"] == str(checkpoint_path(run, 3))
    assert {"pipeline", "samples", "report.html"} <= set(os.listdir(run))
    assert [path.name for path in all_checkpoints(run)] == ["step-00000003"]


@pytest.mark.full("matrix")
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_two_processes_continue_a_run_of_one_at_the_right_sample(
    tmp_path: Path, run_python: Callable[..., CompletedProcess[str]]
) -> None:
    options = [*SMALL, "optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.eps", "optimizer.lr=0.05"]
    command = ["-m", "sd_lightning.train", f"output_dir={tmp_path}/run", *options]
    run_python(*command, "trainer.max_steps=6", "callbacks.checkpoint.every_n_steps=3", check=True)
    straight = checkpoint_path(tmp_path / "run", 6)
    two = ["trainer.max_steps=6", "strategy=ddp", "trainer.devices=2", f"resume={checkpoint_path(tmp_path / 'run', 3)}"]
    run_python(*command[:2], f"output_dir={tmp_path}/two", *options, *two, check=True)
    resumed = checkpoint_path(tmp_path / "two", 6)
    assert small.trainer_state(resumed)["position"] == small.trainer_state(straight)["position"]
    ours, theirs = small.stored(resumed), small.stored(straight)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5)
