"""Loading of pretrained weights into ZeRO-3's partitions, with one whole parameter in memory at a time.

DeepSpeed cannot fill a single partition. Its ``zero.Init`` takes whole parameters, broadcasts rank 0's values and keeps
each rank's range. So rank 0 reads every tensor of the files, and no rank holds more than its partitions and one tensor.
The engine then copies all partitions to pack them into flat tensors.

Measured on two gloo ranks with 150 M float32 weights (blocks of sd21's UNet; 300 MB a rank, the largest tensor 29 MB):
392 and 427 MB at the peak of partitioning, 1415 and 1460 MB with the engine's flat weights, gradients and buckets.
tests/strategies/test_loading_memory.py measures it, and FSDP2 and Gemini with all of sd21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.base import is_partitioned
from sd_lightning.strategies.networks import take_deferred, trained_networks

ReadRange = Callable[[Tensor, int, int], None]
"""(out, begin, end): fill ``out`` with a flat range of one parameter."""


class _InTurn(nn.Module):
    """A module whose parameters are created one by one, as they are iterated over."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__()
        self._in_turn = parameters

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._in_turn


def partition_deferred(
    module: pl.LightningModule, config: dict[str, Any], device: torch.device
) -> dict[str, DeferredWeights]:
    """Partition and fill the networks whose weights are still in their files; a collective call.

    Args:
        module: The LightningModule.
        config: The engine's configuration.
        device: Device on which whole parameters are created.

    Returns:
        The weights by network, to restore what the engine's compute dtype rounds away.
    """
    import deepspeed

    dtype = next((d for key, d in _COMPUTE_TYPES.items() if config.get(key, {}).get("enabled")), None)
    deferred: dict[str, DeferredWeights] = {}
    for name, network in trained_networks(module).items():
        weights = take_deferred(module, name)
        if weights is not None:
            deferred[name] = weights
            parameters = weights.fill_in_turn(network, device, dtype, reading=dist.get_rank() == 0)
            deepspeed.zero.Init(module=_InTurn(parameters), config_dict_or_path=config)
    return deferred


_COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def exact_weights(module: nn.Module, deferred: Mapping[str, DeferredWeights]) -> dict[str, ReadRange]:
    """Return readers of trained parameters' exact float32 values, which an engine rounds to its compute dtype."""
    weights: dict[str, ReadRange] = {}
    for name, parameter in module.named_parameters():
        network, _, key = name.partition(".")
        if not parameter.requires_grad:
            continue
        if network in deferred:
            weights[name] = partial(deferred[network].read, key)
        elif not is_partitioned(parameter):
            weights[name] = partial(_copy_range, parameter.data)
    return weights


def _copy_range(values: Tensor, out: Tensor, begin: int, end: int) -> None:
    out.copy_(values.reshape(-1)[begin:end])


def register_external_parameters(module: nn.Module) -> None:
    """Register with ZeRO-3 the weights that a module reads from its child, as CLIP's embeddings do for a shape.

    DeepSpeed finds them by itself only inside its engine's forward, and sampling runs outside of it.
    """
    from deepspeed.runtime.zero import register_external_parameter

    for part in module.modules():
        embedding = part._modules.get("position_embedding")
        if isinstance(embedding, nn.Embedding):
            register_external_parameter(part, embedding.weight)
