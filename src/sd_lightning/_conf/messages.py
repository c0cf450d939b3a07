"""One-line messages with a remedy for exceptions of Hydra, OmegaConf and YAML, and for other tools' names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_lightning._conf.annotations import list_element, our_value
from sd_lightning._conf.check import SPECIAL_KEYS, nearest_argument
from sd_lightning._conf.command_line import CommandLine, Program, groups_of, owner_of, paths
from sd_lightning._errors import UsageError

_OTHER_NAMES = (
    ("pretrained_model_name_or_path", "model.pretrained"),
    ("train_data_dir", "instance_data_dir"),
    ("train_data_dir", "data.train_data_dir"),
    ("dataset_name", "data.dataset_name"),
    ("train_batch_size", "data.batch_size"),
    ("gradient_accumulation_steps", "trainer.accumulate_grad_batches"),
    ("mixed_precision", "trainer.precision"),
    ("precision", "trainer.precision"),
    ("max_train_steps", "trainer.max_steps"),
    ("trainer.gpus", "trainer.devices"),
    ("gpus", "trainer.devices"),
    ("num_gpus", "trainer.devices"),
    ("trainer.strategy", "strategy"),
    *((name, "max_train_steps=<n>") for name in ("epochs", "max_epochs", "num_train_epochs", "trainer.max_epochs")),
    *((name, "trainer.max_steps=<n>") for name in ("epochs", "max_epochs", "num_train_epochs", "trainer.max_epochs")),
    ("objective.timestep_sampling", "objective.weighting_scheme"),
    ("steps", "num_inference_steps"),
    ("steps", "max_train_steps"),
    ("steps", "trainer.max_steps"),
    ("prompt", "prompts"),
    ("learning_rate", "optimizer.lr"),
    ("max_grad_norm", "trainer.gradient_clip_val"),
    ("lr_warmup_steps", "lr_scheduler.warmup_steps"),
    ("dataloader_num_workers", "data.num_workers"),
    ("checkpointing_steps", "callbacks.checkpoint.every_n_steps"),
    ("checkpoints_total_limit", "callbacks.checkpoint.keep"),
    ("resume_from_checkpoint", "resume"),
    ("rank", "lora.rank"),
    ("network_dim", "lora.rank"),
    ("network_alpha", "lora.alpha"),
    ("network_weights", "init_lora"),
    ("network_train_unet_only", "train_text_encoder=false"),
    ("network_train_unet_only", "module.train_text_encoder=false"),
    ("network_train_text_encoder_only", "lora.target_modules=[] module.train_text_encoder=true"),
    ("hub_model_id", "push_to_hub"),
    *((name, "data.shuffle_tags") for name in ("shuffle_caption", "shuffle_tokens")),
    *((name, "data.keep_tags") for name in ("keep_tokens", "shuffle_tokens_keep", "keep_tags_count")),
    ("caption_tag_dropout_rate", "data.tag_dropout"),
    ("caption_separator", "data.tag_separator"),
    ("caption_dropout_rate", "data.proportion_empty_prompts"),
    *((name, "data.caption_extension") for name in ("caption_ext", "caption_extension")),
    *((name, "data.masked_loss=files") for name in ("masked_loss", "masked_training", "mask_path")),
    ("conditioning_data_dir", "data.masked_loss=files"),
    ("alpha_mask", "data.masked_loss=alpha"),
    ("mask_min_value", "data.unmasked_weight"),
    ("reg_data_dir", "class_data_dir"),
    ("class_tokens", "instance_prompt"),
)
"""Their name and ours; the first of ours that the program has is used. ``=<n>``: their value has another meaning."""
_MODELS = {"sdxl": r"xl", "sd21": r"(diffusion|sd)[-_]?v?2", "sd15": r"(diffusion|sd)[-_]?v?1"}
"""Option of the group ``model`` -> pattern of the names of pretrained models that need it."""


def check_additions(command_line: CommandLine) -> None:
    """Check that the program reads the top-level key of every ``+key=…``.

    Additions below a node with ``_target_`` are checked against the target's signature.

    Raises:
        UsageError: It does not; the message names the addition and the nearest key.
    """
    for each in (each for each in command_line.overrides if each.startswith("+")):
        key = re.split("[@=]", each.lstrip("+"))[0]
        known = command_line.defaults
        if known and not command_line.is_group(key) and key.partition(".")[0] not in known:
            raise UsageError(_unknown_key(each, key, command_line))


def check_choices(program: Program, command_line: CommandLine) -> None:
    """Check that groups and experiments are not another program's: Hydra would accept them, or not name the program.

    Raises:
        UsageError: One is; the message names the program that it belongs to.
    """
    folder = command_line.folders[0]  # has the primary configs of all programs
    groups = {name: groups_of(name, folder) for name in program.among}
    for override in command_line.overrides:
        group, _, value = override.lstrip("+").partition("=")
        owners = [name for name in program.among if group in groups[name]]
        if owners and program.name not in owners and group not in command_line.groups:
            plain = f"python -m sd_lightning.{owners[0]} {group}={value}"
            remedy = program.instead.get(group, f"leave it out, or write {plain}")
            raise UsageError(
                f"{override}: {program.name} has no group {group!r}, which is of {' and '.join(owners)}; {remedy}"
            )
        for name in value.split(",") if group == "experiment" else ():
            files = [file for each in command_line.folders if (file := Path(each, group, f"{name}.yaml")).is_file()]
            owner = owner_of(files[-1], folder, program.among) if files else None
            if owner not in (None, program.name):
                raise UsageError(
                    f"{override}: {name} is an experiment of {owner}, not of {program.name}; write python -m "
                    f"sd_lightning.{owner} experiment={name}"
                )


def explain(error: Exception, command_line: CommandLine) -> str | None:
    """Return a one-line message for an exception that ended a program.

    Returns:
        The line, without ``error: ``; None if it is not a user error.
    """
    import yaml
    from hydra.errors import HydraException, MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

    if isinstance(error, UsageError):
        return str(error)
    text, package = None, raised_by(error)
    if isinstance(error, OverrideParseException):
        text = _unreadable_override(error.override, command_line)
    elif isinstance(error, MissingConfigException):
        text = _missing_config(error, command_line)
    elif isinstance(error, HydraException) or (isinstance(error, ValueError | OSError) and package == "hydra"):
        reason = str(error)
        if isinstance(error.__cause__, OmegaConfBaseException):
            reason = f"{reason} {str(error.__cause__).splitlines()[0]}"
        text = _wrong_override(reason, command_line) or f"command line: {reason}; see --help"
    elif isinstance(error, ConfigAttributeError | ConfigKeyError):
        key = error.full_key
        text = f"{key} is missing, but the program reads it; leave it as it was, or give it: +{key}=<value>"
    elif isinstance(error, OmegaConfBaseException):
        text = str(error).splitlines()[0]
    elif isinstance(error, yaml.YAMLError):
        text = f"a config file is no valid YAML: {error}"
    # Arguments that Lightning checks only when it starts.
    elif package == "lightning" and (isinstance(error, ValueError) or "Misconfiguration" in type(error).__name__):
        text = f"trainer: {error} (change trainer.*, or see where with HYDRA_FULL_ERROR=1)"
    return text and " ".join(text.split())


def unreadable(arguments: Sequence[str], command_line: CommandLine) -> str:
    """Return a message for argparse's error, with the setting that an unknown option most likely means."""
    option = next((each for each in command_line.unknown if each.startswith("--")), None)
    setting = None if option is None else _option_as_setting(option, arguments, command_line)
    remedy = f"write {setting}" if setting else "write settings as key=value"
    return f"command line: {command_line.problem}; {remedy}, put options such as --cfg job before them, and see --help"


