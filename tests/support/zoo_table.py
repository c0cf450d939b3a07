"""The table of the zoo: which module is trained how, and where it is refused; a table of the guide is made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelPruning

from zoo import (
    Attends,
    Backbone,
    BuildsLate,
    CalledTwice,
    CallsFunctional,
    CallsMethods,
    CallsParts,
    Clamps,
    ClipsByConfigure,
    ClipsByHook,
    Doubles,
    DropsGradients,
    EditsGradients,
    Freezes,
    FrozenInOptimizer,
    GradientPenalty,
    GradNorm,
    Groups,
    Hooked,
    Lbfgs,
    LightningsGradNorm,
    Lists,
    LoadsAtFitStart,
    LoadsTarget,
    LogsWeights,
    Manual,
    ManualClips,
    NestedOutputs,
    NormalisesBatches,
    OwnAverage,
    OwnParameter,
    Parametrized,
    PenaltyOfAll,
    Plain,
    Plateau,
    Pruned,
    Recomputes,
    SavesItself,
    Schedulers,
    Sparse,
    Target,
    Tied,
    TiedAcross,
    TwoOptimizers,
    Unfreezes,
    UnfreezesLast,
    Unused,
    WarmsUp,
    WritesAtFitStart,
    WritesAtTrainStart,
)

EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """A module, and how it is trained."""

    module: Callable[[], pl.LightningModule]
    what: str
    """What it does, for the table of the guide."""
    callbacks: Callable[[], Iterable[Callback]] = tuple
    trainer: Mapping[str, Any] = field(default_factory=dict)
    unused: bool = False
    """Whether DDP must search for parameters without a gradient."""


CASES: dict[str, Case] = {
    "plain": Case(Plain, "two networks and SGD"),
    "lists": Case(Lists, "networks in `ModuleList` and `ModuleDict`"),
    "builds_late": Case(BuildsLate, "networks built in `configure_model`"),
    "writes_at_fit_start": Case(WritesAtFitStart, "weights written in `on_fit_start`"),
    "writes_at_train_start": Case(WritesAtTrainStart, "weights written in `on_train_start`"),
    "loads_at_fit_start": Case(LoadsAtFitStart, "`load_state_dict` of a network in `on_fit_start`"),
    "logs_weights": Case(LogsWeights, "weights read in a hook"),
    "saves_itself": Case(SavesItself, "`state_dict` of a network in a hook"),
    "clamps": Case(Clamps, "`p.data.clamp_()` after a step"),
    "target": Case(Target, "a slow copy of a network in the module (BYOL), `q.data.lerp_(p.data, 0.1)`"),
    "loads_target": Case(LoadsTarget, "a copy renewed by `load_state_dict` (DQN)"),
    "own_average": Case(OwnAverage, "an average of the weights in buffers"),
    "edits_gradients": Case(EditsGradients, "gradients edited in `on_after_backward`"),
    "drops_gradients": Case(DropsGradients, "gradients dropped in `on_before_optimizer_step`", unused=True),
    "grad_norm": Case(GradNorm, "the norm of `p.grad` by hand"),
    "lightnings_grad_norm": Case(LightningsGradNorm, "Lightning's `grad_norm`"),
    "clips": Case(Plain, "`Trainer(gradient_clip_val=…)`", trainer={"gradient_clip_val": 0.1}),
    "clips_values": Case(
        Plain,
        "clipping by value",
        trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "clips_by_hook": Case(ClipsByHook, "`clip_grad_norm_(self.parameters())` in a hook"),
    "clips_by_configure": Case(ClipsByConfigure, "`configure_gradient_clipping`"),
    "penalty": Case(PenaltyOfAll, "an L2 penalty over `self.parameters()`"),
    "gradient_penalty": Case(GradientPenalty, "a gradient penalty (`create_graph=True`)"),
    "functional": Case(CallsFunctional, "`F.linear(x, self.head.weight)`", unused=True),
    "parts": Case(CallsParts, "parts of a network called, never the whole"),
    "methods": Case(CallsMethods, "other methods of a network than `forward`"),
    "twice": Case(CalledTwice, "a network called twice"),
    "nested_outputs": Case(NestedOutputs, "nested dictionaries in and out of a network"),
    "recomputes": Case(Recomputes, "`torch.utils.checkpoint`"),
    "attends": Case(Attends, "`TransformerEncoderLayer`, `LSTM`"),
    "parametrized": Case(Parametrized, "`weight_norm`, `spectral_norm`"),
    "hooked": Case(Hooked, "forward hooks"),
    "batch_norm": Case(NormalisesBatches, "BatchNorm's running statistics"),
    "unused": Case(Unused, "parameters without a part in the loss", unused=True),
    "own_parameter": Case(OwnParameter, "a parameter of the LightningModule itself"),
    "tied": Case(Tied, "a weight used twice in a network"),
    "tied_across": Case(TiedAcross, "a weight shared by two networks"),
    "sparse": Case(Sparse, "sparse gradients of an embedding"),
    "frozen": Case(FrozenInOptimizer, "a frozen block, and `SGD(self.parameters())`"),
    "unfreezes": Case(Unfreezes, "`requires_grad_(True)` after an epoch", unused=True),
    "freezes": Case(Freezes, "`requires_grad_(False)` after an epoch", unused=True),
    "backbone": Case(
        Backbone,
        "`BackboneFinetuning`",
        lambda: [BackboneFinetuning(1, backbone_initial_lr=0.05, should_align=False)],
        unused=True,
    ),
    "finetuning": Case(
        Backbone, "`BaseFinetuning`, a layer more with each epoch", lambda: [UnfreezesLast()], unused=True
    ),
    "pruned": Case(Pruned, "`torch.nn.utils.prune` before fit"),
    "pruning": Case(Plain, "`ModelPruning`", lambda: [ModelPruning("l1_unstructured", amount=0.5)]),
    "schedulers": Case(Schedulers, "`return [optimizer], [scheduler]`"),
    "plateau": Case(Plateau, "`ReduceLROnPlateau`"),
    "groups": Case(Groups, "several groups of parameters"),
    "warms_up": Case(WarmsUp, "`optimizer_step` overridden"),
    "accumulates": Case(Plain, "`accumulate_grad_batches=2`", trainer={"accumulate_grad_batches": 2}),
    "manual": Case(Manual, "manual optimization"),
    "manual_clips": Case(ManualClips, "`clip_gradients` in manual optimization"),
    "two_optimizers": Case(TwoOptimizers, "two optimizers, `toggle_optimizer`", unused=True),
    "lbfgs": Case(Lbfgs, "`LBFGS`"),
    "double": Case(Doubles, '`precision="64-true"`', trainer={"precision": "64-true"}),
}


STRATEGIES = ("fsdp", "fsdp_offload", "zero1", "zero2", "zero3", "gemini", "gemini_offload")
COLUMNS = {"FSDP": "fsdp", "DeepSpeed ZeRO-1, ZeRO-2": "zero2", "ZeRO-3": "zero3", "Gemini": "gemini"}
"""Columns of the guide's table, and the strategy that stands for each."""

