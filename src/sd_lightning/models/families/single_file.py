"""The original layout of Stable Diffusion: all networks in one file, with the names of the first releases.

Stable Diffusion 1.x, 2.x and XL were published as one file each. UNet and VAE have the names of CompVis'
``latent-diffusion`` (prefixes ``model.diffusion_model.`` and ``first_stage_model.``). CLIP of 1.x and the first of XL
have those of transformers, CLIP of 2.x and the second of XL those of ``open_clip``. Most programs other than diffusers
read this layout. diffusers reads it but does not write it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from sd_lightning._errors import UsageError
from sd_lightning.models.families.architecture import Component
from sd_lightning.models.families.base import Family, Layout
from sd_lightning.storage.streamed_tensor import StreamedTensor, joined

_UNET_PREFIX, _VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
_ENCODER_PREFIXES = {
    "v1": {"text_encoder": "cond_stage_model.transformer."},
    "v2": {"text_encoder": "cond_stage_model.model."},
    "xl": {"text_encoder": "conditioner.embedders.0.transformer.", "text_encoder_2": "conditioner.embedders.1.model."},
}
_OPEN_CLIP_LAYERS = 23
"""Encoder layers of Stable Diffusion 2: readers of the layout drop a 24th layer, which the UNet does not use."""

# Module names without indices, diffusers -> original.
_UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"conv_shortcut": "nin_shortcut"}
_VAE_ENDS = {"conv_in": "conv_in", "conv_norm_out": "norm_out", "conv_out": "conv_out"}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    # In files from before diffusers 0.12, such as those of Stable Diffusion 1.5 on the hub.
    "query": "q",
    "key": "k",
    "value": "v",
    "proj_attn": "proj_out",
}
_OPEN_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


@dataclass(frozen=True)
class Origin:
    """The source of a tensor of the original layout in a diffusers pipeline."""

    network: str
    """unet, vae, text_encoder or text_encoder_2."""
    names: tuple[str, ...]
    """Tensors in the network's weight file, concatenated along the first dimension."""
    change: Literal["none", "to_conv", "transpose"] = "none"
    """``to_conv``: a linear layer's matrix becomes the kernel of a 1x1 convolution."""


def layout_of(family: Family, components: Mapping[str, Component], *, who: str) -> Layout:
    """Return the original layout of a pipeline.

    Raises:
        UsageError: The family has no such layout for these networks.
    """
    layout = family.single_file_layout(components)
    if layout is None:
        raise UsageError(
            f"{who}: this {family.pipeline_class} cannot be one file; expected Stable Diffusion 1.x (a text encoder "
            "with hidden_act=quick_gelu), 2.x (hidden_act=gelu) or XL; write format=diffusers"
        )
    return layout


def original_names(networks: Mapping[str, Iterable[str]], layout: Layout, *, who: str) -> dict[str, Origin]:
    """Map the tensor names of the original layout to their sources in a pipeline.

    Args:
        networks: By network, the names of the tensors in its weight file.
        layout: See :func:`layout_of`.
        who: Begins the error message.

    Raises:
        UsageError: The layout has no name for a tensor: the network's structure is not an original one.
    """
    result: dict[str, Origin] = {}
    for network, given in networks.items():
        names = [name for name in given if not name.endswith("position_ids")]  # not learned
        naming = _naming(network, names, layout)
        sources: dict[str, list[str]] = {}
        for name in names:
            original = naming(name)
            if original is None:
                raise UsageError(
                    f"{who}: the one-file layout has no name for {name} of the {network}; write format=diffusers"
                )
            sources.setdefault(original, []).append(name)
        for original, parts in sources.items():
            result[original] = Origin(network, tuple(sorted(parts, key=_qkv_order)), _change(original))
            if len(parts) != (3 if ".in_proj_" in original else 1):
                raise UsageError(
                    f"{who}: {', '.join(parts)} of the {network} would be {original} of the one-file layout; write "
                    "format=diffusers"
                )
    return result


