"""A user's DeepSpeed configuration: read, checked with DeepSpeed's own models, and compared with the run.

A configuration is the dictionary that DeepSpeed's documentation describes. The value "auto" (a convention of Hugging
Face's Trainer) leaves a key to the run or to a default, so it is left out when a configuration is read. Values are
found by dotted paths.

Explicit values of a file override the defaults of our YAML. Values that the command line or a Python caller sets are
not defaults: they have to agree with the file, or the run does not start.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import parse_json
from sd_lightning.strategies.deepspeed.machine import import_deepspeed

Config = dict[str, Any]

AUTO = "auto"
"""Value of a key that a configuration leaves to the run."""

ARGUMENTS = {
    "stage": "zero_optimization.stage",
    "offload_optimizer": "zero_optimization.offload_optimizer.device",
    "offload_parameters": "zero_optimization.offload_param.device",
    "nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "cpu_adam": "zero_force_ds_cpu_optimizer",
    "reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "overlap_comm": "zero_optimization.overlap_comm",
    "stage3_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "cpu_checkpointing": "activation_checkpointing.cpu_checkpointing",
}
"""Argument of the strategy -> its path in a configuration."""
SETTINGS = {
    **{f"strategy.{name}": path for name, path in ARGUMENTS.items()},
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps",
    "trainer.gradient_clip_val": "gradient_clipping",
    "data.batch_size": "train_batch_size",
}
"""Key of a run's setting -> its path in a configuration."""

