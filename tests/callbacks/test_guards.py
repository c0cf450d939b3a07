"""Runs that end in good order: signals, and losses that are no longer numbers."""

import json
import logging
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import small_training as small
from places import SUPPORT
from sd_lightning import SDLightningModule, UsageError
from sd_lightning.callbacks import EMA, NonFiniteLossGuard, PortableCheckpoint, SampleGrid, StopOnSignal
from sd_lightning.callbacks.checkpoint import writer
from sd_lightning.models.generation import SamplingOptions
from sd_lightning.state.shards import TensorRange, tensor_of
from sd_lightning.storage.atomic import TEMPORARY
from sd_lightning.storage.checkpoint import all_checkpoints, checkpoint_path, step_of

Run = Callable[..., CompletedProcess[str]]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Signalled(Callback):
    """Sends this process signals when the given batches begin."""

    def __init__(self, number: signal.Signals, *batches: int) -> None:
        self.number = number
        self.batches = list(batches)
        self.count = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.count += 1
        for _ in range(self.batches.count(self.count)):
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def _handlers_are_given_back() -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let it be ignored in the background
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@SIGNALS
def test_a_signal_saves_at_the_end_of_the_step_and_the_run_resumes_bitwise(
    tmp_path: Path, number: signal.Signals
) -> None:
    straight = small.train(tmp_path / "straight", 5)
    run, stop = tmp_path / "run", StopOnSignal()
    small.fit(small.module(), small.data(), 5, EMA(0.9), stop, Signalled(number, 3), PortableCheckpoint(run))
    assert (stop.received, stop.stopped) == (number, True)
    (left,) = all_checkpoints(run)
    assert left == checkpoint_path(run, 3)
    small.assert_bitwise_equal(small.train(run, 5, resume=left), straight)


def test_a_signal_amid_accumulated_batches_waits_for_the_whole_step(tmp_path: Path) -> None:
    stop = StopOnSignal()
    callbacks = (EMA(0.9), stop, Signalled(signal.SIGTERM, 3), PortableCheckpoint(tmp_path))
    trainer = small.fit(small.module(), small.data(), 5, *callbacks, accumulate_grad_batches=2)
    assert stop.stopped and trainer.global_step == 2
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000002"]


