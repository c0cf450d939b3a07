"""Updates of flat ranges by an optimizer's own class, and the choice of an update."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.gemini.eight_bit import BlockwiseUpdate
from sd_lightning.gemini.elementwise import AdamUpdate, Group, Progress, Ranges, SGDUpdate, Update

_TRIED_SHAPE = (96, 128)
"""Large enough for optimizers that treat small parameters differently (bitsandbytes: below 4096 elements)."""
_TRIED_PARTS = [512, 4608, 7168]
"""Multiples of the width of vector instructions."""
_TRIED_STEPS = 3
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_COPIED = ("state", "param_groups", "step", "_opt_called")
"""Attributes of the user's object that are not copied; schedulers replace an optimizer's ``step``."""

OptimizerEntry = dict[str, Any]
"""An optimizer's state of one parameter."""


class _NotElementwise(Exception):
    """The reason a class cannot step flat ranges."""


class OwnUpdate(Update):
    """Update by the user's own class, which steps flat ranges as if they were its parameters.

    A test with the settings of each group checks that it is elementwise: a small matrix is stepped whole, and a copy of
    it in flat parts, each by a separate optimizer. Weights and states must stay bit-equal.

    A step on ranges is neither captured in a CUDA graph nor differentiated, and scalars per parameter stay on the host.
    So ``capturable`` and ``differentiable`` are off, and ``fused`` is used for chunks on the host only.

    Args:
        inner: The user's optimizer.
        devices: Devices on which chunks are stepped.
    """

    def __init__(self, inner: torch.optim.Optimizer, devices: Iterable[torch.device]) -> None:
        self._inner = inner
        self._kind = type(inner)
        self._devices = tuple(devices)
        self._is_made_when_built = any(inner.state.values())
        """Whether the constructor creates states, as Adagrad's does."""
        self._types: dict[str, torch.dtype | None] = {}
        """By name of each scalar per parameter: the dtype of the tensor, or None for a Python number."""
        self._beside_weights: set[str] = set()
        """Names of scalar tensors that must be on the device of the weights."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        return tuple(self._types)

    def states(self, group: Group) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        for device in self._devices:
            try:
                with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                    names = self._compare(group, device)
            except _NotElementwise as error:
                raise self._refusal(str(error)) from None
            except Exception as error:  # a class that was not made for this may raise anything
                reason = f"{type(error).__name__}: {error}"
                raise self._refusal(f"its step fails on a flat range of a parameter ({reason})") from None
        return names

    def scalars(self, progress: Progress) -> dict[str, Any]:
        types = ((name, value, self._types[name]) for name, value in progress.scalars)
        return {name: value if dtype is None else torch.tensor(value, dtype=dtype) for name, value, dtype in types}

    def progress(self, scalars: Mapping[str, Any]) -> Progress | None:
        return self._progress(scalars) if scalars.keys() >= self._types.keys() else None

    def apply(self, ranges: Ranges, group: Group, divisor: float | Tensor, found_inf: Tensor | None = None) -> Progress:
        assert found_inf is None and not isinstance(divisor, Tensor)
        weights, gradients, states, progress = ranges.weights, ranges.gradients, ranges.states, ranges.progress
        if divisor != 1.0:
            torch._foreach_div_(gradients, divisor)
        entries: list[OptimizerEntry | None] = [None] * len(weights)
        if progress is not None:
            for index, weight in enumerate(weights):
                scalars = self.scalars(progress)
                scalars |= {name: scalars[name].to(weight.device) for name in self._beside_weights}
                entries[index] = {name: parts[index] for name, parts in states.items()} | scalars
        try:
            stepped = self._step(weights, gradients, entries, group)
        except _NotElementwise as error:
            raise self._refusal(str(error)) from None
        for index, entry in enumerate(stepped):
            for name, parts in states.items():
                if entry[name].data_ptr() != parts[index].data_ptr():  # made by the first step or replaced
                    parts[index].copy_(entry[name])
        return self._progress(stepped[-1])

    def _progress(self, entry: Mapping[str, Any]) -> Progress:
        return Progress(1, tuple((name, _number(entry[name])) for name in self._types))

    def _step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        entries: Sequence[OptimizerEntry | None],
        group: Group,
    ) -> list[OptimizerEntry]:
        """Step ranges with their states, which are None before the first step; return the new states."""
        parameters = [weight.detach().requires_grad_() for weight in weights]  # separate objects: they get gradients
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        settings |= {key: False for key in ("capturable", "differentiable") if key in settings}
        if settings.get("fused") and weights[0].device.type != "cpu":
            settings["fused"] = None
        stepper = self._stepper([{**settings, "params": parameters}], is_first=entries[0] is None)
        before = _counts(stepper)
        for parameter, gradient, entry in zip(parameters, gradients, entries, strict=True):
            parameter.grad = gradient
            if entry is not None:
                stepper.state[parameter] = entry
        stepper.step()
        after = {name: value for name, value in stepper.param_groups[0].items() if name != "params"}
        changed = [name for name in after if name not in settings or after[name] != settings[name]]
        changed += [name for name, value in _counts(stepper).items() if value != before.get(name, value)]
        if changed:
            raise _NotElementwise(f"it keeps {', '.join(changed)} from step to step, beside its parameters' states")
        for weight, parameter in zip(weights, parameters, strict=True):
            if weight.data_ptr() != parameter.data_ptr():  # the class has replaced the tensor
                weight.copy_(parameter)
        return [stepper.state[parameter] for parameter in parameters]

    def _stepper(self, groups: list[dict[str, Any]], *, is_first: bool) -> torch.optim.Optimizer:
        """Return an optimizer over other parameters, with the class and attributes of the user's."""
        inner = self._inner
        if self._is_made_when_built and is_first:
            takes = inspect.signature(self._kind).parameters
            return self._kind(groups, **{key: value for key, value in inner.defaults.items() if key in takes})
        stepper: torch.optim.Optimizer = object.__new__(self._kind)
        vars(stepper).update({key: value for key, value in vars(inner).items() if key not in _NOT_COPIED})
        vars(stepper).update({name: OrderedDict() for name in _HOOKS})
        stepper.defaults = {**inner.defaults, "differentiable": False}  # torch enables gradients by this
        stepper.state = defaultdict(dict)
        stepper.param_groups = groups
        return stepper

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(
            f"Gemini cannot step {self._kind.__name__}: {reason}, and chunks are cut anywhere inside a parameter; use "
            "an optimizer that updates each element by itself (torch's AdamW, Adam, SGD, RMSprop, NAdam and others), "
            "bitsandbytes' AdamW8bit, or another strategy"
        )

    def _compare(self, group: Group, device: torch.device) -> tuple[str, ...]:
        """Step a matrix whole and in parts, compare after each step, and return the names of states like weights."""
        generator = torch.Generator().manual_seed(0)
        # Use a learning rate that moves the weights: warm-up starts at zero, where every update looks elementwise.
        group = {**group, "lr": 0.1} if "lr" in group else group
        whole = torch.randn(_TRIED_SHAPE, generator=generator).to(device)
        parts = [part.clone() for part in whole.flatten().split(_TRIED_PARTS)]
        entry: OptimizerEntry | None = None
        entries: list[OptimizerEntry | None] = [None] * len(parts)
        names: tuple[str, ...] = ()
        for step in range(_TRIED_STEPS):
            gradient = torch.randn(_TRIED_SHAPE, generator=generator).to(device)
            pieces = [piece.clone() for piece in gradient.flatten().split(_TRIED_PARTS)]
            (entry,) = self._step([whole], [gradient], [entry], group)
            for index, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
                (entries[index],) = self._step([part], [piece], [entries[index]], group)
            before, names = names, self._names(entry, device)
            if step and before != names:
                raise _NotElementwise("its states change from step to step")
            of_parts = [each for each in entries if each]
            pairs = [(whole, parts), *((entry[name], [each[name] for each in of_parts]) for name in names)]
            is_equal = all(torch.equal(one.flatten().nan_to_num(), torch.cat(many).nan_to_num()) for one, many in pairs)
            scalars = [self._progress(state) for state in (entry, *of_parts) if state]
            if not is_equal or any(other != scalars[0] for other in scalars):
                raise _NotElementwise("its update of an element depends on other elements")
        return names

    def _names(self, entry: OptimizerEntry, device: torch.device) -> tuple[str, ...]:
        """Return the names of states with one value per weight; record the names of scalars."""
        names = []
        for name, value in entry.items():
            if isinstance(value, Tensor) and value.shape == _TRIED_SHAPE and value.dtype == torch.float32:
                names.append(name)
            elif isinstance(value, Tensor) and value.dim() == 0:
                self._types[name] = value.dtype
                if value.device.type == device.type != "cpu":
                    self._beside_weights.add(name)
            elif isinstance(value, int | float):
                self._types[name] = None
            elif value is not None:
                kind = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
                raise _NotElementwise(
                    f"it keeps {name} ({kind}) of a parameter of shape {_TRIED_SHAPE}, not one float32 value per weight"
                )
        return tuple(names)


def _plain(value: Any) -> Any:
    """Return a setting with tensors replaced by numbers, since chunks are on several devices."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the attributes that may be counters."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


def update_of(inner: torch.optim.Optimizer, devices: Iterable[torch.device] = (torch.device("cpu"),)) -> Update:
    """Return an optimizer's update of flat ranges; :meth:`Update.states` raises if it is not elementwise.

    Args:
        inner: The user's optimizer.
        devices: Devices on which ranges are stepped.
    """
    kind = type(inner)
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return AdamUpdate()
    if kind is torch.optim.SGD:
        return SGDUpdate()
    if kind.__name__ == "AdamW8bit" and kind.__module__.startswith("bitsandbytes."):
        return BlockwiseUpdate(inner)
    return OwnUpdate(inner, devices)
