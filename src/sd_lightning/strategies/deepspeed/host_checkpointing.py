"""Activation checkpoints in host memory: a recomputed block's inputs stay there until backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


def checkpointed_blocks(module: nn.Module) -> list[Any]:
    """Return the blocks of diffusers and transformers that recompute their activations."""
    return [each for each in module.modules() if getattr(each, "gradient_checkpointing", False) is True]


def checkpoint_on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Call a block, keep its inputs in host memory, and recompute it in backward.

    DeepSpeed's own function empties the inputs in place. That suits stacks of layers, but not a UNet, whose time
    embedding and skip connections are inputs of many blocks. Only reentrant checkpointing saves inputs through hooks.
    """
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=True)
