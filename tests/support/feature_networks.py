"""Small networks with random weights that read pictures, as transformers writes them, and FID's Inception."""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from places import PACKAGE

TOKENIZER = PACKAGE / "models/assets/tiny/tokenizer"
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def save_clip(folder: Path, *, num_features: int = 16) -> Path:
    """A CLIP of 32 x 32 pixels, which reads captions with the tiny model's tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    shutil.copytree(TOKENIZER, folder)
    text = {key: _VISION[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {"num_attention_heads": 2, "vocab_size": 2000, "max_position_embeddings": 16}
    text |= {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(vision_config=_VISION, text_config=text, projection_dim=num_features)).save_pretrained(folder)
    return _with_processor(folder, "CLIPImageProcessor")


def save_dinov2(folder: Path) -> Path:
    """A DINOv2 of 32 x 32 pixels."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**_VISION)).save_pretrained(folder)
    return _with_processor(folder, "BitImageProcessor")


def _with_processor(folder: Path, kind: str) -> Path:
    settings = {
        "image_processor_type": kind,
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.3, 0.2, 0.25],
    }
    switches = ("do_resize", "do_center_crop", "do_normalize", "do_rescale", "do_convert_rgb")
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | dict.fromkeys(switches, True)))
    return folder


_A = {
    "1x1": [(64, 1, 1)],
    "5x5": [(48, 1, 1), (64, 5, 5)],
    "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)],
}
_B = {"3x3": [(384, 3, 3)], "3x3dbl": [(64, 1, 1), (96, 3, 3), (96, 3, 3)]}
_D = {
    "3x3": [(192, 1, 1), (320, 3, 3)],
    "7x7x3": [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)],
}
_E = {
    "1x1": [(320, 1, 1)],
    "3x3": [(384, 1, 1), (384, 1, 3), (384, 3, 1)],
    "3x3dbl": [(448, 1, 1), (384, 3, 3), (384, 1, 3), (384, 3, 1)],
}


def _c(channels: int) -> dict[str, list[tuple[int, int, int]]]:
    c = channels
    double = [(c, 1, 1), (c, 7, 1), (c, 1, 7), (c, 7, 1), (192, 1, 7)]
    return {"1x1": [(192, 1, 1)], "7x7": [(c, 1, 1), (c, 1, 7), (192, 7, 1)], "7x7dbl": double}


_BLOCKS = {
    "5b": (192, _A, 32),
    "5c": (256, _A, 64),
    "5d": (288, _A, 64),
    "6a": (288, _B, 0),
    "6b": (768, _c(128), 192),
    "6c": (768, _c(160), 192),
    "6d": (768, _c(160), 192),
    "6e": (768, _c(192), 192),
    "7a": (768, _D, 0),
    "7b": (1280, _E, 192),
    "7c": (2048, _E, 192),
}
"""Channels before each block, its branches as (channels, kernel height, kernel width), and channels of its pooling."""


def inception_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the convolutions in torch-fidelity's file, table by table from its source."""
    shapes: dict[str, tuple[int, ...]] = {
        "Conv2d_1a_3x3": (32, 3, 3, 3),
        "Conv2d_2a_3x3": (32, 32, 3, 3),
        "Conv2d_2b_3x3": (64, 32, 3, 3),
        "Conv2d_3b_1x1": (80, 64, 1, 1),
        "Conv2d_4a_3x3": (192, 80, 3, 3),
    }
    for block, (before, branches, pooled) in _BLOCKS.items():
        for branch, layers in branches.items():
            fork = len(layers) - 2 if block in ("7b", "7c") and len(layers) > 1 else len(layers)
            channels = before
            for place, (out, height, width) in enumerate(layers):
                end = (
                    ""
                    if len(layers) == 1
                    else f"_{min(place, fork) + 1}" + "ab"[place - fork : place - fork + 1] * (place >= fork)
                )
                shapes[f"Mixed_{block}.branch{branch}{end}"] = (out, channels, height, width)
                channels = channels if place >= fork else out
        if pooled:
            shapes[f"Mixed_{block}.branch_pool"] = (pooled, before, 1, 1)
    return shapes


def inception_weights(*, classes: int = 1008) -> dict[str, Tensor]:
    """Random weights of FID's Inception, through which features neither vanish nor explode; seeded name by name."""
    generator = torch.Generator().manual_seed(0)
    names = {f"{name}.conv.weight": shape for name, shape in inception_shapes().items()}
    for name, shape in inception_shapes().items():
        names |= {f"{name}.bn.{each}": shape[:1] for each in ("bias", "running_mean", "running_var", "weight")}
    weights: dict[str, Tensor] = {}
    for name, shape in sorted(names.items()):
        uniform = torch.rand(shape, generator=generator)
        if len(shape) == 4:
            weights[name] = (uniform - 0.5) * 1.2 * (12 / (shape[1] * shape[2] * shape[3])) ** 0.5
        elif name.endswith(("running_var", "bn.weight")):
            weights[name] = 0.5 + uniform
        else:
            weights[name] = (uniform - 0.5) * 0.2
    return weights | {"fc.weight": torch.zeros(classes, 2048), "fc.bias": torch.zeros(classes)}


def save_inception(file: Path, *, classes: int = 1008) -> Path:
    """Write such weights as PyTorch's file."""
    torch.save(inception_weights(classes=classes), file)
    return file