def original_tensors(
    networks: Mapping[str, Mapping[str, StreamedTensor]], layout: Layout, *, who: str
) -> dict[str, StreamedTensor]:
    """Return the tensors of a pipeline with the names and shapes of the original layout."""
    return {
        original: _made(origin, [networks[origin.network][name] for name in origin.names])
        for original, origin in original_names(networks, layout, who=who).items()
    }


def model_spec(
    family: Family,
    components: Mapping[str, Component],
    *,
    title: str,
    prediction_type: str,
    date: datetime | None = None,
) -> tuple[dict[str, str], str]:
    """Return the file's metadata by Stability AI's model metadata specification 1.0.0, and kohya's name of the model.

    Args:
        family: Of the model.
        components: Of its networks.
        title: Name of the model.
        prediction_type: As in a scheduler's configuration.
        date: When it was made; now if not given.
    """
    is_v, layout = prediction_type == "v_prediction", family.single_file_layout(components)
    names = {
        None: (family.pipeline_class, family.pipeline_class),
        "v1": ("stable-diffusion-v1", "sd_v1"),
        "v2": ("stable-diffusion-v2-768-v", "sd_v2_v") if is_v else ("stable-diffusion-v2-512", "sd_v2"),
        "xl": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
    }
    published = None if layout else family.published(components)
    architecture, version = names[layout] if published is None else published.known_as
    entries = {
        "sai_model_spec": "1.0.0",
        "architecture": architecture,
        "implementation": "https://github.com/Stability-AI/generative-models" if layout else "diffusers",
        "title": title,
        "date": (date or datetime.now(UTC)).isoformat(timespec="seconds"),
        "resolution": f"{family.resolution(components)}x{family.resolution(components)}",
        "prediction_type": "v" if is_v else prediction_type,
    }
    return {f"modelspec.{key}": value for key, value in entries.items()}, version


def _made(origin: Origin, parts: list[StreamedTensor]) -> StreamedTensor:
    tensor = parts[0] if len(parts) == 1 else joined(parts)
    if origin.change == "transpose":
        return tensor.transposed()
    if origin.change == "to_conv":
        return tensor.reshaped((*tensor.shape[:2], 1, 1))
    return tensor


def _change(original: str) -> Literal["none", "to_conv", "transpose"]:
    if original.endswith(".text_projection"):
        return "transpose"
    in_attention = re.fullmatch(r"first_stage_model\..*\.mid\.attn_1\.(q|k|v|proj_out)\.weight", original)
    return "to_conv" if in_attention else "none"


def _qkv_order(name: str) -> int:
    return next((i for i, part in enumerate(("q_proj", "k_proj", "v_proj")) if part in name), 0)


def _naming(network: str, names: Sequence[str], layout: Layout) -> Callable[[str], str | None]:
    """Return the function that renames a network's tensors; it returns None for a tensor without a name."""
    if network in ("unet", "vae"):
        prefix, of_module = (
            (_UNET_PREFIX, _unet_naming(names)) if network == "unet" else (_VAE_PREFIX, _vae_naming(names))
        )

        def rename(name: str) -> str | None:
            module, _, kind = name.rpartition(".")
            original = of_module(module)
            return None if original is None else f"{prefix}{original}.{kind}"

        return rename
    prefix = _ENCODER_PREFIXES[layout][network]
    if prefix.endswith(".model."):  # of open_clip
        return lambda name: _open_clip_name(name, prefix, layout)
    # transformers 5 writes CLIPTextModel without the text_model. prefix of the original file.
    return lambda name: f"{prefix}text_model.{name.removeprefix('text_model.')}"


