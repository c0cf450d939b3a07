"""The fields of the page's forms: what is asked for, and the setting of our programs that each stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_lightning import _conf
from sd_lightning._errors import UsageError
from sd_lightning.planner.devices import tables
from sd_lightning.ui.folders import inside


@dataclass(frozen=True)
class Field:
    """A field of a form."""

    key: str
    """The setting, and the input's name."""
    label: str
    help: str = ""
    value: str = ""
    options: tuple[tuple[str, str], ...] = ()
    """Values and what they are called; the field is a choice, or with ``is_open`` a text with suggestions."""
    is_open: bool = False
    is_path: bool = False
    """A path has to lie in the folders of the page."""
    more: bool = False
    """Shown after the others."""
    error: str = ""


_OTHER_NAMES = {"model.pretrained": "init_from", "data.resolution": "resolution"}
"""Settings of our programs -> fields that stand for them, too."""
_AS_PRESET = ("", "as the preset says")
_YES_NO = (_AS_PRESET, ("true", "yes"), ("false", "no"))

SUBJECT = (
    Field("output_dir", "Name of the run", "A new folder of this name.", "my-subject"),
    Field("instance_prompt", "Instance prompt", "Such as: a photo of sks dog. Empty: each photo's own caption, above."),
    Field("init_from", "Start from", "A run, a folder, or a model's name on the hub.", is_open=True, is_path=True),
    Field("experiment", "Preset", "Chosen for the card that is there."),
    Field("model", "Model", "What “Start from” holds."),
    Field("card", "Card", "Jobs wait for their card."),
    Field("max_train_steps", "Steps", "Empty: as the preset says.", more=True),
    Field("learning_rate", "Learning rate", "Empty: as the preset says.", more=True),
    Field("trainable", "Train", options=(_AS_PRESET, ("lora", "LoRA"), ("full", "all weights")), more=True),
    Field("resolution", "Resolution", "Pixels; empty: as the preset says.", more=True),
    Field("data.batch_size", "Batch size", "Empty: as the preset says.", more=True),
    Field("with_prior_preservation", "Keep the class", "Also train on pictures of it.", "", _YES_NO, more=True),
    Field("class_prompt", "Class prompt", "What the subject is one of: a photo of a dog.", more=True),
    Field("init_lora", "Go on from LoRA", "A LoRA file, or a run that trained one.", is_path=True, more=True),
    Field("callbacks.samples.every_n_steps", "Steps between samples", "0: only at the end.", "30", more=True),
    Field("push_to_hub", "Upload to the hub", "user/name, when it is done.", more=True),
)
PICTURE = (
    Field("run", "Model", "A run with a finished pipeline or a checkpoint.", is_path=True),
    Field("prompts", "Prompt"),
    Field("negative_prompt", "Negative prompt", more=True),
    Field("seed", "Seed", value="0"),
    Field("num_inference_steps", "Steps", "Empty: the model's own."),
    Field("guidance_scale", "Guidance", "Empty: the model's own."),
    Field("lora_weight", "LoRA weight", "0: as before training, 1: as trained.", more=True),
    Field("lora", "Another LoRA", "A file for this model.", is_path=True, more=True),
    Field("quantization", "Weights", options=(("", "as they are"), ("int8", "int8")), more=True),
    Field("card", "Card", more=True),
)
PLAN = (
    Field("model", "Model"),
    Field("gpu", "GPU"),
    Field("gpus", "Number of GPUs", value="1"),
    Field("trainable", "Train", options=(("full", "all weights"), ("lora", "LoRA"))),
    Field("data.batch_size", "Batch size", "Empty: the fastest."),
    Field("data.resolution", "Resolution", "Pixels; empty: the model's."),
    Field("images", "Images to train on", "For days and dollars, such as 1e6."),
)


def filled(
    fields: Sequence[Field], values: Mapping[str, str], options: Mapping[str, Any], message: str = ""
) -> tuple[list[Field], str]:
    """Return fields with values, options and the message, if it names one of them; and the message if it does not."""
    at = named(message, [each.key for each in fields])
    found = [replace(each, value=values.get(each.key, each.value), error=message * (each.key == at)) for each in fields]
    found = [replace(each, options=tuple(options.get(each.key, each.options))) for each in found]
    return found, "" if at else message


def named(message: str, keys: Sequence[str]) -> str | None:
    """Return the setting of some that a message of our programs names first."""
    names = re.findall(r"(?<![\w.])([\w.]+)=", message)
    return next((key for name in names for key in (name, _OTHER_NAMES.get(name)) if key in keys), None)


def setting(key: str, value: str) -> str:
    """Return a setting as on the command line.

    Raises:
        UsageError: It has characters that mean something else there.
    """
    if re.search(r"[\\\x00-\x1f]|\$\{", value):
        raise UsageError(f"{key}={value}: has a backslash, a line break or ${{; expected plain text; leave that out")
    is_plain = "prompt" not in key and re.fullmatch(r"[\w.+-]+", value, re.ASCII)
    shown = value if is_plain else quoted(value)
    return f"{key}=[{shown}]" if key == "prompts" else f"{key}={shown}"


def quoted(value: str) -> str:
    """Return a text as Hydra reads it, whatever it looks like."""
    return '"' + value.replace('"', '\\"') + '"'


def confined(key: str, value: str, roots: Sequence[Path]) -> str:
    """Return a path in the folders of the page, or a name on the hub, as it was given.

    Raises:
        UsageError: It is neither.
    """
    path = Path(value)
    if any(inside(root, path) for root in roots):
        return value
    if not re.fullmatch(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", value) or path.exists():
        shown = ", ".join(map(str, roots))
        raise UsageError(
            f"{key}={value}: is neither a name on the hub nor there in the folders of this page ({shown}); give one of "
            f"these, or start the page with 'folders=[{path.parent}]'"
        )
    return value


def options() -> dict[str, list[tuple[str, str]]]:
    """Return the choices of models, presets and GPUs: names, with what their files say of them."""
    models = [(name, text.partition(",")[0]) for name, text in _described("model")]
    presets = [("dreambooth_tiny", "the tiny model, in minutes on a CPU"), *_described("experiment", "dreambooth_*b")]
    gpus = [(name, device.name) for name, device in tables().items()]
    return {"model": [_AS_PRESET, *models], "experiment": presets, "gpu": gpus}


def _described(group: str, pattern: str = "*") -> list[tuple[str, str]]:
    files = sorted(Path(_conf.config_dir(), group).glob(f"{pattern}.yaml"))
    texts = [re.search(r"^# (?!@)(.*?)[:.]( |$)", file.read_text("utf-8"), re.MULTILINE) for file in files]
    return [(file.stem, f"{file.stem}: {text[1]}" if text else file.stem) for file, text in zip(files, texts)]


def preset_for(memory_gb: float | None) -> str:
    """Return the preset for a card: of those that fit, the one for the largest."""
    names = [re.fullmatch(r"dreambooth_(?:lora_)?(\d+)gb", name) for name, _ in options()["experiment"]]
    fitting = {int(name[1]): name[0] for name in names if name and int(name[1]) <= (memory_gb or 0) + 1}
    return fitting[max(fitting)] if fitting else "dreambooth_tiny"