_CHECKPOINTING = "partition_activations contiguous_memory_optimization number_checkpoints profile"
WITHOUT_EFFECT = {
    **{
        f"activation_checkpointing.{name}": "torch checkpoints blocks, and no activations are divided over ranks"
        for name in (*_CHECKPOINTING.split(), "synchronize_checkpoint_boundary")
    },
    "checkpoint": "checkpoints are sd_lightning's own",
    "vocabulary_size": "nothing reads it",
    "dataloader_drop_last": "data are sd_lightning's own",
}
"""Harmless keys that have no effect here -> the reason."""
_MISNAMED = "zero_optimization.stage3_max_reuse_parameters"
"""Key of an example that most tutorials copy, though no release has had it."""
_RIGHT_NAME = "zero_optimization.stage3_max_reuse_distance"

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
    "zero_optimization.zenflow": ((), _STATE),
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


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; the default if there is none."""
    node: Any = config
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return default if node is None else node


def put(config: Config, path: str, value: Any) -> None:
    """Set the value at a dotted path, creating the sections on the way."""
    *parents, name = path.split(".")
    for part in parents:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[name] = value


def text(value: Any) -> str:
    """Return a value as JSON, as in a configuration file."""
    return json.dumps(value, default=str)


def precision_section(precision: str) -> str | None:
    """Return DeepSpeed's section for a precision of Lightning's: "fp16" or "bf16"; None for float32."""
    return {"16-": "fp16", "bf1": "bf16"}.get(precision[:3])


@dataclass(frozen=True)
class UserConfig:
    """A user's checked configuration, without what has no effect here."""

    who: str
    """Its name in messages."""
    values: Config
    warnings: tuple[str, ...] = ()
    """One line per key that was left out, or had another's name."""

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any], *, who: str | None = None) -> Self:
        """Read a JSON file, or the dictionary itself.

        Raises:
            UsageError: The file cannot be read, a key is unknown (names the nearest), or a value cannot work.
        """
        if who is None:
            who = "strategy.config" if isinstance(source, Mapping) else f"strategy.config={source}"
        import_deepspeed(who)
        written = copy.deepcopy(dict(source)) if isinstance(source, Mapping) else _parse(Path(source), who)
        warnings = _leave_out_effectless(written, who)
        _check_keys(written, who)
        config = cls(who, _without_auto(written), tuple(warnings))
        check(config.values, who)
        config.optimizer()
        return config

    def precision(self) -> str | None:
        """Return the precision by Lightning's name; None if it is left to the trainer."""
        if get(self.values, "fp16.enabled") is True:
            return "16-mixed"
        return "bf16-mixed" if get(self.values, "bf16.enabled") is True else None

    def check_precision(self, chosen: str, *, on_cuda: bool) -> None:
        """Compare the fp16 and bf16 sections with the trainer's precision and the device.

        Raises:
            UsageError: They contradict each other, or the precision is float16 on a CPU.
        """
        kind = precision_section(chosen)
        for name in ("fp16", "bf16"):
            enabled = get(self.values, f"{name}.enabled")
            if enabled is (name != kind):
                raise self._contradiction(f"{name}.enabled={text(enabled)}", f"trainer.precision={chosen}")
        if kind == "fp16" and not on_cuda:
            setting, remedy = f"trainer.precision={chosen}", "write trainer.precision=bf16-mixed"
            if self.precision() == "16-mixed":
                setting, remedy = f"{self.who}: fp16.enabled=true", 'write "fp16": {"enabled": "auto"} in the file'
            raise UsageError(f"{setting} needs a CUDA device, DeepSpeed has no float16 on CPU; {remedy}")

    def optimizer(self) -> tuple[str, Config] | None:
        """Return the optimizer, as torch's class and the explicit hyper-parameters; None if there is none.

        Raises:
            UsageError: It is not Adam or AdamW, or a hyper-parameter is unknown or not supported.
        """
        kind, params = get(self.values, "optimizer.type"), dict(get(self.values, "optimizer.params", {}))
        if kind is None:
            return None
        target = _OPTIMIZERS.get(str(kind).lower())
        if target is None:
            raise UsageError(
                f"{self.who}: optimizer.type={kind}; expected AdamW or Adam, or choose optimizer=sgd and remove the "
                "section"
            )
        for flag in ("torch_adam", "legacy_fusion", "fp32_optimizer_states", "foreach"):
            params.pop(flag, None)  # they choose an implementation
        if params.pop("adam_w_mode", True) is False:
            target = "torch.optim.Adam"
        for flag, expected in (("bias_correction", True), ("amsgrad", False)):
            if params.pop(flag, expected) is not expected:
                raise UsageError(f"{self.who}: optimizer.params.{flag}={not expected} is not supported; remove it")
        for key in params.keys() - _HYPER_PARAMETERS:
            near = difflib.get_close_matches(key, sorted(_HYPER_PARAMETERS), n=1) or ["lr"]
            meant = "you mean gradient_clipping" if key == "max_grad_norm" else f"the nearest is {near[0]}"
            raise UsageError(f"{self.who}: optimizer.params.{key} is no hyper-parameter of AdamW's; {meant}")
        return target, params

    def settle(
        self, run: Mapping[str, Any], given: Collection[str] | None = None, *, num_processes: int = 1
    ) -> dict[str, Any]:
        """Return the settings of a run that explicit values replace, by dotted key.

        Args:
            run: The run's nested settings; sections and keys may be missing.
            given: Dotted keys (``trainer.precision``) and groups (``optimizer``) that are not our defaults; every
                setting that is not None if not given.
            num_processes: Number of processes on all machines.

        Raises:
            UsageError: A given setting contradicts the configuration; names both.
        """
        changes: Config = {}
        wanted = self._wanted(run, num_processes)
        target, params = self.optimizer() or (None, {})
        chosen = get(run, "optimizer._target_")
        if target is not None and target == chosen:
            wanted |= {f"optimizer.{n}": (f"optimizer.params.{n}={text(v)}", v) for n, v in params.items()}
        elif target is not None and chosen is not None:
            if given is None or {"optimizer", "optimizer._target_"} & set(given):
                raise self._contradiction(f"optimizer.type={target}", f"optimizer={chosen}")
            changes["optimizer"] = {"_target_": target, "_partial_": True, **params}
        for key, (written, value) in wanted.items():
            ours = get(run, key)
            if ours == value or text(ours) == text(value):  # JSON has lists for tuples
                continue
            if ours is not None if given is None else key in given:
                raise self._contradiction(written, f"{key}={text(ours)}")
            changes[key] = value
        return changes

    def _wanted(self, run: Mapping[str, Any], num_processes: int) -> dict[str, tuple[str, Any]]:
        """Return the explicit values by the run's key, as (what is written, value)."""
        wanted: dict[str, tuple[str, Any]] = {}
        for key, path in SETTINGS.items():
            value, (section, _, name) = get(self.values, path), key.partition(".")
            if value is not None and name in run.get(section, ()):
                if isinstance(value, float) and value.is_integer() and isinstance(run[section][name], int):
                    value = int(value)  # JSON may write 50000000 as 5e7
                wanted[key] = (f"{path}={text(value)}", value)
        micro = get(self.values, "train_micro_batch_size_per_gpu")
        if micro is not None and "data" in run:
            accumulate = get(self.values, "gradient_accumulation_steps", run["trainer"]["accumulate_grad_batches"])
            whole = micro * accumulate * num_processes
            written = (
                f"train_micro_batch_size_per_gpu={micro} on {num_processes} processes, {accumulate} times accumulated"
            )
            if wanted.get("data.batch_size", ("", whole))[1] != whole:
                raise UsageError(f"{self.who}: {wanted['data.batch_size'][0]} is not {written} = {whole}; remove one")
            wanted["data.batch_size"] = (written, whole)
        precision = self.precision()
        if precision is not None and "precision" in run.get("trainer", ()):
            wanted["trainer.precision"] = (f"{precision_section(precision)}.enabled=true", precision)
        return wanted

    def _contradiction(self, theirs: str, ours: str) -> UsageError:
        return UsageError(f'{self.who}: {theirs} contradicts {ours}; make them agree, or write "auto" in the file')


