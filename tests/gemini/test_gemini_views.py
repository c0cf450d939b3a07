"""What user code writes through views of weights, and in other ways than by ``p.data``: as in torch, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from sd_lightning._errors import UsageError
from sd_lightning.gemini import GeminiConfig, GeminiEngine

WHOLE: dict[str, Any] = {"shard_param_frac": 0.0}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "fast": {},
    "slow": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "copied": {"offload_optim_frac": 1.0, **WHOLE},
}
"""Weights that are the trained ones, those that are gathered, and whole ones that are a copy of the trained ones."""


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def reversed_in_place(weight: Tensor) -> None:
    flat = weight.view(-1)
    flat.data.copy_(flat.data.flip(0))


def zeroed_by_rows(weight: Tensor) -> None:
    for row in weight:
        row.data.zero_()


THROUGH_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda weight: weight[0].data.zero_(),
    "transposed": lambda weight: weight.T.detach().mul_(0.5),
    "flat": lambda weight: weight.view(-1).data.fill_(0.0),
    "split": lambda weight: weight.split(1)[1].data.zero_(),
    "rows": zeroed_by_rows,
    "reversed": reversed_in_place,
    "embedding": lambda weight: nn.functional.embedding(torch.tensor([0, 1]), weight, max_norm=0.1),
}
"""By views that are taken while gradients are recorded."""


def parametrized(module: nn.Sequential) -> None:
    parametrize.register_parametrization(module[2], "weight", Halved())
    parametrize.remove_parametrizations(module[2], "weight")


def masked(module: nn.Sequential) -> None:
    weight = module[2].weight
    weight.data[weight.abs() < 0.2] = 0.0


@torch.no_grad()
def taken_over(module: nn.Sequential) -> None:
    module[2].weight.set_(torch.full((3, 8), 0.25))


OTHERWISE: dict[str, Callable[[nn.Sequential], Any]] = {
    "vector": lambda module: vector_to_parameters(parameters_to_vector(module.parameters()) * 0.5, module.parameters()),
    "masked": masked,
    "listed": lambda module: torch._foreach_lerp_(
        [p.detach() for p in module.parameters()], [torch.ones_like(p) for p in module.parameters()], 0.1
    ),
    "array": lambda module: module[2].weight.detach().numpy().fill(0.0),
    "flat": lambda module: module[2].weight.data.view(-1).copy_(torch.arange(24.0)),
    "taken over": taken_over,
    "parametrized": parametrized,
}


def trained(settings: dict[str, Any] | None, write: Callable[[nn.Sequential], Any]) -> list[Tensor]:
    """Train for a step, write, and train for another; without settings with torch alone."""
    module = network()
    engine = None if settings is None else GeminiEngine({"": module}, GeminiConfig(chunk_numel=60, **settings))
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    if engine is not None:
        optimizer = engine.optimizer(optimizer)
    for step in range(2):
        module(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            write(module)
    if engine is not None:
        engine.restore()
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("name", THROUGH_VIEWS)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_write_through_a_view_counts_or_is_refused_by_name(place: str, name: str) -> None:
    def write(module: nn.Sequential) -> None:
        THROUGH_VIEWS[name](module[2].weight)

    if place == "copied":
        with pytest.raises(UsageError, match=r"2\.weight written while gradients are recorded.*torch\.no_grad\(\)"):
            trained(PLACEMENTS[place], write)
    else:
        torch.testing.assert_close(trained(PLACEMENTS[place], write), trained(None, write))


@pytest.mark.parametrize("name", THROUGH_VIEWS)
def test_the_remedy_of_the_refusal_works(name: str) -> None:
    @torch.no_grad()
    def write(module: nn.Sequential) -> None:
        THROUGH_VIEWS[name](module[2].weight)

    torch.testing.assert_close(trained(PLACEMENTS["copied"], write), trained(None, write))


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_writes_of_all_kinds_count_as_in_torch(place: str, name: str) -> None:
    torch.testing.assert_close(trained(PLACEMENTS[place], OTHERWISE[name]), trained(None, OTHERWISE[name]))


@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_write_that_autograd_records_and_one_of_the_shape_are_refused(place: str) -> None:
    with pytest.raises((UsageError, RuntimeError), match="while gradients are recorded|a view of a leaf Variable"):
        trained(PLACEMENTS[place], lambda module: module[2].weight[0].mul_(0.5))
    with pytest.raises(UsageError, match=re.escape("2.weight.t_(), which changes its shape or its memory")):
        trained(PLACEMENTS[place], torch.no_grad()(lambda module: module[2].weight.t_()))


class Copies(TorchDispatchMode):
    """Counts the elements that are copied."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.numel += result.numel()
        return result


@pytest.mark.parametrize("place", PLACEMENTS)
def test_weights_that_a_loss_reads_by_views_keep_their_gradients_and_are_copied_once(place: str) -> None:
    def penalty(module: nn.Module) -> Any:
        return sum(p.pow(2).sum() + p.view(-1)[1:].exp().sum() for p in module.parameters())

    module, plain = network(), network()
    engine = GeminiEngine({"": module}, GeminiConfig(chunk_numel=60, **PLACEMENTS[place]))
    optimizer: Any = engine.optimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    for each, stepped in ((module, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        loss = each(torch.ones(2, 6)).square().sum()
        with Copies() as copies:
            loss += 0.1 * penalty(each)
        loss.backward()
        stepped.step()
        gathered = sum(chunk.layout.numel for chunk in engine.chunks) if place == "slow" else 0
        assert copies.numel == (gathered if each is module else 0)
    engine.restore()
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))


def test_weights_of_a_chunk_are_read_and_written_apart() -> None:
    """A write into one weight must not make autograd refuse a loss that read another."""
    module = network()
    engine = GeminiEngine({"": module}, GeminiConfig(**PLACEMENTS["slow"]))
    assert len(engine.chunks) == 1
    penalty = module[0].weight.pow(2).sum()
    with torch.no_grad():
        module[2].weight.mul_(0.5)
    (module(torch.ones(2, 6)).sum() + penalty).backward()
    penalty = module[0].weight.pow(2).sum()
    with torch.no_grad():
        module[0].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_refused_write_is_dropped_and_the_weights_can_be_restored() -> None:
    module = network()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    engine = GeminiEngine({"": module}, GeminiConfig(chunk_numel=60, **PLACEMENTS["slow"]))
    module[2].weight.view(-1).mul_(2)
    with pytest.raises(UsageError, match=r"2\.weight written while gradients are recorded"):
        module(torch.ones(2, 6))
    engine.restore()
    torch.testing.assert_close([parameter.detach() for parameter in module.parameters()], before)


@pytest.mark.parametrize("opened", [0, 2])
def test_a_view_is_watched_while_weights_are_opened_beside_it(opened: int) -> None:
    module = network()
    engine = GeminiEngine({"": module}, GeminiConfig(chunk_numel=60, **PLACEMENTS["copied"]))
    view = module[2].weight.view(-1)
    with torch.no_grad():
        module[opened].weight.norm()
        view.mul_(0)
    with pytest.raises(UsageError, match=r"2\.weight written while gradients are recorded, or through a view"):
        engine.access.close()
    engine.abort()
