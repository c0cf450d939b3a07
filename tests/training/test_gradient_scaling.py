"""Scaled losses and clipping with fused optimizers, against plain torch; and no read of the scaler's decision."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import small_training as small
from sd_lightning import SDLightningModule
from sd_lightning.strategies.base import give_found_inf, takes_found_inf

STEPS = 4
CLIP = 0.05
"""Below the norm of the first gradients."""
KINDS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=2e-3, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, fused=True),
    "plain": lambda groups: torch.optim.AdamW(groups, lr=2e-3),
}
TAKE_FOUND_INF = ("adamw", "adam")


class Seen(Callback):
    """Records the norm of the gradients that callbacks see before every step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(norm_of(pl_module)))


def norm_of(module: SDLightningModule) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])


def scaled(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


class Recorded(Callback):
    """Keeps the batches of a training."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


def by_hand(kind: Any, scale: float | None, clip: str | None, batches: list[Any]) -> dict[str, Tensor]:
    """Train as torch's guide to mixed precision does, without Lightning."""
    module = small.module(optimizer=kind)
    optimizer: Any = module.configure_optimizers()
    optimizer._step_supports_amp_scaling = False  # the guide's: unscale, clip, then step if a read finds no overflow
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    dtype = torch.bfloat16 if scale is None else torch.half
    module.train()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            loss = module.training_loss(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip == "norm":
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(module.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
    return small.weights(module)


@pytest.mark.parametrize(
    ("name", "scale", "clip"),
    [
        ("adamw", 2.0**10, "norm"),
        ("adamw", 2.0**127, "value"),
        ("adam", 2.0**127, None),
        ("sgd", 2.0**127, "norm"),
        ("plain", 2.0**127, "norm"),
        ("adamw", None, "norm"),
        ("plain", None, "value"),
    ],
)
def test_weights_are_those_of_torchs_own_loop(name: str, scale: float | None, clip: str | None) -> None:
    """2**127 overflows at first."""
    recorded, module = Recorded(), small.module(optimizer=KINDS[name])
    plugin = MixedPrecision("bf16-mixed", "cpu") if scale is None else scaled(scale)
    clipping = {"gradient_clip_val": CLIP if clip else None, "gradient_clip_algorithm": clip}
    small.fit(module, small.data(), STEPS, recorded, plugins=[plugin], **clipping)
    assert small.same(small.weights(module), by_hand(KINDS[name], scale, clip, recorded.batches))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_see_gradients_that_are_unscaled_once_and_not_clipped(accumulate: int) -> None:
    found = {}
    for scale in (2.0**10, 2.0**5):
        seen, options = Seen(), {"gradient_clip_val": CLIP, "accumulate_grad_batches": accumulate}
        small.fit(small.module(), small.data(), 1, seen, plugins=[scaled(scale)], **options)
        found[scale] = seen.norms
    assert found[2.0**10] == pytest.approx(found[2.0**5], rel=1e-2) and found[2.0**10][0] > CLIP


@pytest.mark.parametrize("name", KINDS)
def test_the_scalers_decision_is_read_only_for_optimizers_that_do_not_take_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    original = torch.amp.GradScaler._maybe_opt_step

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(True)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", counted)
    small.fit(small.module(optimizer=KINDS[name]), small.data(), 2, plugins=[scaled(2.0**10)])
    assert len(read) == (0 if name in TAKE_FOUND_INF else 2)


def test_a_user_may_train_in_bfloat16_with_lightnings_own_names() -> None:
    module = small.module()
    before = small.weights(module)
    small.fit(module, small.data(), 2, precision="bf16-mixed", gradient_clip_val=1.0)
    assert not small.same(small.weights(module), before)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_found_inf_leaves_weights_and_states_alone_for_one_step(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, fused=True)
    assert takes_found_inf(optimizer)
    parameter.grad = torch.ones(8)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()} | {"weights": parameter.clone()}
    for skips in (True, True, False):
        parameter.grad = torch.full((8,), torch.nan if skips else 1.0)
        if skips:
            give_found_inf(optimizer, torch.ones(()))
        optimizer.step()
        after = dict(optimizer.state[parameter]) | {"weights": parameter}
        assert small.same(after, before) is skips
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.parametrize("name", ["sgd", "plain"])
def test_optimizers_that_do_not_take_found_inf(name: str) -> None:
    assert not takes_found_inf(KINDS[name]([torch.nn.Parameter(torch.ones(1))]))
