"""Training loops of plain DDP, FSDP2 and DeepSpeed, as one writes them by hand: what our strategies are measured by.

Each function takes a network and gives back its training step, ``step(batch) -> loss``. The process group exists.
"""

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


def ddp(network: nn.Module, recipe: Recipe) -> Step:
    """DistributedDataParallel: everything on every rank."""
    model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    return _torch_step(model, recipe)


def fsdp2(network: nn.Module, recipe: Recipe, *, reshard_after_forward: bool = True, offload: bool = False) -> Step:
    """FSDP2, sharded by resnet and transformer blocks; offloaded are weights, gradients and optimizer."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for module in _blocks(network):
        fully_shard(module, **options)
    fully_shard(network, **options)
    return _torch_step(network, recipe)


def _blocks(network: nn.Module) -> list[nn.Module]:
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_2d import Transformer2DModel

    return [module for module in network.modules() if isinstance(module, ResnetBlock2D | Transformer2DModel)]


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


def deepspeed(network: nn.Module, recipe: Recipe, *, stage: int, offload: bool = False) -> Step:
    """DeepSpeed ZeRO; offloaded are the optimizer, stepped by CPU Adam, and at stage 3 the weights."""
    import deepspeed as ds
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 200_000_000,
        "allgather_bucket_size": 200_000_000,
    }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    make: Any = DeepSpeedCPUAdam if offload else torch.optim.AdamW
    optimizer = make(network.parameters(), lr=recipe.lr, weight_decay=1e-2, **({} if offload else {"fused": True}))
    engine, *_ = ds.initialize(
        model=network,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,  # only its own throughput meter reads it
            "gradient_clipping": recipe.clip,
            "zero_optimization": zero,
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
