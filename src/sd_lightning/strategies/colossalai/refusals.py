"""Checks for runs that ColossalAI cannot train, or trains incorrectly without an error."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.strategies.adam import is_adam, unsupported_option
from sd_lightning.strategies.colossalai.settings import OURS, WHO, ColossalAIConfig
from sd_lightning.strategies.networks import trained_networks

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Compute dtype by ``Trainer(precision=)``; master weights are float32."""


def check_run(config: ColossalAIConfig, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if ColossalAI cannot train a run, or trains it incorrectly without an error.

    Raises:
        UsageError: It cannot; gives the reason and what to write instead.
    """
    precision = str(trainer.precision_plugin.precision)
    if precision not in DTYPES:
        raise UsageError(
            f"{WHO} got trainer.precision={precision}: ColossalAI computes in 16 bits over float32 weights; write "
            f"trainer.precision=bf16-mixed or 16-mixed, {OURS}"
        )
    if precision == "bf16-mixed" and config.of_loss_scale() != ColossalAIConfig().of_loss_scale():
        raise UsageError(f"{WHO} got a loss scale, which bf16-mixed has not; leave it out, or write precision=16-mixed")
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UsageError(f"{WHO} clips by norm only; write trainer.gradient_clip_algorithm=norm, {OURS}")
    if trainer.gradient_clip_val and precision == "bf16-mixed" and config.offloads:
        raise UsageError(
            f"{WHO} got trainer.gradient_clip_val={trainer.gradient_clip_val} with bf16-mixed and an optimizer in host "
            "memory, where ColossalAI ignores clipping without a word; write trainer.gradient_clip_val=null, "
            f"trainer.precision=16-mixed, or placement_policy=static with offload_optim_frac=0, {OURS}"
        )
    if trainer.accumulate_grad_batches > 1:
        raise UsageError(
            f"{WHO} got trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: ColossalAI adds gradients "
            f"up in 16 bits; write trainer.accumulate_grad_batches=1 and a smaller data.batch_size, {OURS}"
        )
    if not module.automatic_optimization:
        raise UsageError(f"{WHO} steps by itself; set automatic_optimization = True in {type(module).__name__}, {OURS}")
    for name, network in trained_networks(module).items():
        if any(part._compiled_call_impl is not None for part in network.modules()):
            raise UsageError(
                f"{WHO} got a compiled {name}: torch.compile does not see ColossalAI's hooks on weights, which gather "
                f"them; write speed.compile=false, {OURS}"
            )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise if ColossalAI's Adam cannot replace the optimizers.

    Raises:
        UsageError: They are not exactly one Adam or AdamW, or it uses an option that ColossalAI's lacks.
    """
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if len(optimizers) != 1 or not is_adam(optimizers[0]):
        raise UsageError(
            f"{WHO} got the optimizer {names}: ColossalAI steps its chunks with its own Adam only; choose "
            f"optimizer=adamw, {OURS}"
        )
    option = unsupported_option(optimizers[0])
    if option is not None:
        raise UsageError(f"{WHO}: ColossalAI's Adam has no {option}; write optimizer.{option}=false, {OURS}")
