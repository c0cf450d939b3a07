"""Any elementwise optimizer steps chunks, by the user's own class; others are refused with what was found."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_training
from gemini_jobs import (
    BUDGETED,
    OPTIMIZERS,
    PLACEMENTS,
    Blocks,
    Findings,
    Job,
    distance,
    inputs,
    loss_of,
    train,
    weights_of,
)
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine
from sd_lightning.gemini.layout import ALIGNMENT
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SavedParameter
from sd_lightning.strategies.ddp import DDPStrategy
from sd_lightning.strategies.gemini import GeminiStrategy
from sd_lightning.strategies.processes.group import leave_process_group

PLACES = [name for name in PLACEMENTS if "gathered" not in name and name != "sharded"]
COVERED = {name: PLACES[index % len(PLACES)] for index, name in enumerate(OPTIMIZERS)}
"""Each optimizer with one placement, and nearly every placement that differs on one rank."""


@lru_cache
def trained(name: str, *, engine: str = "gemini", place: str = "sharded", split: int = 1) -> Findings:
    job = Job(name, engine=engine, optimizer=name, settings=OPTIMIZERS[name], split=split, steps=12)
    job.config = PLACEMENTS[place]
    return train(job)


@pytest.mark.parametrize(("name", "place"), COVERED.items())
def test_an_elementwise_optimizer_trains_as_under_plain_torch(name: str, place: str) -> None:
    plain, fast, placed = trained(name, engine="torch"), trained(name), trained(name, place=place)
    assert placed.digest == fast.digest
    floor = distance(plain, trained(name, engine="torch", split=2))[1]
    loss, rms = distance(fast, plain)
    assert loss <= 1e-6 * max(plain.losses) and rms <= 3 * floor, (loss, rms, floor)
    assert fast.losses[-1] < fast.losses[0]


@pytest.mark.full("engines")
@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_placement_changes_a_bit_of_what_an_optimizer_does(name: str, place: str) -> None:
    assert trained(name, place=place).digest == trained(name).digest


class Sign(torch.optim.Optimizer):
    """Lion without weight decay (Chen et al. 2023): neither torch's, nor known by name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, parameter, parameter.grad, self.state[parameter])

    def update(self, group: Any, parameter: Tensor, gradient: Tensor, state: Any) -> None:
        momentum = state.get("momentum", torch.zeros_like(parameter))
        parameter.sub_(momentum.lerp(gradient, 1 - self.beta).sign(), alpha=group["lr"])
        state["momentum"] = momentum.lerp(gradient, 0.01)  # another tensor in each step


class Trusting(Sign):
    """Scales by the norm of the whole parameter, as LAMB does (You et al. 2019)."""

    def update(self, group: Any, parameter: Tensor, gradient: Tensor, state: Any) -> None:
        parameter.sub_(gradient / gradient.norm(), alpha=group["lr"])


class CountingInGroups(Sign):
    def update(self, group: Any, parameter: Tensor, gradient: Tensor, state: Any) -> None:
        group["k"] = group.get("k", 0) + 1
        parameter.sub_(gradient, alpha=group["lr"] / group["k"])


class CountingInItself(Sign):
    def update(self, group: Any, parameter: Tensor, gradient: Tensor, state: Any) -> None:
        self.beta *= 0.9
        parameter.sub_(gradient, alpha=group["lr"] * self.beta)


