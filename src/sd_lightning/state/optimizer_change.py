"""Resume a checkpoint with another optimizer, or with other settings of the same optimizer.

One rule for all strategies: saved states are kept if they match the new optimizer's states in name and meaning and
include all that it needs. Otherwise no state is kept, nor the step count (which would correct the bias of missing
moments), and the optimizer starts as in a new run. Dropped states are in no later checkpoint.
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

_ENGINES = ("deepspeed", "colossalai")
_SCHEDULED = ("params", "lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
"""Group keys of any optimizer: ``params``, and those that schedulers write."""


def optimizer_name(optimizer: Optimizer) -> str:
    """Return an optimizer's name in checkpoints: its package and class, such as ``torch.AdamW``.

    Adam classes of engines have the name of the torch class they replace.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if package in _ENGINES and "Adam" in kind.__name__:
        decoupled = getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", True))
        return "torch.AdamW" if decoupled else "torch.Adam"
    return f"{package}.{kind.__name__}"


def keep_states(saved: dict[str, Any], optimizers: Sequence[str], configured: list[list[dict[str, Any]]]) -> str:
    """Remove from a checkpoint all states that the optimizers of the resuming run cannot use.

    Args:
        saved: The checkpoint's ``trainer.json``, changed in place. Earlier releases did not name the optimizers: then
            the names of the states decide.
        optimizers: The resuming run's, from :func:`optimizer_name`.
        configured: Their groups as configured.

    Returns:
        A message on what is kept and what starts anew; "" if everything is kept.
    """
    messages = []
    theirs: Sequence[str | None] = saved.get("optimizers") or [None] * len(saved["optimizer_groups"])
    for number, (ours, before, groups) in enumerate(zip(optimizers, theirs, configured)):
        names = [name for group in saved["optimizer_groups"][number] for name in group["params"]]
        entries = [saved["parameters"][name] for name in names if name in saved["parameters"]]
        kinds = tuple(dict.fromkeys(kind for entry in entries for kind in entry["states"]))
        is_other = not _is_known_of(ours, kinds) if before is None else before != ours
        means_the_same = not is_other or any({ours, before} <= family for family in _INTERCHANGEABLE)
        # Earlier releases did not save the configured groups: use the saved settings.
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
            messages.append(_description(ours, before, is_other, kept, kinds))
    return "; ".join(messages)


def _is_known_of(name: str, kinds: Sequence[str]) -> bool:
    """Return whether an optimizer may have kept these states; True for unknown optimizers."""
    if name not in _STATES:
        return True
    always, by_setting = _STATES[name]
    return set(kinds) <= {*always, *by_setting.values()}


def _needed(name: str, groups: Sequence[dict[str, Any]], kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states that an optimizer keeps with its settings; the saved ones for unknown optimizers."""
    if name not in _STATES:
        return kinds
    always, by_setting = _STATES[name]
    return (*always, *(kind for setting, kind in by_setting.items() if any(group.get(setting) for group in groups)))


def _take_settings(saved: dict[str, Any], number: int, configured: Sequence[dict[str, Any]]) -> None:
    """Replace the saved settings by those of another optimizer, except the values that schedulers have set."""
    for group, ours in zip(saved["optimizer_groups"][number], configured):
        scheduled = {key: value for key, value in group.items() if key in _SCHEDULED}
        group.clear()
        group.update({key: value for key, value in ours.items() if key not in _SCHEDULED} | scheduled)
    for scheduler in saved["schedulers"]:  # all belong to the one optimizer of the module
        for group in scheduler["groups"]:
            for key in group.keys() - set(_SCHEDULED):
                del group[key]


def _description(ours: str, before: str | None, is_other: bool, kept: Sequence[str], kinds: Sequence[str]) -> str:
    change = f"optimizer {before or 'of another class'} -> {ours}" if is_other else f"other settings of {ours}"
    dropped = [kind for kind in kinds if kind not in kept]
    if not kinds:
        return f"{change}: the checkpoint holds no states; they start anew"
    if not kept:
        return f"{change}: states and step counts start anew, without the checkpoint's {', '.join(dropped)}"
    return f"{change}: {', '.join(kept)} and step counts are kept{f', {dropped[0]} is dropped' if dropped else ''}"
