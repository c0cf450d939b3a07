"""Updates that are skipped for a bad loss: by the device, of which the host hears one step late, or by the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import small_training as small
from sd_lightning import SDLightningModule, UsageError
from sd_lightning.callbacks import NonFiniteLossGuard
from sd_lightning.callbacks.steps import Lagged
from sd_lightning.strategies import EngineStrategy

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=2e-3, fused=True),
}
TOLD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda groups: torch.optim.AdamW(groups, lr=2e-3),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
}
"""Optimizers that the host must tell."""


class Bad(SDLightningModule):
    """Its loss is not a number in some batches."""

    batches: tuple[int, ...] = ()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step + 1 in self.batches:
            loss = loss * float("nan")
            self.last_loss = loss.detach()
        return loss


def with_bad(optimizer: Any, *batches: int) -> Bad:
    module = small.module(optimizer=optimizer)
    module.__class__ = Bad
    assert isinstance(module, Bad)
    module.batches = batches
    return module


class States(Callback):
    """Records weights and optimizer states after every step, and what the guard has heard by then."""

    def __init__(self, guard: NonFiniteLossGuard) -> None:
        self.guard = guard
        self.after: list[dict[str, Tensor]] = []
        self.heard: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        states = trainer.optimizers[0].state
        found = small.weights(pl_module)
        for name, parameter in pl_module.named_parameters():
            for kind, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor):  # SGD's is None before its first step
                    found[f"{kind}/{name}"] = value.clone()
        self.after.append(found)
        self.heard.append((self.guard.bad_steps, self.guard.total_bad_steps))


def train(module: Bad, steps: int, patience: int = 9, **options: Any) -> States:
    guard = NonFiniteLossGuard(patience)
    states = States(guard)
    small.fit(module, small.data(), steps, guard, states, **options)
    return states


@pytest.mark.parametrize(("name", "late"), [*((name, True) for name in FUSED), *((name, False) for name in TOLD)])
def test_a_skipped_update_leaves_weights_moments_and_step_counts_and_is_heard_of_one_step_late(
    name: str, late: bool
) -> None:
    states = train(with_bad((FUSED | TOLD)[name], 2, 3), 5)
    assert small.same(states.after[0], states.after[1]) and small.same(states.after[1], states.after[2])
    assert not small.same(states.after[2], states.after[3])
    assert all(torch.isfinite(value).all() for value in states.after[-1].values())
    at_once = [(0, 0), (1, 1), (2, 2), (0, 2), (0, 2)]
    assert states.heard == ([(0, 0), *at_once[:-1]] if late else at_once)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("bad", [(1, 2), (3,)], ids=["first steps", "later"])
def test_training_goes_on_as_if_the_host_had_dropped_the_gradients(
    name: str, bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = train(with_bad(FUSED[name], *bad), 4)
    monkeypatch.setattr(EngineStrategy, "skip_update_if", lambda *_: False)
    theirs = train(with_bad(FUSED[name], *bad), 4)
    assert small.same(ours.after[-1], theirs.after[-1])
    assert ours.heard != theirs.heard


@pytest.mark.parametrize("optimizer", [FUSED["adamw"], TOLD["plain"]], ids=["late", "at once"])
def test_too_many_bad_steps_at_the_end_of_a_run_are_not_missed(optimizer: Any) -> None:
    with pytest.raises(UsageError, match="stopped at step 4: the loss was NaN or infinite 2 steps in a row"):
        train(with_bad(optimizer, 3, 4), 4, patience=2)


def test_a_second_fit_does_not_hear_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    guard, data = NonFiniteLossGuard(2), small.data()
    module = with_bad(FUSED["adamw"], 2, 3, 4)
    with pytest.raises(UsageError, match="stopped at step 3"):
        small.fit(module, data, 9, guard)
    module.batches = ()
    small.fit(module, small.data(), 1, guard)
    assert (guard.bad_steps, guard.total_bad_steps) == (0, 0)


def test_values_are_read_when_the_next_ones_come() -> None:
    lagged = Lagged()
    assert lagged.pop() is None
    values = torch.tensor([1.0, 2.0])
    assert lagged.swap(values) is None
    values += 1  # the copy has been made
    assert lagged.swap(values) == [1.0, 2.0]
    assert lagged.pop() == [2.0, 3.0] and lagged.pop() is None