def _unet_naming(names: Sequence[str]) -> Callable[[str], str | None]:
    """Return the renaming of a UNet's modules: layers of each half are numbered in a row, resolution changes too."""
    split = [name.split(".") for name in names]
    resnets = {
        (side, block, layer) for side, block, kind, layer, *_ in (n for n in split if len(n) > 4) if kind == "resnets"
    }
    counts = Counter((side, block) for side, block, _ in resnets)
    layers = counts["down_blocks", "0"]
    is_regular = all(count == layers + (side == "up_blocks") for (side, _), count in counts.items())
    attended = {n[1] for n in split if n[0] == "up_blocks" and n[2:3] == ["attentions"]}

    def rename(module: str) -> str | None:
        match module.split("."):
            case ["mid_block", "attentions", "0", *rest]:
                return ".".join(["middle_block.1", *rest])
            case ["mid_block", "resnets", "0" | "1" as layer, part] if part in _UNET_RESNET:
                return f"middle_block.{2 * int(layer)}.{_UNET_RESNET[part]}"
            case ["down_blocks" | "up_blocks" as side, block, kind, layer, *rest] if (
                is_regular and block.isdecimal() and layer.isdecimal()
            ):
                half = "input_blocks" if side == "down_blocks" else "output_blocks"
                first = int(block) * (layers + 1) + (side == "down_blocks")  # input_blocks.0 is conv_in
                part = ".".join(rest)
                if kind == "resnets" and part in _UNET_RESNET:
                    return f"{half}.{first + int(layer)}.0.{_UNET_RESNET[part]}"
                if kind == "attentions":
                    return f"{half}.{first + int(layer)}.1.{part}"
                if kind == "downsamplers" and part == "conv":
                    return f"{half}.{first + layers}.0.op"
                if kind == "upsamplers" and part == "conv":
                    return f"{half}.{first + layers}.{2 if block in attended else 1}.conv"
        return _UNET_ENDS.get(module)

    return rename


def _vae_naming(names: Sequence[str]) -> Callable[[str], str | None]:
    """Return the renaming of a VAE's modules: decoder blocks count from the largest resolution down."""
    numbers = (name.split(".")[2:3] for name in names if name.startswith("decoder.up_blocks."))
    last = max((int(number) for (number,) in numbers if number.isdecimal()), default=0)

    def rename(module: str) -> str | None:
        match module.split("."):
            case ["quant_conv" | "post_quant_conv"]:
                return module
            case ["encoder" | "decoder" as half, part] if part in _VAE_ENDS:
                return f"{half}.{_VAE_ENDS[part]}"
            case ["encoder" | "decoder" as half, "mid_block", "attentions", "0", *rest] if (
                ".".join(rest) in _VAE_ATTENTION
            ):
                return f"{half}.mid.attn_1.{_VAE_ATTENTION['.'.join(rest)]}"
            case ["encoder" | "decoder" as half, "mid_block", "resnets", "0" | "1" as layer, part] if (
                part in _VAE_RESNET
            ):
                return f"{half}.mid.block_{int(layer) + 1}.{_VAE_RESNET[part]}"
            case ["encoder" | "decoder" as half, "down_blocks" | "up_blocks" as side, block, kind, layer, part] if (
                block.isdecimal()
            ):
                place = f"{half}.down.{block}" if side == "down_blocks" else f"{half}.up.{last - int(block)}"
                if kind == "resnets" and part in _VAE_RESNET:
                    return f"{place}.block.{layer}.{_VAE_RESNET[part]}"
                if kind in ("downsamplers", "upsamplers") and part == "conv":
                    return f"{place}.{kind.removesuffix('rs')}.conv"
        return None

    return rename


def _open_clip_name(name: str, prefix: str, layout: Layout) -> str | None:
    if name == "text_projection.weight":
        return f"{prefix}text_projection"
    name = name.removeprefix("text_model.")
    if name in _OPEN_CLIP_ENDS:
        return prefix + _OPEN_CLIP_ENDS[name]
    layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if layer is None or (layout == "v2" and int(layer[1]) >= _OPEN_CLIP_LAYERS):
        return None
    number, module, kind = layer.groups()
    if re.fullmatch(r"self_attn\.[qkv]_proj", module):
        return f"{prefix}transformer.resblocks.{number}.attn.in_proj_{kind}"
    if module not in _OPEN_CLIP_LAYER:
        return None
    return f"{prefix}transformer.resblocks.{number}.{_OPEN_CLIP_LAYER[module]}.{kind}"