def _option_as_setting(option: str, arguments: Sequence[str], command_line: CommandLine) -> str | None:
    """Return the setting that an unknown option, such as ``--strategy ddp``, most likely means."""
    written, has_value, value = option.removeprefix("--").partition("=")
    name = written.replace("-", "_")
    if not has_value:
        following = [*arguments[arguments.index(option) + 1 :], "-"][0]
        value = "true" if following.startswith("-") or "=" in following else following
    renamed = _by_another_name(name, value, command_line)
    if renamed is None and (name in command_line.groups or name in paths(command_line.defaults)):
        return f"{name}={our_value(name, value)}"
    return renamed or _of_another_option(name, value, command_line)


def _unreadable_override(override: str, command_line: CommandLine) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        key = key.lstrip("+~").partition(" ")[0]
        known = key if command_line.default_at(key) is not None else command_line.nearest(key)
        return f"{override!r} is no setting: write key=value, e.g. {known or 'key'}=<value>"
    if value.startswith("[{"):
        texts = re.sub(r"""(\w+):([^{}"']+?)(?=\s*(,\s*\w+:|}))""", r'\1:"\2"', value)
        quoted = shlex.quote(f"{key}={texts}")
    elif value.startswith("["):
        elements = (each.strip() for each in value.strip("[]").split(","))
        spelled = (each if re.fullmatch(r"[\w.+ -]+", each) else list_element(each) for each in elements if each)
        quoted = shlex.quote(f"{key}=[{','.join(spelled)}]")
    else:
        quoted = shlex.quote(f'{key}="{value}"')
    return (
        f"cannot read {override!r}; expected key=value, with special characters quoted for Hydra inside quotes for the "
        f"shell: {quoted}"
    )


