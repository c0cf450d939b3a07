"""Keep of a checkpoint what a run can use that resumes with another optimizer, or with other settings of the same.

One rule for all strategies: states are kept where the run's optimizer keeps states of the same names and meaning, and
finds all that it needs among them. Else none is kept, nor the step count (which would correct the bias of moments that
are not there), and the optimizer starts as in a new run. What is not kept is in no later checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

_ADAMS = frozenset({"torch.Adam", "torch.AdamW", "torch.RAdam"})
_ADAMS_8BIT = frozenset(
    f"bitsandbytes.{paged}{kind}{bits}" for paged in ("", "Paged") for kind in ("Adam", "AdamW")
    for bits in ("", "8bit", "32bit")
)  # fmt: skip
_INTERCHANGEABLE = (_ADAMS, _ADAMS_8BIT)
"""Optimizers whose states mean the same: moments of the gradients, and a count of steps."""

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
"""States with one value per weight: those that an optimizer always keeps, and those that a setting brings."""

_ENGINES = ("deepspeed", "colossalai")
_SCHEDULED = ("params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""What schedulers make of any optimizer's groups."""


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name by which checkpoints know an optimizer: its package and class, such as ``torch.AdamW``.

    The Adams of engines go by the name of torch's that they stand for.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if package in _ENGINES and "Adam" in kind.__name__:
        decoupled = getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", True))
        return "torch.AdamW" if decoupled else "torch.Adam"
    return f"{package}.{kind.__name__}"


def keep_states(saved: dict[str, Any], optimizers: Sequence[str], configured: list[list[dict[str, Any]]]) -> str:
    """Leave in a checkpoint only what the optimizers of the run that resumes can go on with.

    Args:
        saved: The checkpoint's ``trainer.json``, which is changed. One of an earlier release does not name its
            optimizers; there the names of its states tell.
        optimizers: From :func:`optimizer_name`, of the run that resumes.
        configured: Their groups as configured.

    Returns:
        What is kept and what starts anew; "" where all goes on.
    """
    told = []
    theirs: Sequence[str | None] = saved.get("optimizers") or [None] * len(saved["optimizer_groups"])
    for number, (ours, before, groups) in enumerate(zip(optimizers, theirs, configured)):
        names = [name for group in saved["optimizer_groups"][number] for name in group["params"]]
        entries = [saved["parameters"][name] for name in names if name in saved["parameters"]]
        kinds = tuple(dict.fromkeys(kind for entry in entries for kind in entry["states"]))
        is_other = not _is_known_of(ours, kinds) if before is None else before != ours
        means_the_same = not is_other or any({ours, before} <= family for family in _INTERCHANGEABLE)
        # What an earlier release has not said to be configured stays as it was.
        settings = groups if is_other or "configured_groups" in saved else saved["optimizer_groups"][number]
        kept = _needed(ours, settings, kinds) if means_the_same else ()
        if not set(kept) <= set(kinds):
            kept = ()
        for entry in entries if set(kept) != set(kinds) else ():
            entry["states"] = {kind: shape for kind, shape in entry["states"].items() if kind in kept}
        if not kept and (kinds or is_other):
            for entry in entries:
                entry["scalars"] = {}
        if is_other:
            _take_settings(saved, number, groups)
        if is_other or set(kept) != set(kinds):
            told.append(_told(ours, before, is_other, kept, kinds))
    return "; ".join(told)


def _is_known_of(name: str, kinds: Sequence[str]) -> bool:
    """Whether an optimizer may have kept such states; of one that is not known, yes."""
    if name not in _STATES:
        return True
    always, by_setting = _STATES[name]
    return set(kinds) <= {*always, *by_setting.values()}


def _needed(name: str, groups: Sequence[dict[str, Any]], kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states that an optimizer keeps with its settings; of one that is not known, those of before."""
    if name not in _STATES:
        return kinds
    always, by_setting = _STATES[name]
    return (*always, *(kind for setting, kind in by_setting.items() if any(group.get(setting) for group in groups)))


def _take_settings(saved: dict[str, Any], number: int, configured: Sequence[dict[str, Any]]) -> None:
    """Put the settings of another optimizer in the place of the saved ones, but for what schedules have set."""
    for group, ours in zip(saved["optimizer_groups"][number], configured):
        scheduled = {key: value for key, value in group.items() if key in _SCHEDULED}
        group.clear()
        group.update({key: value for key, value in ours.items() if key not in _SCHEDULED} | scheduled)
    for scheduler in saved["schedulers"]:  # all of the one optimizer that a module has
        for group in scheduler["groups"]:
            for key in group.keys() - set(_SCHEDULED):
                del group[key]


def _told(ours: str, before: str | None, is_other: bool, kept: Sequence[str], kinds: Sequence[str]) -> str:
    change = f"optimizer {before or 'of another class'} -> {ours}" if is_other else f"other settings of {ours}"
    dropped = [kind for kind in kinds if kind not in kept]
    if not kinds:
        return f"{change}: the checkpoint holds no states; they start anew"
    if not kept:
        return f"{change}: states and step counts start anew, without the checkpoint's {', '.join(dropped)}"
    return f"{change}: {', '.join(kept)} and step counts are kept{f', {dropped[0]} is dropped' if dropped else ''}"
