"""What a network with adapters computes without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def without_adapters(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Compute with the frozen weights alone while the context lasts; weights and ``requires_grad`` stay as they are."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for network in networks for each in network.modules() if isinstance(each, BaseTunerLayer)]
    try:
        for layer in layers:  # not its enable_adapters(), which freezes parameters and thaws all of them afterwards
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
