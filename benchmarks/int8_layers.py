"""What each group of layers costs in int8 alone: why `Int8.exclude` and `Int8.float_inputs` are what they are.

    python benchmarks/int8_layers.py          a table per network; random weights of sd21's shapes, 2.3 GB of memory

The error is that of the network's output against float32. A group is better left out when its squared error per weight
is far above that of all layers together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from int8_unet import relative_error, sd21_blocks, step  # noqa: E402

KERNELS = ("weight_only", "bitsandbytes")
GROUPS: dict[str, dict[str, str]] = {
    "unet": {
        "time_embedding": r"^time_embedding",
        "conv_in": r"^conv_in",
        "conv_out": r"^conv_out",
        "time_emb_proj": r"time_emb_proj",
        "attention: q, k, v": r"to_[qkv]$",
        "attention: out": r"to_out",
        "feed-forward": r"ff\.",
        "proj_in, proj_out": r"proj_(in|out)$",
        "convolutions": r"conv[12]$|conv_shortcut|samplers",
        "all": r"",
    },
    "vae": {
        "post_quant_conv": r"^post_quant",
        "conv_in": r"decoder.conv_in",
        "conv_out": r"decoder.conv_out",
        "mid block": r"decoder.mid",
        "up blocks": r"decoder.up_blocks",
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


def networks() -> dict[str, tuple[nn.Module, Callable[[Any], Tensor]]]:
    """Return the networks with what to call them with; the text encoder has 6 of 23 layers and a small vocabulary."""
    from sd_lightning.models.families import Component, architecture
    from sd_lightning.models.pipeline_folder import instantiate

    parts = architecture("sd21").networks
    small = {"num_hidden_layers": 6, "vocab_size": 4000, "bos_token_id": 1, "eos_token_id": 3}
    torch.manual_seed(0)
    vae = instantiate(parts["vae"]).eval()
    text_encoder = instantiate(Component("transformers", "CLIPTextModel", parts["text_encoder"].config | small)).eval()
    latents, ids = torch.randn(1, 4, 24, 24), torch.randint(0, 3999, (2, 77))
    return {
        "vae": (vae, lambda vae: vae.decode(latents).sample),
        "text_encoder": (text_encoder, lambda text_encoder: text_encoder(ids)[0]),
        "unet": (sd21_blocks(), step(side=32)),
    }


def measure(network: nn.Module, call: Callable[[Any], Tensor], groups: dict[str, str]) -> None:
    """Print a row per group."""
    from sd_lightning.quantization import Int8, quantize_
    from sd_lightning.quantization.layers import int8_layers, to_float

    expected = call(network)
    total = sum(p.numel() for p in network.parameters())
    for group, pattern in groups.items():
        weights: dict[str, Any] = {
            name: layer.weight
            for name, layer in network.named_modules()
            if type(layer) in (nn.Linear, nn.Conv2d, nn.Embedding) and re.search(pattern, name)
        }
        count = sum(w.numel() for w in weights.values())
        errors = []
        for kernel in KERNELS:
            config = Int8(linear=kernel, float_inputs=())  # type: ignore[arg-type]
            quantize_(network, config, lambda layer, name, weights=weights: name in weights)  # type: ignore[misc]
            errors.append(relative_error(call(network), expected))
            for _, layer in list(int8_layers(network)):
                to_float(layer)
            del network.int8_config
            for name, weight in weights.items():
                network.get_submodule(name).weight = weight
        found = "  ".join(f"{kernel} {each:.2e}" for kernel, each in zip(KERNELS, errors))
        print(f"{group:20} {count:12,} {count / total:8.3%}  {found}", flush=True)


def main() -> None:
    """Print the tables."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    with torch.no_grad():
        for name, (network, call) in networks().items():
            print(f"{name}: weights, share of all, error of the output")
            measure(network, call, GROUPS[name])


if __name__ == "__main__":
    main()
