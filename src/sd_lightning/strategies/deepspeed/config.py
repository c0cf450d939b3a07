"""Reading, correction and checks of a user's DeepSpeed configuration.

A configuration is the dictionary that DeepSpeed's documentation describes. The value ``"auto"`` (a convention of
Hugging Face's Trainer) leaves a key to the run or to a default. The functions do not modify their arguments.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sd_lightning._errors import UsageError
from sd_lightning.storage.untrusted import parse_json
from sd_lightning.strategies.deepspeed.builds import import_deepspeed
from sd_lightning.strategies.deepspeed.keys import GONE, KEYS, MOVED, REFUSED, SECTIONS, WITHOUT_EFFECT
from sd_lightning.strategies.deepspeed.nested import (
    ABSENT,
    AUTO,
    Config,
    explicit,
    get,
    leaves,
    put,
    remove,
    text,
    without_auto,
)

_OPTIMIZERS = {"adamw": "torch.optim.AdamW", "adam": "torch.optim.AdamW"}
"""DeepSpeed's ``Adam`` decays weights as AdamW does, unless ``adam_w_mode`` is false."""
_HYPER_PARAMETERS = frozenset({"lr", "betas", "eps", "weight_decay"})


def load(source: str | Path | Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Read a configuration, translate old and mistaken keys, and check it.

    Args:
        source: A JSON file, or the dictionary itself.

    Returns:
        The configuration, and one warning per key that was translated or left out.

    Raises:
        UsageError: The file cannot be read, a key is unknown (names the nearest), or a value cannot work.
    """
    who = name_of(source)
    import_deepspeed(who)
    config, warnings = translate(_read(source, who), who)
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


def translate(config: Config, who: str) -> tuple[Config, list[str]]:
    """Return the configuration with old and mistaken keys corrected, and a warning for each."""
    config, warnings = copy.deepcopy(config), []
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        raise UsageError(f'{who}: zero_optimization={zero}; expected an object, e.g. {{"stage": 2}}')
    for old, new in MOVED.items():
        value = get(config, old)
        if value is ABSENT:
            continue
        remove(config, old)
        if new.endswith(".device"):
            value = "cpu" if value is True else "none"
        if get(config, new) is ABSENT:
            put(config, new, value)
            warnings.append(f"{who}: {old} is called {new} today; translated")
        else:
            warnings.append(f"{who}: {old} is the old name of {new}, which is there too; left out")
    for key, reason in WITHOUT_EFFECT.items():
        value = get(config, key)
        if value is not ABSENT:
            remove(config, key)
            if value not in (False, None, AUTO):
                warnings.append(f"{who}: {key} has no effect here ({reason}); left out")
    for path, (off, reason) in REFUSED.items():
        if reason == GONE and get(config, path) in (*off, AUTO):
            key = path if path.startswith("zero_") else path.partition(".")[0]
            remove(config, key)
            warnings.append(f"{who}: {key} is of old releases ({reason}); left out")
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
    told = ", ".join(f"zero_optimization.{name}" for name in names)
    return [f"{who}: {told}: only stage 3 reads this, the file says stage {zero['stage']}; left out"] if names else []


def check(config: Mapping[str, Any], who: str) -> None:
    """Check keys, stage and features.

    Raises:
        UsageError: One is wrong; names the first, and the nearest key.
    """
    for path, (harmless, reason) in REFUSED.items():
        value = get(config, path)
        if value is not ABSENT and value != AUTO and value not in harmless:
            told = "" if isinstance(value, Mapping) else f"={text(value)}"
            raise UsageError(f"{who}: {path}{told} cannot be used: {reason}; remove it")
    gone = {path.partition(".")[0] for path in REFUSED}
    for section in SECTIONS:
        node = get(config, section) if section else config
        if node is ABSENT or node is None or node == AUTO:
            continue
        if not isinstance(node, Mapping):
            raise UsageError(f"{who}: {section}={text(node)}; expected an object")
        known = known_keys(section) | (frozenset() if section else gone)
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
    if all(get(config, f"{name}.enabled") is True for name in ("fp16", "bf16")):
        raise UsageError(f"{who}: fp16.enabled and bf16.enabled are both true; switch one of them off")
    scheduler = config.get("scheduler")
    if isinstance(scheduler, Mapping) and any(v != AUTO for path, v in leaves(scheduler) if path != "type"):
        raise UsageError(
            f"{who}: scheduler={scheduler.get('type')}: the learning rate's schedule is lr_scheduler=… here; "
            "remove this section and choose lr_scheduler=cosine, constant or none"
        )
    optimizer_of(config, who)
    _ask_deepspeed(config, who)


def known_keys(section: str) -> frozenset[str]:
    """Return the keys of a section of the configuration, "" for its top level."""
    if section in KEYS:
        return KEYS[section]
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    fields = models[section].model_fields
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}


def _unknown(section: str, key: str, known: Collection[str]) -> str:
    prefix = f"{section}." if section else ""
    told = f"{prefix}{key} is no key of DeepSpeed's"
    near = difflib.get_close_matches(key, sorted(known), n=1)
    if near:
        return f"{told}; the nearest is {prefix}{near[0]}"
    for other in SECTIONS:
        if key in known_keys(other):
            return f"{told}; you mean {other}.{key}" if other else f"{told}; you mean {key}, outside of {section}"
    return f"{told}; remove it"


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
        section = {"DeepSpeedZeroConfig": "zero_optimization", "DeepSpeedFP16Config": "fp16"}.get(error.title)
        place = ".".join(str(part) for part in (*([section] if section else []), *first["loc"]))
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
