"""Activation checkpointing by operation: what a block keeps of its forward pass; backward recomputes the rest.

Chen et al. 2016, arXiv:1604.06174, keep a block's inputs. Convolutions, matrix products and attention are worth
keeping, too: they take most of the time, and normalisations and activation functions most of the memory.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "_int_mm"), "matmul"),
    **dict.fromkeys(("convolution", "convolution_backward", "_convolution"), "convolution"),
    **{f"_scaled_dot_product_{kernel}{suffix}": "attention" for kernel in _ATTENTION for suffix in ("", "_backward")},
}
"""Operator, without overload -> kind; all others are elementwise: memory limits them."""


class SavedActivations(enum.Enum):
    """What a block keeps for backward besides its inputs, from the most memory to the least."""

    ALL = "all"
    PRODUCTS = "products"
    """Outputs of convolutions, matrix products and attention."""
    CONVOLUTIONS = "convolutions"
    """Outputs of convolutions and attention."""
    INPUTS = "inputs"
    """Nothing: the whole block is recomputed."""

    def keeps(self, operator: str) -> bool:
        """Return whether the outputs of an operator are kept."""
        return self is SavedActivations.ALL or KINDS.get(operator) in _KEPT_KINDS[self]


_KEPT_KINDS: Mapping[SavedActivations, frozenset[str]] = {
    SavedActivations.PRODUCTS: frozenset(("convolution", "matmul", "attention")),
    SavedActivations.CONVOLUTIONS: frozenset(("convolution", "attention")),
    SavedActivations.INPUTS: frozenset(),
}


def recompute_(blocks: Mapping[str, nn.Module], kept: Mapping[str, SavedActivations]) -> None:
    """Let blocks keep only some of their activations, in place.

    A block's class becomes a subclass with another ``forward``, so torch.compile and the engines' hooks are outside of
    the checkpoint. Compiled inside of it, a block would silently run uncompiled (pytorch issue 161889).

    Args:
        blocks: By name.
        kept: Name -> what the block keeps; blocks without a name in it keep everything.
    """
    for name, what in kept.items():
        if what is not SavedActivations.ALL:
            blocks[name].__class__ = _recomputing(type(blocks[name]))  # type: ignore[arg-type]
            blocks[name]._kept = what  # type: ignore[assignment]


def kept_by(blocks: Iterable[nn.Module]) -> set[SavedActivations]:
    """Return what blocks keep."""
    return {getattr(block, "_kept", SavedActivations.ALL) for block in blocks}


def description(kept: Iterable[SavedActivations]) -> str:
    """Return how many blocks keep what, as text: "4 keep convolutions, 2 keep inputs"."""
    values = list(kept)
    return ", ".join(f"{count} keep {each.value}" for each in SavedActivations if (count := values.count(each)))


@functools.cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, *args, **kwargs)
        # Not if the whole block is recomputed: a dispatch mode in Python slows every operation.
        contexts: dict[str, Any] = {}
        if self._kept is not SavedActivations.INPUTS:
            policy = functools.partial(_policy, self._kept)
            contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
        run = functools.partial(kind.forward, self)
        return checkpoint(run, *args, use_reentrant=False, **contexts, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _policy(kept: SavedActivations, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = kept.keeps(operator._overloadpacket.__name__)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
