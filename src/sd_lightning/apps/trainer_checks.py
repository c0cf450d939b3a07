"""Checks of trainer settings that Lightning accepts, or refuses only after processes have started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sd_lightning._errors import UsageError
from sd_lightning._launchers import check_started_processes

if TYPE_CHECKING:
    from omegaconf import DictConfig

AUTO = "auto"
AUTO_STRATEGY = "sd_lightning.strategies.auto.AutoStrategy"
"""Target of ``strategy=auto``; the planner replaces it."""
_NO_VALIDATION = "or trainer.limit_val_batches=0 for no validation"
_AT_LEAST = (
    ("accumulate_grad_batches", 1, "at least 1", "1"),
    ("max_steps", 1, "at least 1", "1"),
    ("num_nodes", 1, "at least 1", "1"),
    ("log_every_n_steps", 0, "at least 0", "10, or 0 for no logs"),
    ("check_val_every_n_epoch", 1, "at least 1", f"1, {_NO_VALIDATION}"),
    ("gradient_clip_val", 0, "a norm of at least 0", "1, or null for no clipping"),
)
"""Trainer settings, each with its minimum, the wording of the minimum, and the remedy."""


def check_trainer(cfg: DictConfig) -> None:
    """Check precision, devices and batch size against each other and against this machine."""
    trainer, cuda = cfg.trainer, cuda_devices(cfg)
    precision = str(trainer.precision)
    if precision == "16-mixed" and not cuda:
        raise UsageError(
            "trainer.precision=16-mixed needs a CUDA device, and Lightning would silently compute in bfloat16 on CPU; "
            "write trainer.precision=bf16-mixed or 32"
        )
    _check_speed(cfg, precision, on_cuda=cuda > 0)
    if trainer.accelerator in ("cuda", "gpu") and not cuda:
        raise UsageError(f"trainer.accelerator={trainer.accelerator}: there is no CUDA device; write cpu or auto")
    _check_length(trainer, steps_key="max_train_steps" if "max_train_steps" in cfg else "trainer.max_steps")
    devices, cores = _num_devices(trainer.devices, cuda), os.cpu_count() or 1
    if devices > (cuda or cores):
        there = f"{cuda} CUDA device(s)" if cuda else f"no CUDA device and {cores} CPU core(s)"
        raise UsageError(f"trainer.devices={devices}: this machine has {there}; write trainer.devices={cuda or cores}")
    if precision.startswith("16") and cfg.strategy["_target_"].endswith(".FSDPStrategy"):
        raise UsageError(
            f"trainer.precision={precision}: FSDP2 does not scale losses, and float16 underflows without; "
            "write trainer.precision=bf16-mixed"
        )
    check_started_processes(devices, trainer.num_nodes)
    processes = devices * trainer.num_nodes
    if processes > 1 and cfg.strategy["_target_"].endswith(".single"):
        raise UsageError(
            f"strategy=single is one process, but trainer.devices={trainer.devices} trainer.num_nodes="
            f"{trainer.num_nodes} ask for {processes}; add strategy=ddp"
        )
    from sd_lightning.data.sampler import check_division

    if cfg.data.batch_size != AUTO:
        check_division(cfg.data.batch_size, processes, trainer.accumulate_grad_batches)


def left_to_planner(cfg: DictConfig) -> list[str]:
    """Return the settings that the planner chooses: ``["strategy=auto", "data.batch_size=auto"]``, or fewer."""
    is_auto = {"strategy": cfg.strategy["_target_"] == AUTO_STRATEGY, "data.batch_size": cfg.data.batch_size == AUTO}
    return [f"{name}=auto" for name, found in is_auto.items() if found]


def refuse(setting: str, value: Any, expected: str, remedy: str) -> None:
    """Raise an error for a value.

    Raises:
        UsageError: Always.
    """
    raise UsageError(f"{setting}={value}: expected {expected}; write {setting}={remedy}")


def _check_length(trainer: DictConfig, *, steps_key: str) -> None:
    """Check the length of a run and its intervals."""
    for name, least, expected, remedy in _AT_LEAST:
        value = trainer.get(name)
        if value is not None and value < least:
            refuse(steps_key if name == "max_steps" else f"trainer.{name}", value, expected, remedy)
    for name in ("limit_train_batches", "overfit_batches", "min_steps", "min_epochs", "max_epochs"):
        if trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name}={trainer[name]}: expected only trainer.max_steps to say how long a run is, over whole "
                "epochs; write trainer.max_steps=<n> instead"
            )
    interval = trainer.get("val_check_interval")
    if interval is not None and not (isinstance(interval, int) and interval >= 1) and not 0 < interval <= 1:
        expected = "a number of forward passes of at least 1, or a fraction of an epoch"
        refuse("trainer.val_check_interval", interval, expected, f"60, {_NO_VALIDATION}")


def _check_speed(cfg: DictConfig, precision: str, *, on_cuda: bool) -> None:
    """Check combinations of speed settings that libraries would refuse, or undo, at the first step."""
    if on_cuda and cfg.speed.attention in ("flash", "cudnn") and not precision.endswith("-mixed"):
        raise UsageError(
            f"speed.attention={cfg.speed.attention} computes in 16 bits, but trainer.precision={precision}; write "
            "trainer.precision=bf16-mixed or speed.attention=efficient"
        )
    if cfg.speed.channels_last and str(cfg.optimizer["_target_"]).startswith("bitsandbytes."):
        raise UsageError(
            f"speed.channels_last=true: {cfg.optimizer['_target_']} works on contiguous weights only; write "
            "speed.channels_last=false or optimizer=adamw"
        )
    strategy = str(cfg.strategy["_target_"]).rpartition(".")[2]
    if cfg.speed.channels_last and strategy in ("FSDPStrategy", "gemini", "deepspeed", "colossalai"):
        raise UsageError(
            f"speed.channels_last=true: {strategy} keeps weights row by row, in flat tensors or shards; write "
            "speed.channels_last=false or strategy=ddp"
        )


def cuda_devices(cfg: DictConfig) -> int:
    """Return the number of CUDA devices that a run may use."""
    import torch

    return torch.cuda.device_count() if cfg.trainer.accelerator in ("auto", "cuda", "gpu") else 0


def num_processes(cfg: DictConfig) -> int:
    """Return the number of processes that a run asks for."""
    return _num_devices(cfg.trainer.devices, cuda_devices(cfg)) * cfg.trainer.num_nodes


def _num_devices(devices: Any, cuda: int) -> int:
    if devices in ("auto", -1, "-1"):
        return max(cuda, 1)
    if isinstance(devices, int | str):
        number = int(devices) if isinstance(devices, int) or devices.isdecimal() else 0
    else:
        number = len(devices)
    if number < 1:
        refuse("trainer.devices", devices, "a number of at least 1, a list of indices, or auto", "1")
    return number
