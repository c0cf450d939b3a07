"""Checks of a run's settings before data, model or processes: what no constructor can see."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sd_lightning._conf.instantiate import leave_out
from sd_lightning._errors import UsageError
from sd_lightning._launchers import check_started_processes
from sd_lightning.apps.run_spec import AUTO, RunSpec, refuse, target_of
from sd_lightning.storage.atomic import unused

if TYPE_CHECKING:
    import torch

_SECTIONS = (
    *("model", "module", "objective", "optimizer", "lr_scheduler", "strategy", "trainer", "data", "speed", "sampling"),
    "callbacks.checkpoint",
)
"""Sections that every run needs."""
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


def check_sections(spec: RunSpec) -> None:
    """Check what no target's signature covers: that no section was removed, and the top-level values."""
    for name in _SECTIONS:
        node = spec.get(name)
        if not isinstance(node, Mapping) or "_target_" not in node:
            problem = "is missing" if node is None else f"is {node}"
            raise UsageError(f"{name} {problem}: expected a section with _target_, what to build; leave it as it was")
    for name in ("callbacks", "logger"):
        for key, node in (spec.get(name) or {}).items():
            if node is not None and not (isinstance(node, Mapping) and "_target_" in node):
                raise UsageError(
                    f"{name}.{key}={node}: expected a section with _target_, or null; write {name}.{key}=null to go "
                    "without"
                )
    if not 0 <= spec["seed"] < 2**63:
        refuse("seed", spec["seed"], "a whole number from 0 to 2**63 - 1", "0")
    rate = spec.get("optimizer.lr")
    if isinstance(rate, int | float) and rate < 0:
        name = "learning_rate" if "learning_rate" in spec.settings else "optimizer.lr"
        refuse(name, rate, "a number of at least 0", "1e-5, for instance")
    lora = spec.get("lora")
    if lora is not None and not isinstance(lora, Mapping):
        raise UsageError(f"lora={lora}: expected a section; write trainable=lora lora.rank=4, or lora=null")


def check_trainer(spec: RunSpec) -> None:
    """Check precision, devices, strategy and batch size against each other and against this machine."""
    from sd_lightning.strategies.base import RunSettings, engine_of

    cuda, precision = spec.cuda_devices, str(spec["trainer.precision"])
    if precision == "16-mixed" and not cuda:
        raise UsageError(
            "trainer.precision=16-mixed needs a CUDA device, and Lightning would silently compute in bfloat16 on CPU; "
            "write trainer.precision=bf16-mixed or 32"
        )
    _check_speed(spec, precision, on_cuda=cuda > 0)
    accelerator = spec["trainer.accelerator"]
    if accelerator in ("cuda", "gpu") and not cuda:
        raise UsageError(f"trainer.accelerator={accelerator}: there is no CUDA device; write cpu or auto")
    _check_length(
        spec["trainer"], steps_key="max_train_steps" if "max_train_steps" in spec.settings else "trainer.max_steps"
    )
    devices, cores, nodes = spec.devices, os.cpu_count() or 1, spec["trainer.num_nodes"]
    if devices > (cuda or cores):
        there = f"{cuda} CUDA device(s)" if cuda else f"no CUDA device and {cores} CPU core(s)"
        raise UsageError(f"trainer.devices={devices}: this machine has {there}; write trainer.devices={cuda or cores}")
    channels_last = spec.get("speed.channels_last", False)
    engine_of(spec.strategy).check_settings(RunSettings(precision, devices, nodes, channels_last=channels_last))
    check_started_processes(devices, nodes)
    from sd_lightning.data.sampler import check_division

    if spec["data.batch_size"] != AUTO:
        check_division(spec["data.batch_size"], spec.num_processes, spec["trainer.accumulate_grad_batches"])


def _check_length(trainer: Mapping[str, Any], *, steps_key: str) -> None:
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


def _check_speed(spec: RunSpec, precision: str, *, on_cuda: bool) -> None:
    """Check combinations of speed settings that libraries would refuse, or undo, at the first step."""
    attention, optimizer = spec.get("speed.attention"), target_of(spec.optimizer)
    if on_cuda and attention in ("flash", "cudnn") and not precision.endswith("-mixed"):
        raise UsageError(
            f"speed.attention={attention} computes in 16 bits, but trainer.precision={precision}; write "
            "trainer.precision=bf16-mixed or speed.attention=efficient"
        )
    if spec.get("speed.channels_last") and optimizer.__module__.startswith("bitsandbytes."):
        raise UsageError(
            f"speed.channels_last=true: {optimizer.__name__} of bitsandbytes works on contiguous weights only; write "
            "speed.channels_last=false or optimizer=adamw"
        )


def check_parts(spec: RunSpec) -> None:
    """Build the parts that need neither data nor model, and try optimizer and schedule on a small parameter.

    Raises:
        UsageError: Their settings are invalid.
    """
    _ = spec.objective, spec.speed, spec.lora, spec.learned_token
    build, schedule = spec.optimizer, spec.lr_scheduler
    if not target_of(build).__module__.startswith(("torch.optim.", "bitsandbytes.optim.")):
        return  # others may need other parameter shapes
    import torch

    optimizer = build([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}])
    if spec["trainer.accelerator"] == "cpu" or not torch.cuda.is_available():
        _check_step(spec, optimizer)
    if target_of(schedule).__module__.startswith(("torch.optim.", "sd_lightning.")):
        schedule(optimizer)


def _check_step(spec: RunSpec, optimizer: torch.optim.Optimizer) -> None:
    """Take a trial step with an optimizer that will run on the CPU: some settings fail only there."""
    import torch

    try:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    except Exception as error:
        named = [key for key in spec["optimizer"] if re.search(rf"\b{re.escape(str(key))}\b", str(error))]
        raise UsageError(
            f"optimizer: {type(optimizer).__name__} cannot step on the CPU with these arguments: {error} "
            f"({type(error).__name__}); {leave_out('optimizer', named) or 'write optimizer=adamw'}"
        ) from error


def check_not_scanned(spec: RunSpec) -> None:
    """Raise if the run is inside a folder that ``datasets`` scans: its pictures would become data."""
    from sd_lightning.data.sources.huggingface import is_saved_dataset

    name, run_dir = spec.get("data.dataset_name"), spec.output_dir
    if not name or not Path(name).is_dir() or is_saved_dataset(name):
        return
    if run_dir.resolve().is_relative_to(Path(name).resolve()):
        raise UsageError(
            f"data.dataset_name={name}: output_dir={run_dir} lies in it, and the run's pictures would become data; "
            f"expected two folders apart; write output_dir={unused(f'{Path(name)}-runs/{run_dir.name}')}"
        )


def paths_read(spec: RunSpec, *, resumed: bool) -> dict[str, str]:
    """Return the settings that name a file or folder which the run reads, with their values.

    The model of a resumed run is left out: it may lie in the run's own folder.
    """
    of_data = {key: value for key, value in spec["data"].items() if isinstance(value, str)}
    reads = {
        key if key in spec.settings and key.endswith("_dir") else f"data.{key}": value for key, value in of_data.items()
    }
    if not resumed:
        reads |= {"init_from": spec["init_from"]}
        reads |= {f"model.{key}": spec.model.get(key) for key in ("pretrained", "vae")}
    # Values that do not exist are no paths (column names, hub ids), except folders of class images to be drawn.
    return {k: v for k, v in reads.items() if v and (k.endswith("_dir") or os.path.exists(v))}
