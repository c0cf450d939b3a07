"""Training loops of plain DDP, FSDP2 and DeepSpeed, as one writes them by hand: what our strategies are measured by.

Each function takes a network and gives back its training step, ``step(batch) -> loss``. The process group exists.
The settings are those that a good engineer of theirs would choose for a network of some ten million weights, and what
:func:`settings` returns stands in every line.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Recipe:
    """What is the same for every engine."""

    loss: Callable[[nn.Module, Batch], Tensor]
    """(network, batch) -> this rank's mean loss."""
    lr: float
    clip: float
    """Largest norm of the gradient."""


_BLOCK = re.compile(r"(down|mid|up)_block(?:s\.(\d+))?\.(resnets|attentions)\.(\d+)")
BUCKET = 25 * 2**20 // 4
"""Elements of a message of DeepSpeed's, in float32: the 25 MiB that DDP sends at a time. Its 200 million, or the 500
million of its documentation, are buffers of several times a small network."""


def settings() -> dict[str, dict[str, Any]]:
    """Return what the loops below are set to, by package."""
    return {
        "torch": {
            "optimizer": "AdamW(fused=True)",
            "ddp": {"gradient_as_bucket_view": True, "memory_format": "channels_last"},
            "fsdp2": {
                "sharded": "each resnet and transformer, and the root",
                "memory_format": "contiguous: FSDP2 refuses others",
            },
        },
        "deepspeed": {
            "optimizer": "torch's AdamW(fused=True); offloaded: DeepSpeedCPUAdam",
            "zero_optimization": zero_optimization(stage=3, offload=False),
            "offload": zero_optimization(stage=3, offload=True),
            "memory_format": "contiguous: ZeRO flattens weights",
        },
    }


def ddp(network: nn.Module, recipe: Recipe) -> Step:
    """DistributedDataParallel: everything on every rank."""
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    return _torch_step(model, recipe)


def fsdp2(
    network: nn.Module,
    recipe: Recipe,
    *,
    reshard_after_forward: bool = True,
    offload: bool = False,
    prefetch: bool = False,
) -> Step:
    """FSDP2, sharded by resnet and transformer blocks; offloaded are weights, gradients and optimizer.

    With ``prefetch`` the weights of the next block are gathered while a block computes, forward and backward.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    blocks: list[Any] = _blocks(network)
    for module in blocks:
        fully_shard(module, **options)
    root: Any = fully_shard(network, **options)
    if prefetch:
        for block, following in zip(blocks, blocks[1:]):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
        for block in (root, *blocks):
            block._set_unshard_async_op(True)  # gloo has no streams: without this every gather is waited for
    return _torch_step(network, recipe)


def _blocks(network: nn.Module) -> list[nn.Module]:
    """Return the resnets and transformers of a UNet in the order in which they compute."""
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    def order(name: str) -> tuple[int, ...]:
        stage, block, kind, number = _BLOCK.fullmatch(name).groups()  # type: ignore[union-attr]
        return "down mid up".split().index(stage), int(block or 0), int(number), kind == "attentions"

    kinds = (ResnetBlock2D, Transformer2DModel)
    found = {name: module for name, module in network.named_modules() if isinstance(module, kinds)}
    return [found[name] for name in sorted(found, key=order)]


def _torch_step(model: nn.Module, recipe: Recipe) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)

    def step(batch: Batch) -> Tensor:
        loss = recipe.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def zero_optimization(*, stage: int, offload: bool, live: int | None = None) -> dict[str, Any]:
    """Return DeepSpeed's settings of that name.

    Args:
        stage: Of ZeRO.
        offload: Whether the optimizer and at stage 3 the weights are kept on the host.
        live: At stage 3, weights that may be gathered at a time; DeepSpeed's billion if not given.
    """
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    if live is not None:
        zero |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
        zero["stage3_prefetch_bucket_size"] = BUCKET
    return zero


def deepspeed(
    network: nn.Module, recipe: Recipe, *, stage: int, offload: bool = False, live: int | None = None
) -> Step:
    """DeepSpeed ZeRO; offloaded are the optimizer, stepped by CPU Adam, and at stage 3 the weights."""
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    make: Any = DeepSpeedCPUAdam if offload else torch.optim.AdamW
    optimizer = make(network.parameters(), lr=recipe.lr, weight_decay=1e-2, **({} if offload else {"fused": True}))
    engine, *_ = ds.initialize(
        model=network,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,  # only its own throughput meter reads it
            "gradient_clipping": recipe.clip,
            "zero_optimization": zero_optimization(stage=stage, offload=offload, live=live),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(batch: Batch) -> Tensor:
        loss = recipe.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def gemini(network: nn.Module, recipe: Recipe, *, engines: list[Any], **settings: Any) -> Step:
    """Our engine without Lightning, gathering by the same blocks as FSDP2; it is appended to `engines`."""
    from sd_lightning.gemini import GeminiConfig, GeminiEngine

    engine = GeminiEngine({"": network}, GeminiConfig(**settings), blocks=_blocks(network))
    engines.append(engine)
    optimizer = engine.optimizer(torch.optim.AdamW(network.parameters(), lr=recipe.lr, fused=True))

    def step(batch: Batch) -> Tensor:
        loss = recipe.loss(network, batch)
        engine.backward(loss)
        optimizer.clip_grad_norm_(recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
