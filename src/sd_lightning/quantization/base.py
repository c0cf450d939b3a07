"""Frozen networks in int8 or in 4 bits, on which adapters are trained (QLoRA, arXiv 2305.14314).

The weights of :class:`~sd_lightning.quantization.layers.Int8Layer` and :class:`NF4Linear` are buffers outside of
``state_dict``: strategies neither shard, cast, average nor broadcast them, and checkpoints do not hold them. Every
process has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sd_lightning._errors import UsageError
from sd_lightning.quantization.int8 import EXCLUDED, matches, row_reader
from sd_lightning.quantization.layers import (
    INT8_CLASSES,
    Int8Linear,
    Rows,
    int8_layers,
    quantize_rows,
    refuse_quantised,
    to_int8,
)

if TYPE_CHECKING:
    from sd_lightning.storage.deferred_weights import DeferredWeights

Base = Literal["int8", "nf4"]

_BLOCK = 64
"""Consecutive values that share a scale, as in QLoRA."""
_AT_A_TIME = 2**18
"""Values that are read at a time, about."""


class NF4Linear(Int8Linear):
    """A linear layer in 4-bit NormalFloat, without double quantisation; bitsandbytes' kernels, on CPUs too.

    ``weight`` is (I * O / 2, 1) uint8, ``weight_scale`` is (I * O / 64,) float32. Not bitsandbytes' ``Linear4bit``:
    its weight is a parameter with a state of its own, which engines that shard or flatten parameters lose.
    """

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        import bitsandbytes  # noqa: F401  registers the operator

        # A row per block: on CPUs bitsandbytes 0.50 mistakes the blocks of rows that do not end with one.
        shape = (len(self.weight_scale), _BLOCK)
        op = torch.ops.bitsandbytes.dequantize_4bit.default
        weight: Tensor = op(self.weight.contiguous(), self.weight_scale, _BLOCK, "nf4", shape, dtype)
        return weight.view(self.out_features, self.in_features)

    def for_one_call(self, dtype: torch.dtype) -> Tensor:
        return self.dequantized(dtype)

    def extra_repr(self) -> str:
        return super().extra_repr().replace("int8", "nf4")


def quantize_base_(network: nn.Module, base: Base, *, blocks: Collection[nn.Module]) -> None:
    """Quantise a network that stays frozen, in place; call :func:`hide_base_` once it has its adapters.

    "nf4" is for linear layers of repeated blocks (with a multiple of 64 values); convolutions, embeddings and what is
    outside of blocks become int8. Layers on the meta device get their values from :func:`fill_base_`.

    Args:
        network: The network.
        base: "int8" or "nf4".
        blocks: The network's repeated blocks.

    Raises:
        UsageError: The network is quantised already, or a weight is not finite.
    """
    refuse_quantised(network, f"base={base}")
    in_blocks = {id(part) for block in blocks for part in block.modules()}
    for name, layer in list(network.named_modules()):
        if type(layer) not in INT8_CLASSES or getattr(layer, "max_norm", None) is not None or matches(EXCLUDED, name):
            continue
        weight: Any = layer.weight
        is_nf4 = base == "nf4" and type(layer) is nn.Linear and id(layer) in in_blocks and weight.numel() % _BLOCK == 0
        values = _empty(weight, is_nf4=is_nf4) if weight.is_meta else _quantized(name, weight, None, is_nf4=is_nf4)
        new = to_int8(layer, *values, kernel="weight_only", threshold=0.0)
        if is_nf4:
            new.__class__ = NF4Linear
    network.requires_grad_(False)


def fill_base_(network: nn.Module, files: DeferredWeights) -> None:
    """Quantise weights that are in files, for the quantised layers of a network that are on the meta device.

    They are read onto the host a few rows at a time, so that none is in memory whole in floating point.

    Raises:
        UsageError: A weight is not finite.
    """
    for name, layer in int8_layers(network):
        if layer.weight.is_meta:
            weight = torch.empty(original_shape(layer), device="meta")
            values = _quantized(name, weight, files, is_nf4=isinstance(layer, NF4Linear))
            layer.weight, layer.weight_scale = values
    files.close()


def hide_base_(network: nn.Module) -> None:
    """Take the quantised weights out of ``state_dict``: they are constants, which the model's files hold."""
    for _, layer in int8_layers(network):
        layer._non_persistent_buffers_set.update(("weight", "weight_scale"))


def original_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's weight, before it was quantised if it is."""
    weight: Any = layer.weight
    return (layer.out_features, layer.in_features) if isinstance(layer, NF4Linear) else tuple(weight.shape)


def base_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's quantised weights and their scales."""
    return sum(layer.weight.nbytes + layer.weight_scale.nbytes for _, layer in int8_layers(network))


def _empty(weight: Tensor, *, is_nf4: bool) -> tuple[Tensor, Tensor]:
    if not is_nf4:
        return torch.empty_like(weight, dtype=torch.int8), torch.empty(weight.shape[0], device=weight.device)
    packed = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device=weight.device)
    return packed, torch.empty(weight.numel() // _BLOCK, device=weight.device)


def _quantized(name: str, weight: Tensor, files: DeferredWeights | None, *, is_nf4: bool) -> tuple[Tensor, Tensor]:
    """Quantise the weight of a layer, or what files have of it."""
    rows = row_reader(weight, files, f"{name}.weight")
    quantized, scale = (_quantize_nf4 if is_nf4 else quantize_rows)(weight.shape, rows)
    if not torch.isfinite(scale).all():
        plain = name.replace(".base_layer", "")
        raise UsageError(f"the quantised base: {plain}.weight holds NaN or infinite values; load the weights again")
    return quantized, scale


def _quantize_nf4(shape: torch.Size, rows: Rows) -> tuple[Tensor, Tensor]:
    """Quantise a weight (O, I) to 4-bit NormalFloat; returns packed values and scales."""
    import bitsandbytes  # noqa: F401  registers the operator

    width, packed, scales = shape[1], [], []
    step = _BLOCK // math.gcd(_BLOCK, width)  # of rows, so that blocks do not cross what is read at a time
    step *= max(1, _AT_A_TIME // (step * width))
    for begin in range(0, shape[0], step):
        block = rows(begin, min(begin + step, shape[0])).detach().float().reshape(-1)
        values, scale = torch.ops.bitsandbytes.quantize_4bit.default(block, _BLOCK, "nf4", torch.uint8)
        packed.append(values)
        scales.append(scale if torch.isfinite(block).all() else scale * math.nan)
    return torch.cat(packed), torch.cat(scales)
