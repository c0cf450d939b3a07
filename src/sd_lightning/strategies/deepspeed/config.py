"""A user's DeepSpeed configuration: read, checked with DeepSpeed's own models, and rid of what has no effect here.

A configuration is the dictionary that DeepSpeed's documentation describes. The value ``"auto"`` (a convention of
Hugging Face's Trainer) leaves a key to the run or to a default. Values are found by dotted paths. The functions do not
modify their arguments, except :func:`put`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import parse_json
from sd_lightning.strategies.deepspeed.builds import import_deepspeed

Config = dict[str, Any]

AUTO = "auto"
"""Value of a key that a configuration leaves to the run."""
ABSENT = object()


def get(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or ``ABSENT``, which equals no value of a file."""
    node: Any = config
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node


def explicit(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; the default if it is absent or "auto"."""
    value = get(config, path)
    return default if value in (ABSENT, AUTO) else value


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every leaf."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_auto(config: Mapping[str, Any]) -> Config:
    """Return a copy without the values "auto"."""
    return {
        key: without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in config.items()
        if value != AUTO
    }


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """Return the configuration with absent and "auto" values taken from defaults."""
    filled = copy.deepcopy(dict(config))
    for path, value in leaves(defaults):
        if get(filled, path) in (ABSENT, AUTO):
            put(filled, path, value)
    return filled


def put(config: Config, path: str, value: Any) -> None:
    """Set the value at a dotted path, creating the sections on the way."""
    *parents, name = path.split(".")
    for part in parents:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[name] = value


def remove(config: Config, path: str) -> None:
    """Remove the key at a dotted path."""
    *parents, name = path.split(".")
    for part in parents:
        config = config[part]
    del config[name]


def equal(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal; a list equals a tuple of the same items."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)


def text(value: Any) -> str:
    """Return a value as JSON, as in a configuration file."""
    return json.dumps(value, default=str)


_MISNAMED = {
    "zero_optimization.stage3_max_reuse_parameters": "zero_optimization.stage3_max_reuse_distance",
}
"""Key of an example that most tutorials copy, though no release has had it -> what it means."""

WITHOUT_EFFECT = {
    "activation_checkpointing.partition_activations": "it divides activations over the ranks of a model-parallel group",
    "activation_checkpointing.contiguous_memory_optimization": "it belongs to partition_activations",
    "activation_checkpointing.number_checkpoints": "it belongs to partition_activations",
    "activation_checkpointing.synchronize_checkpoint_boundary": "blocks are checkpointed by torch",
    "activation_checkpointing.profile": "blocks are checkpointed by torch",
    "checkpoint": "checkpoints are sd_lightning's own",
    "vocabulary_size": "nothing reads it",
    "dataloader_drop_last": "data are sd_lightning's own",
}
"""Harmless keys that have no effect here -> the reason."""

_KEYS: dict[str, frozenset[str]] = {
    "": frozenset(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
        "scheduler fp16 bf16 zero_optimization activation_checkpointing aio data_types communication_data_type "
        "prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc "
        "flops_profiler comms_logger tensorboard wandb csv_monitor comet timers log_level".split()
    ),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "activation_checkpointing": frozenset({"cpu_checkpointing"}),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
}
"""Keys of the sections that DeepSpeed does not check itself; a test compares the first with what it reads."""

_STATE = "EMA, portable checkpoints and sampling cannot read the training state that it makes"
_ENGINE = "it is another kind of engine than the data-parallel one this strategy drives"
REFUSED: dict[str, tuple[Collection[Any], str]] = {
    "zero_optimization.zero_hpz_partition_size": ((0, 1), _STATE),
    "zero_optimization.zero_quantized_weights": ((False,), _STATE),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _STATE),
    "zero_optimization.zero_quantized_gradients": ((False,), "gradients in 4 bits change the result of a run"),
    "zero_optimization.zenflow": ((None,), _STATE),
    "zero_optimization.elastic_checkpoint": ((False,), _STATE),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has no such feature any more"),
    "zero_optimization.parameter_alignment": ((False,), _STATE),
    "zero_optimization.offload_optimizer.ratio": ((1, 1.0), _STATE),
    "zero_optimization.offload_optimizer.super_offload": ((False,), _STATE),
    "zero_optimization.offload_optimizer.pipeline_read": ((False,), _STATE),
    "zero_optimization.offload_optimizer.pipeline_write": ((False,), _STATE),
    "zero_optimization.offload_param.device": (
        ("none", "cpu"),
        "DeepSpeed rounds weights to half precision on their way to a disk, in float32 runs too; with device=cpu they "
        "take 2 bytes each in host memory",
    ),
    "fp16.fp16_master_weights_and_grads": ((False,), "weights would not be kept in float32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "weights would not be kept in float32"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer states would not be kept in float32"),
    "aio.use_gds": ((False,), _STATE),
    "gradient_allreduce_op": (("mean",), "a loss is a mean over the whole batch here"),
    "managed_gradient_accumulation": ((True,), "trainer.accumulate_grad_batches is the one that accumulates"),
    "torch_autocast.enabled": ((False,), "trainer.precision says what is computed in"),
    "sequence_parallel_size": ((1,), _ENGINE),
    "tensor_parallel": ((), _ENGINE),
    "expert_parallel": ((), _ENGINE),
    "use_data_before_expert_parallelism": ((False,), _ENGINE),
    "pipeline": ((), _ENGINE),
    "hybrid_engine.enabled": ((False,), _ENGINE),
    "weight_quantization": ((), _ENGINE),
    "compile.deepcompile": ((False,), "speed.compile_blocks=true compiles"),
    "autotuning.enabled": ((False,), "it starts runs of its own"),
    "data_efficiency.enabled": ((False,), "data are sd_lightning's own"),
    "datastates_ckpt": ((False,), "checkpoints are sd_lightning's own"),
}
"""Path of a feature that cannot work here -> the accepted values, which switch it off, and the reason."""

_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "adam": "torch.optim.AdamW"}
"""DeepSpeed's ``Adam`` decays weights as AdamW does, unless ``adam_w_mode`` is false."""
_HYPER_PARAMETERS = frozenset({"lr", "betas", "eps", "weight_decay"})


def load(source: str | Path | Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Read a configuration, leave out what has no effect here, and check it.

    Args:
        source: A JSON file, or the dictionary itself.

    Returns:
        The configuration, and one warning per key that was left out, or had another's name.

    Raises:
        UsageError: The file cannot be read, a key is unknown (names the nearest), or a value cannot work.
    """
    who = name_of(source)
    import_deepspeed(who)
    config, warnings = _without_effectless(_read(source, who), who)
    check(config, who)
    return config, warnings


def name_of(source: str | Path | Mapping[str, Any]) -> str:
    """Return the name of a configuration for messages."""
    return "strategy.config" if isinstance(source, Mapping) else f"strategy.config={source}"


def _read(source: str | Path | Mapping[str, Any], who: str) -> Config:
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        config = parse_json(Path(source).read_text(encoding="utf-8"), pairs=_without_duplicates)
    except OSError as error:
        raise UsageError(f"{who}: cannot be read ({error.strerror}); give the path of a DeepSpeed JSON file") from error
    except ValueError as error:
        raise UsageError(f"{who}: is not JSON ({error}); give a DeepSpeed JSON file") from error
    if not isinstance(config, dict):
        raise UsageError(
            f'{who}: holds a {type(config).__name__}; expected an object such as {{"zero_optimization": …}}'
        )
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the key {name!r} is there twice")
    return dict(pairs)


def _without_effectless(config: Config, who: str) -> tuple[Config, list[str]]:
    """Return the configuration without keys that have no effect here, and a warning for each."""
    config, warnings = copy.deepcopy(config), []
    for wrong, right in _MISNAMED.items():
        value = get(config, wrong)
        if value is not ABSENT:
            remove(config, wrong)
            put(config, right, explicit(config, right, value))
            warnings.append(f"{who}: {wrong} is called {right}")
    for key, reason in WITHOUT_EFFECT.items():
        value = get(config, key)
        if value is not ABSENT:
            remove(config, key)
            if value not in (False, None, AUTO):
                warnings.append(f"{who}: {key} has no effect here ({reason}); left out")
    warnings += _without_stage3(config, who)
    if get(config, "train_batch_size") == AUTO:
        warnings.append(
            f'{who}: train_batch_size="auto" is understood by Hugging Face\'s Trainer only; set from the run'
        )
    return config, warnings


def _without_stage3(config: Config, who: str) -> list[str]:
    """Remove the keys of stage 3 from the configuration of another stage; return warnings."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2):
        return []
    names = [name for name in zero if name.startswith("stage3_") and name in known_keys("zero_optimization")]
    for name in names:
        del zero[name]
    keys = ", ".join(f"zero_optimization.{name}" for name in names)
    return [f"{who}: {keys}: only stage 3 reads this, the file says stage {zero['stage']}; left out"] if names else []


def check(config: Mapping[str, Any], who: str) -> None:
    """Check keys, stage and features.

    Raises:
        UsageError: One is wrong; names the first, and the nearest key.
    """
    for path, (harmless, reason) in REFUSED.items():
        value = get(config, path)
        if value is not ABSENT and value != AUTO and value not in harmless:
            setting = path if isinstance(value, Mapping) else f"{path}={text(value)}"
            raise UsageError(f"{who}: {setting} cannot be used: {reason}; remove it")
    refused = frozenset(path.partition(".")[0] for path in REFUSED)  # what switches them off may stay
    for section in (*_KEYS, "aio", *_models()):
        node = get(config, section) if section else config
        if node is ABSENT or node is None or node == AUTO:
            continue
        if not isinstance(node, Mapping):
            raise UsageError(f"{who}: {section}={text(node)}; expected an object")
        known = known_keys(section) | (frozenset() if section else refused)
        for key in node:
            if key not in known:
                raise UsageError(f"{who}: {_unknown(section, str(key), known)}")
    stage = get(config, "zero_optimization.stage")
    if stage is not ABSENT and stage != AUTO and (isinstance(stage, bool) or stage not in (1, 2, 3)):
        remedy = "strategy=ddp shards nothing" if stage == 0 else "write 2 if in doubt"
        raise UsageError(f"{who}: zero_optimization.stage={text(stage)}; expected 1, 2 or 3: {remedy}")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        number = explicit(config, name, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f'{who}: {name}={text(number)}; expected a whole number of at least 1, or "auto"')
    clip = explicit(config, "gradient_clipping", 0)
    if isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0:
        raise UsageError(f'{who}: gradient_clipping={text(clip)}; expected a norm of at least 0, or "auto"')
    scheduler = config.get("scheduler")
    if isinstance(scheduler, Mapping) and any(v != AUTO for path, v in leaves(scheduler) if path != "type"):
        raise UsageError(
            f"{who}: scheduler={scheduler.get('type')}: the learning rate's schedule is lr_scheduler=… here; "
            "remove this section and choose lr_scheduler=cosine, constant or none"
        )
    optimizer_of(config, who)
    _ask_deepspeed(config, who)


@functools.cache
def _models() -> dict[str, Any]:
    """Return the pydantic models with which DeepSpeed checks sections, by path."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config as zero

    return {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }


def known_keys(section: str) -> frozenset[str]:
    """Return the keys of a section of the configuration, "" for its top level, without names of old releases."""
    if section in _KEYS:
        return _KEYS[section]
    if section == "aio":
        from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

        return frozenset(AIO_DEFAULT_DICT)
    fields = _models()[section].model_fields
    old = {name for name, field in fields.items() if (field.json_schema_extra or {}).get("deprecated")}
    return frozenset(fields) - old | {field.alias for field in fields.values() if field.alias}


def _unknown(section: str, key: str, known: Collection[str]) -> str:
    prefix = f"{section}." if section else ""
    problem = f"{prefix}{key} is no key of DeepSpeed's"
    fields = _models()[section].model_fields if section in _models() else {}
    if key in fields:
        new = fields[key].json_schema_extra["new_param"]
        return f"{prefix}{key} is a key of old releases; write {prefix}{new}"
    near = difflib.get_close_matches(key, sorted(known), n=1)
    if near:
        return f"{problem}; the nearest is {prefix}{near[0]}"
    for other in (*_KEYS, *_models()):
        if key in known_keys(other):
            return f"{problem}; you mean {other}.{key}" if other else f"{problem}; you mean {key}, outside of {section}"
    return f"{problem}; remove it"


def _ask_deepspeed(config: Mapping[str, Any], who: str) -> None:
    """Let DeepSpeed check types and values, with consistent batch sizes instead of the user's."""
    import pydantic
    from deepspeed.runtime.config import DeepSpeedConfig

    trial = {k: v for k, v in without_auto(config).items() if k not in ("optimizer", "scheduler", "train_batch_size")}
    trial |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    try:
        DeepSpeedConfig(trial)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        section = [path for path, model in _models().items() if model.__name__ == error.title]
        place = ".".join(map(str, (*section, *first["loc"])))
        raise UsageError(f"{who}: {place}={text(first['input'])}: {first['msg']}") from error
    except Exception as error:
        raise UsageError(f"{who}: DeepSpeed refuses it: {str(error).splitlines()[0]}") from error


def optimizer_of(config: Mapping[str, Any], who: str) -> tuple[str, Config] | None:
    """Return a file's optimizer, as torch's class and the explicit hyper-parameters; None if it sets none.

    Raises:
        UsageError: It is not Adam or AdamW, or a hyper-parameter is unknown or not supported.
    """
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or section.get("type", AUTO) == AUTO:
        return None
    kind, params = str(section["type"]), section.get("params") or {}
    params = {} if params == AUTO else {key: value for key, value in params.items() if value != AUTO}
    target = _OPTIMIZERS.get(kind.lower())
    if target is None:
        raise UsageError(
            f"{who}: optimizer.type={kind}; expected AdamW or Adam, or choose optimizer=sgd and remove the section"
        )
    for flag in ("torch_adam", "legacy_fusion", "fp32_optimizer_states", "foreach"):
        params.pop(flag, None)  # they choose an implementation
    if params.pop("adam_w_mode", True) is False:
        target = "torch.optim.Adam"
    for flag, expected in (("bias_correction", True), ("amsgrad", False)):
        if params.pop(flag, expected) is not expected:
            raise UsageError(f"{who}: optimizer.params.{flag}={not expected} is not supported; remove it")
    for key in params:
        if key not in _HYPER_PARAMETERS:
            near = difflib.get_close_matches(key, sorted(_HYPER_PARAMETERS), n=1) or ["lr"]
            meant = "you mean gradient_clipping" if key == "max_grad_norm" else f"the nearest is {near[0]}"
            raise UsageError(f"{who}: optimizer.params.{key} is no hyper-parameter of AdamW's; {meant}")
    return target, params
