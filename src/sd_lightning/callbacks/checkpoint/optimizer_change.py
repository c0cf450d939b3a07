"""Resume a checkpoint with another optimizer, or with other settings of the same optimizer.

One rule for all strategies: saved states are kept if they match the new optimizer's states in name and meaning and
include all that it needs. Otherwise no state is kept, nor the step count (which would correct the bias of missing
moments), and the optimizer starts as in a new run. Dropped states are in no later checkpoint.

Settings that the run has changed apply from the checkpoint on; unchanged ones stay as saved, bit for bit. A new
learning rate rescales the current, scheduled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sd_lightning.state.shards import OptimizerGroups

_ADAMS = frozenset({"torch.Adam", "torch.AdamW", "torch.RAdam"})
_ADAMS_8BIT = frozenset(
    f"bitsandbytes.{paged}{kind}{bits}" for paged in ("", "Paged") for kind in ("Adam", "AdamW")
    for bits in ("", "8bit", "32bit")
)  # fmt: skip
_INTERCHANGEABLE = (_ADAMS, _ADAMS_8BIT)
"""Families of optimizers whose states mean the same: moments of the gradients, and a step count."""

_STATES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "torch.ASGD": (("ax",), {}),
    "torch.Adadelta": (("square_avg", "acc_delta"), {}),
    "torch.Adagrad": (("sum",), {}),
    "torch.Adam": (("exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "torch.AdamW": (("exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}),
    "torch.Adamax": (("exp_avg", "exp_inf"), {}),
    "torch.NAdam": (("exp_avg", "exp_avg_sq"), {}),
    "torch.RAdam": (("exp_avg", "exp_avg_sq"), {}),
    "torch.RMSprop": (("square_avg",), {"momentum": "momentum_buffer", "centered": "grad_avg"}),
    "torch.Rprop": (("prev", "step_size"), {}),
    "torch.SGD": ((), {"momentum": "momentum_buffer"}),
    **dict.fromkeys(_ADAMS_8BIT, (("state1", "state2"), {})),
}
"""States with one value per weight: those that an optimizer always keeps, and those that a setting adds."""

_SCHEDULED = ("params", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Group keys of any optimizer, besides ``lr``: ``params``, and those that schedulers write."""
GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
STATE_RATES = ("base_lrs", "max_lrs", "_last_lr")


def keep_states(saved: dict[str, Any], optimizers: Sequence[str], configured: OptimizerGroups) -> str:
    """Remove from a checkpoint all states that the optimizers of the resuming run cannot use.

    Args:
        saved: The checkpoint's ``trainer.json``, changed in place.
        optimizers: The resuming run's, as ``optimizer_name`` writes them.
        configured: Their groups, from :func:`configured_groups`.

    Returns:
        A message on what is kept and what starts anew; "" if everything is kept.
    """
    messages = []
    for number, (ours, before, groups) in enumerate(zip(optimizers, saved["optimizers"], configured)):
        names = [name for group in saved["optimizer_groups"][number] for name in group["params"]]
        entries = [saved["parameters"][name] for name in names if name in saved["parameters"]]
        kinds = tuple(dict.fromkeys(kind for entry in entries for kind in entry["states"]))
        is_other = before != ours
        means_the_same = not is_other or any({ours, before} <= family for family in _INTERCHANGEABLE)
        kept = _needed(ours, groups, kinds) if means_the_same else ()
        if not set(kept) <= set(kinds):
            kept = ()
        for entry in entries:
            entry["states"] = {kind: shape for kind, shape in entry["states"].items() if kind in kept}
            if not kept and (kinds or is_other):
                entry["scalars"] = {}
        if is_other:
            _replace_settings(saved, number, groups)
        if is_other or set(kept) != set(kinds):
            change = f"optimizer {before} -> {ours}" if is_other else f"other settings of {ours}"
            messages.append(f"{change}: {_description(kept, kinds)}")
    return "; ".join(messages)


