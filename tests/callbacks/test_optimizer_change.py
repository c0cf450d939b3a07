"""Another optimizer on resume: what is kept, what starts anew, and that nothing dead is carried on."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small_training as small
from sd_lightning.callbacks.checkpoint.optimizer_change import adopt_settings, configured_groups, keep_states
from sd_lightning.state.replicated import ReplicatedState
from sd_lightning.state.shards import SavedParameter, optimizer_name
from sd_lightning.storage import typed_json
from sd_lightning.storage.tensor_store import ShardedTensors, merge_index, write_shards

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CLASSES: dict[str, Factory] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "Adam": partial(torch.optim.Adam, lr=1e-2, betas=(0.8, 0.9)),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2),
    "RMSprop momentum": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=1e-2),
    "SGD momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}
KEPT = {
    ("AdamW", "Adam"): ["exp_avg", "exp_avg_sq"],
    ("Adam", "AdamW"): ["exp_avg", "exp_avg_sq"],
    ("AdamW", "RAdam"): ["exp_avg", "exp_avg_sq"],
    ("RAdam", "AdamW"): ["exp_avg", "exp_avg_sq"],
    ("Adam", "RAdam"): ["exp_avg", "exp_avg_sq"],
    ("RAdam", "Adam"): ["exp_avg", "exp_avg_sq"],
    ("AdamW amsgrad", "AdamW"): ["exp_avg", "exp_avg_sq"],
    ("AdamW amsgrad", "Adam"): ["exp_avg", "exp_avg_sq"],
    ("AdamW amsgrad", "RAdam"): ["exp_avg", "exp_avg_sq"],
    ("RMSprop momentum", "RMSprop"): ["square_avg"],
}
"""What goes on, of all pairs of different optimizers."""
WITHOUT_STATES = {("SGD", "SGD momentum")}
"""The same class, of which there is nothing to keep."""


def _network() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"first": nn.Linear(6, 4), "second": nn.Linear(4, 2)})


def _step(network: nn.ModuleDict, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    network["second"](network["first"](torch.randn(3, 6)).relu()).square().sum().backward()
    optimizer.step()


def _document(state: ReplicatedState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = state.optimizer_groups()
    return {
        "parameters": {shard.name: vars(shard.saved()) for shard in state.parameter_shards()},
        "optimizers": state.optimizer_names(),
        "optimizer_groups": groups,
        "configured_groups": configured_groups(groups),
        "schedulers": [],
    }


def _state(network: nn.ModuleDict, optimizer: torch.optim.Optimizer) -> ReplicatedState:
    return ReplicatedState(dict(network.named_parameters()), [optimizer])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """A store and the typed JSON of a run of two steps with each optimizer."""
    runs = {}
    for name, factory in CLASSES.items():
        folder = tmp_path_factory.mktemp("store")
        network = _network()
        optimizer = factory(list(network.parameters()))
        for seed in range(2):
            _step(network, optimizer, seed)
        state = _state(network, optimizer)
        write_shards(folder, 0, 1, [entry for shard in state.parameter_shards() for entry in shard.ranges()])
        merge_index(folder, 1)
        runs[name] = folder, typed_json.dumps(_document(state, optimizer))
    return runs


def _resumed(folder: Path, document: dict[str, Any], factory: Factory) -> tuple[Any, Any, str]:
    """Return network and optimizer that go on from a checkpoint, and what was said."""
    network = _network()
    optimizer = factory(list(network.parameters()))
    state = _state(network, optimizer)
    configured = configured_groups(state.optimizer_groups())
    told = keep_states(document, state.optimizer_names(), configured)
    adopt_settings(document, configured)
    entries = {name: SavedParameter(**entry) for name, entry in document["parameters"].items()}
    with ShardedTensors(folder) as store:
        state.load(
            entries,
            document["optimizer_groups"],
            lambda kind, name, out, begin, end: store.read_into(f"{kind}/{name}", out, begin, end),
        )
    return network, optimizer, told


@pytest.mark.parametrize("old", CLASSES)
def test_states_are_kept_where_they_mean_the_same_and_else_the_optimizer_starts_as_in_a_new_run(
    saved: dict[str, tuple[Path, str]], old: str
) -> None:
    folder, text = saved[old]
    for new, factory in CLASSES.items():
        network, optimizer, told = _resumed(folder, typed_json.loads(text), factory)
        fresh_network = _network()
        fresh_network.load_state_dict(network.state_dict())
        fresh = factory(list(fresh_network.parameters()))
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        expected = [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
        if new == old:
            assert told == "" and settings == expected
            continue
        kept = KEPT.get((old, new), [])
        parameter = network["first"].weight
        loaded = {key for key, value in optimizer.state.get(parameter, {}).items() if key != "step"}
        begun = {key for key in fresh.state.get(fresh_network["first"].weight, {}) if key != "step"}  # Adagrad
        assert loaded == set(kept) | begun, f"{old} -> {new}"
        if optimizer_name(fresh) != typed_json.loads(text)["optimizers"][0]:
            # The learning rate goes on from the saved one, as that of any resumed run.
            assert settings == [group | {"lr": settings[0]["lr"]} for group in expected], f"{old} -> {new}"
        assert bool(told) == ((old, new) not in WITHOUT_STATES), f"{old} -> {new}"
        for group in fresh.param_groups:
            group["lr"] = settings[0]["lr"]
        for seed in range(2, 4):
            _step(network, optimizer, seed)
            _step(fresh_network, fresh, seed)
        keys = [set(o.state.get(n["first"].weight, {})) for o, n in ((optimizer, network), (fresh, fresh_network))]
        assert keys[0] == keys[1], f"{old} -> {new}: dead states, or missing ones"
        same = all(torch.equal(a, b) for a, b in zip(network.parameters(), fresh_network.parameters()))
        assert same is not bool(kept), f"{old} -> {new}"


def test_kept_moments_and_steps_are_those_of_the_checkpoint_bit_for_bit(saved: dict[str, tuple[Path, str]]) -> None:
    folder, text = saved["AdamW"]
    network, optimizer, told = _resumed(folder, typed_json.loads(text), CLASSES["Adam"])
    assert told == "optimizer torch.AdamW -> torch.Adam: exp_avg, exp_avg_sq and step counts are kept"
    for name, parameter in network.named_parameters():
        state = optimizer.state[parameter]
        assert float(state["step"]) == 2.0
        with ShardedTensors(folder) as store:
            for kind in ("exp_avg", "exp_avg_sq"):
                values = torch.empty_like(parameter)
                store.read_into(f"{kind}/{name}", values)
                assert torch.equal(state[kind], values)


def test_a_state_that_other_settings_do_not_need_is_dropped_in_one_line(saved: dict[str, tuple[Path, str]]) -> None:
    folder, text = saved["AdamW amsgrad"]
    assert _resumed(folder, typed_json.loads(text), CLASSES["AdamW"])[2] == (
        "other settings of torch.AdamW: exp_avg, exp_avg_sq and step counts are kept, max_exp_avg_sq is dropped"
    )


def test_states_of_8_bits_and_of_32_are_not_taken_for_each_other(saved: dict[str, tuple[Path, str]]) -> None:
    from bitsandbytes.optim import AdamW8bit

    folder, text = saved["AdamW"]
    network, optimizer, told = _resumed(folder, typed_json.loads(text), partial(AdamW8bit, lr=1e-2))
    assert told.startswith("optimizer torch.AdamW -> bitsandbytes.AdamW8bit: states and step counts start anew")
    _step(network, optimizer, 2)
    document = _document(_state(network, optimizer), optimizer)
    assert set(document["parameters"]["first.weight"]["states"]) == {"state1", "state2"}
    back = keep_states(document, ["torch.AdamW"], [[{"amsgrad": False}]])
    assert back.startswith("optimizer bitsandbytes.AdamW8bit -> torch.AdamW: states and step counts start anew")
    assert document["parameters"]["first.weight"]["states"] == {}


def test_the_adams_of_engines_go_by_the_name_of_those_that_they_stand_for() -> None:
    def named(module: str, kind: str, **attributes: Any) -> Any:
        made = type(kind, (), {"__module__": module} | attributes)()
        return optimizer_name(made)

    assert named("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", adam_w_mode=True) == "torch.AdamW"
    assert named("colossalai.nn.optimizer.hybrid_adam", "HybridAdam", adamw_mode=False) == "torch.Adam"
    assert named("mine.lion", "Lion") == "mine.Lion"


def test_a_run_goes_on_with_another_optimizer_and_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def kinds(path: Path) -> set[str]:
        return {key.partition("/")[0] for key in small.stored(path)}

    sgd = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
    first = small.train(tmp_path / "a", 1)
    with caplog.at_level(logging.INFO, logger="sd_lightning"):
        second = small.train(tmp_path / "b", 2, resume=first, optimizer=sgd)
        third = small.train(tmp_path / "c", 3, resume=second)
    lines = [message for message in caplog.messages if "optimizer torch" in message]
    assert lines == [
        f"resume={first}: optimizer torch.AdamW -> torch.SGD: states and step counts start anew, without the "
        "checkpoint's exp_avg, exp_avg_sq",
        f"resume={second}: optimizer torch.SGD -> torch.AdamW: states and step counts start anew, without the "
        "checkpoint's momentum_buffer",
    ]
    assert kinds(second) == {"master", "ema", "momentum_buffer"}
    assert kinds(third) == {"master", "ema", "exp_avg", "exp_avg_sq"}
    states = [small.trainer_state(path) for path in (second, third)]
    assert [state["optimizers"] for state in states] == [["torch.SGD"], ["torch.AdamW"]]
    assert "betas" not in states[0]["optimizer_groups"][0][0] and states[1]["optimizer_groups"][0][0]["betas"]
    steps: list[Tensor] = [entry["scalars"]["step"] for entry in states[1]["parameters"].values()]
    assert {float(step) for step in steps} == {1.0}
