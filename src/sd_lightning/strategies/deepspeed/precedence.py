"""Precedence of settings between a DeepSpeed file, the command line, the module and our defaults.

Explicit values of the file override the defaults of our YAML. Values that the command line or a Python caller sets are
not defaults: they have to agree with the file, or the run does not start.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from sd_lightning._errors import UsageError
from sd_lightning.state.replicated import is_eight_bit
from sd_lightning.strategies.deepspeed.config import (
    ABSENT,
    AUTO,
    Config,
    equal,
    get,
    optimizer_of,
    put,
    text,
    without_auto,
)
from sd_lightning.strategies.optimizers import is_adam, unsupported_option

SAME = {
    "strategy.stage": "zero_optimization.stage",
    "strategy.offload_optimizer": "zero_optimization.offload_optimizer.device",
    "strategy.offload_parameters": "zero_optimization.offload_param.device",
    "strategy.nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "strategy.cpu_adam": "zero_force_ds_cpu_optimizer",
    "strategy.reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "strategy.allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "strategy.overlap_comm": "zero_optimization.overlap_comm",
    "strategy.stage3_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "strategy.cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps",
    "trainer.gradient_clip_val": "gradient_clipping",
    "data.batch_size": "train_batch_size",
}
"""Key of a run's setting -> its path in a DeepSpeed file."""


def precision(config: Mapping[str, Any]) -> str | None:
    """Return a file's precision by Lightning's name; None if the file leaves it to the trainer."""
    if get(config, "fp16.enabled") is True:
        return "16-mixed"
    return "bf16-mixed" if get(config, "bf16.enabled") is True else None


def check_precision(config: Mapping[str, Any], chosen: str, who: str, *, on_cuda: bool) -> None:
    """Compare a file's fp16 and bf16 sections with the trainer's precision and the device.

    Raises:
        UsageError: They contradict each other, or the precision is float16 on a CPU.
    """
    kind = {"16-": "fp16", "bf1": "bf16"}.get(chosen[:3])
    for name in ("fp16", "bf16"):
        asked = get(config, f"{name}.enabled")
        if asked is (name != kind):
            raise UsageError(
                f"{who}: {name}.enabled={text(asked)} contradicts trainer.precision={chosen}; make them agree, "
                f'or write "{name}": {{"enabled": "auto"}} in the file'
            )
    if kind == "fp16" and not on_cuda:
        setting = f"{who}: fp16.enabled=true" if precision(config) == "16-mixed" else f"trainer.precision={chosen}"
        remedy = (
            'write "fp16": {"enabled": "auto"} in the file'
            if config.get("fp16")
            else "write trainer.precision=bf16-mixed"
        )
        raise UsageError(f"{setting} needs a CUDA device, DeepSpeed has no float16 on CPU; {remedy}")


def settle(
    config: Mapping[str, Any],
    run: Mapping[str, Any],
    overridden: Collection[str],
    *,
    world_size: int,
    on_cuda: bool,
    who: str,
) -> Config:
    """Return the settings of a run that a file's explicit values replace.

    Args:
        config: A configuration from :func:`load`.
        run: The run's nested settings: strategy, trainer, data, optimizer.
        overridden: Dotted keys (``trainer.precision``) and groups (``optimizer``) that the command line sets.
        world_size: Number of processes.
        on_cuda: Whether the run computes on CUDA devices.
        who: The file's name in messages.

    Returns:
        Values by dotted key, only those that change.

    Raises:
        UsageError: The command line contradicts the file; names both.
    """
    wanted = _wanted(config, run, world_size, who)
    changes: Config = {}
    target, params = optimizer_of(config, who) or (None, {})
    if target == run["optimizer"]["_target_"]:
        wanted |= {f"optimizer.{name}": (f"optimizer.params.{name}", value) for name, value in params.items()}
    elif target is not None and {"optimizer", "optimizer._target_"} & set(overridden):
        raise UsageError(
            f"{who}: optimizer.type is {target}, which contradicts optimizer={run['optimizer']['_target_']} on the "
            "command line; remove one of the two"
        )
    elif target is not None:
        changes["optimizer"] = {"_target_": target, "_partial_": True, **params}
    for key, (path, value) in wanted.items():
        ours = get(run, key)
        if equal(ours, value):
            continue
        if key in overridden:
            setting = path if "=" in path else f"{path}={text(value)}"
            raise UsageError(
                f"{who}: {setting} contradicts {key}={text(ours)} on the command line; make them agree, or write "
                '"auto" in the file'
            )
        changes[key] = value
    check_precision(config, str(changes.get("trainer.precision", run["trainer"]["precision"])), who, on_cuda=on_cuda)
    return changes


