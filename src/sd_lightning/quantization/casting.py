"""Networks cast to another dtype, but for what has to keep its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def kept_in_float32(network: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return the weights that stay in float32 in a network of ``dtype``: "wo" of T5, as transformers lists them."""
    listed = set(getattr(network, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    return [weight for name, weight in network.named_parameters() if not listed.isdisjoint(name.split("."))]


def cast_(network: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Cast a network, and move it if there is a device, a tensor at a time.

    Computed buffers, such as rotary frequencies, keep their dtype; what overflows in float16 is in float32 instead.
    Tensors on meta stay there.
    """
    computed = {
        id(module._buffers[name]) for module in network.modules() for name in module._non_persistent_buffers_set
    }
    wide = set(map(id, kept_in_float32(network, dtype)))

    def cast(tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() and id(tensor) not in computed
        place = None if tensor.is_meta else device
        return tensor.to(place, (torch.float32 if id(tensor) in wide else dtype) if is_cast else tensor.dtype)

    with torch.no_grad():
        network._apply(cast)
