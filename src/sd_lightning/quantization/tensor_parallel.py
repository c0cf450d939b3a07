"""Tensor parallelism: layers of a network divided among processes, and the plan that says which and how.

A column-wise layer has some of the outputs on each process, a row-wise one takes some of the inputs, and the products
are summed (Megatron-LM, arXiv 1909.08053, section 3). Styles have the names that diffusers and transformers give them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.quantization.layers import Part

_DIMS = {
    nn.Linear: {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1},
    nn.Embedding: {"colwise": 1, "embedding_rowwise": 0},
}
"""Dimension of the weight that a style divides."""
_HEADS = ("heads", "num_heads", "n_heads", "num_kv_heads")
"""Attributes of attention modules that count heads."""
_MOST = 64
"""Largest number of processes that a message recommends."""


class Style(NamedTuple):
    """How one layer is divided."""

    name: Literal["colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"]
    """``colwise_gather_output`` gathers the outputs again; ``embedding_rowwise`` divides the vocabulary."""
    blocks: tuple[int, ...] = (1,)
    """Sizes, in proportion, of the parts of a packed layer, such as (1, 1) of gate and values: each is divided."""


@dataclass(frozen=True)
class Plan:
    """What is divided in a network; all else is replicated."""

    styles: Mapping[str, Style]
    """By the end of the layers' names, ``*`` for a number: "transformer_blocks.*.attn.to_q"."""
    heads: tuple[str, ...] = ()
    """Attributes of the attention modules to divide: numbers of heads that they do not take from shapes."""
    must_divide: bool = False
    """Whether the widest attention must be divided. Other layers that cannot be stay whole."""


