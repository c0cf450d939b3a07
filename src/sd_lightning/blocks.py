"""The repeated units of a network: what engines shard, checkpoint and compile, and the order in which they run."""

from __future__ import annotations

from torch import nn

_BLOCK_CLASSES = ("ResnetBlock2D", "Transformer2DModel", "CLIPEncoderLayer")


def repeated_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated units of a network by name: resnet and transformer blocks, encoder layers.

    These are the units that engines shard, checkpoint and compile; this is the one place that knows them.
    """
    # By the name of any base class: engines wrap a block's class in a subclass of another name.
    return {
        name: module
        for name, module in network.named_modules()
        if any(base.__name__ in _BLOCK_CLASSES for base in type(module).__mro__)
    }


def execution_position(name: str) -> tuple[int, ...]:
    """Return a sort key that brings parts of a UNet, by name, into the order in which they run.

    They are registered in another: up before mid blocks, and attention before the resnets that it follows. Names in
    other networks have one key, so that a stable sort leaves them as they are.
    """
    stages = {"conv_in": 1, "down_blocks": 2, "mid_block": 3, "up_blocks": 4, "conv_norm_out": 5, "conv_out": 6}
    stage, *inner = name.split(".")
    if stage not in ("down_blocks", "mid_block", "up_blocks"):
        return (stages.get(stage, 0),)
    block = 0 if stage == "mid_block" else int(inner.pop(0))
    kinds = ("resnets", "attentions")
    if len(inner) < 2 or inner[0] not in kinds:
        return stages[stage], block, 1000  # the samplers, after all layers
    return stages[stage], block, int(inner[1]), kinds.index(inner[0])
