"""Names of a denoiser's layers in LoRA files of other front ends.

Sources: ``comfy/lora.py`` of ComfyUI, which reads ``lora_unet_`` and the names of its own networks with underscores,
for UNets diffusers' names too; ``networks/lora.py``, ``lora_sd3.py`` and ``lora_flux.py`` of kohya's sd-scripts and
``lora_flux_2.py``, ``lora_zimage.py``, ``lora_qwen_image.py`` and ``lora_krea2.py`` of musubi-tuner, which read the
names of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FrontEnd = Literal["kohya", "comfyui"]
Names = Mapping[str, str]
"""Diffusers' name of a layer -> the front end's; ``*`` is the number of a block. Several layers with one name are the
rows of one layer there, from top to bottom. An empty mapping keeps all names."""


@dataclass(frozen=True)
class LoraNames:
    """Tables of names by front end, for one kind of denoiser."""

    kohya: Names = field(default_factory=dict)
    comfyui: Names = field(default_factory=dict)

    def of(self, layer: str, front_end: FrontEnd) -> tuple[str, list[str]] | None:
        """Return the front end's name of a layer, and the layers it is made of there; None if it has no such layer."""
        table: Names = getattr(self, front_end)
        if not table:
            return layer, [layer]
        number = re.search(r"\d+", layer)
        block = "" if number is None else number[0]
        theirs = table.get(layer) or table.get(layer.replace(block, "*", 1))
        if theirs is None:
            return None
        return theirs.replace("*", block), [ours.replace("*", block) for ours, name in table.items() if name == theirs]


def block_names(ours: str, theirs: str, layers: Mapping[str, str]) -> dict[str, str]:
    """Return a table for the layers of repeated blocks, ``ours.0.key``, and ``theirs.0.name`` there."""
    return {f"{ours}.*.{key}": f"{theirs}.*.{name}" for key, name in layers.items()}


def flux_names(double: Mapping[str, str], single: Mapping[str, str]) -> dict[str, str]:
    """Return a table for the blocks of Flux, by Black Forest Labs' names; attention of two streams has always the same.

    Args:
        double: Layers of the blocks with two streams, without those of attention.
        single: Layers of the blocks with one.
    """
    sides = {"img": "to_{}", "txt": "add_{}_proj"}
    attention = {f"attn.{name.format(part)}": f"{side}_attn.qkv" for side, name in sides.items() for part in "qkv"}
    attention |= {"attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj"}
    return block_names("transformer_blocks", "double_blocks", {**attention, **double}) | block_names(
        "single_transformer_blocks", "single_blocks", single
    )
