"""Weights in DeepSpeed's hands: how pretrained ones get in, what users' hooks see of them, and inputs kept on the host.

DeepSpeed cannot fill a single partition. Its ``zero.Init`` takes whole parameters, broadcasts rank 0's values and keeps
each rank's range. So rank 0 reads every tensor of the files, and no rank holds more than its partitions and one tensor.
The engine then copies all partitions to pack them into flat tensors.

Measured on two gloo ranks with 150 M float32 weights (blocks of sd21's UNet; 300 MB a rank, the largest tensor 29 MB):
392 and 427 MB at the peak of partitioning, 1415 and 1460 MB with the engine's flat weights, gradients and buckets.
tests/strategies/test_loading_memory.py measures it, and FSDP2 and Gemini with all of sd21.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from sd_lightning._errors import UsageError
from sd_lightning.storage.deferred_weights import DeferredWeights
from sd_lightning.strategies.networks import take_deferred, trained_networks

ReadRange = Callable[[Tensor, int, int], None]
"""(out, begin, end): fill ``out`` with a flat range of one parameter."""


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 has partitioned a parameter: DeepSpeed empties it and sets ``ds_shape``."""
    return hasattr(parameter, "ds_shape")


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, even if ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


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


_ANY: Any = Tensor  # whose attributes are properties, which no type says
_ABOUT_GRADIENTS = {_ANY.grad.__get__, _ANY.grad.__set__}
_HARMLESS = {
    *(_ANY.requires_grad.__get__, _ANY.requires_grad.__set__, Tensor.requires_grad_),
    *(_ANY.device.__get__, _ANY.dtype.__get__, _ANY.layout.__get__, _ANY.is_leaf.__get__, Tensor.untyped_storage),
}
_KNOW_PARTS = ("deepspeed.", "sd_lightning.", "torch.optim.")
_MOVES = ("_apply", "convert", "compute_should_use_set_data", "zero_grad")
"""Functions of ``nn.Module`` that send parameters to devices, or drop gradients: parts are as good as wholes there."""


class TouchedWeights(TorchFunctionMode):
    """Notes the parameters that a hook uses, gathers those of ZeRO-3 until the hook ends, and refuses gradients.

    Gathering is a collective call: all ranks must use the same parameters.

    Args:
        hook: "Class.name" of the hook, for the message.
        names: Names of the engine's parameters.
        gathered: Takes the contexts in which parameters are whole.
    """

    def __init__(self, hook: str, names: Mapping[nn.Parameter, str], gathered: ExitStack) -> None:
        super().__init__()
        self.touched: set[str] = set()
        self._hook, self._known, self._gathered = hook, names, gathered

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        place = caller.f_globals.get("__name__", "")
        moves = place == "torch.nn.modules.module" and caller.f_code.co_name in _MOVES
        if func in _HARMLESS or moves or place.startswith(_KNOW_PARTS):
            return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, nn.Parameter) and each in self._known:
                self._touch(each, func)
        return func(*args, **kwargs)

    def _touch(self, parameter: nn.Parameter, func: Callable[..., Any]) -> None:
        if func in _ABOUT_GRADIENTS:
            raise UsageError(
                f"{self._hook} uses the gradient of {self._known[parameter]}, which DeepSpeed keeps to itself; clip "
                "with trainer.gradient_clip_val, or take strategy=fsdp or ddp"
            )
        self.touched.add(self._known[parameter])
        status: Any = parameter
        if is_partitioned(parameter) and status.ds_status.name == "NOT_AVAILABLE":
            import deepspeed

            self._gathered.enter_context(deepspeed.zero.GatheredParameters([parameter], modifier_rank=0))


@contextmanager
def whole_in_hook(hook: str, names: Mapping[nn.Parameter, str], adopt: Callable[[set[str]], None]) -> Iterator[None]:
    """Run a hook in which weights are whole, and hand over the names of those that it may have written.

    Args:
        hook: "Class.name" of the hook, for messages.
        names: Names of the engine's parameters.
        adopt: Takes over written weights.

    Raises:
        UsageError: The hook uses gradients, or changes what is trained.
    """
    before = [parameter.requires_grad for parameter in names]
    with ExitStack() as gathered, TouchedWeights(hook, names, gathered) as mode:
        yield
    for (parameter, name), was_trained in zip(names.items(), before, strict=True):
        if parameter.requires_grad != was_trained:
            raise UsageError(
                f"{hook} changed requires_grad of {name}, and DeepSpeed trains what it got at the start; freeze and "
                "unfreeze before fit, or take strategy=fsdp or ddp"
            )
    if mode.touched:
        adopt(mode.touched)


def remedy_of(error: BaseException) -> str | None:
    """Return what to do about an error of torch that comes of weights that ZeRO-3 has emptied; None for others."""
    if type(error) is not RuntimeError or not re.search(r"\[0\]|must be a matrix|tensor \w \(0\)", str(error)):
        return None
    return (
        "DeepSpeedStrategy: at stage 3 weights are empty outside of a network's forward, and "
        f"{type(error).__name__} came of that: {str(error).splitlines()[0]}; use a weight in the forward of the "
        "network that has it (for a penalty on weights, the optimizer's weight_decay), or take strategy=deepspeed_zero2"
    )


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