@dataclass(frozen=True)
class TensorParallel:
    """One process of the default group, all of which hold a model together; on the meta device there need be none."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(
                f"TensorParallel got rank={self.rank}, size={self.size}; expected a rank in [0, size), "
                "e.g. TensorParallel(dist.get_rank(), dist.get_world_size())"
            )

    def check_joined(self) -> None:
        """Check that this process is that rank of the default process group.

        Raises:
            UsageError: It is not, or there is no group.
        """
        joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
        if self.size > 1 and joined != (self.rank, self.size):
            group = "no process group" if joined is None else f"this is rank {joined[0]} of {joined[1]}"
            raise UsageError(
                f"TensorParallel got rank={self.rank}, size={self.size}, but {group}; expected that rank of the "
                "default process group; call torch.distributed.init_process_group() in each process, or write size=1"
            )

    def ranges(self, length: int, blocks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return the ranges of a dimension that this process holds: one of every block."""
        widths = [block * (length // sum(blocks)) for block in blocks]
        own = [(width * self.rank // self.size, width * (self.rank + 1) // self.size) for width in widths]
        return tuple((at + begin, at + end) for at, (begin, end) in zip(accumulate(widths, initial=0), own))

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum in place over the processes, in the tensor's own dtype."""
        if self.size > 1 and not partial.is_meta:
            dist.all_reduce(partial)
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        """Join the last dimension over the processes."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        if self.size > 1 and not part.is_meta:
            dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1) if self.size > 1 else part


class DividedModel(Protocol):
    """Networks with plans: a ``LatentDiffusion``."""

    networks: dict[str, nn.Module]

    def tensor_parallel_plan(self, name: str) -> Plan:
        """Return the plan of a network."""


def check_division(model: DividedModel, size: int) -> None:
    """Check that so many processes can divide a model, which may be on the meta device.

    Raises:
        UsageError: They do not divide the heads of an attention that has to be.
    """
    for name, network in model.networks.items():
        plan = model.tensor_parallel_plan(name)
        if not plan.must_divide or not (heads := _undivided_heads(network, plan, size)):
            continue
        others = [n for n in range(2, _MOST + 1) if not _undivided_heads(network, plan, n)]
        known = f"write tensor_parallel={others[0]}" if others else "leave tensor_parallel out"
        raise UsageError(
            f"tensor_parallel={size}: {size} processes cannot divide the {' and '.join(map(str, heads))} attention "
            f"heads of {name}; expected one of {', '.join(map(str, others)) or 'none'}; {known}"
        )


def layer_styles(network: nn.Module, plan: Plan, size: int) -> dict[str, Style]:
    """Return the layers that so many processes divide, by name.

    Attentions whose heads they do not divide, and layers whose sizes they do not, stay whole.
    """
    found: dict[str, Style] = {}
    for members in _groups(network, plan).values():
        if _sizes_fit(network, members, size) and all(n % size == 0 for n in _head_counts(network, members)):
            found |= members
    return found


@dataclass(frozen=True)
class Division:
    """The layers of one network that a process holds a part of; the default divides nothing."""

    styles: Mapping[str, Style] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By the names of the tensors; all others are whole."""
    heads: tuple[str, ...] = ()
    parallel: TensorParallel | None = None

    @classmethod
    def of(cls, network: nn.Module, plan: Plan, parallel: TensorParallel) -> Division:
        styles = layer_styles(network, plan, parallel.size)
        parts: dict[str, Part] = {}
        for name, style in styles.items():
            layer: Any = network.get_submodule(name)
            dim = _dim(layer, style)
            ranges = parallel.ranges(layer.weight.shape[dim], style.blocks)
            parts[f"{name}.weight"] = Part.of(layer.weight.shape, dim, ranges)
            for key in ("bias", "weight_scale") if dim == 0 else ():
                if (tensor := getattr(layer, key, None)) is not None:
                    parts[f"{name}.{key}"] = Part.of(tensor.shape, 0, ranges)
        return cls(styles, parts, plan.heads, parallel)

    def apply_(self, network: nn.Module) -> None:
        """Let the layers, which have their parts already, compute together with those of the other processes."""
        if self.parallel is None or not self.styles:
            return
        for name, style in self.styles.items():
            layer: Any = network.get_submodule(name)
            if style.name == "embedding_rowwise":
                layer.first_index = self.parallel.ranges(layer.num_embeddings, (1,))[0][0]
            elif style.name == "rowwise":
                layer.register_parameter("summed_bias", layer.bias)
                layer.bias = None
            layer.parallel = self.parallel
            layer.__class__ = _divided_class(layer.__class__, style.name)
        for module in {network.get_submodule(name.rpartition(".")[0]) for name in self.styles}:
            for heads in self.heads:
                if hasattr(module, heads):
                    setattr(module, heads, getattr(module, heads) // self.parallel.size)
        network.division = self  # type: ignore[assignment]


def division_of(network: nn.Module) -> Division:
    """Return which layers of a network are divided: none if it is whole."""
    return getattr(network, "division", Division())


def check_is_whole(networks: Mapping[str, nn.Module], who: str) -> None:
    """Check that no network is divided.

    Raises:
        UsageError: One is.
    """
    divided = [name or "the network" for name, network in networks.items() if division_of(network).styles]
    if divided:
        raise UsageError(
            f"{who} got {', '.join(divided)} divided among processes, of which each has a part; expected whole "
            "networks; load the model again, without tensor_parallel"
        )


class _Divided(nn.Module):
    parallel: TensorParallel


class _RowwiseLinear(_Divided):
    summed_bias: Tensor | None
    """Added once, to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.parallel.all_reduce(super().forward(x))
        return out if self.summed_bias is None else out.add_(self.summed_bias)


class _GatheredLinear(_Divided):
    def forward(self, x: Tensor) -> Tensor:
        return self.parallel.all_gather(super().forward(x))


class _VocabularyEmbedding(_Divided):
    first_index: int
    weight: Tensor

    def forward(self, indices: Tensor) -> Tensor:
        """Return the embeddings; indices of other processes give zeros here."""
        local = indices - self.first_index
        absent = (local < 0) | (local >= len(self.weight))
        values = super().forward(local.masked_fill(absent, 0))
        return self.parallel.all_reduce(values.masked_fill(absent[..., None], 0))


_FORWARDS: dict[str, type[nn.Module]] = {
    "rowwise": _RowwiseLinear,
    "colwise_gather_output": _GatheredLinear,
    "embedding_rowwise": _VocabularyEmbedding,
}


@functools.cache
def _divided_class(cls: Any, style: str) -> type[nn.Module]:
    return type(f"{cls.__name__}_{style}", (_FORWARDS[style], cls), {}) if style in _FORWARDS else cls


def _dim(layer: nn.Module, style: Style) -> int:
    return next(dims for kind, dims in _DIMS.items() if isinstance(layer, kind))[style.name]


def _groups(network: nn.Module, plan: Plan) -> dict[str, dict[str, Style]]:
    """Return the layers of a plan in groups that are divided together: an attention, a feed-forward network."""
    patterns = [
        (re.compile(rf"((?:.*\.)?{re.escape(end)})".replace(r"\*", r"\d+")), end.rpartition("*.")[2], style)
        for end, style in plan.styles.items()
    ]
    groups: dict[str, dict[str, Style]] = {}
    for name, layer in network.named_modules():
        for pattern, last, style in patterns if isinstance(layer, tuple(_DIMS)) else ():
            if pattern.fullmatch(name):
                inner = last.partition(".")
                group = name.removesuffix(inner[1] + inner[2]) if inner[2] else name
                groups.setdefault(group, {})[name] = style
                break
    return groups


def _head_counts(network: nn.Module, members: Mapping[str, Style]) -> set[int]:
    counts: set[int] = set()
    for name, style in members.items():
        module: Any = network.get_submodule(name.rpartition(".")[0])
        layer: Any = network.get_submodule(name)
        counts |= {n for each in _HEADS if isinstance(n := getattr(module, each, None), int)}
        if style == Style("colwise") and isinstance(width := getattr(module, "head_dim", None), int):
            counts.add(layer.weight.shape[_dim(layer, style)] // width)
    return counts


def _sizes_fit(network: nn.Module, members: Mapping[str, Style], size: int) -> bool:
    for name, style in members.items():
        layer: Any = network.get_submodule(name)
        length = layer.weight.shape[_dim(layer, style)]
        units = [block * (length // sum(style.blocks)) for block in style.blocks]
        if style.name != "embedding_rowwise" and (length % sum(style.blocks) or any(n % size for n in units)):
            return False
    return True


def _undivided_heads(network: nn.Module, plan: Plan, size: int) -> list[int]:
    """Return the numbers of heads of the widest attention if so many processes do not divide it."""
    counts = {name: _head_counts(network, members) for name, members in _groups(network, plan).items()}
    widest = max(counts.values(), key=lambda each: max(each, default=0), default=set())
    return [] if all(n % size == 0 for n in widest) else sorted(widest)
