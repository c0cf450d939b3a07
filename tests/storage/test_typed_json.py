"""Typed JSON gives back exactly what it was given, or refuses; also the state of every LR scheduler."""

from __future__ import annotations

import collections
import enum
import functools
import inspect
import json
import math
import pathlib
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, Optimizer, lr_scheduler, swa_utils

from sd_lightning._errors import UsageError
from sd_lightning.callbacks.checkpoint.trainer_state import load_scheduler_state, scheduler_state
from sd_lightning.storage import typed_json


def identical(one: Any, other: Any) -> bool:
    """Same types and same bits all the way down; dictionaries in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(identical(a, b) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, np.generic | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return math.isnan(one) and math.isnan(other) or struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


VALUES: dict[str, Any] = {
    "scalars": [None, True, False, 0, -1, 2**200, "", "ünï\ud83d\n", 0.1, -0.0, 5e-324, 1.7e308],
    "not finite": [math.nan, math.inf, -math.inf],
    "keys": {1: "a", "1": "b", None: 0, False: 1, 2.5: 2, (1, "x"): 3, "": 4},
    "order": {"z": 1, "a": 2, "m": {"y": 1, "b": 2}},
    "our own tag": {"$type": "tuple", "items": [1]},
    "containers": [(1, (2, [3, ()])), {1, 2, (3, 4)}, frozenset({"a", "b"}), [], {}, set()],
    "collections": [collections.Counter({30: 1, 80: 2}), collections.OrderedDict([(2, "b"), (1, "a")])],
    "dtypes": [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn],
    "numpy": [np.float32(0.1), np.float64(math.nan), np.int64(-5), np.bool_(True), np.arange(6).reshape(2, 3)],
    "numpy RNG": np.random.RandomState(3).get_state(),
    "torch RNG": torch.get_rng_state(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_their_types_and_bits(name: str) -> None:
    text = typed_json.dumps(VALUES[name])
    assert identical(typed_json.loads(text), VALUES[name])
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not standard JSON"))


@pytest.mark.parametrize("dtype", typed_json._TENSOR_DTYPES.values())
def test_tensors_of_every_dtype_come_back_bit_exact(dtype: torch.dtype) -> None:
    tensors = [
        torch.randint(2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)
        for shape in [(), (0, 3), (1,), (3, 5)]
    ]
    assert identical(typed_json.loads(typed_json.dumps(tensors)), tensors)


def test_tensors_are_stored_without_graph_strides_or_aliasing() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    loaded = typed_json.loads(typed_json.dumps([weight, weight.t(), weight[1:, ::2], weight[:1].t()[:1]]))
    assert [type(tensor) for tensor in loaded] == [torch.Tensor] * 4
    assert not any(tensor.requires_grad for tensor in loaded)
    for tensor, original in zip(loaded, [weight, weight.t(), weight[1:, ::2], weight[:1].t()[:1]]):
        assert torch.equal(tensor, original)
    loaded[0].zero_()  # writable, and its own memory
    assert torch.equal(loaded[1], weight.t())


def test_paths_become_strings() -> None:
    assert typed_json.loads(typed_json.dumps({"run": pathlib.PurePosixPath("runs/a")})) == {"run": "runs/a"}


def test_equal_sets_give_equal_text() -> None:
    assert typed_json.dumps({"b", "a", "c"}) == typed_json.dumps({"c", "b", "a"})


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"schedulers": [{"foo": print}]}, r"schedulers\[0\].foo: cannot store <class 'builtin_function_or_method'>"),
        (object(), "object: cannot store <class 'object'>"),
        ({"a": {1: {2: b"x"}}}, r"a\[1\]\[2\]: cannot store <class 'bytes'>"),
        ([Colour.RED], r"\[0\]: cannot store <enum 'Colour'>"),
        ({"state": collections.defaultdict(list)}, "state: cannot store <class 'collections.defaultdict'>"),
        ({"x": torch.empty(2, device="meta")}, r"x: cannot store a tensor of shape \(2,\), .* on meta"),
        ({"x": torch.eye(2).to_sparse()}, "x: cannot store a tensor .* expected a dense tensor"),
        ({"x": torch.empty(5_000_000)}, "x: cannot store a tensor .* at most 16,777,216 bytes. Use the tensor store"),
        ([np.array([object()])], r"\[0\]: cannot store <class 'numpy.ndarray'>"),
        ({(1, print): 2}, r"key of .*: cannot store"),
    ],
)
def test_anything_else_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        typed_json.dumps(value)


def test_an_object_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        typed_json.dumps(loop)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"a": 1',
        '{"$type": "os.system", "items": ["true"]}',
        '{"$type": ["tuple"], "items": []}',
        '{"$type": "tuple"}',
        '{"$type": "dict", "items": [[[1], 2]]}',
        '{"$type": "dtype", "value": "torch.nn"}',
        '{"$type": "tensor", "dtype": "torch.float32", "shape": [2], "data": "AAAA"}',
        '{"$type": "tensor", "dtype": "torch.float32", "shape": [3], "data": "AAAAAA=="}',
        '{"$type": "tensor", "dtype": "torch.quint8", "shape": [0], "data": ""}',
        '{"$type": "ndarray", "dtype": "|O8", "shape": [1], "data": "AAAAAAAAAAA="}',
        '{"$type": "numpy", "dtype": "rubbish", "shape": [], "data": ""}',
        "[" * 100_000,
    ],
)
def test_altered_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="typed_json cannot read this text") as error:
        typed_json.loads(text)
    assert len(str(error.value)) < 300


class Halving:
    """A callable object, whose attributes torch saves."""

    def __init__(self, period: int) -> None:
        self.period = period
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5 ** (step // self.period) + 0.001 * self.calls


def warm_up(step: int, length: int = 4) -> float:
    return min(1.0, (step + 1) / length)


Build = Callable[[Optimizer], Any]
S = lr_scheduler
SCHEDULERS: dict[str, Build] = {
    "LambdaLR": lambda o: S.LambdaLR(o, [warm_up, lambda step: 0.9**step]),
    "LambdaLR/partial": lambda o: S.LambdaLR(o, functools.partial(warm_up, length=7)),
    "LambdaLR/object": lambda o: S.LambdaLR(o, [Halving(3), Halving(4)]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: S.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: S.MultiStepLR(o, milestones=[3, 3, 9, 14]),
    "ConstantLR": lambda o: S.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: S.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, total_iters=12, power=1.5),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, T_max=8),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=4), S.MultiStepLR(o, [2, 5]), S.ExponentialLR(o, 0.8)], milestones=[4, 11]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.1, 5), S.ExponentialLR(o, 0.9)]),
    "ChainedScheduler/nested": lambda o: S.ChainedScheduler(
        [S.SequentialLR(o, [S.LambdaLR(o, warm_up), S.StepLR(o, 2)], [5]), S.MultiplicativeLR(o, lambda step: 0.97)]
    ),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "ReduceLROnPlateau/max": lambda o: S.ReduceLROnPlateau(o, mode="max", patience=2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.95),
    "CyclicLR/triangular2": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="triangular2"),
    "CyclicLR/function": lambda o: S.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 1 / (5**x * 0.1)),
    "OneCycleLR": lambda o: S.OneCycleLR(o, max_lr=[0.2, 0.1], total_steps=30),
    "OneCycleLR/linear": lambda o: S.OneCycleLR(o, 0.2, total_steps=25, anneal_strategy="linear", three_phase=True),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=7),
}
NUM_STEPS = 20


def an_optimizer(kind: str) -> Optimizer:
    groups = [{"params": [torch.zeros(2)], "lr": 0.1}, {"params": [torch.zeros(3)], "lr": 0.05}]
    if kind == "tensor lr":
        return Adam([group | {"lr": torch.tensor(group["lr"])} for group in groups], fused=True)
    return SGD(groups, momentum=0.8) if kind == "SGD" else Adam(groups)


def group_values(scheduler: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]


def advance(scheduler: Any, begin: int, end: int) -> list[Any]:
    """Step a scheduler; what it has set in the optimizer's groups after each step."""
    seen = []
    for step in range(begin, end):
        scheduler.optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step([3.0, 2.0, 2.0, 2.5, 1.0][step % 5])
        else:
            scheduler.step()
        seen += [
            (float(group["lr"]), group.get("momentum"), group.get("betas"))
            for group in scheduler.optimizer.param_groups
        ]
        seen.append([float(lr) for lr in scheduler.get_last_lr()])
    return seen