def _missing_config(error: Any, command_line: CommandLine) -> str:
    group, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
    if error.options is None:
        names = sorted(file.stem for folder in command_line.folders for file in Path(folder).glob("*.yaml"))
        near = difflib.get_close_matches(name, names, n=1)
        remedy = f"; write -cn {near[0]}" if near else ""
        searched = " and ".join(command_line.folders)
        return f"there is no config {name!r} in {searched}; available: {', '.join(names)}{remedy}"
    for override in command_line.overrides:
        _, _, value = override.partition("model=")
        if "/" in value and error.missing_cfg_file == f"model/{value}":
            like = _model_like(value)
            return f"{override}: expected the kind of a model; write model={like} model.pretrained={value}"
    ours = our_value(group, name)
    near = [ours] if ours in error.options else difflib.get_close_matches(name, error.options, n=1)
    remedy = f"; write {group}={near[0]}" if near else ""
    options = ", ".join(sorted(error.options)) or "none"
    return f"{group}={name}: there is no such option; available: {options}{remedy}"


def _model_like(name: str) -> str:
    """Return the option of the group ``model`` that a pretrained model most likely needs."""
    matching = (option for option, pattern in _MODELS.items() if re.search(pattern, name.lower()))
    return next(matching, "<sd15, sd21 or sdxl>")


def _wrong_override(reason: str, command_line: CommandLine) -> str | None:
    """Return a message on the override that Hydra refused: an unknown key, a bare comma, or no option of a group.

    Args:
        reason: Hydra's text, which names the override; only for a value that is no option's name it does not.
        command_line: The command line.

    Returns:
        The message; None if Hydra's text is about something else.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    known = paths(command_line.defaults)
    for each in OverridesParser.create().parse_overrides(list(command_line.overrides)) if known else ():
        text, key = str(each.input_line), each.key_or_group
        if each.is_sweep_override():
            if f"Ambiguous value for argument '{text}'" in reason:
                listed = shlex.quote(f"{key}=[{text.partition('=')[2]}]")
                return f"{text}: a bare comma is ambiguous; write {listed} for a list, or add -m to run once per value"
        elif not command_line.is_group(key):
            if f"'{key}'" in reason and key not in known and not key.startswith("hydra.") and text[0] != "+":
                return _unknown_key(text, key, command_line)
        elif not each.is_delete() and not isinstance(each.value(), str | list):
            options = command_line.options_of(key)
            return f"{text}: {key} is a group of configs; available: {', '.join(options)}; write {key}={options[0]}"
    return None


def _unknown_key(override: str, key: str, command_line: CommandLine) -> str:
    """Return a message on a key that the configuration does not have: what was probably meant, or what there is."""
    near = command_line.nearest(key)
    if override.startswith("~"):
        return f"{override}: there is no key {key!r}; " + (f"the nearest is {near}" if near else "leave it out")
    value = override.partition("=")[2]
    parent, _, name = key.rpartition(".")
    section, _, last = (near or "").rpartition(".")
    is_typo = section == parent and difflib.get_close_matches(name, [last], cutoff=0.9)
    argument = None if is_typo else nearest_argument(command_line.default_at(parent), name)  # imports its target
    as_argument = f"+{parent}.{argument}={value}"
    setting = (
        _by_another_name(key, value, command_line)
        or (as_argument if argument == name else None)
        or _of_another_option(key, value, command_line)
        or (as_argument if argument and near in (None, parent) else None)
    )
    below = command_line.default_at(near) if near else command_line.defaults
    if setting is None and near and not isinstance(below, dict):
        setting = f"{near}={our_value(near, value)}"
    if setting:
        remedy = f"write {setting}"
    elif near and not key.startswith(f"{near}."):
        remedy = f"the nearest is {near}"
    else:
        names = ", ".join(str(each) for each in below or () if each not in SPECIAL_KEYS)
        remedy = f"{near} has {names or 'no keys below it'}" if near else f"top-level keys are {names}"
    return f"{override}: there is no key {key!r}; {remedy}"


def _by_another_name(key: str, value: str, command_line: CommandLine) -> str | None:
    """Return our override for a setting that is given by another tool's name."""
    known = paths(command_line.defaults)
    of_ours = [ours.partition("=")[::2] for theirs, ours in _OTHER_NAMES if theirs == key]
    candidates = [(ours, fixed or our_value(ours, value)) for ours, fixed in of_ours]
    for ours, meant in candidates:
        if ours in known and isinstance(command_line.default_at(ours), list) and not meant.startswith("["):
            return shlex.quote(f"{ours}=[{list_element(meant)}]")
        if ours in known:
            return f"{ours}={meant}"
    settings = (_of_another_option(ours, meant, command_line) for ours, meant in candidates)
    return next(filter(None, settings), None)


def _of_another_option(key: str, value: str, command_line: CommandLine) -> str | None:
    """Return the override that sets a key together with the group choice that adds it."""
    option = command_line.option_with(key)
    return f"{option} {key}={value}" if option else None


def raised_by(error: BaseException) -> str:
    """Return the top-level package of the code that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] if trace else ""
