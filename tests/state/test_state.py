"""The view of training state: live tensors, swapping weights, and every optimizer's state through a checkpoint."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import small_training as small
from sd_lightning import SamplingOptions, UsageError
from sd_lightning.callbacks import EMA, SampleGrid
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SavedParameter
from sd_lightning.storage import typed_json
from sd_lightning.storage.tensor_store import ShardedTensors, merge_index, write_shards
from sd_lightning.strategies import training_state

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def test_shards_are_the_live_weights_and_optimizer_states() -> None:
    module = small.module()
    trainer = small.fit(module, small.data(), 2)
    state = training_state(trainer)
    shards = {shard.name: shard for shard in state.parameter_shards()}
    parameters = dict(module.named_parameters())
    moments = trainer.optimizers[0].state
    assert list(shards) == list(parameters)
    assert any(name.startswith("unet.") for name in shards) and any(n.startswith("text_encoder.") for n in shards)
    assert not any("vae" in name for name in shards)
    for name, parameter in parameters.items():
        shard = shards[name]
        assert (shard.shape, shard.begin, shard.end) == (tuple(parameter.shape), 0, parameter.numel())
        assert shard.master.data_ptr() == parameter.data_ptr() and not shard.master.requires_grad
        assert shard.states.keys() == {"exp_avg", "exp_avg_sq"} and shard.scalars["step"] == 2
        for kind, tensor in shard.states.items():
            assert tensor.data_ptr() == moments[parameter][kind].data_ptr()
        assert shard.writes
    shards["unet.conv_in.bias"].master.fill_(7.0)
    assert module.unet.conv_in.bias.eq(7.0).all()


def test_groups_name_their_parameters_and_leave_out_how_updates_are_computed() -> None:
    module = small.module(text_encoder_lr=1e-4)
    state = training_state(small.fit(module, small.data(), 1))
    unet, text = state.optimizer_groups()[0]
    assert (unet["lr"], text["lr"]) == (2e-3, 1e-4)
    assert all(name.startswith("unet.") for name in unet["params"])
    assert [*unet["params"], *text["params"]] == [name for name, _ in module.named_parameters()]
    assert not unet.keys() & {"fused", "foreach", "capturable"}


def _linear() -> tuple[nn.Linear, ReplicatedState]:
    layer = nn.Linear(3, 2)
    return layer, ReplicatedState(dict(layer.named_parameters()), [torch.optim.SGD(layer.parameters(), lr=0.1)])


def test_swapping_computes_with_other_weights_and_gives_the_trained_ones_back_bit_for_bit() -> None:
    layer, state = _linear()
    before, inputs = small_copy(layer), torch.randn(4, 3)
    trained = layer(inputs)
    objects = list(layer.parameters())
    other = {("weight", 0): torch.randn(2, 3), ("bias", 0): torch.randn(2)}
    state.swap_in(other)
    assert torch.equal(layer(inputs), nn.functional.linear(inputs, other["weight", 0], other["bias", 0]))
    assert layer.weight.data_ptr() == other["weight", 0].data_ptr()  # no copy where none is needed
    state.swap_out()
    assert [a is b for a, b in zip(layer.parameters(), objects)] == [True, True]
    assert small.same(small_copy(layer), before) and torch.equal(layer(inputs), trained)


def test_weights_of_another_dtype_are_cast_when_they_are_swapped_in() -> None:
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    state = ReplicatedState(dict(layer.named_parameters()), [])
    before = small_copy(layer)
    other = {("weight", 0): torch.randn(2, 3), ("bias", 0): torch.randn(2)}
    state.swap_in(other)
    assert layer.weight.dtype == torch.bfloat16 and torch.equal(layer.weight, other["weight", 0].bfloat16())
    state.swap_out()
    assert small.same(small_copy(layer), before)


def test_swaps_do_not_nest() -> None:
    _, state = _linear()
    with pytest.raises(RuntimeError, match="without swap_in"):
        state.swap_out()
    other = {("weight", 0): torch.zeros(2, 3), ("bias", 0): torch.zeros(2)}
    state.swap_in(other)
    with pytest.raises(RuntimeError, match="twice"):
        state.swap_in(other)


def small_copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


class Losses(Callback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(pl_module.last_loss)  # type: ignore[arg-type]


def test_sampling_and_validating_between_steps_changes_no_loss(tmp_path: Path) -> None:
    plain, watched = Losses(), Losses()
    modules = small.module(), small.module()
    averages = EMA(0.9), EMA(0.9)
    small.fit(modules[0], small.data(), 7, plain, averages[0])
    options = SamplingOptions(num_inference_steps=2, guidance_scale=3.0, batch_size=2)
    grid = SampleGrid(tmp_path, prompts=["a handwritten one", "the digit two"], every_n_steps=1, options=options)
    small.fit(
        modules[1],
        small.data(),
        7,
        watched,
        averages[1],
        grid,
        limit_val_batches=1,
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    assert len(list((tmp_path / "samples").glob("*.png"))) == 7
    assert plain.losses == watched.losses and len(plain.losses) == 7
    assert small.same(small.weights(modules[0]), small.weights(modules[1]))
    assert all(torch.equal(averages[0].shadow[key], value) for key, value in averages[1].shadow.items())


def _network() -> nn.ModuleDict:
    torch.manual_seed(0)
    # Convolution weights in the NHWC layout, as with channels_last: states must keep their elements apart.
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.ModuleDict({"conv": conv, "linear": nn.Linear(8, 5), "never_used": nn.Linear(2, 2)})


def _matrices() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(6, 8, bias=False), "second": nn.Linear(8, 3, bias=False)})


def _train(network: nn.ModuleDict, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        if "conv" in network:
            hidden = network["conv"](torch.randn(4, 3, 5, 5)).mean((2, 3))
            loss = network["linear"](hidden).square().sum()
        else:
            loss = network["second"](network["first"](torch.randn(4, 6)).relu()).square().sum()
        loss.backward()
        optimizer.step()


def _through_a_store(folder: Path, ours: ReplicatedState, theirs: ReplicatedState) -> None:
    """Save one state as a checkpoint does and load the other from it."""
    shards = ours.parameter_shards()
    entries = [entry for shard in shards for entry in shard.ranges()]
    write_shards(folder, 0, 1, entries)
    merge_index(folder, 1)
    document = typed_json.loads(
        typed_json.dumps(
            {
                "groups": ours.optimizer_groups(),
                "parameters": {shard.name: vars(shard.saved()) for shard in shards},
            }
        )
    )
    saved = {name: SavedParameter(**entry) for name, entry in document["parameters"].items()}
    with ShardedTensors(folder) as store:
        theirs.load(
            saved, document["groups"], lambda kind, name, out, b, e: store.read_into(f"{kind}/{name}", out, b, e)
        )


OPTIMIZERS: dict[str, tuple[Callable[[], nn.ModuleDict], Factory]] = {
    "AdamW": (_network, lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "fused AdamW": (_network, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "Adam amsgrad": (_network, lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True)),
    "SGD momentum": (_network, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    "SGD": (_network, lambda p: torch.optim.SGD(p, lr=1e-2)),
    "Adafactor": (_network, lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "Muon": (_matrices, lambda p: torch.optim.Muon(p, lr=1e-2)),
    "NAdam": (_network, lambda p: torch.optim.NAdam(p, lr=1e-2)),
    "RAdam": (_network, lambda p: torch.optim.RAdam(p, lr=1e-2)),
    "RMSprop": (_network, lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True)),
    "Adagrad": (_network, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "Adadelta": (_network, torch.optim.Adadelta),
    "Adamax": (_network, lambda p: torch.optim.Adamax(p, lr=1e-2)),
    "ASGD": (_network, lambda p: torch.optim.ASGD(p, lr=1e-2)),
    "Rprop": (_network, lambda p: torch.optim.Rprop(p, lr=1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_continues_bit_for_bit_from_its_stored_state(tmp_path: Path, name: str) -> None:
    make, factory = OPTIMIZERS[name]
    networks = make(), make()
    optimizers = [factory(list(network.parameters())) for network in networks]
    states = [ReplicatedState(dict(n.named_parameters()), [o]) for n, o in zip(networks, optimizers)]
    _train(networks[0], optimizers[0], range(3))
    for group in optimizers[0].param_groups:
        group["lr"] *= 0.5  # as a scheduler would
    _through_a_store(tmp_path, states[0], states[1])
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters()):
        saved, loaded = optimizers[0].state.get(ours, {}), optimizers[1].state.get(theirs, {})
        assert saved.keys() == loaded.keys()
        for key, value in saved.items():
            if isinstance(value, Tensor):
                assert torch.equal(loaded[key], value) and loaded[key].dtype == value.dtype
                assert loaded[key].stride() == value.stride() and loaded[key].device == value.device
            else:
                assert loaded[key] == value and type(loaded[key]) is type(value)
    for network, optimizer in zip(networks, optimizers):
        _train(network, optimizer, range(3, 6))
    assert small.same(small_copy(networks[0]), small_copy(networks[1]))


def test_loading_without_groups_takes_the_weights_alone(tmp_path: Path) -> None:
    networks = _network(), _network()
    optimizers = [torch.optim.AdamW(network.parameters(), lr=1e-2) for network in networks]
    states = [ReplicatedState(dict(n.named_parameters()), [o]) for n, o in zip(networks, optimizers)]
    _train(networks[0], optimizers[0], range(2))
    write_shards(tmp_path, 0, 1, [entry for shard in states[0].parameter_shards() for entry in shard.ranges()])
    merge_index(tmp_path, 1)
    with ShardedTensors(tmp_path) as store:
        states[1].load({}, None, lambda kind, name, out, b, e: store.read_into(f"{kind}/{name}", out, b, e))
    assert small.same(small_copy(networks[0]), small_copy(networks[1]))
    assert not optimizers[1].state and optimizers[1].param_groups[0]["lr"] == 1e-2


def test_groups_of_other_parameters_are_refused_with_both_sizes() -> None:
    network = _network()
    one = ReplicatedState(dict(network.named_parameters()), [torch.optim.SGD(network.parameters(), lr=1)])
    parts = [{"params": list(part.parameters())} for part in network.values()]
    other = ReplicatedState(dict(network.named_parameters()), [torch.optim.SGD(parts, lr=1)])
    with pytest.raises(UsageError, match=r"groups hold \[\[2, 2, 2\]\] parameters, .* \[\[6\]\].*init_from="):
        other.load({}, one.optimizer_groups(), lambda *args: None)


def _eight_bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2, min_8bit_size=64)


def test_8_bit_states_are_stored_dequantised_and_continue_nearly_as_before(tmp_path: Path) -> None:
    networks = [nn.ModuleDict({"first": nn.Linear(64, 64), "second": nn.Linear(64, 3)}) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    optimizers = [_eight_bit(list(network.parameters())) for network in networks]
    states = [ReplicatedState(dict(n.named_parameters()), [o]) for n, o in zip(networks, optimizers)]

    def train(steps: range) -> list[float]:
        losses = []
        for step, (network, optimizer) in itertools.product(steps, zip(networks, optimizers)):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = network["second"](network["first"](torch.randn(16, 64)).relu()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(range(5))
    for state in optimizers[1].state.values():  # what is loaded must not be left over
        for kind in ("state1", "state2"):
            state[kind].zero_()
    _through_a_store(tmp_path, states[0], states[1])
    with ShardedTensors(tmp_path) as store:
        assert {store.dtype(key) for key in store.keys()} == {torch.float32}
    large = dict(networks[0].named_parameters())["first.weight"]
    assert optimizers[0].state[large]["state1"].dtype == torch.uint8
    for ours, theirs in zip(states[0].parameter_shards(), states[1].parameter_shards()):
        assert ours.scalars == theirs.scalars == {"step": 5}
        for kind in ours.states:
            one, two = (s.states[kind]() if callable(s.states[kind]) else s.states[kind] for s in (ours, theirs))
            assert (one - two).abs().max() <= 0.02 * one.abs().max()
    losses = train(range(5, 12))
    assert losses[::2] == pytest.approx(losses[1::2], rel=0.02)


def test_8_bit_optimizers_are_refused_with_weights_in_another_layout() -> None:
    # bitsandbytes replaces such weights by contiguous copies at every step, under the hands of whoever holds them.
    network = _network()
    with pytest.raises(UsageError, match="AdamW8bit.*channels_last=false"):
        ReplicatedState(dict(network.named_parameters()), [_eight_bit(list(network.parameters()))])