def _wanted(config: Mapping[str, Any], run: Mapping[str, Any], world_size: int, who: str) -> dict[str, tuple[str, Any]]:
    """Return a file's explicit values by run key, as (path in the file, value)."""
    wanted: dict[str, tuple[str, Any]] = {}
    for key, path in SAME.items():
        value = get(config, path)
        if value not in (ABSENT, AUTO) and get(run, key) is not ABSENT:
            if isinstance(value, float) and value.is_integer() and isinstance(get(run, key), int):
                value = int(value)  # JSON may write 50000000 as 5e7
            wanted[key] = (path, value)
    accumulate = wanted.get("trainer.accumulate_grad_batches", ("", run["trainer"]["accumulate_grad_batches"]))[1]
    micro = get(config, "train_micro_batch_size_per_gpu")
    if micro not in (ABSENT, AUTO):
        whole = micro * accumulate * world_size
        path = f"train_micro_batch_size_per_gpu={micro} on {world_size} processes, {accumulate} times accumulated"
        if "data.batch_size" in wanted and wanted["data.batch_size"][1] != whole:
            raise UsageError(
                f"{who}: train_batch_size={wanted['data.batch_size'][1]} is not {path} = {whole}; remove one"
            )
        wanted["data.batch_size"] = (path, whole)
    asked = precision(config)
    if asked is not None:
        wanted["trainer.precision"] = ("fp16.enabled=true" if asked == "16-mixed" else "bf16.enabled=true", asked)
    return wanted


def check_optimizer(config: Mapping[str, Any], optimizer: Any, who: str) -> None:
    """Compare the optimizer of a file with the module's.

    Raises:
        UsageError: They differ; names both.
    """
    chosen = optimizer_of(config, who)
    if chosen is None:
        return
    target, params = chosen
    theirs, name = target.rpartition(".")[2], type(optimizer).__name__
    ours = {key: optimizer.defaults.get(key) for key in params}
    if name != theirs or any(not equal(ours[key], value) for key, value in params.items()):
        first, second = (
            f"{kind}({', '.join(f'{k}={v}' for k, v in each.items())})"
            for kind, each in ((theirs, params), (name, ours))
        )
        raise UsageError(
            f"{who}: optimizer={first} contradicts the module's {second}; give it that one, or remove the section"
        )


def merge(arguments: Mapping[str, Any], config: Mapping[str, Any], who: str) -> Config:
    """Return a file's configuration with our explicit arguments added.

    Args:
        arguments: Ours by name, of which those in :data:`SAME` count; None if not given.
        config: The file's.
        who: The file's name in messages.

    Raises:
        UsageError: An argument contradicts the file; names both.
    """
    merged = copy.deepcopy(dict(config))
    for key, path in SAME.items():
        name = key.removeprefix("strategy.")
        value, theirs = arguments.get(name), get(config, path)
        if value is not None and theirs not in (ABSENT, AUTO) and not equal(theirs, value):
            raise UsageError(
                f"{who}: {path}={text(theirs)} contradicts DeepSpeedStrategy({name}={text(value)}); give one of the two"
            )
        if value is not None:
            put(merged, path, value)
    return merged


def engine_config(
    config: Mapping[str, Any], *, micro_batch_size: int, accumulate: int, clip: float | None, chosen_precision: str
) -> Config:
    """Return the configuration for ``deepspeed.initialize``: "auto" filled in, and only the engine's sections.

    Args:
        config: A checked configuration.
        micro_batch_size: Samples per process and forward pass.
        accumulate: Forward passes per optimizer step.
        clip: Norm to clip gradients to; the file's if not given.
        chosen_precision: The trainer's, such as ``bf16-mixed``.
    """
    kind = {"16-": "fp16", "bf1": "bf16"}.get(chosen_precision[:3])
    sections = {name: without_auto(config.get(name) or {}) for name in ("fp16", "bf16")}
    ours = ("optimizer", "scheduler", "train_batch_size", "fp16", "bf16")
    engine = {key: value for key, value in without_auto(config).items() if key not in ours}
    engine |= {"train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": accumulate}
    engine["gradient_clipping"] = float(clip if clip is not None else engine.get("gradient_clipping", 0.0))
    if kind is not None:
        engine[kind] = sections[kind] | {"enabled": True}
    return engine


_WHOLE = {"LBFGS", "Adafactor", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "LARS"}
"""Optimizers that need whole matrices or all weights, while a rank has only a flat range."""


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise if an optimizer's states are not one value per weight.

    Raises:
        UsageError: They are not; names the optimizer and the reason.
    """
    name = type(optimizer).__name__
    problem = f"{name} cannot step DeepSpeed's shards, flat ranges of many weights"
    if is_eight_bit(optimizer):
        raise UsageError(f"{problem}: its states are quantised in blocks; choose optimizer=adamw, or strategy=ddp")
    if name in _WHOLE:
        raise UsageError(f"{problem}: it looks at whole weights; choose optimizer=adamw, or strategy=ddp")


def check_cpu_adam(optimizer: Optimizer) -> None:
    """Raise if DeepSpeed's CPU Adam cannot replace an optimizer.

    Raises:
        UsageError: It is not torch's Adam or AdamW, or uses an option that CPU Adam lacks.
    """
    remedy = "write strategy.cpu_adam=false to step with torch's optimizer"
    if not is_adam(optimizer):
        raise UsageError(
            f"strategy.cpu_adam=true replaces torch's Adam or AdamW, not {type(optimizer).__name__}; {remedy}"
        )
    option = unsupported_option(optimizer)
    if option is not None:
        raise UsageError(f"strategy.cpu_adam=true: DeepSpeed's CPU Adam has no {option}; {remedy}")
