"""Steps that the device skips: weights, moments and step counts stay, and the host hears of it at the next step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.optimizer import LossScale
from sd_lightning.state.shards import tensor_of

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5),
}
OFFLOADED = {"offload_optim_frac": 1.0}


def made(kind: Any, **settings: Any) -> tuple[nn.Module, GeminiEngine, Any]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    engine = GeminiEngine({"": network}, GeminiConfig(chunk_numel=160, **settings))
    return network, engine, engine.optimizer(kind(network.parameters()))


def backward(network: nn.Module, engine: GeminiEngine, step: int, factor: float = 1.0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    dtype = torch.float32 if engine.loss_scale is None else torch.float16
    engine.backward((network(x.to(dtype)).float() * factor - x).square().mean())


def state_of(engine: GeminiEngine) -> dict[str, Tensor]:
    found = {}
    for shard in engine.state.parameter_shards():
        found[shard.name] = tensor_of(shard.master).clone()
        found |= {f"{name}/{shard.name}": tensor_of(value).clone() for name, value in shard.states.items()}
        found |= {f"{name}/{shard.name}": torch.as_tensor(value) for name, value in shard.scalars.items()}
    return found


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("skipped", [(0, 1), (2,)], ids=["first steps", "later"])
@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
def test_training_goes_on_as_if_the_gradients_had_been_dropped(
    name: str, skipped: tuple[int, ...], watched: bool
) -> None:
    results = []
    for on_device in (True, False):
        network, engine, optimizer = made(KINDS[name])
        for step in range(5):
            backward(network, engine, step, float("nan") if step in skipped else 1.0)
            before = state_of(engine) if watched else {}
            if on_device:
                assert optimizer.skip_if(torch.full((), float(step in skipped)))
            elif step in skipped:
                optimizer.zero_grad()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            assert not watched or same(state_of(engine), before) is (step in skipped)
        results.append(state_of(engine))
    assert same(*results) and all(value.isfinite().all() for value in results[0].values())


@pytest.mark.parametrize("clip", [None, "norm", "value"])
def test_overflows_are_skipped_alike_wherever_chunks_are_stepped(clip: str | None) -> None:
    results = []
    for settings in ({}, OFFLOADED):
        network, engine, optimizer = made(KINDS["adamw"], compute_dtype=torch.float16, **settings)
        assert engine.loss_scale is not None
        engine.loss_scale.growth_interval = 2
        engine.loss_scale.load_state_dict({"value": 2.0**8, "good_steps": 0, "skipped": 0})
        for step in range(6):
            backward(network, engine, step, 1e4 if step in (0, 3) else 1.0)
            if clip == "norm":
                optimizer.clip_grad_norm_(0.3)
            elif clip == "value":
                optimizer.clip_grad_value_(0.01)
            optimizer.step()
        results.append(state_of(engine) | {"scale": torch.tensor(list(engine.loss_scale.state_dict().values()))})
        assert engine.loss_scale.state_dict()["skipped"] == 2
    assert same(*results)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (KINDS["adamw"], OFFLOADED),
        (KINDS["adamw"], {"placement": "auto", "memory_cap": "64MiB"}),
        (torch.optim.NAdam, {}),
    ],
    ids=["on the host", "auto", "own class"],
)
def test_the_host_must_tell_what_it_steps_itself(kind: Any, settings: dict[str, Any]) -> None:
    _, engine, optimizer = made(kind, **settings)
    assert not optimizer.skip_if(torch.ones(()))


def test_a_norm_stays_on_the_device_and_an_infinite_limit_clips_nothing() -> None:
    norms = []
    for limit in (0.1, float("inf")):
        network, engine, optimizer = made(KINDS["sgd"])
        backward(network, engine, 0)
        norms.append(optimizer.clip_grad_norm_(limit))
        assert norms[-1].dtype == torch.float32
        assert optimizer.grad_norm() == pytest.approx(min(float(norms[-1]), limit), rel=1e-4)
    assert norms[0] == norms[1] > 0.1


def test_the_scale_grows_and_shrinks_as_torchs() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", growth_interval=3)
    ours.growth_interval = 3
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for found_inf in (0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0):
        theirs.scale(torch.ones(()))
        weight.grad = torch.full((2,), float("inf") if found_inf else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.scale(torch.ones(()))
        ours.update(torch.tensor(float(found_inf)))
        state = ours.state_dict()
        assert (state["value"], state["good_steps"]) == (theirs.get_scale(), theirs._get_growth_tracker())
    assert ours.state_dict()["skipped"] == 3


def test_a_scale_is_saved_as_numbers_and_goes_on_where_it_was() -> None:
    saved = {"value": 64.0, "good_steps": 3, "skipped": 7}
    scale = LossScale()
    scale.growth_interval = 5
    scale.load_state_dict(saved)
    assert scale.state_dict() == saved
    assert all(type(value) in (int, float) for value in scale.state_dict().values())
    scale.scale(torch.ones(()))
    scale.update(torch.zeros(()))
    scale.scale(torch.ones(()))
    scale.update(torch.zeros(()))
    assert scale.state_dict()["value"] == 128.0, "five good steps, of which three were saved"
