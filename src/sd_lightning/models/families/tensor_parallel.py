"""Tensor-parallel plans: of text encoders, and those that diffusers has for its transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from sd_lightning.quantization.tensor_parallel import Plan, Style

COLWISE, ROWWISE, GATHERED = Style("colwise"), Style("rowwise"), Style("colwise_gather_output")
_VOCABULARY = Style("embedding_rowwise")


def feed_forward(block: str, *, gated: bool = False) -> dict[str, Style]:
    """Return the plan of diffusers' ``FeedForward`` of that name; a gated one has two halves."""
    return {f"{block}.net.0.proj": COLWISE._replace(blocks=(1, 1) if gated else (1,)), f"{block}.net.2": ROWWISE}


def attention(block: str, inputs: str = "to_q to_k to_v", output: str = "to_out.0") -> dict[str, Style]:
    """Return the plan of an attention, or a gated feed-forward network, by the names of its layers."""
    return {**dict.fromkeys((f"{block}.{name}" for name in inputs.split()), COLWISE), f"{block}.{output}": ROWWISE}


def modulation(*names: str) -> dict[str, Style]:
    """Return the plan of layers that make a few vectors of time: large weights, and little to gather."""
    return dict.fromkeys(names, GATHERED)


TEXT_ENCODERS = Plan(
    {
        # CLIP, and Qwen: the language models, as configurations of transformers have it
        **attention("layers.*.self_attn", "q_proj k_proj v_proj", "out_proj"),
        "layers.*.self_attn.o_proj": ROWWISE,
        **attention("layers.*.mlp", "fc1", "fc2"),
        **attention("layers.*.mlp", "gate_proj up_proj", "down_proj"),
        **dict.fromkeys(("token_embedding", "embed_tokens"), _VOCABULARY),
        "lm_head": GATHERED,
        # T5, whose first layer has a bias per head
        **attention("block.*.layer.*.SelfAttention", "q k v relative_attention_bias", "o"),
        **attention("block.*.layer.*.DenseReluDense", "wi wi_0 wi_1", "wo"),
        "shared": _VOCABULARY,
    },
    heads=("n_heads",),
)
"""By the names of layers, which tell the classes apart."""


def published_plan(network: nn.Module) -> dict[str, Style]:
    """Return the plan that a transformer of diffusers has, with the blocks of its packed layers."""
    plan: Mapping[str, Any] = getattr(network, "_tp_plan", None) or {}
    return {name: _style(name, style, network) for name, style in plan.items()}


def _style(name: str, style: Any, network: nn.Module) -> Style:
    if isinstance(style, str):
        return {"colwise": COLWISE, "rowwise": ROWWISE}[style]
    kind: Literal["colwise", "rowwise"] = "colwise" if type(style).__name__ == "PackedColwiseParallel" else "rowwise"
    attribute = f"_tp_packed_{kind.removesuffix('wise')}_blocks"
    first: Any = network.get_submodule(name.replace("*", "0")) if style.blocks is None else None
    return Style(kind, tuple(getattr(first, attribute) if style.blocks is None else style.blocks))
