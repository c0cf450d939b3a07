"""The parts of a run that need neither model nor data: built once, before anything that takes time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sd_lightning import _conf
from sd_lightning._conf.instantiate import leave_out
from sd_lightning._errors import UsageError

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig

    from sd_lightning.diffusion.objective import Objective
    from sd_lightning.models.adapters.learned_token import LearnedToken
    from sd_lightning.models.adapters.lora import Lora
    from sd_lightning.training.module import OptimizerFactory, SchedulerFactory
    from sd_lightning.training.speed import Speed


@dataclass(frozen=True)
class Parts:
    """What the module is made of, beside the model."""

    objective: Objective
    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory
    speed: Speed
    lora: Lora | None
    learned_token: LearnedToken | None

    @classmethod
    def build(cls, cfg: DictConfig) -> Parts:
        """Build the parts, and try the optimizer and the schedule on a small parameter.

        Raises:
            UsageError: Their settings cannot work.
        """
        names = ("objective", "speed", "optimizer", "lr_scheduler", "lora", "learned_token")
        parts = cls(**{name: _conf.instantiate(cfg.get(name)) for name in names})
        if str(cfg.optimizer["_target_"]).startswith(("torch.optim.", "bitsandbytes.optim.")):
            import torch  # another optimizer may want parameters of other shapes

            optimizer = parts.optimizer([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}])
            _check_step(cfg, optimizer)
            if str(cfg.lr_scheduler["_target_"]).startswith(("torch.optim.", "sd_lightning.")):
                parts.lr_scheduler(optimizer)
        return parts


def _check_step(cfg: DictConfig, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that will run on the CPU take a step: some settings are refused only there."""
    import torch

    if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available():
        return
    try:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception as error:
        named = [key for key in cfg.optimizer if re.search(rf"\b{re.escape(str(key))}\b", str(error))]
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} cannot step on the CPU with these arguments: {error} "
            f"({type(error).__name__}); {leave_out('optimizer', named) or 'write optimizer=adamw'}"
        ) from error
