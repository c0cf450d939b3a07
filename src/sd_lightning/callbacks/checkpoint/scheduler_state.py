"""State of any torch learning-rate scheduler, without functions, so that ``typed_json`` can write it."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from sd_lightning._errors import UsageError

# Keys that schedulers set in parameter groups. Several schedulers compute the next value from the current one, so
# these values belong to their state.
_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "betas", "base_momentum", "max_momentum")
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
STATE_RATES = ("base_lrs", "max_lrs", "_last_lr")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref)


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a scheduler's state for ``typed_json``, with the values it has set in the optimizer's groups.

    Functions (``LambdaLR``'s lambdas, ``CyclicLR``'s scale function) are left out: the resumed run builds them from
    the same configuration. Callable objects keep their attributes, as in torch.
    """
    groups = [{key: group[key] for key in _GROUP_KEYS if key in group} for group in scheduler.optimizer.param_groups]
    state = _without_functions(scheduler.state_dict())
    return copy.deepcopy({"type": type(scheduler).__name__, "state": state, "groups": groups})


def load_scheduler_state(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Load a saved state into a scheduler that is built as in the saved run.

    Also sets learning rate and momentum in the optimizer's groups: load the optimizer's own state, if it holds
    groups, before.

    Raises:
        UsageError: The scheduler is of another class or its optimizer has another number of groups.
    """
    kind = type(scheduler).__name__
    if state["type"] != kind:
        raise UsageError(
            f"The checkpoint holds the state of {state['type']}, but the run has {kind}; "
            "resume with the same scheduler, or start a new run with init_from=."
        )
    groups = scheduler.optimizer.param_groups
    if len(state["groups"]) != len(groups):
        raise UsageError(
            f"The checkpoint's {kind} had {len(state['groups'])} parameter groups, the optimizer has {len(groups)}; "
            "resume with the same groups, or start a new run with init_from=."
        )
    scheduler.load_state_dict(copy.deepcopy(state["state"]))
    for group, saved in zip(groups, state["groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # captured CUDA graphs read this tensor
            else:
                group[key] = copy.deepcopy(value)


def scale_rates(group: dict[str, Any], old: float, new: float) -> None:
    """Rescale the current learning rates of an optimizer group from the configured rate ``old`` to ``new``."""
    for key in GROUP_RATES:
        if key in group:
            group[key] = _scaled(group[key], old, new)


def scale_scheduler(state: dict[str, Any], group: int, old: float, new: float) -> None:
    """Rescale the rates of one optimizer group in a state from :func:`scheduler_state`."""
    scale_rates(state["groups"][group], old, new)
    _scale_lists(state["state"], group, old, new)


def _scale_lists(state: dict[str, Any], group: int, old: float, new: float) -> None:
    for key in STATE_RATES:
        if isinstance(state.get(key), list) and group < len(state[key]):
            state[key][group] = _scaled(state[key][group], old, new)
    for inner in state.get("_schedulers", ()):  # SequentialLR, ChainedScheduler
        _scale_lists(inner, group, old, new)


def _scaled(value: Any, old: float, new: float) -> Any:
    return new if value is None or value == old or not old else value * (new / old)


def _without_functions(state: Any) -> Any:
    if type(state) is dict:
        return {key: _without_functions(value) for key, value in state.items() if not isinstance(value, _FUNCTIONS)}
    if type(state) is list:
        return [_without_functions(value) for value in state]
    return state
