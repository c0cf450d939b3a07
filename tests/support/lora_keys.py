"""What ComfyUI and kohya's tools read of a LoRA file: their tables of keys, derived again from their sources.

ComfyUI 17358c8 (`comfy/lora.py`, `comfy/utils.py`, `comfy/weight_adapter/lora.py`): `model_lora_keys_unet` accepts
`lora_unet_` with the names of its own networks, and for UNets with diffusers'; `model_lora_keys_clip` CLIP's layers.
sd-scripts 48d368f (`networks/lora.py`) and musubi-tuner 30c658c (`networks/lora_flux_2.py`, `lora_zimage.py`,
`lora_qwen_image.py`): layers of some blocks of the network that they train. A layer's scale is `alpha / rank`, or 1 if
the file has no `alpha`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

Rows = tuple[str, int, int]
"""A layer of the front end's network, and the first row and number of rows that a layer of diffusers has in it."""

_UNET_IN_COMFYUI = re.compile(
    r"(down_blocks\.\d+|mid_block|up_blocks\.\d+)\."
    r"(attentions\.\d+\.(proj_in|proj_out|transformer_blocks\.\d+\.(attn[12]\.to_(q|k|v|out\.0)|ff\.net\.(0\.proj|2)))"
    r"|resnets\.\d+\.(conv1|conv2|time_emb_proj|conv_shortcut)|(down|up)samplers\.0\.conv)"
    r"|conv_in|conv_out|(time|add)_embedding\.linear_[12]"
)
_UNET_IN_KOHYA = ("Transformer2DModel", "ResnetBlock2D", "Downsample2D", "Upsample2D")
_BLOCKS_IN_KOHYA = {
    "ZImageTransformer2DModel": ("ZImageTransformerBlock",),
    "QwenImageTransformer2DModel": ("QwenImageTransformerBlock",),
}
_CLIP = re.compile(r"(text_model\.)?encoder\.layers\.\d+\.(mlp\.fc[12]|self_attn\.(k|q|v|out)_proj)")
_FLUX2 = {
    r"transformer_blocks\.(\d+)\.": {
        "attn.to_q": ("double_blocks.{}.img_attn.qkv", 0),
        "attn.to_k": ("double_blocks.{}.img_attn.qkv", 1),
        "attn.to_v": ("double_blocks.{}.img_attn.qkv", 2),
        "attn.add_q_proj": ("double_blocks.{}.txt_attn.qkv", 0),
        "attn.add_k_proj": ("double_blocks.{}.txt_attn.qkv", 1),
        "attn.add_v_proj": ("double_blocks.{}.txt_attn.qkv", 2),
        "attn.to_out.0": ("double_blocks.{}.img_attn.proj", 0),
        "attn.to_add_out": ("double_blocks.{}.txt_attn.proj", 0),
        "ff.linear_in": ("double_blocks.{}.img_mlp.0", 0),
        "ff.linear_out": ("double_blocks.{}.img_mlp.2", 0),
        "ff_context.linear_in": ("double_blocks.{}.txt_mlp.0", 0),
        "ff_context.linear_out": ("double_blocks.{}.txt_mlp.2", 0),
    },
    r"single_transformer_blocks\.(\d+)\.": {
        "attn.to_qkv_mlp_proj": ("single_blocks.{}.linear1", 0),
        "attn.to_out": ("single_blocks.{}.linear2", 0),
    },
}
_Z_IMAGE = {
    rf"{blocks}\.(\d+)\.": {
        "attention.to_q": (f"{blocks}.{{}}.attention.qkv", 0),
        "attention.to_k": (f"{blocks}.{{}}.attention.qkv", 1),
        "attention.to_v": (f"{blocks}.{{}}.attention.qkv", 2),
        "attention.to_out.0": (f"{blocks}.{{}}.attention.out", 0),
        "feed_forward.w1": (f"{blocks}.{{}}.feed_forward.w1", 0),
        "feed_forward.w2": (f"{blocks}.{{}}.feed_forward.w2", 0),
        "feed_forward.w3": (f"{blocks}.{{}}.feed_forward.w3", 0),
        "adaLN_modulation.0": (f"{blocks}.{{}}.adaLN_modulation.0", 0),
    }
    for blocks in ("layers", "noise_refiner", "context_refiner")
}


def _linear(network: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def _by_table(network: nn.Module, table: Mapping[str, Mapping[str, tuple[str, int]]]) -> Iterator[tuple[str, Rows]]:
    for name, layer in _linear(network).items():
        for prefix, names in table.items():
            match = re.match(prefix, name)
            if match is not None and (found := names.get(name[match.end() :])) is not None:
                rows = layer.weight.shape[0]  # type: ignore[union-attr]
                yield name, (found[0].format(match[1]), found[1] * rows, rows)  # type: ignore[operator]


def _whole(names: Iterable[str], network: nn.Module) -> dict[str, Rows]:
    return {name: (name, 0, network.get_submodule(name).weight.shape[0]) for name in names}  # type: ignore


def denoiser_layers(network: nn.Module, front_end: str) -> dict[str, Rows]:
    """Return where a front end has the layers of a denoiser of diffusers that it reads adapters of."""
    kind = type(network).__name__
    if kind == "Flux2Transformer2DModel":
        return dict(_by_table(network, _FLUX2))
    if kind == "ZImageTransformer2DModel" and front_end == "comfyui":
        return dict(_by_table(network, _Z_IMAGE))
    if kind == "QwenImageTransformer2DModel" and front_end == "comfyui":
        return _whole(_linear(network), network)
    if front_end == "comfyui":
        return _whole(filter(_UNET_IN_COMFYUI.fullmatch, _linear(network)), network)
    classes = _BLOCKS_IN_KOHYA.get(kind, _UNET_IN_KOHYA)
    inside = tuple(f"{name}." for name, m in network.named_modules() if type(m).__name__ in classes)
    return _whole((name for name in _linear(network) if name.startswith(inside)), network)


def clip_layers(network: nn.Module) -> dict[str, Rows]:
    """Return the layers of CLIP that both read adapters of, by their names in weight files."""
    found = _whole(filter(_CLIP.fullmatch, _linear(network)), network)
    named = {name: f"text_model.{name.removeprefix('text_model.')}" for name in found}
    return {name: (named[name], first, rows) for name, (_, first, rows) in found.items()}


def read_changes(file: Mapping[str, Tensor], prefix: str, layers: Mapping[str, Rows]) -> dict[str, Tensor]:
    """Return what a file adds to weights of diffusers, as the front end computes it; the keys read are removed.

    Args:
        file: Tensors by key; keys that a front end does not read are left.
        prefix: "lora_unet_", "lora_te_", …; with dots for diffusers' keys: "transformer.".
        layers: See :func:`denoiser_layers`.
    """
    changes: dict[str, Tensor] = {}
    assert isinstance(file, dict)
    whole: dict[str, Tensor] = {}
    for theirs in dict.fromkeys(name for name, _, _ in layers.values()):
        key = prefix + theirs.replace(".", "_")
        if f"{key}.lora_up.weight" in file:
            up, down = file.pop(f"{key}.lora_up.weight"), file.pop(f"{key}.lora_down.weight")
            scale = file.pop(f"{key}.alpha", torch.tensor(down.shape[0])).item() / down.shape[0]
            whole[theirs] = scale * (up.double().flatten(1) @ down.double().flatten(1))
    for name, (theirs, first, rows) in layers.items():
        if theirs in whole:
            changes[name] = whole[theirs][first : first + rows]
    return changes