def test_a_signal_while_latents_are_cached_saves_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, stop = small.module(), StopOnSignal()
    encode = module.encoder.encode_moments

    def signalled(pixels: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return encode(pixels)

    monkeypatch.setattr(module.encoder, "encode_moments", signalled)
    small.fit(module, small.data(), 5, stop, PortableCheckpoint(tmp_path))
    assert stop.stopped and [path.name for path in all_checkpoints(tmp_path)] == ["step-00000001"]


def test_a_signal_in_the_last_step_does_not_make_a_complete_run_an_interrupted_one(tmp_path: Path) -> None:
    stop = StopOnSignal()
    trainer = small.fit(
        small.module(), small.data(), 3, stop, Signalled(signal.SIGTERM, 3), PortableCheckpoint(tmp_path)
    )
    assert trainer.global_step == 3 and not stop.stopped


def test_a_second_interrupt_does_not_wait_for_the_step(tmp_path: Path) -> None:
    module = small.module()
    before = small.weights(module)
    with pytest.raises(SystemExit):
        small.fit(module, small.data(), 5, StopOnSignal(), Signalled(signal.SIGINT, 1, 1), PortableCheckpoint(tmp_path))
    assert not all_checkpoints(tmp_path) and small.same(small.weights(module), before)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from then on


class BadLoss(SDLightningModule):
    """Its loss is not a number in the given batches."""

    batches: tuple[int, ...] = ()
    value = float("nan")
    count = 0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.count += 1
        if self.count in self.batches:
            loss = loss * self.value
            self.last_loss = loss.detach()
        return loss


def _with_bad_losses(*batches: int, value: float = float("nan")) -> BadLoss:
    module = small.module()
    module.__class__ = BadLoss
    assert isinstance(module, BadLoss)
    module.batches, module.value = batches, value
    return module


class Weights(Callback):
    """Records the weights after every step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.after.append(small.weights(pl_module))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_with_a_bad_loss_leaves_the_weights_alone_and_training_goes_on(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    with caplog.at_level(logging.WARNING):
        trainer = small.fit(_with_bad_losses(2, 3, value=value), small.data(), 4, NonFiniteLossGuard(3), weights)
    assert trainer.global_step == 4
    assert small.same(weights.after[0], weights.after[1]) and small.same(weights.after[1], weights.after[2])
    assert not small.same(weights.after[2], weights.after[3])
    assert all(torch.isfinite(weight).all() for weight in weights.after[3].values())
    warnings = [m for m in caplog.messages if "no update" in m]
    assert [m.split(":")[0] for m in warnings] == ["step 2", "step 3"]


def test_one_bad_batch_skips_the_accumulated_step() -> None:
    weights = Weights()
    small.fit(_with_bad_losses(3), small.data(), 3, NonFiniteLossGuard(3), weights, accumulate_grad_batches=2)
    assert small.same(weights.after[1], weights.after[3])  # the second step: batches 3 (bad) and 4 (good)
    assert all(torch.isfinite(weight).all() for weight in weights.after[-1].values())
    assert not small.same(weights.after[3], weights.after[5])


def test_the_nth_bad_step_in_a_row_stops_the_run_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    guard, module = NonFiniteLossGuard(3, run_dir=tmp_path), _with_bad_losses(2, 3, 5, 6, 7)
    saving = PortableCheckpoint(tmp_path, every_n_steps=4)
    with pytest.raises(UsageError) as caught:
        small.fit(module, small.data(), 12, guard, saving)
    message = str(caught.value)
    assert message.startswith("training stopped at step 7: the loss was NaN or infinite 3 steps in a row; ")
    assert f"the last good checkpoint is {checkpoint_path(tmp_path, 4)};" in message and "\n" not in message
    assert "optimizer.lr" in message
    saved = {
        k.removeprefix("master/"): v for k, v in small.stored(checkpoint_path(tmp_path, 4)).items() if "master" in k
    }
    assert small.same(small.weights(module), saved)


def test_a_run_whose_losses_are_bad_from_the_start_has_no_checkpoint_to_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint yet"):
        small.fit(_with_bad_losses(*range(1, 9)), small.data(), 8, NonFiniteLossGuard(2, run_dir=tmp_path))


def _names(run_dir: Path) -> list[int]:
    return [step_of(path) for path in all_checkpoints(run_dir)]


def test_no_checkpoint_is_saved_amid_bad_losses_and_the_message_names_the_one_before(tmp_path: Path) -> None:
    guard, saving = NonFiniteLossGuard(4, run_dir=tmp_path), PortableCheckpoint(tmp_path, every_n_steps=1, keep=2)
    with pytest.raises(UsageError, match=f"; the last good checkpoint is {checkpoint_path(tmp_path, 3)};"):
        small.fit(_with_bad_losses(4, 5, 6, 7), small.data(), 12, guard, saving)
    assert _names(tmp_path) == [2, 3]


class Listed(Callback):
    """Records which checkpoints there are after every step."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.after: list[list[int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.after.append(_names(self.run_dir))


def test_the_checkpoint_that_was_due_comes_with_the_next_good_loss_and_the_one_before_stays_until_all_is_well(
    tmp_path: Path,
) -> None:
    listed = Listed(tmp_path)
    saving = PortableCheckpoint(tmp_path, every_n_steps=2, keep=1)
    module = _with_bad_losses(4, 5, 7, value=float("inf"))
    small.fit(module, small.data(), 10, EMA(0.9), NonFiniteLossGuard(3), saving, listed)
    assert listed.after[3:] == [[2], [2], [2], [2, 6], [2, 6], [2, 8], [2, 8]]
    assert _names(tmp_path) == [10]
    assert all(torch.isfinite(value).all() for value in small.stored(checkpoint_path(tmp_path, 10)).values())


def test_a_run_that_ends_amid_bad_losses_says_so_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    saving = PortableCheckpoint(tmp_path, every_n_steps=2)
    with pytest.raises(UsageError) as caught:
        small.fit(_with_bad_losses(4, 5), small.data(), 5, NonFiniteLossGuard(3), saving)
    assert str(caught.value).startswith(
        "training ended at step 5 amid losses that are NaN or infinite (2 in a row), which are not saved; the last "
        f"good checkpoint is {checkpoint_path(tmp_path, 2)}; resume with a lower optimizer.lr"
    )
    assert str(caught.value).endswith("or end before them with trainer.max_steps=3")
    resumed = PortableCheckpoint(tmp_path, resume=checkpoint_path(tmp_path, 2))
    small.fit(small.module(), small.data(), 3, resumed)  # the remedy
    assert _names(tmp_path) == [2, 3]


def test_a_signal_amid_bad_losses_stops_and_saves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop, saving = StopOnSignal(), PortableCheckpoint(tmp_path, every_n_steps=2)
    small.fit(
        _with_bad_losses(3, 4), small.data(), 8, NonFiniteLossGuard(3), stop, Signalled(signal.SIGTERM, 4), saving
    )
    assert stop.stopped and _names(tmp_path) == [2] and saving.last_saved == checkpoint_path(tmp_path, 2)
    assert [m for m in caplog.messages if "no checkpoint" in m] == [
        "step 4: no checkpoint is saved while the loss is not finite"
    ]


class Spoils(Callback):
    """Makes a weight, or only its average, NaN after a step."""

    def __init__(self, step: int, average: EMA | None = None) -> None:
        self.step, self.average = step, average

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            values = self.average.shadow["unet.conv_in.weight", 0] if self.average else pl_module.unet.conv_in.weight
            values.detach().view(-1)[7] = float("nan")


@pytest.mark.parametrize(("kind", "step"), [("master", 4), ("master", 3), ("ema", 3)])
def test_weights_that_are_not_finite_are_never_saved_though_the_loss_is(tmp_path: Path, kind: str, step: int) -> None:
    ema = EMA(0.9)
    spoils = Spoils(step, ema if kind == "ema" else None)
    saving = PortableCheckpoint(tmp_path, every_n_steps=1, keep=2)
    with pytest.raises(UsageError) as caught:
        small.fit(small.module(), small.data(), 4, ema, spoils, saving)
    assert str(caught.value).startswith(
        f"training stopped at step {step}: weights are NaN or infinite ({kind}/unet.conv_in.weight), which are not "
        f"saved; the last good checkpoint is {checkpoint_path(tmp_path, step - 1)}; resume with a lower optimizer.lr"
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step-{n:08d}" for n in (step - 2, step - 1)]


def test_large_weights_whose_sum_overflows_are_saved() -> None:
    each = TensorRange("master/x", (3,), 0, 3, torch.full((3,), 3e38))
    not_finite: list[str] = []
    assert tensor_of(writer.watched(each, not_finite).values).sum().isinf() and not_finite == []


def test_an_overflow_of_scaled_gradients_is_not_taken_for_a_bad_loss(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    weights, saving = Weights(), PortableCheckpoint(tmp_path, every_n_steps=1)
    options: dict[str, Any] = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": None}
    small.fit(small.module(), small.data(), 2, weights, NonFiniteLossGuard(1), saving, **options)
    assert small.same(weights.after[0], weights.after[1]) and scaler.get_scale() == 2.0**125
    assert _names(tmp_path) == [1, 2]


def test_a_rank_hears_of_weights_that_another_has_found(tmp_path: Path) -> None:
    told = SimpleNamespace(reduce_boolean_decision=lambda found, all: False, broadcast=lambda value: "there")
    trainer: Any = SimpleNamespace(strategy=told, is_global_zero=False, global_step=9)
    with pytest.raises(UsageError, match=r"step 9: weights are NaN or infinite \(on another process\).* is there;"):
        writer.check_finite(trainer, tmp_path, [])


def test_a_patience_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="NonFiniteLossGuard got patience=0; expected at least 1"):
        NonFiniteLossGuard(0)


@pytest.mark.gpu
def test_on_cuda_the_gradient_scaler_skips_a_bad_step_itself() -> None:
    for fused in (False, True):
        weights, module = Weights(), _with_bad_losses(2)
        module._optimizer_factory = lambda groups, fused=fused: torch.optim.AdamW(groups, lr=1e-3, fused=fused)
        options = {"accelerator": "cuda", "precision": "16-mixed", "gradient_clip_val": None}
        small.fit(module, small.data(), 3, NonFiniteLossGuard(3), weights, **options)
        assert small.same(weights.after[0], weights.after[1]) and not small.same(weights.after[1], weights.after[2])


def test_a_rank_that_does_not_see_output_dir_ends_the_run_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is marked, as by an earlier start; rank 0's new file is not there, as on a disk of this machine's."""
    monkeypatch.setattr(writer, "_NFS_SECONDS", 0.0)
    monkeypatch.setattr(Path, "touch", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    module, weights = small.module(), Weights()
    with pytest.raises(UsageError) as caught:
        small.fit(module, small.data(), 2, weights, PortableCheckpoint(tmp_path / "run", every_n_steps=0))
    assert not weights.after
    assert str(caught.value) == (
        f"rank 0 on node7 does not see output_dir={tmp_path / 'run'}, which rank 0 has made; put it on a file system "
        "that all machines share"
    )


def test_a_rank_waits_for_output_dir_to_show_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, slept = tmp_path, []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            (run / f"{TEMPORARY}new").touch()

    monkeypatch.setattr(writer.time, "sleep", sleep)
    monkeypatch.setattr(writer, "on_rank_zero", lambda _: "new")
    trainer = SimpleNamespace(global_rank=5, is_global_zero=False)
    writer.check_shared(trainer, run)  # type: ignore[arg-type]
    assert len(slept) == 3


class Drawing(SampleGrid):
    """Counts its grids."""

    def __init__(self, run_dir: Path, every_n_steps: int) -> None:
        options = SamplingOptions(num_inference_steps=1)
        super().__init__(run_dir, prompts=["a handwritten two"], every_n_steps=every_n_steps, options=options)
        self.steps: list[int] = []

    def draw(self, trainer: pl.Trainer, pl_module: Any) -> Path:
        self.steps.append(trainer.global_step)
        return super().draw(trainer, pl_module)


@pytest.mark.parametrize("every_n_steps", [0, 1])
def test_a_run_that_stops_early_is_complete_and_gets_its_last_pictures_once(tmp_path: Path, every_n_steps: int) -> None:
    drawing, stopping = Drawing(tmp_path, every_n_steps), EarlyStopping("val/loss", stopping_threshold=100.0)
    trainer = small.fit(small.module(), small.data(), 5, stopping, drawing, limit_val_batches=1, val_check_interval=2)
    assert trainer.global_step == 2  # met by the first validation
    assert drawing.steps == ([1, 2] if every_n_steps else [2])


def test_a_run_that_a_signal_stops_draws_no_last_pictures_and_the_next_fit_does(tmp_path: Path) -> None:
    stop, drawing, module = StopOnSignal(), Drawing(tmp_path, 0), small.module()
    trainer = small.fit(module, small.data(), 4, stop, Signalled(signal.SIGTERM, 2), drawing)
    assert (trainer.global_step, stop.stopped, drawing.steps) == (2, True, [])
    trainer.fit(module, trainer.datamodule)  # type: ignore[attr-defined]
    assert (trainer.global_step, stop.stopped, drawing.steps) == (4, False, [4])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_signalled_command_ends_with_75_and_one_line_and_resume_auto_continues(
    tmp_path: Path, run_python: Run
) -> None:
    script = """
        import json, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        import forked_training as forked

        folder, ends = Path(sys.argv[1]), {}
        assert forked.start(folder / "straight", "trainer.max_steps=9").wait() == 0
        for number in (signal.SIGTERM, signal.SIGINT):
            run = folder / number.name
            command = forked.start(run, "trainer.max_steps=9", "callbacks.checkpoint.every_n_steps=2")
            command.wait_for(lambda: (run / "checkpoints/step-00000002").exists())
            command.send(number)
            ends[number.name] = [command.wait(), command.output()]
            ends[number.name] += [forked.start(run, "trainer.max_steps=9", "resume=auto").wait()]
        print(json.dumps(ends))
    """
    done = run_python("-c", textwrap.dedent(script), tmp_path, SUPPORT, check=True)
    ends = json.loads(done.stdout.splitlines()[-1])
    for name, (code, output, resumed_code) in ends.items():
        assert (code, resumed_code) == (75, 0), output
        left = all_checkpoints(tmp_path / name)[-2]  # the newest before the end
        assert f"stopped by a signal at step {int(left.name[5:])}; saved {left}; resume=auto continues" in output
        assert "Traceback" not in output
        small.assert_bitwise_equal(checkpoint_path(tmp_path / name, 9), checkpoint_path(tmp_path / "straight", 9))