def test_every_scheduler_of_torch_is_covered() -> None:
    classes = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} == {name.split("/")[0] for name in SCHEDULERS}


@pytest.mark.parametrize("kind", ["SGD", "Adam", "tensor lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_bit_equal_after_any_step(name: str, kind: str) -> None:
    build = SCHEDULERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = advance(build(an_optimizer(kind)), 0, NUM_STEPS)
        for stop in range(NUM_STEPS):
            first = build(an_optimizer(kind))
            head = advance(first, 0, stop)
            text = typed_json.dumps(scheduler_state(first))
            resumed = build(an_optimizer(kind))
            load_scheduler_state(resumed, typed_json.loads(text))
            assert identical(scheduler_state(resumed), scheduler_state(first))
            assert group_values(resumed) == group_values(first)
            assert head + advance(resumed, stop, NUM_STEPS) == reference, f"stopped after {stop} steps"


def test_tensor_learning_rates_are_filled_in_place() -> None:
    first = lr_scheduler.StepLR(an_optimizer("tensor lr"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        advance(first, 0, 2)
    resumed = lr_scheduler.StepLR(an_optimizer("tensor lr"), 1)
    tensor = resumed.optimizer.param_groups[0]["lr"]
    load_scheduler_state(resumed, scheduler_state(first))
    assert resumed.optimizer.param_groups[0]["lr"] is tensor
    assert tensor.item() == pytest.approx(0.001)


def test_state_is_a_snapshot() -> None:
    scheduler = lr_scheduler.MultiStepLR(an_optimizer("SGD"), [1, 2])
    state = scheduler_state(scheduler)
    text = typed_json.dumps(state)
    load_scheduler_state(scheduler, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        advance(scheduler, 0, 3)
    assert typed_json.dumps(state) == text


class WithFunctions(lr_scheduler.StepLR):
    """A user's scheduler that keeps functions, which torch's ``state_dict`` hands out."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.curve = math.sqrt
        self.stages = [{"name": "first", "curve": warm_up}]
        self.bound = self.get_lr
        super().__init__(optimizer, 3)


def test_functions_of_a_custom_scheduler_are_left_to_its_constructor() -> None:
    first = WithFunctions(an_optimizer("SGD"))
    advance(first, 0, 4)
    resumed = WithFunctions(an_optimizer("SGD"))
    load_scheduler_state(resumed, typed_json.loads(typed_json.dumps(scheduler_state(first))))
    assert resumed.curve is math.sqrt
    assert resumed.bound.__self__ is resumed
    assert advance(resumed, 4, 9) == advance(first, 4, 9)


def test_another_scheduler_or_number_of_groups_is_refused() -> None:
    state = scheduler_state(lr_scheduler.StepLR(an_optimizer("SGD"), 3))
    with pytest.raises(UsageError, match="holds the state of StepLR, but the run has ConstantLR; resume with the same"):
        load_scheduler_state(lr_scheduler.ConstantLR(an_optimizer("SGD")), state)
    with pytest.raises(UsageError, match="StepLR had 2 parameter groups, the optimizer has 1"):
        load_scheduler_state(lr_scheduler.StepLR(SGD([torch.zeros(1)], lr=0.1), 3), state)
