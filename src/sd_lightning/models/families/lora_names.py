"""Names of a denoiser's layers in LoRA files of other front ends.

Sources: ``comfy/lora.py`` of ComfyUI, which reads ``lora_unet_`` and the names of its own networks with underscores,
for UNets diffusers' names too; ``networks/lora.py`` of kohya's sd-scripts (UNets) and ``networks/lora_flux_2.py`` and
``lora_zimage.py`` of musubi-tuner, which read the names of theirs.
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
        theirs = table.get(layer if number is None else layer.replace(block, "*", 1))
        if theirs is None:
            return None
        return theirs.replace("*", block), [ours.replace("*", block) for ours, name in table.items() if name == theirs]


def _blocks(ours: str, theirs: str, layers: Mapping[str, str]) -> dict[str, str]:
    return {f"{ours}.*.{key}": f"{theirs}.*.{name}" for key, name in layers.items()}


_DOUBLE_STREAM = {
    **{f"attn.to_{part}": "img_attn.qkv" for part in "qkv"},
    **{f"attn.add_{part}_proj": "txt_attn.qkv" for part in "qkv"},
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
_SINGLE_STREAM = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
_FLUX2 = _blocks("transformer_blocks", "double_blocks", _DOUBLE_STREAM) | _blocks(
    "single_transformer_blocks", "single_blocks", _SINGLE_STREAM
)
FLUX2 = LoraNames(kohya=_FLUX2, comfyui=_FLUX2)
"""``Flux2Transformer2DModel``: both have Black Forest Labs' names. musubi-tuner reads adapters in blocks only."""

_JOINED = {
    **{f"attention.to_{part}": "attention.qkv" for part in "qkv"},
    "attention.to_out.0": "attention.out",
    "adaLN_modulation.0": "adaLN_modulation.0",
    **{f"feed_forward.w{number}": f"feed_forward.w{number}" for number in (1, 2, 3)},
}
Z_IMAGE = LoraNames(
    comfyui=_blocks("layers", "layers", _JOINED)
    | _blocks("noise_refiner", "noise_refiner", _JOINED)
    | _blocks("context_refiner", "context_refiner", _JOINED)
)
"""``ZImageTransformer2DModel``: musubi-tuner has diffusers' names, ComfyUI joins queries, keys and values."""