class Halved(Sign):
    def update(self, group: Any, parameter: Tensor, gradient: Tensor, state: Any) -> None:
        state["momentum"] = gradient.bfloat16()
        parameter.sub_(gradient, alpha=group["lr"])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Adafactor, r"it keeps row_var \(torch.float32 of shape \(96, 1\)\) of a parameter of shape"),
        (torch.optim.Muon, "its step fails on a flat range of a parameter .ValueError: .*2D matrix"),
        (torch.optim.LBFGS, "its step fails on a flat range of a parameter .TypeError: .*closure"),
        (torch.optim.SparseAdam, "its step fails on a flat range of a parameter .RuntimeError: .*dense gradients"),
        (Trusting, "its update of an element depends on other elements"),
        (CountingInGroups, "it keeps k from step to step, beside its parameters' states"),
        (CountingInItself, "it keeps beta from step to step, beside its parameters' states"),
        (Halved, r"it keeps momentum \(torch.bfloat16 of shape"),
    ],
)
@pytest.mark.parametrize("lr", [1e-3, 0.0])
def test_an_optimizer_that_is_not_elementwise_is_refused_with_the_reason(kind: Any, reason: str, lr: float) -> None:
    if kind is torch.optim.SparseAdam and not lr:
        return  # torch refuses it
    network = nn.Linear(8, 8, bias=False)
    engine = GeminiEngine({"": network}, GeminiConfig())
    state = torch.get_rng_state()
    with pytest.raises(
        UsageError, match=f"Gemini cannot step {kind.__name__}: {reason}.*use an optimizer that updates"
    ):
        engine.optimizer(kind(network.parameters(), lr=lr))
    assert torch.equal(torch.get_rng_state(), state)


