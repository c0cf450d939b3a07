"""The command that trains by a plan: what the plan's command line gave, and what ``train`` has otherwise by default."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sd_lightning._conf.annotations import as_override
from sd_lightning._conf.command_line import CommandLine
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.planner.run import TrainingRun

_OF_PLAN = frozenset(
    [
        *("action", "gpu", "gpus", "host_gb", "images", "price", "loader", "compare", "output"),
        *("encoders", "ema", "strategy", "hydra"),
    ]
)
"""Settings of the planning program that a plan's options or :func:`_implied` say in the words of ``train``."""
_CHOSEN = frozenset(("data.batch_size", "trainer.precision", "speed.gradient_checkpointing"))
"""Settings that are among the options of every plan, or are left at the default of both programs."""
_SHARED = ("module.train_text_encoder", "module.encoder_dtype", "module.offload_encoders", "speed.allow_tf32")
"""Settings of both programs whose defaults differ, or that a model's preset sets."""


def train_command(spec: RunSpec, training: TrainingRun, options: Sequence[str]) -> str:
    """Return the command that trains what was planned.

    Args:
        spec: Of the planning program.
        training: Its settings of the run.
        options: Those of a plan.
    """
    chosen = {each.partition("=")[0] for each in options}
    given = [each for each in _given() if _key(each) not in chosen]
    if not any(_key(each) == "model" for each in given):
        given.insert(0, f"model={spec.model.get('architecture')}")
    settings = [*given, *_data(spec)]
    known = chosen | {_key(each) for each in given}
    settings += [f"{key}={as_override(value)}" for key, value in _implied(spec, training, settings) if key not in known]
    folders = [word for folder in _command_line().folders[1:] for word in ("--config-dir", folder)]
    return shlex.join(["python", "-m", "sd_lightning.train", *folders, *settings, *options])


def _command_line() -> CommandLine:
    return CommandLine.parse("train", sys.argv[1:])


def _given() -> list[str]:
    """Return the overrides of this command line that ``train`` takes as they are."""
    overrides = _command_line().overrides
    return [each for each in overrides if _key(each).partition(".")[0] not in _OF_PLAN and _key(each) not in _CHOSEN]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def _data(spec: RunSpec) -> list[str]:
    """Return whose images are trained on: those of the tiny model are digits, which need no folder."""
    if spec["encoders"] == "none":
        return ["data=latents", "data.store=store"]
    return [] if spec.model.get("architecture") == "tiny" else ["data=images", "data.train_data_dir=photos"]


def _implied(spec: RunSpec, training: TrainingRun, settings: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield what ``train`` with these settings has otherwise than the plan."""
    from omegaconf import OmegaConf

    command = CommandLine("train", _command_line().folders, tuple(settings))
    train = OmegaConf.create(command.compose(settings))
    wanted: dict[str, Any] = {key: spec[key] for key in _SHARED}
    wanted["data.resolution"] = training.resolution
    if spec["encoders"] != "none":
        wanted["data.cache_latents"] = training.cache_latents
    if training.cache_latents and spec["encoders"] != "none":
        wanted["data.center_crop"] = True  # latents can be cached of images that do not change
    if not training.averages:
        wanted["callbacks.ema"] = None
    for key, value in wanted.items():
        if OmegaConf.select(train, key) != value:
            yield key, value
