"""The state of any torch learning-rate scheduler, without functions, so that it fits ``typed_json``."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from sd_lightning._errors import UsageError

# What schedulers set in the optimizer's parameter groups. Several compute the next value from the
# group's present one, so it belongs to their state.
_GROUP_KEYS = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "momentum",
    "betas",
    "base_momentum",
    "max_momentum",
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref)


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """State of a scheduler for ``typed_json``, with what it has set in the optimizer's groups.

    Functions (``LambdaLR``'s lambdas, ``CyclicLR``'s scale function) are left out: the resumed
    run builds its scheduler from the same configuration and so has them. Callable objects keep
    their attributes, as in torch.
    """
    groups = [{key: group[key] for key in _GROUP_KEYS if key in group} for group in scheduler.optimizer.param_groups]
    state = {
        "type": type(scheduler).__name__,
        "state": _without_functions(scheduler.state_dict()),
        "groups": groups,
    }
    return copy.deepcopy(state)


def load_scheduler_state(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Continue a scheduler, built as in the saved run, from its saved state.

    Also sets learning rate and momentum in the optimizer's groups. Call it after the optimizer's
    own state is loaded, if that holds groups as well.

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
                group[key].fill_(value)  # captured graphs hold on to this very tensor
            else:
                group[key] = copy.deepcopy(value)


def _without_functions(state: Any) -> Any:
    if type(state) is dict:
        return {key: _without_functions(value) for key, value in state.items() if not isinstance(value, _FUNCTIONS)}
    if type(state) is list:
        return [_without_functions(value) for value in state]
    return state
