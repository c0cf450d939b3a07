"""LoRA files for other front ends: kohya's format, with the layer names of each front end.

A layer has ``<name>.lora_down.weight``, ``<name>.lora_up.weight`` and ``<name>.alpha``; its output is scaled by
``alpha / rank``. ``<name>`` has underscores for dots, after ``lora_unet_`` for the denoiser, ``lora_te_`` for the text
encoder, ``lora_te1_`` and ``lora_te2_`` if there are two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sd_lightning._errors import UsageError
from sd_lightning.models.families import Family
from sd_lightning.models.families.lora_names import FrontEnd
from sd_lightning.models.lora import AdaptedLayer, LoraFile
from sd_lightning.storage.streamed_tensor import StreamedTensor

FILE_NAME = "lora.safetensors"

Networks = Mapping[str, Mapping[str, StreamedTensor]]
_Parts = Sequence[tuple[AdaptedLayer | None, int]]
"""The layers that a front end joins, each with its number of outputs; None for one without an adapter."""


def front_end_tensors(
    file: LoraFile, networks: Networks, family: Family, front_end: FrontEnd
) -> dict[str, StreamedTensor]:
    """Return adapters by the keys that a front end reads.

    Layers that are one in the front end become one adapter of the sum of their ranks, exactly: ``lora_up`` is
    block-diagonal, with zeros for layers without adapters.

    Args:
        file: The adapters.
        networks: By network, the tensors of its weight file.
        family: Of the pipeline.
        front_end: "kohya" or "comfyui".

    Raises:
        UsageError: The adapters do not fit the networks, are not plain LoRA, or the front end has no such layer.
    """
    groups: dict[str, _Parts] = {}
    adapted = {(each.network, each.layer): each for each in file.layers(networks)}
    if any(each.magnitude is not None for each in adapted.values()):
        raise UsageError(f"{file.path}: {front_end} gets plain LoRA only, and these are DoRA's; write format=diffusers")
    for network, layer in adapted:
        named = family.lora_names.of(layer, front_end) if network == family.denoiser else (layer, [layer])
        if named is None:
            raise UsageError(
                f"{file.path}: {front_end} has no name for the adapter of {network}.{layer}; train without it "
                "(lora.target_modules), or write format=diffusers"
            )
        key = f"{_prefix(network, family)}_{named[0]}".replace(".", "_")
        weights = networks[network]
        groups[key] = [(adapted.get((network, part)), weights[f"{part}.weight"].shape[0]) for part in named[1]]
    tensors: dict[str, StreamedTensor] = {}
    for key, parts in groups.items():
        first = next(part for part, _ in parts if part is not None)
        ranks = len(parts) * first.down.shape[0]
        down = (ranks, *first.down.shape[1:])
        up = (sum(rows for _, rows in parts), ranks, *first.up.shape[2:])
        tensors[f"{key}.lora_down.weight"] = StreamedTensor.of(partial(_down, parts, down), first.down.dtype, down)
        tensors[f"{key}.lora_up.weight"] = StreamedTensor.of(partial(_up, parts, up), first.up.dtype, up)
        tensors[f"{key}.alpha"] = StreamedTensor.of(torch.tensor(first.scale * ranks))
    return tensors


def _prefix(network: str, family: Family) -> str:
    if network == family.denoiser:
        return "lora_unet"
    return "lora_te" if len(family.text_encoders) == 1 else f"lora_te{family.text_encoders.index(network) + 1}"


def _down(parts: _Parts, shape: tuple[int, ...]) -> Tensor:
    joined = torch.zeros(shape)
    for block, (part, _) in zip(joined.chunk(len(parts)), parts, strict=True):
        if part is not None:
            block.copy_(part.down.read())
    return joined


def _up(parts: _Parts, shape: tuple[int, ...]) -> Tensor:
    joined, row = torch.zeros(shape), 0
    for block, (part, rows) in zip(joined.chunk(len(parts), dim=1), parts, strict=True):
        if part is not None:
            block[row : row + rows] = part.up.read()
        row += rows
    return joined
