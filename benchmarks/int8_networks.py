"""Networks of sd21 with random weights, what they are called with, and outliers in their activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

BLOCK_ROWS = 256
"""Rows among which LLM.int8 looks for columns of outliers at a time on a CPU."""
OUTLIER_GAIN = 20.0
"""Of a layer norm, whose outputs have a variance of one: far above LLM.int8's threshold of 6."""
OUTLIER_FEATURES = 4
"""Of 320 to 1280: about as many as trained transformers have (LLM.int8, arXiv 2208.07339, section 4)."""


def network(name: str, *, gaussian: bool = False, **changes: Any) -> Any:
    """Build a network of sd21 in float32.

    Args:
        name: "unet", "vae" or "text_encoder".
        gaussian: Weights as layers start, which is uniformly, or Gaussian of the same size: trained weights have
            longer tails than uniform ones.
        changes: Of its configuration.
    """
    from sd_lightning.models.families import architecture

    component = architecture("sd21").networks[name]
    torch.manual_seed(0)
    built: Any = replace(component, config=component.config | changes).instantiate().eval()
    if gaussian:
        with torch.no_grad():
            for weight in (p for p in built.parameters() if p.dim() > 1):
                weight.normal_(0, float(weight.std()))
    return built


def unet_call(*, side: int, rows: int = 2) -> Callable[[Any], Tensor]:
    """Return a function that calls a UNet once on latents of this side, in its own type and on its device.

    Args:
        side: Of the latents: an eighth of the picture's.
        rows: 2 are one picture with guidance, 1 without.
    """
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 4, side, side, generator=generator)[:rows]
    hidden = torch.randn(2, 77, 1024, generator=generator)[:rows]
    timesteps = torch.tensor([100, 700])[:rows]

    @torch.inference_mode()
    def call(unet: Any) -> Tensor:
        bias = unet.conv_out.bias
        return unet(latents.to(bias), timesteps.to(bias.device), hidden.to(bias)).sample

    return call


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference over the norm of the reference."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@contextmanager
def outliers(unet: nn.Module) -> Iterator[None]:
    """Give some features of every second transformer block magnitudes far above the others', as training does."""
    from diffusers.models.attention import BasicTransformerBlock

    blocks = [module for module in unet.modules() if isinstance(module, BasicTransformerBlock)][::2]
    gains: list[Tensor] = [norm.weight for block in blocks for norm in (block.norm1, block.norm2, block.norm3)]
    with torch.no_grad():
        before = [gain.clone() for gain in gains]
        for gain in gains:
            gain[:: len(gain) // OUTLIER_FEATURES] = OUTLIER_GAIN
        try:
            yield
        finally:
            for gain, values in zip(gains, before, strict=True):
                gain.copy_(values)


def share_with_outliers(unet: nn.Module, call: Callable[[Any], Tensor]) -> float:
    """Return the share of the blocks of rows, in all calls of bitsandbytes' kernel, that have a column of outliers."""
    from sd_lightning.quantization.layers import Int8Linear

    found: list[bool] = []

    def look(layer: Any, inputs: tuple[Tensor]) -> None:
        rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
        found.extend(bool((block.abs() >= layer.threshold).any()) for block in rows.split(BLOCK_ROWS))

    layers = [each for each in unet.modules() if isinstance(each, Int8Linear) and each.kernel == "bitsandbytes"]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    call(unet)
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)
