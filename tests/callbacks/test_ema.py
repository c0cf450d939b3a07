"""The average of the weights: its numbers against a reference, and who computes with it when."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

import small_training as small
from sd_lightning import UsageError
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.strategies import restoring
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group


class Layer(pl.LightningModule):
    """A few weights that move a lot at every step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3, dtype=dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(self.global_step)
        return (self.layer(torch.randn(8, 4, dtype=self.layer.weight.dtype)) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = small.weights(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def train_dataloader(self) -> list[Tensor]:
        return [torch.zeros(1)] * 100

    def val_dataloader(self) -> list[Tensor]:
        return [torch.zeros(1)]


class Trajectory(Callback):
    """Records the weights after every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(small.weights(pl_module))


def fit(module: pl.LightningModule, max_steps: int, *callbacks: Callback, **options: Any) -> pl.Trainer:
    trainer = small.trainer_of(max_steps, *callbacks, **options)
    trainer.fit(module)
    return trainer


def shadow(ema: EMA) -> dict[str, Tensor]:
    return {name: average.clone() for (name, _), average in ema.shadow.items()}


def averages(
    start: dict[str, Tensor], trajectory: list[dict[str, Tensor]], decay: Callable[[int], float | None]
) -> dict[str, Tensor]:
    """Average in float64, one element after the other; ``decay(step)`` is None for a step without update."""
    average = {name: weight.double() for name, weight in start.items()}
    for step, weights in enumerate(trajectory, 1):
        d = decay(step)
        if d is not None:
            average = {name: d * average[name] + (1 - d) * weight.double() for name, weight in weights.items()}
    return {name: weight.float() for name, weight in average.items()}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=tolerance)


def warm_up(decay: float, updates_before: int) -> float:
    return min(decay, (1 + updates_before) / (10 + updates_before)) if updates_before else 0.0


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_50_steps_equal_a_reference_and_the_average_of_diffusers(decay: float) -> None:
    from diffusers.training_utils import EMAModel

    module, ema, trajectory = Layer(), EMA(decay), Trajectory()
    start = small.weights(module)
    fit(module, 50, trajectory, ema)
    expected = averages(start, trajectory.weights, lambda step: warm_up(decay, step - 1))
    assert_close(shadow(ema), expected)
    live = Layer()
    peer = EMAModel(live.parameters(), decay=decay)
    for weights in trajectory.weights:
        live.load_state_dict(weights)
        peer.step(live.parameters())
    assert_close(shadow(ema), dict(zip(shadow(ema), peer.shadow_params)))
    far = max((expected[name] - weight).abs().max() for name, weight in trajectory.weights[-1].items())
    assert far > 1e-3  # the weights moved, so that the comparison means something


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        # Until then the average follows the weights; warm-up begins with the first update.
        ({"update_after_step": 7}, lambda step: 0.0 if step <= 7 else warm_up(0.95, step - 8)),
        ({"update_every": 3}, lambda step: None if step % 3 else warm_up(0.95, step // 3 - 1)),
        ({"decay": 0.0}, lambda step: 0.0),
        ({"decay": 1.0}, lambda step: warm_up(1.0, step - 1)),
        ({"offload": True}, lambda step: warm_up(0.95, step - 1)),
    ],
)
def test_every_option_changes_the_numbers_as_it_says(options: dict[str, Any], decay: Callable[[int], float]) -> None:
    module, ema, trajectory = Layer(), EMA(**{"decay": 0.95} | options), Trajectory()
    start = small.weights(module)
    fit(module, 23, trajectory, ema)
    assert_close(shadow(ema), averages(start, trajectory.weights, decay))


def test_one_update_per_optimizer_step_when_gradients_are_accumulated() -> None:
    module, ema, trajectory = Layer(), EMA(0.95), Trajectory()
    start = small.weights(module)
    fit(module, 9, trajectory, ema, accumulate_grad_batches=3)
    assert ema.num_updates == len(trajectory.weights) == 9
    assert_close(shadow(ema), averages(start, trajectory.weights, lambda step: warm_up(0.95, step - 1)))


def test_the_average_of_half_precision_weights_is_kept_in_float32() -> None:
    module, ema, trajectory = Layer(torch.bfloat16), EMA(0.9), Trajectory()
    start = small.weights(module)
    fit(module, 20, trajectory, ema)
    assert {average.dtype for average in ema.shadow.values()} == {torch.float32}
    assert_close(shadow(ema), averages(start, trajectory.weights, lambda step: warm_up(0.9, step - 1)))
    assert module.layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_gpu_an_offloaded_average_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    kept: list[dict[str, Tensor]] = []
    for offload in (False, True):
        module, ema = Layer(dtype), EMA(0.9, offload=offload)
        start = small.weights(module)
        fit(module, 12, ema)
        assert {average.device.type for average in ema.shadow.values()} == {"cpu"}
        kept.append(shadow(ema))
        assert not any(torch.equal(average, start[name].float()) for name, average in kept[-1].items())
    assert small.same(kept[0], kept[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.5}, r"EMA got decay=1.5; expected a number in \[0, 1\]"),
        ({"update_every": 0}, "EMA got update_every=0; expected at least 1"),
        ({"update_after_step": -1}, "EMA got update_after_step=-1; expected at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EMA(**options)


def test_validation_computes_with_the_average_and_training_does_not() -> None:
    module, ema, trajectory = Layer(), EMA(0.9), Trajectory()
    start = small.weights(module)
    fit(module, 6, trajectory, ema, val_check_interval=3, limit_val_batches=1)
    expected = averages(start, trajectory.weights, lambda step: warm_up(0.9, step - 1))
    assert_close(module.seen, expected)
    alone = Layer()
    fit(alone, 6, without := Trajectory())
    assert all(small.same(a, b) for a, b in zip(trajectory.weights, without.weights))


def test_after_fit_the_module_holds_the_average_and_a_second_fit_continues_from_the_trained_weights() -> None:
    modules, ema = (Layer(), Layer()), EMA(0.9)
    first, second, plain = Trajectory(), Trajectory(), Trajectory()
    fit(modules[0], 5, first, ema)
    assert small.same(small.weights(modules[0]), shadow(ema))
    assert not small.same(small.weights(modules[0]), first.weights[-1])
    start = small.weights(Layer())
    fit(modules[0], 4, second, ema)  # another trainer, which counts its own steps
    fit(modules[1], 5)
    fit(modules[1], 4, plain)
    assert all(small.same(a, b) for a, b in zip(second.weights, plain.weights))
    expected = averages(start, first.weights + second.weights, lambda step: warm_up(0.9, step - 1))
    assert ema.num_updates == 9
    assert_close(shadow(ema), expected)
    assert_close(small.weights(modules[0]), expected)


def test_a_fit_that_is_refused_leaves_the_average_in_the_module_and_the_next_one_goes_on() -> None:
    class Refusing(Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            raise UsageError("no")

    module, plain, ema = Layer(), Layer(), EMA(0.9)
    ours, theirs = Trajectory(), Trajectory()
    fit(module, 5, ema)
    held = small.weights(module)
    for refused in (module, Layer()):  # the average of the first module outlives a refused fit of another
        with pytest.raises(UsageError, match="no"):
            fit(refused, 4, ema, Refusing())
        assert small.same(small.weights(module), held) and ema.num_updates == 5
    fit(module, 4, ours, ema)
    fit(plain, 5)
    fit(plain, 4, theirs)
    assert all(small.same(a, b) for a, b in zip(ours.weights, theirs.weights))
    assert ema.num_updates == 9


def test_a_second_fit_with_a_new_callback_continues_from_the_trained_weights_too() -> None:
    module, first, second = Layer(), Trajectory(), Trajectory()
    fit(module, 5, first, EMA(0.9))
    fit(module, 4, second, ema := EMA(0.9))
    assert ema.num_updates == 4
    assert_close(shadow(ema), averages(first.weights[-1], second.weights, lambda step: warm_up(0.9, step - 1)))


def test_a_module_that_stays_in_parts_goes_on_from_its_trained_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "free_host_bytes", lambda: 0)
    ours, theirs, module, whole = EMA(0.9), EMA(0.9), Layer(), Layer()
    for steps in (5, 4):
        fit(module, steps, ours, strategy=GeminiStrategy())
        fit(whole, steps, theirs)
    leave_process_group()
    assert ours.num_updates == 9
    for key, average in theirs.shadow.items():
        torch.testing.assert_close(ours.shadow[key], average.flatten())


def test_another_module_gets_an_average_of_its_own() -> None:
    modules, ema = (Layer(), Layer()), EMA(0.9)
    with torch.no_grad():
        modules[1].layer.weight.add_(5.0)
    start = small.weights(modules[1])
    fit(modules[0], 5, ema)
    held = small.weights(modules[0])
    fit(modules[1], 5, trajectory := Trajectory(), ema)
    assert_close(shadow(ema), averages(start, trajectory.weights, lambda step: warm_up(0.9, step - 1)))
    assert small.same(small.weights(modules[0]), held)


def test_the_same_trainer_goes_on_averaging_in_a_longer_fit() -> None:
    module, ema, trajectory = Layer(), EMA(0.9), Trajectory()
    start = small.weights(module)
    trainer = fit(module, 5, trajectory, ema)
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(module)
    assert len(trajectory.weights) == ema.num_updates == 9
    assert_close(shadow(ema), averages(start, trajectory.weights, lambda step: warm_up(0.9, step - 1)))


def test_weights_loaded_after_a_fit_are_trained_by_the_next_and_start_its_average(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, ema, second, plain = Layer(), EMA(0.9), Trajectory(), Trajectory()
    start = small.weights(module)
    fit(module, 5, ema)
    average = shadow(ema)
    module.load_state_dict(start)
    assert small.same(shadow(ema), average)
    fit(module, 4, second, ema)
    fit(Layer(), 4, plain)
    assert all(small.same(a, b) for a, b in zip(second.weights, plain.weights))
    assert ema.num_updates == 4 and "weights were loaded since the last fit" in caplog.text
    assert_close(shadow(ema), averages(start, second.weights, lambda step: warm_up(0.9, step - 1)))


def test_a_file_that_lightning_wrote_brings_its_weights_into_the_next_fit_and_into_no_average(tmp_path: Path) -> None:
    module, ema, trajectory = Layer(), EMA(0.9), Trajectory()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit(module, 4, ema, saving, trajectory, enable_checkpointing=True)
    average = shadow(ema)
    again = small.trainer_of(3, EMA(0.9), second := Trajectory())
    small.trainer_of(4, ema, limit_val_batches=1).validate(module, ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
    assert small.same(shadow(ema), average)
    fit(module, 4, ema)  # holds an average again
    again.fit(module, ckpt_path=tmp_path / "step=2.ckpt")
    assert again.global_step == 3 and small.same(second.weights[-1], trajectory.weights[2])


class _Interrupted(Layer):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        raise RuntimeError("interrupted")


def test_an_exception_in_a_validation_leaves_the_trained_weights_in_the_module() -> None:
    module, trajectory = _Interrupted(), Trajectory()
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(module, 6, trajectory, EMA(0.9), val_check_interval=3, limit_val_batches=1)
    assert len(trajectory.weights) == 3 and small.same(small.weights(module), trajectory.weights[-1])


def test_pictures_after_fit_come_from_the_average_and_the_checkpoint_keeps_both(tmp_path: Path) -> None:
    module, ema, saving = small.module(), EMA(0.9), PortableCheckpoint(tmp_path, every_n_steps=0)
    trained = Trajectory()
    small.fit(module, small.data(), 4, trained, ema, saving)
    assert saving.last_saved is not None
    stored = small.stored(saving.last_saved)
    of = {
        kind: {k.removeprefix(f"{kind}/"): v for k, v in stored.items() if k.startswith(kind)}
        for kind in ("master", "ema")
    }
    assert small.same(of["master"], trained.weights[-1]) and small.same(of["ema"], shadow(ema))
    assert small.same(small.weights(module), of["ema"])

    def picture() -> bytes:
        return module.sample("the digit two", num_inference_steps=2, guidance_scale=3.0)[0].tobytes()

    with_average = picture()
    module.load_state_dict(of["master"])
    assert picture() != with_average
    module.load_state_dict(of["ema"])
    assert picture() == with_average
    from sd_lightning import LatentDiffusion

    exported = LatentDiffusion.from_pretrained(saving.last_saved / "pipeline")
    unet = {name: weight for name, weight in of["ema"].items() if name.startswith("unet.")}
    assert small.same({f"unet.{n}": p.detach() for n, p in exported.denoiser.named_parameters()}, unet)


def test_a_checkpoint_carries_the_average_into_a_new_run(tmp_path: Path) -> None:
    straight = small.train(tmp_path / "straight", 6, save=(3,))
    ema = EMA(0.9)
    saving = PortableCheckpoint(
        tmp_path / "resumed", resume=tmp_path / "straight/checkpoints/step-00000003", every_n_steps=0
    )
    small.fit(small.module(), small.data(), 6, ema, saving)
    expected = small.stored(straight)
    assert ema.num_updates == 6
    assert all(torch.equal(average, expected[f"ema/{name}"]) for name, average in shadow(ema).items())


def test_a_checkpoint_without_average_starts_one_at_its_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = PortableCheckpoint(tmp_path, every_n_steps=0)
    small.fit(small.module(), small.data(), 2, first)
    saved = {k.removeprefix("master/"): v for k, v in small.stored(first.last_saved).items() if k.startswith("master/")}  # type: ignore[arg-type]
    ema, trajectory = EMA(0.9), Trajectory()
    small.fit(
        small.module(),
        small.data(),
        4,
        trajectory,
        ema,
        PortableCheckpoint(tmp_path / "next", every_n_steps=0, resume=first.last_saved),
    )
    assert "has no EMA; the average starts at its weights" in caplog.text
    assert_close(shadow(ema), averages(saved, trajectory.weights, lambda step: warm_up(0.9, step - 1)))


@pytest.mark.gpu
def test_on_cuda_an_offloaded_average_stays_in_host_memory_with_the_same_numbers() -> None:
    kept: list[dict[str, Tensor]] = []
    for offload in (False, True):
        module, ema = small.module(), EMA(0.9, offload=offload)
        trainer = small.trainer_of(6, ema, accelerator="cuda")
        trainer.fit(module, small.data())
        assert {average.device.type for average in ema.shadow.values()} == {"cpu" if offload else "cuda"}
        kept.append({name: average.cpu() for name, average in shadow(ema).items()})
        trainer.fit_loop.epoch_loop.max_steps = 8  # a second fit, after Lightning has moved the module to the host
        trainer.fit(module, small.data())
        assert ema.num_updates == 8
    for name, average in kept[0].items():
        torch.testing.assert_close(kept[1][name], average, rtol=0, atol=1e-5)
