"""What people call between a forward pass and a step gives what plain torch gives, wherever the chunks are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini_jobs import weights_of
from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine

SMALL, LARGE = {"chunk_numel": 100}, {"chunk_numel": 400}
WHOLE: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "large": LARGE,
    "optimizer offloaded": LARGE | {"offload_optim_frac": 1.0},
}
"""Weights stay on the accelerator."""
EVERYWHERE: dict[str, dict[str, Any]] = WHOLE | {
    "optimizer offloaded, small": SMALL | {"offload_optim_frac": 1.0},
    "all offloaded": LARGE | {"offload_param_frac": 1.0, "offload_optim_frac": 1.0},
    "all offloaded, small": SMALL | {"offload_param_frac": 1.0, "offload_optim_frac": 1.0, "gathered_budget": 0},
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))


class Net(nn.Module):
    """Its output is that of its last layer, and it has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head, self.gain = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def encode(self, x: Tensor) -> Tensor:
        for block in [self.inp, *self.blocks]:
            x = block(x) * self.gain
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def batch(index: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


class Plain:
    """Plain torch in the words of the engine."""

    def optimizer(self, inner: Any) -> Any:
        parameters = [p for group in inner.param_groups for p in group["params"]]
        inner.clip_grad_norm_ = lambda bound: nn.utils.clip_grad_norm_(inner.param_groups[0]["params"], bound)
        inner.clip_grad_value_ = lambda bound: nn.utils.clip_grad_value_(parameters, bound)
        return inner

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


Api = Any


def squared(network: nn.Module, index: int) -> Tensor:
    return network(batch(index)).square().mean()


def steps_of(api: Api, network: Net, losses: Callable[[int], Iterable[Tensor]], num_steps: int = 3) -> None:
    """Take steps, each after a backward pass for every loss."""
    optimizer = api.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step in range(num_steps):
        for loss in losses(step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def penalty(network: Net) -> Tensor:
    return 0.1 * torch.stack([block.a.weight.square().sum() for block in network.blocks]).sum()


def one_after_another(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: (squared(network, step),))


def two_graphs_at_a_time(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: [squared(network, step), squared(network, step + 50)])


def one_graph_twice(api: Api, network: Net) -> None:
    optimizer = api.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step in range(3):
        output = network(batch(step))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradients_of_inputs_beside(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        x = batch(step).requires_grad_()
        output = network(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        yield output.square().mean() * gradient.norm()

    steps_of(api, network, losses)


def checkpointed(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        hidden = network.inp(batch(step))
        for block in network.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        yield network.head(hidden).square().mean()

    steps_of(api, network, losses)


def adversaries(api: Api, network: Net) -> None:
    """The order of the DCGAN tutorial: the generator's graph outlives the discriminator's step."""
    first, second = [*network.inp.parameters(), *network.blocks.parameters(), network.gain], network.head.parameters()
    generator = api.optimizer(torch.optim.SGD(first, lr=0.1))
    discriminator = api.optimizer(torch.optim.SGD(second, lr=0.1))
    for step in range(3):
        discriminator.zero_grad()
        F.softplus(-network.head(batch(step))).mean().backward()
        fake = batch(100 + step)
        for block in [network.inp, *network.blocks]:
            fake = block(fake)
        F.softplus(network.head(fake.detach())).mean().backward()
        discriminator.step()
        generator.zero_grad()
        F.softplus(-network.head(fake)).mean().backward()
        generator.step()


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize(
    "train",
    [
        one_after_another,
        two_graphs_at_a_time,
        one_graph_twice,
        gradients_of_inputs_beside,
        checkpointed,
        adversaries,
    ],
)
def test_graphs_and_passes_in_any_order_equal_plain_torch(train: Callable[..., None], placement: str) -> None:
    assert_as_plain_torch(train, EVERYWHERE[placement])


def penalty_built_before(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        term = penalty(network)
        yield squared(network, step) + term

    steps_of(api, network, losses)


def penalty_built_after(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: (squared(network, step) + penalty(network),))


def penalty_on_its_own(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: [squared(network, step), penalty(network)])


def penalty_alone(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: (penalty(network),))


def another_method_than_forward(api: Api, network: Net) -> None:
    steps_of(api, network, lambda step: [squared(network, step), network.encode(batch(9)).square().mean()])


def gradient_penalty(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        x = batch(step).requires_grad_()
        output = network(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        yield output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()

    steps_of(api, network, losses)


@pytest.mark.parametrize("placement", WHOLE)
@pytest.mark.parametrize(
    "train",
    [
        penalty_built_before,
        penalty_built_after,
        penalty_on_its_own,
        penalty_alone,
        another_method_than_forward,
        gradient_penalty,
    ],
)
def test_weights_used_elsewhere_equal_plain_torch(train: Callable[..., None], placement: str) -> None:
    assert_as_plain_torch(train, WHOLE[placement])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (another_method_than_forward, "a gradient of gain outside of its block's part of the backward pass"),
        (gradient_penalty, "create_graph=True through head, whose weights are gathered for one pass only"),
    ],
)
def test_weights_used_elsewhere_are_refused_where_they_do_not_stay(train: Callable[..., None], message: str) -> None:
    network = fresh()
    engine = GeminiEngine({"": network}, GeminiConfig(**EVERYWHERE["all offloaded, small"]))
    with pytest.raises(UsageError, match=message):
        train(engine, network)


class Inside(Residual):
    """A residual block that checkpoints a part of itself, as often as asked."""

    times = 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.a(x))
        for _ in range(self.times):
            hidden = hidden + checkpoint(self.inner, hidden, use_reentrant=True)
        return x + hidden

    def inner(self, hidden: Tensor) -> Tensor:
        return self.b(hidden.sin())


def network_of(block: type[nn.Module]) -> Net:
    torch.manual_seed(0)
    network = Net()
    network.blocks = nn.ModuleList(block() for _ in range(3))
    return network


def checkpointed_inside(api: Api, network: Net) -> None:
    one_after_another(api, network)


checkpointed_inside.block = Inside  # type: ignore[attr-defined]


def reentrant(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        hidden = network.inp(batch(step))
        for block in network.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        yield network.head(hidden).square().mean()

    steps_of(api, network, losses)


def reentrant_network(api: Api, network: Net) -> None:
    """All units in one nested backward pass, with a checkpoint of the other kind, and of the same, inside."""

    def inner(x: Tensor) -> Tensor:
        x = checkpoint(network.blocks[0], network.inp(x), use_reentrant=True)
        return network.head(checkpoint(network.blocks[1], x, use_reentrant=False))

    def losses(step: int) -> Iterator[Tensor]:
        yield checkpoint(inner, batch(step).requires_grad_(), use_reentrant=True).square().mean()

    steps_of(api, network, losses)


def reentrant_and_shared(api: Api, network: Net) -> None:
    """One block is called under two checkpoints and without, before and after; another twice under one."""

    def twice(x: Tensor) -> Tensor:
        return network.blocks[1](network.blocks[1](x))

    def losses(step: int) -> Iterator[Tensor]:
        hidden = network.blocks[0](network.inp(batch(step)))
        for block in (network.blocks[0], twice, network.blocks[0], network.blocks[2]):
            hidden = checkpoint(block, hidden, use_reentrant=True)
        yield network.head(network.blocks[2](network.blocks[0](hidden))).square().mean()

    steps_of(api, network, losses)


class Again(torch.autograd.Function):
    """Calls a module, and in the backward pass again, with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, fails: bool) -> Tensor:
        ctx.module, ctx.fails = module, fails
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.module(x)
            (weight,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
            if ctx.fails:
                failing = output.clone()
                failing.register_hook(fail)
                with suppress(ZeroDivisionError):  # the pass around it goes on
                    failing.sum().backward(retain_graph=True)
            output.backward(gradient)
        assert x.grad is not None and torch.equal(x.grad, weight)
        return x.grad, None, None


def fail(gradient: Tensor) -> Tensor:
    raise ZeroDivisionError


def functions_that_go_backward(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        hidden = network.inp(batch(step))
        for block in network.blocks:
            hidden = Again.apply(hidden, block, step == 1)
        yield network.head(hidden).square().mean()

    steps_of(api, network, losses)


def hooks_that_go_backward(api: Api, network: Net) -> None:
    def losses(step: int) -> Iterator[Tensor]:
        other = network.head(network.blocks[1](batch(70 + step))).square().mean()
        hidden = network.inp(batch(step))
        hidden.register_hook(lambda gradient: other.backward())
        yield network.head(network.blocks[2](network.blocks[0](hidden))).square().mean()

    steps_of(api, network, losses)


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize(
    "train",
    [
        checkpointed_inside,
        reentrant,
        reentrant_network,
        reentrant_and_shared,
        functions_that_go_backward,
        hooks_that_go_backward,
    ],
)
def test_backward_passes_inside_of_others_equal_plain_torch(train: Callable[..., None], placement: str) -> None:
    assert_as_plain_torch(train, EVERYWHERE[placement])


def test_what_is_computed_again_from_a_gradient_is_refused() -> None:
    """Two checkpoints of the same weights inside one block: fine where weights stay, by name where they do not."""

    class Twice(Inside):
        times = 2

    def train(api: Api, network: Net) -> None:
        one_after_another(api, network)

    train.block = Twice  # type: ignore[attr-defined]
    for config in WHOLE.values():
        assert_as_plain_torch(train, config)
    network = network_of(Twice)
    engine = GeminiEngine({"": network}, GeminiConfig(**EVERYWHERE["all offloaded, small"]))
    with pytest.raises(UsageError, match=r"a second gradient of blocks\.2\.b\.\w+ from a backward pass inside another"):
        train(engine, network)


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("fails", ["inside", "around"])
def test_a_pass_that_fails_inside_of_another_or_around_it_is_forgotten(fails: str, placement: str) -> None:
    def train(api: Api, network: Net) -> None:
        optimizer = api.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
        for step in range(3):
            if step == 1:
                hidden = network.inp(batch(step))
                if fails == "around":
                    hidden.register_hook(fail)
                hidden = checkpoint(failing if fails == "inside" else network.blocks[0], hidden, use_reentrant=True)
                with pytest.raises(ZeroDivisionError):
                    network.head(network.blocks[1](hidden)).square().mean().backward()
                optimizer.zero_grad()
            # The next one begins inside of a node, and with a graph from before.
            hidden = checkpoint(network.blocks[0], batch(step).requires_grad_(), use_reentrant=True)
            network.head(hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def failing(x: Tensor) -> Tensor:
        hidden = network_under_test[0].blocks[0](x)
        if hidden.requires_grad:
            hidden.register_hook(fail)
        return network_under_test[0].blocks[2](hidden)

    network_under_test: list[Net] = []

    def train_one(api: Api, network: Net) -> None:
        network_under_test[:] = [network]
        train(api, network)

    assert_as_plain_torch(train_one, EVERYWHERE[placement])


def test_gradients_are_not_dropped_by_anything_but_an_exception() -> None:
    network = fresh()
    engine = GeminiEngine({"": network}, GeminiConfig(**LARGE))
    output = network(batch(0))
    output.register_hook(lambda gradient: None)
    hidden = network.blocks[1](batch(0).requires_grad_())
    hidden.register_hook(lambda gradient: engine.abort())
    with pytest.raises(RuntimeError, match="dropped inside the backward pass that computes them"):
        network.head(hidden).sum().backward()
    squared(network, 0).backward()  # the failed one is forgotten
    assert engine.statistics()["aborted"] == 1


def norm_then_value(api: Api, network: Net) -> None:
    clipped(api, network, lambda optimizer: (optimizer.clip_grad_norm_(0.3), optimizer.clip_grad_value_(0.02)))


def norm_twice(api: Api, network: Net) -> None:
    clipped(api, network, lambda optimizer: (optimizer.clip_grad_norm_(0.3), optimizer.clip_grad_norm_(1.0)))


def value_then_norm(api: Api, network: Net) -> None:
    clipped(api, network, lambda optimizer: (optimizer.clip_grad_value_(0.02), optimizer.clip_grad_norm_(0.1)))


def clipped(api: Api, network: Net, clip: Callable[[Any], Any]) -> None:
    optimizer = api.optimizer(torch.optim.SGD(network.parameters(), lr=0.1))
    for step in range(3):
        with api.no_sync():
            squared(network, step).backward()
        clip(optimizer)
        optimizer.step()
        optimizer.zero_grad()


def one_of_two_drops(api: Api, network: Net) -> None:
    """An optimizer drops its gradients between micro-batches; the other, in the same chunks, keeps its own."""
    parameters = list(network.parameters())
    first = api.optimizer(torch.optim.SGD(parameters[::2], lr=0.1))
    second = api.optimizer(torch.optim.SGD(parameters[1::2], lr=0.1))
    for step in range(3):
        with api.no_sync():
            squared(network, step).backward()
        first.zero_grad()
        squared(network, step + 50).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def groups_that_come_later(api: Api, network: Net) -> None:
    optimizer = api.optimizer(torch.optim.AdamW(network.blocks.parameters(), lr=1e-2))
    for step in range(4):
        if step == 2:
            network.head.zero_grad()
            optimizer.add_param_group({"params": list(network.head.parameters()), "lr": 3e-2})
        squared(network, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("placement", EVERYWHERE)
@pytest.mark.parametrize("reduce_once", [False, True])
@pytest.mark.parametrize(
    "train", [norm_then_value, norm_twice, value_then_norm, one_of_two_drops, groups_that_come_later]
)
def test_clipping_dropping_and_new_groups_equal_plain_torch(
    train: Callable[..., None], reduce_once: bool, placement: str
) -> None:
    assert_as_plain_torch(train, EVERYWHERE[placement] | {"reduce_once": reduce_once})


def test_an_overflow_is_seen_before_values_are_clamped() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8, bias=False))
    engine = GeminiEngine({"": network}, GeminiConfig(compute_dtype=torch.float16))
    optimizer = engine.optimizer(torch.optim.SGD(network.parameters(), lr=1.0))
    before = weights_of(engine)["0.weight"]
    engine.backward(network(torch.full((64, 8), 4.0).half()).float().sum(1).mean())
    optimizer.clip_grad_value_(0.5)
    optimizer.step()
    assert engine.loss_scale is not None and engine.loss_scale.state_dict()["skipped"] == 1
    assert torch.equal(weights_of(engine)["0.weight"], before)


def test_parameters_of_another_optimizer_or_of_none_are_refused() -> None:
    network = fresh()
    network.head.requires_grad_(False)
    engine = GeminiEngine({"": network}, GeminiConfig(**LARGE))
    optimizer = engine.optimizer(torch.optim.AdamW(network.blocks.parameters()))
    with pytest.raises(UsageError, match="a second optimizer .SGD. for parameters that another one steps"):
        engine.optimizer(torch.optim.SGD(network.blocks[0].parameters()))
    with pytest.raises(UsageError, match="AdamW got 2 parameters that Gemini does not train"):
        optimizer.add_param_group({"params": list(network.head.parameters())})
    with pytest.raises(UsageError, match="head.weight.requires_grad = True during the run.*BaseFinetuning"):
        network.head.requires_grad_()
    assert len(optimizer.param_groups) == 1


def test_frozen_parameters_of_an_optimizer_are_nothing_to_train_until_they_are_made_trainable() -> None:
    network = fresh()
    network.head.requires_grad_(False)
    engine = GeminiEngine({"": network}, GeminiConfig(**LARGE))
    outside = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = engine.optimizer(torch.optim.SGD([*network.parameters(), outside], lr=0.1))
    assert set(optimizer.param_groups[0]["params"]) == set(network.parameters()) - set(network.head.parameters())
    before = weights_of(engine)["inp.weight"]
    network(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(weights_of(engine)["inp.weight"], before)
    outside.requires_grad_()
    with pytest.raises(UsageError, match="SGD got 1 parameters that Gemini does not train"):
        optimizer.step()


def test_hyper_parameters_are_loaded_in_place() -> None:
    network = fresh()
    engine = GeminiEngine({"": network}, GeminiConfig(**LARGE))
    inner = torch.optim.AdamW(network.parameters(), lr=1e-2)
    optimizer = engine.optimizer(inner)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 1e-3
    optimizer.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == 1e-3 and optimizer.param_groups is inner.param_groups
    with pytest.raises(UsageError, match="a state of 0 groups; expected one of 1"):
        optimizer.load_state_dict({"param_groups": []})


def fresh() -> Net:
    return network_of(Residual)


def assert_as_plain_torch(train: Callable[..., None], config: dict[str, Any]) -> None:
    block = getattr(train, "block", Residual)
    network, expected = network_of(block), network_of(block)
    initial = expected.head.weight.detach().clone()
    train(Plain(), expected)
    assert train is penalty_alone or not torch.allclose(expected.head.weight, initial, atol=1e-3)
    engine = GeminiEngine({"": network}, GeminiConfig(**config))
    train(engine, network)
    found = weights_of(engine)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), atol=1e-6, rtol=1e-5)