def steps_of(network: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(network, inputs(step, Job("own")), torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "build",
    [
        partial(Sign, lr=1e-3),
        partial(torch.optim.NAdam, lr=torch.tensor(1e-3), capturable=False, foreach=False),
        partial(torch.optim.RAdam, lr=1e-2, differentiable=True),
        partial(torch.optim.Adagrad, lr=1e-2, fused=True),
        partial(torch.optim.RMSprop, lr=1e-3, maximize=True, foreach=True),
    ],
    ids=["a class of the user's", "lr as a tensor", "differentiable", "fused", "maximize"],
)
def test_settings_and_classes_of_any_kind_step_as_they_do_by_themselves(build: Any) -> None:
    torch.manual_seed(0)
    network, expected = Blocks(), Blocks()
    expected.load_state_dict(network.state_dict())
    engine = GeminiEngine({"": network}, GeminiConfig(chunk_numel=1500, **BUDGETED))
    parts = [list(network.parameters())[::2], list(network.parameters())[1::2]]
    inner = build([{"params": parts[0]}, {"params": parts[1], "lr": 5e-3}])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)  # puts a step of its own on the optimizer
    optimizer = engine.optimizer(inner)
    assert not inner.state, "states of whole parameters stay in memory"
    plain_parts = [list(expected.parameters())[::2], list(expected.parameters())[1::2]]
    plain = build([{"params": plain_parts[0]}, {"params": plain_parts[1], "lr": 5e-3}])
    plain.defaults["differentiable"] = False  # training through a step needs another loop than this
    for group in plain.param_groups:
        group.update({"differentiable": False} if "differentiable" in group else {})
    plain_scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    for step in range(3):
        steps_of(network, optimizer, range(step, step + 1))
        steps_of(expected, plain, range(step, step + 1))
        scheduler.step()
        plain_scheduler.step()
    found = weights_of(engine)
    # Where a gradient is rounding noise, its sign is, too.
    errors = [(found[name] - weight.detach()).abs() for name, weight in expected.named_parameters()]
    assert float(torch.cat([error.flatten() for error in errors]).mean()) < 1e-6


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare weights within rounding, on average: the sign of a gradient that is rounding noise is noise, too.

    What is kept once per parameter is the same. States are the same when they are handed over.
    """
    weights = [key for key in expected if key.startswith("master/")]
    errors = torch.cat([(found[key] - expected[key]).abs().flatten() for key in weights])
    assert float(errors.mean()) < 1e-6, float(errors.mean())
    for key, value in expected.items():
        assert isinstance(value, Tensor) or found[key] == value, key


@pytest.mark.parametrize("name", ["RMSprop", "NAdam", "ASGD", "Adagrad"])
def test_states_go_to_plain_torch_and_back(name: str) -> None:
    settings = {"lr": 1e-3} | dict(OPTIMIZERS[name])

    def plain() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        network = Blocks()
        optimizer = getattr(torch.optim, name)(network.parameters(), **settings)
        return network, optimizer, ReplicatedState(dict(network.named_parameters()), [optimizer])

    def ours() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        network = Blocks()
        engine = GeminiEngine({"": network}, GeminiConfig(chunk_numel=1500, **BUDGETED))
        # Settings come with the states: what is kept depends on them.
        changed = {"centered": False, "momentum": 0.0} if name == "RMSprop" else {}
        optimizer = engine.optimizer(getattr(torch.optim, name)(network.parameters(), **settings | changed))
        if changed:
            optimizer.param_groups[0].update(settings)
            optimizer.adopt()
        return network, optimizer, engine.state

    def values(state: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for shard in state.parameter_shards():
            tensors = {"master": shard.master, **shard.states}
            found |= {f"{kind}/{shard.name}": t.detach().flatten().clone() for kind, t in tensors.items()}
            found |= {f"{kind}/{shard.name}": float(value) for kind, value in shard.scalars.items()}
        return found

    def hand_over(source: Any, target: Any) -> None:
        saved = {
            s.name: SavedParameter(s.shape, dict.fromkeys(s.states, s.shape), s.scalars)
            for s in source.parameter_shards()
        }
        content = values(source)
        target.load(
            saved,
            source.optimizer_groups(),
            lambda kind, name, out, begin, end: out.copy_(content[f"{kind}/{name}"][begin:end].view(out.shape)),
        )
        assert values(target).keys() == content.keys()
        for key, value in values(target).items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(content[key])), key

    network, optimizer, state = plain()
    steps_of(network, optimizer, range(9))
    expected = values(state)
    for first, second in ((plain, ours), (ours, plain)):
        legs = first(), second(), first()
        for index, (network, optimizer, state) in enumerate(legs):
            if index:
                hand_over(legs[index - 1][2], state)
            steps_of(network, optimizer, range(3 * index, 3 * index + 3))
        found = values(legs[2][2])
        assert found.keys() == expected.keys()
        assert_same_training(found, expected)


def test_scalars_of_another_optimizer_are_refused() -> None:
    network = Blocks()
    engine = GeminiEngine({"": network}, GeminiConfig(chunk_numel=1500))
    engine.optimizer(torch.optim.NAdam(network.parameters()))
    groups = engine.state.optimizer_groups()
    saved = {
        name: SavedParameter(tuple(p.shape), dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(p.shape)), {"step": 3})
        for name, p in engine.trained.items()
    }
    with pytest.raises(UsageError, match="resume: the checkpoint holds exp_avg, exp_avg_sq, step of .*mu_product"):
        engine.state.load(saved, groups, lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "second"), [("RMSprop", "ddp", "gemini"), ("NAdam", "gemini", "ddp")], ids=["to gemini", "to ddp"]
)
def test_a_checkpoint_of_any_elementwise_optimizer_goes_on_elsewhere(
    tmp_path: Path, name: str, first: str, second: str
) -> None:
    def strategy(which: str) -> Any:
        return GeminiStrategy(offload_optim_frac=0.5) if which == "gemini" else DDPStrategy()

    def leg(folder: str, which: str, steps: int, resume: Path | None = None) -> Path:
        optimizer = partial(getattr(torch.optim, name), lr=3e-4, **({"momentum": 0.9} if name == "RMSprop" else {}))
        saved = small_training.train(
            tmp_path / folder, steps, resume=resume, optimizer=optimizer, strategy=strategy(which)
        )
        leave_process_group()
        return saved

    whole = leg("whole", first, 4)
    relay = leg("relay", second, 4, leg("first", first, 2))
    ours, theirs = small_training.stored(relay), small_training.stored(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 2 * ALIGNMENT
    assert_same_training(ours, theirs)
    scalars = [
        {
            f"{kind}/{name}": float(value)
            for name, entry in small_training.trainer_state(path)["parameters"].items()
            for kind, value in entry["scalars"].items()
        }
        for path in (relay, whole)
    ]
    assert scalars[0] == scalars[1] and len(scalars[0]) > ALIGNMENT