_GRADIENT = "uses the gradient of .*, which DeepSpeed keeps to itself"
_FROZEN = "changed requires_grad of .*freeze and unfreeze before fit"
_PARTS = "in parts.*call networks as a whole, and use a weight in the forward of its network"
_SECOND_PASS = "a second manual_backward before optimizer.step"
_EMPTY = "weights are empty outside.*use a weight in the forward of the network"

REFUSED: dict[str, dict[str, str]] = {
    "edits_gradients": {"zero": _GRADIENT},
    "drops_gradients": {"zero": _GRADIENT},
    "grad_norm": {"zero": _GRADIENT},
    "lightnings_grad_norm": {"zero": _GRADIENT},
    "clips_by_hook": {"zero": _GRADIENT},
    "clips_by_configure": {"zero": "configure_gradient_clipping has no effect"},
    "clips_values": {"zero": "DeepSpeed clips by norm only"},
    "manual_clips": {"zero1": _SECOND_PASS, "zero2": _SECOND_PASS, "zero3": "clip_gradients has no effect"},
    "penalty": {"fsdp": _PARTS, "zero3": _EMPTY},
    "gradient_penalty": {"fsdp": _PARTS, "zero3": _EMPTY, "gemini": "create_graph=True"},
    "functional": {"fsdp": _PARTS, "gemini": "outside of that block's forward"},
    "parts": {"fsdp": _PARTS},
    "methods": {"fsdp": _PARTS},
    "manual": {"zero1": _SECOND_PASS, "zero2": _SECOND_PASS},
    "pruning": dict.fromkeys(("fsdp", "zero", "gemini"), "ModelPruning, which replaces weights"),
    "own_parameter": {"fsdp": "a parameter of no network", "gemini": "a parameter of no network"},
    "tied_across": {"fsdp": "FSDP2 cannot gather one weight for two networks"},
    "sparse": dict.fromkeys(("fsdp", "zero", "gemini"), "sparse=False"),
    "unfreezes": {"zero": _FROZEN},
    "freezes": {"zero": _FROZEN},
    "backbone": {"zero": "Finetuning callback does not support"},
    "finetuning": {"zero": "Finetuning callback does not support"},
    "two_optimizers": {"zero": "only supports single optimizer"},
    "lbfgs": dict.fromkeys(("zero", "gemini"), "got LBFGS, which needs whole weights"),
    "double": {"fsdp": "does not support .*64-true", "zero": "64-true.*is not supported", "gemini": "64-true"},
}
"""Case -> beginning of a strategy's name -> what the refusal says. All other pairs train as under DDP."""


def refusal(case: str, strategy: str) -> str | None:
    """Return a regular expression for the message by which a strategy refuses a case; None if it trains it."""
    named = REFUSED.get(case, {})
    return next((message for prefix, message in named.items() if strategy.startswith(prefix)), None)


def answer(case: str, strategy: str) -> str:
    """Return one word of the guide's table."""
    return "trains" if refusal(case, strategy) is None else "refused"


def guide() -> str:
    """Return the guide's lines about the zoo, in Markdown."""
    rows = {case: [answer(case, strategy) for strategy in COLUMNS.values()] for case in CASES}
    everywhere = [CASES[case].what for case, words in rows.items() if set(words) == {"trains"}]
    lines = [f"| trains under DDP | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    lines += [
        f"| {CASES[case].what} | {' | '.join(words)} |" for case, words in rows.items() if set(words) != {"trains"}
    ]
    return "\n".join([*lines, "", "Every strategy trains these: " + "; ".join(everywhere) + "."])