def _parse(file: Path, who: str) -> Config:
    try:
        config = parse_json(file.read_text(encoding="utf-8"), pairs=_without_duplicates)
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


def _leave_out_effectless(config: Config, who: str) -> list[str]:
    """Remove keys that have no effect here; return a warning for each."""

    def pop(path: str) -> Any:
        section, _, name = path.rpartition(".")
        node = get(config, section) if section else config
        return node.pop(name, None) if isinstance(node, dict) else None

    warnings = []
    misnamed = pop(_MISNAMED)
    if misnamed is not None:
        put(config, _RIGHT_NAME, get(config, _RIGHT_NAME, misnamed))
        warnings.append(f"{who}: {_MISNAMED} is called {_RIGHT_NAME}")
    for key, reason in WITHOUT_EFFECT.items():
        if pop(key) not in (False, None, AUTO):
            warnings.append(f"{who}: {key} has no effect here ({reason}); left out")
    stage = get(config, "zero_optimization.stage")
    if stage in (1, 2):
        zero = config["zero_optimization"]
        unread = [name for name in zero if name.startswith("stage3_") and name in known_keys("zero_optimization")]
        keys = ", ".join(f"zero_optimization.{name}" for name in unread)
        if unread:
            warnings.append(f"{who}: {keys}: only stage 3 reads this, the file says stage {stage}; left out")
        for name in unread:
            del zero[name]
    if config.get("train_batch_size") == AUTO:
        warnings.append(
            f'{who}: train_batch_size="auto" is understood by Hugging Face\'s Trainer only; set from the run'
        )
    return warnings


def _without_auto(config: Mapping[str, Any]) -> Config:
    return {k: _without_auto(v) if isinstance(v, Mapping) else v for k, v in config.items() if v != AUTO}


def _check_keys(config: Mapping[str, Any], who: str) -> None:
    refused = frozenset(path.partition(".")[0] for path in REFUSED)  # what switches them off may stay
    for section in (*_KEYS, "aio", *_models()):
        node = get(config, section) if section else config
        if node is None or node == AUTO:
            continue
        if not isinstance(node, Mapping):
            raise UsageError(f"{who}: {section}={text(node)}; expected an object")
        known = known_keys(section) | (frozenset() if section else refused)
        for key in node:
            if key not in known:
                raise UsageError(f"{who}: {_unknown(section, str(key), known)}")


def check(config: Mapping[str, Any], who: str) -> None:
    """Check values: what this strategy cannot do, and then all of them with DeepSpeed's own models.

    Raises:
        UsageError: One is wrong; names the first.
    """
    for path, (harmless, reason) in REFUSED.items():
        value = get(config, path)
        if value is not None and value not in harmless:
            setting = path if isinstance(value, Mapping) else f"{path}={text(value)}"
            raise UsageError(f"{who}: {setting} cannot be used: {reason}; remove it")
    stage = get(config, "zero_optimization.stage", 2)
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        remedy = "strategy=ddp shards nothing" if stage == 0 else "write 2 if in doubt"
        raise UsageError(f"{who}: zero_optimization.stage={text(stage)}; expected 1, 2 or 3: {remedy}")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in (*sizes, "gradient_clipping"):
        least, kinds = (1, (int,)) if name in sizes else (0, (int, float))
        number = get(config, name, least)
        if type(number) not in kinds or number < least:
            expected = "whole number" if name in sizes else "norm"
            raise UsageError(f'{who}: {name}={text(number)}; expected a {expected} of at least {least}, or "auto"')
    scheduler = get(config, "scheduler")
    if isinstance(scheduler, Mapping) and (get(scheduler, "params") or scheduler.keys() - {"type", "params"}):
        raise UsageError(
            f"{who}: scheduler={scheduler.get('type')}: the learning rate's schedule is lr_scheduler=… here; "
            "remove this section and choose lr_scheduler=cosine, constant or none"
        )
    _check_with_deepspeed(config, who)


def _check_with_deepspeed(config: Mapping[str, Any], who: str) -> None:
    """Let DeepSpeed check types and values, with consistent batch sizes instead of the user's."""
    import pydantic
    from deepspeed.runtime.config import DeepSpeedConfig

    trial = {k: v for k, v in config.items() if k not in ("optimizer", "scheduler", "train_batch_size")}
    trial |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    try:
        DeepSpeedConfig(copy.deepcopy(trial))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        section = [path for path, model in _models().items() if model.__name__ == error.title]
        place = ".".join(map(str, (*section, *first["loc"])))
        raise UsageError(f"{who}: {place}={text(first['input'])}: {first['msg']}") from error
    except Exception as error:
        raise UsageError(f"{who}: DeepSpeed refuses it: {str(error).splitlines()[0]}") from error


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
