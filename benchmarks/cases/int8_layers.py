"""What each group of layers costs in int8 alone: why `Int8.exclude` and `Int8.float_inputs` are what they are.

The error is that of the network's output against float32, with random weights of sd21's shapes; the UNet has one layer
per block, the text encoder 6 of 23 layers and a small vocabulary. A group is better left out when its squared error per
weight is far above that of all layers together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

KERNELS = ("weight_only", "bitsandbytes")
GROUPS: dict[str, dict[str, str]] = {
    "unet": {
        "time_embedding": r"^time_embedding",
        "conv_in": r"^conv_in",
        "conv_out": r"^conv_out",
        "time_emb_proj": r"time_emb_proj",
        "attention_qkv": r"to_[qkv]$",
        "attention_out": r"to_out",
        "feed_forward": r"ff\.",
        "proj": r"proj_(in|out)$",
        "convolutions": r"conv[12]$|conv_shortcut|samplers",
        "all": r"",
    },
    "vae": {
        "post_quant_conv": r"^post_quant",
        "conv_in": r"decoder.conv_in",
        "conv_out": r"decoder.conv_out",
        "mid_block": r"decoder.mid",
        "up_blocks": r"decoder.up_blocks",
        "all": r"decoder|^post",
    },
    "text_encoder": {
        "token_embedding": r"token_emb",
        "position_embedding": r"position_emb",
        "attention": r"self_attn",
        "mlp": r"mlp",
        "all": r"",
    },
}
"""Network -> group -> pattern of its layers' names."""
EXCLUDED = {
    "unet": ("time_embedding", "conv_in", "conv_out"),
    "vae": ("post_quant_conv", "conv_in", "conv_out"),  # and the encoder's quant_conv
    "text_encoder": ("position_embedding",),
}
BARS = {
    f"{network}_{group}_{kernel}_cost": ">= 2"
    for network, groups in EXCLUDED.items()
    for group in groups
    for kernel in KERNELS
    if (group, kernel) != ("time_embedding", "weight_only")  # left out for bitsandbytes: one list serves all kernels
}
BARS["unet_proj_bitsandbytes_over_weight_only"] = ">= 2"
TABLE = {
    "error of the output with one group in int8, UNet: `conv_in`; `conv_out`; `time_embedding`; all layers": (
        "{unet_conv_in_weight_only:.1e}; {unet_conv_out_weight_only:.1e}; {unet_time_embedding_weight_only:.1e}; "
        "{unet_all_weight_only:.1e}"
    ),
    "the same, VAE: `post_quant_conv`; `conv_in`; `conv_out`; all layers": (
        "{vae_post_quant_conv_weight_only:.1e}; {vae_conv_in_weight_only:.1e}; {vae_conv_out_weight_only:.1e}; "
        "{vae_all_weight_only:.1e}"
    ),
    "the same, text encoder: `position_embedding`; all layers": (
        "{text_encoder_position_embedding_weight_only:.1e}; {text_encoder_all_weight_only:.1e}"
    ),
    "the same, `proj_in` and `proj_out`: weight-only; by bitsandbytes": (
        "{unet_proj_weight_only:.1e}; {unet_proj_bitsandbytes:.1e}"
    ),
}


def peers() -> dict[str, dict[str, Any]]:
    """Return bitsandbytes' kernels."""
    return {"bitsandbytes": {"threshold": 6.0}}


def measure() -> dict[str, float]:
    """Return, by network and group, the share of weights, errors, and cost per weight to that of all layers.

    ``…_share`` is in per cent; ``…_cost`` is a kernel's squared error per weight over that of all layers.
    """
    import torch

    metrics = {}
    with torch.no_grad():
        for name, groups in GROUPS.items():
            network, call = _network(name)
            found = {group: _errors(network, call, pattern) for group, pattern in groups.items()}
            total = sum(p.numel() for p in network.parameters())
            for group, each in found.items():
                metrics[f"{name}_{group}_share"] = 100 * each["weights"] / total
                for kernel in KERNELS:
                    metrics[f"{name}_{group}_{kernel}"] = each[kernel]
                    ratio = each[kernel] ** 2 / each["weights"] / (found["all"][kernel] ** 2 / found["all"]["weights"])
                    metrics[f"{name}_{group}_{kernel}_cost"] = ratio
                print(name, group, each, file=sys.stderr, flush=True)
    metrics["unet_proj_bitsandbytes_over_weight_only"] = (
        metrics["unet_proj_bitsandbytes"] / metrics["unet_proj_weight_only"]
    )
    return metrics


def _network(name: str) -> tuple[Any, Callable[[Any], Any]]:
    import torch

    from int8_networks import network, unet_call

    if name == "unet":
        return network("unet", layers_per_block=1), unet_call(side=32)
    if name == "vae":
        latents = torch.randn(1, 4, 24, 24, generator=torch.Generator().manual_seed(0))
        return network("vae"), lambda vae: vae.decode(latents).sample
    ids = torch.randint(0, 3999, (2, 77), generator=torch.Generator().manual_seed(0))
    small = {"num_hidden_layers": 6, "vocab_size": 4000, "bos_token_id": 1, "eos_token_id": 3}
    return network("text_encoder", **small), lambda text_encoder: text_encoder(ids)[0]


def _errors(network: Any, call: Callable[[Any], Any], pattern: str) -> dict[str, float]:
    """Quantise the layers of a pattern and turn them back."""
    from torch import nn

    from int8_networks import relative_error
    from sd_lightning.quantization import Int8, quantize_
    from sd_lightning.quantization.layers import int8_layers, to_float

    layers = {
        name: layer.weight
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Embedding)
    }
    weights: dict[str, Any] = {name: weight for name, weight in layers.items() if re.search(pattern, name)}
    exclude = sorted(layers.keys() - weights.keys())
    expected = call(network)
    found: dict[str, float] = {"weights": sum(weight.numel() for weight in weights.values())}
    for kernel in KERNELS:
        quantize_(network, Int8(linear=kernel, float_inputs=(), exclude=exclude))  # type: ignore[arg-type]
        found[kernel] = relative_error(call(network), expected)
        quantized = dict(int8_layers(network))
        assert quantized.keys() == weights.keys(), "a pattern names other layers than those that are in int8"
        for layer in quantized.values():
            to_float(layer)
        del network.int8_config
        for name, weight in weights.items():
            network.get_submodule(name).weight = weight
    return found