def _needed(name: str, groups: Sequence[dict[str, Any]], kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states that an optimizer keeps with its settings; the saved ones for unknown optimizers."""
    if name not in _STATES:
        return kinds
    always, by_setting = _STATES[name]
    return (*always, *(kind for setting, kind in by_setting.items() if any(group.get(setting) for group in groups)))


def _replace_settings(saved: dict[str, Any], number: int, configured: Sequence[dict[str, Any]]) -> None:
    """Replace the saved settings by those of another optimizer, except the values that schedulers have set."""
    stay = {"lr", *_SCHEDULED}
    for group, ours in zip(saved["optimizer_groups"][number], configured):
        scheduled = {key: value for key, value in group.items() if key in stay}
        group.clear()
        group.update({key: value for key, value in ours.items() if key not in stay} | scheduled)
    for scheduler in saved["schedulers"]:  # all belong to the one optimizer of the module
        for group in scheduler["groups"]:
            for key in group.keys() - stay:
                del group[key]


def _description(kept: Sequence[str], kinds: Sequence[str]) -> str:
    dropped = [kind for kind in kinds if kind not in kept]
    if not kinds:
        return "the checkpoint holds no states; they start anew"
    if not kept:
        return f"states and step counts start anew, without the checkpoint's {', '.join(dropped)}"
    return f"{', '.join(kept)} and step counts are kept{f', {dropped[0]} is dropped' if dropped else ''}"


def configured_groups(groups: OptimizerGroups) -> OptimizerGroups:
    """Return optimizer groups as configured, from ``TrainingState.optimizer_groups`` before the first step.

    If a scheduler has already set ``lr``, ``initial_lr`` is the configured rate.
    """
    return [
        [
            {key: value for key, value in group.items() if key not in _SCHEDULED}
            | {"lr": group.get("initial_lr", group.get("lr"))}
            for group in optimizer
        ]
        for optimizer in groups
    ]


def adopt_settings(saved: dict[str, Any], configured: OptimizerGroups) -> str:
    """Write the optimizer settings that a resumed run has changed into the saved groups and schedules.

    Args:
        saved: The checkpoint's ``trainer.json``, which is changed.
        configured: From :func:`configured_groups`, of the run that resumes.

    Returns:
        The differences, such as ``lr 0.001 -> 1e-05``.
    """
    changes: dict[str, None] = {}
    for optimizer, (ours, theirs) in enumerate(zip(configured, saved["configured_groups"])):
        for number, (new, old) in enumerate(zip(ours, theirs)):
            for key in (k for k in new if k in old and not _equal(new[k], old[k])):
                changes[f"{key} {old[key]} -> {new[key]}"] = None
                _adopt(saved, (optimizer, number), key, old[key], new[key])
    return ", ".join(changes)


def _adopt(saved: dict[str, Any], where: tuple[int, int], key: str, old: Any, new: Any) -> None:
    optimizer, number = where
    group = saved["optimizer_groups"][optimizer][number]
    # All belong to the module's only optimizer; one with other groups is refused when it is loaded.
    schedulers = [each for each in saved["schedulers"] if number < len(each["groups"])]
    if key != "lr":
        group[key] = new
        for groups in (each["groups"] for each in schedulers):
            if key in groups[number]:
                groups[number][key] = new
        return
    for rates in (group, *(each["groups"][number] for each in schedulers)):
        rates.update({each: _scaled(rates[each], old, new) for each in GROUP_RATES if each in rates})
    for scheduler in schedulers:
        _scale_lists(scheduler["state"], number, old, new)


def _scale_lists(state: dict[str, Any], group: int, old: float, new: float) -> None:
    """Rescale the rates of one optimizer group in a scheduler's state."""
    for key in STATE_RATES:
        if isinstance(state.get(key), list) and group < len(state[key]):
            state[key][group] = _scaled(state[key][group], old, new)
    for inner in state.get("_schedulers", ()):  # SequentialLR, ChainedScheduler
        _scale_lists(inner, group, old, new)


def _scaled(value: Any, old: float, new: float) -> Any:
    return new if value is None or value == old or not old else value * (new / old)


def _equal(ours: Any, theirs: Any) -> bool:
    """Return whether settings are equal; engines write pairs as lists or tuples."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)
